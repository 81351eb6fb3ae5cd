"""Plugins for other programs. Each program finds its file through its own entry-point group.

Importing a file does not import the program.
"""
