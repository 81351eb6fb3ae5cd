"""Which files of a folder hold the weights: one per rank, or safetensors files that together hold all of them."""

from __future__ import annotations

import re

from reshard.storage.files import Files

PARAMS = "params.json"
EMBEDDING = "tok_embeddings.weight"
_RANK = re.compile(r"consolidated\.(\d\d)\.pth")
_SAFETENSORS = re.compile(r"consolidated(-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.safetensors")
# A folder on the Hugging Face Hub often holds both forms. Then the published one is read.
_PUBLISHED = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)")


def weight_files(files: Files) -> list[str]:
    """The files of ranks, in their order, or else the safetensors files; empty if the folder is of another format."""
    listing = files.list()
    if any(_PUBLISHED.fullmatch(path) for path in listing):
        return []
    ranks = [path for path in listing if _RANK.fullmatch(path)]
    if PARAMS in listing:
        return sorted(ranks) or sorted(path for path in listing if _SAFETENSORS.fullmatch(path))
    # Of any program, a single file may have such a name.
    return sorted(ranks) if len(ranks) > 1 else []


def rank_of(path: str) -> int | None:
    """The rank whose file it is; None for a safetensors file."""
    match = _RANK.fullmatch(path)
    return int(match[1]) if match else None


def expected_files(paths: list[str]) -> list[str]:
    """The files that must be there, according to the numbers in the names of those that are."""
    if rank_of(paths[0]) is not None:
        return [f"consolidated.{rank:02d}.pth" for rank in range(1 + max(rank_of(path) or 0 for path in paths))]
    counts = {int(match["count"]) for path in paths if (match := _SAFETENSORS.fullmatch(path)) and match["count"]}
    return [f"consolidated-{number:05d}-of-{count:05d}.safetensors" for count in counts for number in range(1, count + 1)] or paths
