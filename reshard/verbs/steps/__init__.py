"""What a watch does with the steps of a run."""
