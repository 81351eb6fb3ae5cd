"""The memory of one rank of a training run: pure functions of a model and parallel sizes."""
