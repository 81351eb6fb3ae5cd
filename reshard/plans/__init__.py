"""From two indexes to a proven plan."""
