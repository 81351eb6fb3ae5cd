"""What one rank of a training run holds. Pure functions of a model and parallel sizes."""
