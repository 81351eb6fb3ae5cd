"""Doors: files that do not exist, computed when they are read, for Python, fsspec and clients of the Hub, of S3 and of the web."""
