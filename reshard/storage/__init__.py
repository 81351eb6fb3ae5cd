"""The only place that opens files: listing, reading ranges, writing under a temporary name."""
