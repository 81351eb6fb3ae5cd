"""Verbs that look at checkpoints and configurations: they write nothing, or what they found."""
