"""From the files of a Megatron checkpoint to an Index. legacy.py and distributed.py are the entries; the other files are their steps."""
