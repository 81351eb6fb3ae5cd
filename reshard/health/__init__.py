"""Health: the checks of `reshard doctor`, one file per family of checks. Each check yields findings."""
