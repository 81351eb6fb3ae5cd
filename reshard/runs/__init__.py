"""What a watch writes: outputs, one for each step of a run, on the disk or in a store."""
