"""A model as a declaration, with the numbers of one config put in."""
