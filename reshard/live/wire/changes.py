"""Changes: a parcel of which little has changed since the last update, as positions and values. The receiver's staging holds the rest.

    head   int64 [1]          n, how many 16-bit words of the parcel have changed; WHOLE: all of it follows as it is
    body   int32 [blocks]     how many of them lie in each block of 65,536 words
           uint16 [n]         where each lies in its block
           int16 [n]          the new words

Without changes there is no body. A word that has changed takes 4 bytes instead of 2, so a parcel travels whole where half of its words have
changed. In training by reinforcement 98 to 99 of 100 elements in bfloat16 stay the same from step to step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import RequestError

if TYPE_CHECKING:
    import torch

WHOLE = -1
"""The head of a parcel that travels as it is."""
_BITS = 16
_WORD = 2


def encode(new: torch.Tensor, base: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Head and body of a parcel. Memory: some times its bytes.

    new: uint8 [n], what the receiver should hold. base: uint8 [n], what it holds; None: that is not known.
    """
    import torch

    def head(number: int) -> torch.Tensor:
        return torch.tensor([number], dtype=torch.int64, device=new.device)

    if base is None or len(new) % _WORD:
        return head(WHOLE), new
    words = _words(new)
    positions = _changed(words, _words(base))
    number = len(positions)
    if not number:
        return head(0), None
    if body_bytes(len(new), number) >= len(new):
        return head(WHOLE), new
    ends = torch.arange(_blocks(len(words)) + 1, device=new.device) << _BITS
    counts = torch.searchsorted(positions, ends).diff().to(torch.int32)
    parts = counts, positions.to(torch.int16), words[positions]
    return head(number), torch.cat([part.view(torch.uint8) for part in parts])


def body_bytes(nbytes: int, number: int) -> int:
    """The bytes of a body. nbytes: of the parcel. number: the words that have changed.

    Raises: RequestError if a parcel of so many bytes has no such body.
    """
    if nbytes % _WORD or not 0 <= number <= nbytes // _WORD:
        raise RequestError(f"a parcel of {nbytes:,} bytes claims {number:,} changes", where="the update", do="Update again")
    return 4 * _blocks(nbytes // _WORD) + 2 * _WORD * number if number else 0


def apply(body: torch.Tensor, number: int, held: torch.Tensor) -> None:
    """Change what is held of a parcel, uint8 [n], to what the sender holds.

    Raises: RequestError if a position lies outside; then nothing is changed.
    """
    import torch

    words = _words(held)
    blocks = _blocks(len(words))
    counts, pairs = body[: 4 * blocks].view(torch.int32), body[4 * blocks :].view(torch.int16).view(2, number)
    if int(counts.min()) < 0 or int(counts.sum()) != number:
        raise RequestError(f"the blocks of a parcel do not hold {number:,} changes", where="the update", do="Update again")
    starts = torch.arange(blocks, device=held.device).repeat_interleave(counts) << _BITS
    positions = starts + (pairs[0].to(torch.int64) & ((1 << _BITS) - 1))
    if int(positions.max()) >= len(words):
        raise RequestError("a change lies outside its parcel", where="the update", do="Update again")
    words[positions] = pairs[1]


def _changed(words: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """int64: where they differ, ascending."""
    import torch

    if words.device.type == "cpu":  # 2.5 times as fast as with torch
        return torch.from_numpy(np.flatnonzero(words.numpy() != base.numpy()))
    return (words != base).nonzero().reshape(-1)


def _blocks(words: int) -> int:
    return -(-words >> _BITS)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes as words. Bytes that start at an odd place are copied."""
    import torch

    return (tensor.clone() if tensor.storage_offset() % _WORD else tensor).view(torch.int16)
