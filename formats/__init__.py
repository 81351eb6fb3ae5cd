"""One file per checkpoint format, each ending in its one public object, FORMAT. None imports another."""
