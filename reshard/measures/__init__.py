"""What the elements of tensors show when they are read once: statistics of one tensor, and how one changed into another."""
