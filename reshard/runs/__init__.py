"""The steps of a training run: which checkpoints lie below a folder, and which of them are complete."""
