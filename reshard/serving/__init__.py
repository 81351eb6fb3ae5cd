"""The tensors and the memory of one rank of a serving engine: pure functions of a model, an engine's rules and parallel sizes."""
