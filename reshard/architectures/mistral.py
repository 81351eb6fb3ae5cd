"""Mistral: llama under another name."""

from reshard.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = LLAMA.called("mistral")
