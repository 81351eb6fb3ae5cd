"""From requests to an answer: every rank of every case is traced in a forked process of its own."""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing
import os
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO

from .ranks import Case, Engine, LoadedRank
from .strided import Placed, row_major

# Names of element types in the headers of safetensors files, and in torch.
TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# The elements of a tensor that the model computes are given up to this number.
MOST_VALUES = 4096
# Ranks that are traced at a time. One of a large model takes 0.7 GB.
MOST_AT_A_TIME = 2

Header = dict[str, tuple[str, tuple[int, ...]]]


def main(engine_name: str, requests_path: Path, answer_path: Path) -> None:
    """Answer a list of requests. A line with "failed" says why a rank could not be traced."""
    requests = json.loads(requests_path.read_text())
    engine: Engine = importlib.import_module(f".{engine_name}_ranks", __package__)  # type: ignore[assignment,unused-ignore]
    with answer_path.open("w") as answer:
        engine.prepare()
        import torch

        about = {**engine.about(), "torch": torch.__version__}
        for request in requests:
            sources = headers(Path(request["model"]))
            _say(answer, {**about, "sources": {name: [dtype, list(shape)] for name, (dtype, shape) in sources.items()}})
            for case in (Case(**asked) for asked in request["cases"]):
                _answer_case(answer, engine, request, case, sources)


def _answer_case(answer: TextIO, engine: Engine, request: dict[str, Any], case: Case, sources: Header) -> None:
    """Trace the ranks of one choice of sizes."""
    try:
        config = engine.engine_config(request["model"], case, trust_remote_code=request["trust_remote_code"])
    except Exception as error:
        _say(answer, {"case": asdict(case), "failed": _reason(error)})
        return
    gc.collect()
    gc.freeze()
    _in_forks(answer, case, request["ranks"] or range(case.world), lambda rank: trace(engine, config, case, rank, sources))


def _say(answer: TextIO, document: dict[str, Any]) -> None:
    answer.write(json.dumps(document, separators=(",", ":")) + "\n")
    answer.flush()


def _reason(error: BaseException) -> str:
    """An error in one line: of an assertion without a text, the statement."""
    text = " ".join(str(error).split())[:400]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text or place.line} ({Path(place.filename).name}:{place.lineno})"


def _in_forks(answer: TextIO, case: Case, ranks: Iterable[int], work: Callable[[int], dict[str, Any]]) -> None:
    """Write what `work` returns for each rank, in their order. Each is made in a forked process, with which everything ends that the engine
    keeps for a rank; two run at a time."""
    fork = multiprocessing.get_context("fork")
    parts = {rank: Path(f"{answer.name}.{rank}") for rank in ranks}
    processes = {rank: fork.Process(target=_answer_rank, args=(part, case, rank, work)) for rank, part in parts.items()}
    running: list[Any] = []
    for process in processes.values():
        while len(running) >= min(os.cpu_count() or 1, MOST_AT_A_TIME):
            wait([started.sentinel for started in running])
            running = [started for started in running if started.is_alive()]
        process.start()
        running.append(process)
    for rank, part in parts.items():
        processes[rank].join()
        if status := processes[rank].exitcode:
            _say(answer, {"case": asdict(case), "rank": rank, "failed": f"its process ended with status {abs(status)}"})
        else:
            answer.write(part.read_text())
        part.unlink(missing_ok=True)
    answer.flush()


def _answer_rank(part: Path, case: Case, rank: int, work: Callable[[int], dict[str, Any]]) -> None:
    # The process ends soon, and a rank of a large model makes millions of objects that stay.
    gc.disable()
    try:
        document = {"case": asdict(case), "rank": rank, **work(rank)}
    except BaseException as error:
        if os.environ.get("RESHARD_TRACER_DEBUG"):
            traceback.print_exc()
        document = {"case": asdict(case), "rank": rank, "failed": _reason(error)}
    with part.open("w") as answer:
        _say(answer, document)
    os._exit(0)  # threads that the engine has started are not waited for


def headers(folder: Path) -> Header:
    """Name -> element type and shape of every tensor in a folder's safetensors files, by their headers alone."""
    paths, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    if len(paths) > 1 and index.exists():  # engines read the files of the index
        named = set(json.loads(index.read_text())["weight_map"].values())
        paths = [path for path in paths if path.name in named]
    entries: Header = {}
    for path in paths:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                entries[name] = entry["dtype"], tuple(entry["shape"])
    return entries


def trace(engine: Engine, config: Any, case: Case, rank: int, sources: Header) -> dict[str, Any]:
    """What one rank holds after loading: its tensors, and what was left out or softened on the way."""
    import torch

    from .recorder import Recorder

    recorder = Recorder()
    with torch.device("meta"):
        tensors = {name: torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype])) for name, (dtype, shape) in sources.items()}
    for name, tensor in tensors.items():
        recorder.root(tensor, name)
    with engine.loaded_rank(config, case, rank, recorder, tensors) as loaded:
        return {
            "class": type(loaded.model).__name__,
            "dtype": loaded.dtype,
            "tensors": dict(_tensors(engine, loaded, recorder, sources)),
            "softened": loaded.softened,
        }


def _tensors(engine: Engine, loaded: LoadedRank, recorder: Any, sources: Header) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every tensor of the state dict that the engine would save: of those that share memory, the one with the smallest name."""
    from .recorder import number_of, section

    state = loaded.model.state_dict()
    chosen_by_kernel = dict(engine.kernel_choices(loaded.model))
    shapes = {name: shape for name, (_, shape) in sources.items()}
    seen: dict[tuple[Any, ...], str] = {}
    for name in sorted(state):
        tensor = state[name]
        if tensor.numel() and seen.setdefault((number_of(tensor), *section(tensor)), name) == name:
            module = name.rpartition(".")[0]
            reasons = {"kernel": chosen_by_kernel[module]} if module in chosen_by_kernel else {}
            yield name, {**_described(tensor, recorder, shapes), **reasons}


def _described(tensor: Any, recorder: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A tensor of a rank: its element type, its shape, and where each of its elements comes from."""
    from .origins import one_cast, pieces_of, settled, whole_section
    from .recorder import number_of, section
    from .strided import NotABox

    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    about: dict[str, Any] = {"dtype": dtype, "shape": list(shape)}
    recorder.note(tensor)
    offset, _, strides = section(tensor)
    try:
        pieces = pieces_of(recorder.arrays, number_of(tensor), whole_section(shape, offset, strides))
        held_pieces = settled(pieces, shape or (1,), shapes)
    except NotABox as error:
        return {**about, "unknown": str(error)}
    parts, rest = [], []
    for held in held_pieces:
        piece, placed = held.piece, held.placed
        at = list(placed.at) if shape else []
        if piece.kind == "weight":
            functions = [name for name in piece.functions if name]
            if not one_cast((*piece.dtypes, dtype), dtype):
                functions.append(f"cast by way of {', '.join(piece.dtypes[1:])}")
            start = list(placed.start) if shapes[piece.name] else []
            parts.append([piece.name, start, at, [list(axis) for axis in placed.axes], functions])
        else:
            rest.append([piece.kind, placed.volume, piece.value if piece.kind == "fill" else piece.name])
    if own := [held.placed for held in held_pieces if held.piece.kind == "real"]:
        about["values"] = _values(tensor, own, is_whole=not parts)
    return {**about, "parts": parts, "rest": rest}


def _values(tensor: Any, own: list[Placed], *, is_whole: bool) -> list[float] | str:
    """The tensor's own elements: one value if all are equal, otherwise each in turn. is_whole: whether it has no others."""
    import torch

    if tensor.device.type == "meta":
        return "values that are not in memory"
    flat = tensor.detach().reshape(-1)
    if not is_whole:
        steps = row_major(tuple(tensor.shape))
        flat = torch.cat([flat[_positions(place, steps)] for place in own])
    if bool((flat.view(torch.uint8) == flat[:1].view(torch.uint8).repeat(len(flat))).all()):
        return [float(flat[0])]
    if math.prod(tensor.shape) > MOST_VALUES or not is_whole:
        return f"{math.prod(tensor.shape)} different values"
    return [float(value) for value in flat]


def _positions(placed: Placed, steps: tuple[int, ...]) -> Any:
    """The row-major positions of the elements of a piece. steps: the strides of the tensor."""
    import torch

    positions = torch.tensor([sum(at * step for at, step in zip(placed.at, steps, strict=True))])
    for axis in placed.axes:
        along = torch.arange(axis.size) * axis.target_step * steps[axis.target_axis]
        positions = (positions[:, None] + along).reshape(-1)
    return positions
