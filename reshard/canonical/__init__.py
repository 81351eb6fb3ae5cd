"""From the names and values that a checkpoint stores to the model's own."""
