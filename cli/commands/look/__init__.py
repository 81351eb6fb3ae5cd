"""Commands that look at checkpoints and configurations: one file each, as in reshard/verbs/look/."""
