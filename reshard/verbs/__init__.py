"""The public functions, one verb per file, and what they share."""
