"""Deltas: what changed between two checkpoints.

patches   puts what a delta says on the elements that are read
frames    makes the frames of a delta from two checkpoints
"""
