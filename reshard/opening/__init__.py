"""Opening: from a path and what the user says about it to a Checkpoint. What lies there is gathered once, then steps draw conclusions."""
