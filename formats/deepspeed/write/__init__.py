"""ZeRO-3 shards of another size, and what every checkpoint that DeepSpeed resumes from consists of."""
