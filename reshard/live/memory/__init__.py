"""What ranks hold: described by themselves or computed, and as an index."""
