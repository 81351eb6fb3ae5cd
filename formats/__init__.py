"""The checkpoint formats: one folder per format or family of formats. No folder imports another.

A format is the object FORMAT at the end of a module. signatures.py lists the formats.
"""
