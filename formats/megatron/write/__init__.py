"""From a model, parallel sizes and the source's content to the files of a Megatron checkpoint."""
