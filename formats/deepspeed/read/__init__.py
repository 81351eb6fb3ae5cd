"""From the files of a tag to its index."""
