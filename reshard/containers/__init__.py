"""Containers: the bytes of one file as plain values. Nothing here knows a checkpoint format, and nothing here runs what a file says."""
