"""Names of files and folders."""

from __future__ import annotations

CONFIG, METADATA = "model_config.json", "checkpoint_metadata.json"
WEIGHTS = "model/"
"""The folder of weights: folders below it are the words of a name, the name of a file is the last word and the rank."""
OF_THE_RUN = ("optimizer/", "lr_scheduler/", "random/")
"""Folders of pickles."""
TENSOR = "data"
"""The name of the tensor in a file."""
