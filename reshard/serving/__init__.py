"""What one rank of a serving engine holds. Pure functions of a model and parallel sizes."""
