"""An update by the stream: the files that `reshard convert --to vllm` wrote are sent to the ranks as they are."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.live.arrangement import Arrangement, Link, RankAnswer
from reshard.live.engines.choice import controls
from reshard.live.leading import UpdateReport
from reshard.live.plan.schedule import HeldTensor
from reshard.live.session import opened
from reshard.live.trainers import Trainers
from reshard.live.wire.line import Outcome
from reshard.live.wire.staging import places
from reshard.live.wire.stream import StreamWriter


def rank_file(folder: Path, rank: int) -> tuple[tuple[HeldTensor, ...], dict[str, bytes]]:
    """The tensors of a rank's files, and their bytes."""
    tensors, contents = [], {}
    for path in sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                shape = tuple(entry["shape"])
                tensors.append(HeldTensor(name, from_safetensors(entry["dtype"], where=name), shape, row_major(shape)))
                contents[name] = raw[start:stop]
    return tuple(tensors), contents


def update(address: str, folder: Path, tp: int, version: str) -> UpdateReport:
    """One update of a server by the rank files in a folder. Each tensor is two messages: its even rows and its odd rows."""
    files = [rank_file(folder, rank) for rank in range(tp)]
    expected = [sum(len(data) for data in contents.values()) for _, contents in files]

    def arrange(hellos: object) -> Arrangement:
        return Arrangement(lambda rank: RankAnswer(files[rank][0], {}, None, expected[rank], verify=True))

    session = opened(lambda: controls(address, 60.0), Trainers(), arrange, Link(seconds=60.0))

    def send() -> Outcome:
        outcome = Outcome()
        for rank, (tensors, contents) in enumerate(files):
            writer = StreamWriter(session.transport, session.members.target(rank), verify=True)
            offsets, _ = places(tensors)
            for tensor in tensors:
                rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
                row = math.prod(tensor.shape) * tensor.dtype.itemsize // rows
                for first in range(min(2, rows)):
                    count = len(range(first, rows, 2))
                    body = b"".join(contents[tensor.name][i * row : (i + 1) * row] for i in range(first, rows, 2))
                    writer.write([(offsets[tensor.name] + first * row, row, count, 2 * row)], body)
            writer.end()
            outcome.nbytes += writer.nbytes
        return outcome

    try:
        return session.update(send, lambda: None, version)
    finally:
        session.close()
