"""Checks of a checkpoint by its bytes: whether its files are from one save, and are those that reshard wrote."""
