"""What is asked, opened and planned: options, checkpoints, and planning as a row of steps."""
