"""Commands for whoever serves models."""
