"""Signatures of checkpoints: who says that these are the files, and these the weights."""
