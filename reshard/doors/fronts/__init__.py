"""Fronts: what a client of the Hugging Face Hub, of S3 or of the web asks for, and the answer, as values."""
