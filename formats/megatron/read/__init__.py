"""From the files of a Megatron checkpoint to an Index. legacy.py and distributed.py come first; the other files are their steps."""
