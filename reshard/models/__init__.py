"""Models: the declarations of architectures, and the weights that follow from a declaration and one config."""
