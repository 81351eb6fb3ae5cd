"""What a Megatron checkpoint looks like: tensors, settings, pipeline stages, buffers, folders. Both reader and writer build on it."""
