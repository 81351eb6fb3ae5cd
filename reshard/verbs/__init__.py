"""What one does with checkpoints: one verb per file, as in the command line."""
