"""Laws of a checkpoint format.

    TruthLaws      what is read is what the framework had in memory
    ReadingLaws    TruthLaws, and damage is refused
    WritingLaws    what is written is read back, and is the same each time
    FormatLaws     ReadingLaws and WritingLaws

A class that inherits them has a fixture `case`, which returns a FormatCase.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import reshard
from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.engine.views import LazyTensor
from reshard.errors import RequestError, ReshardError, UnexpectedContentError
from reshard.geometry.dtypes import DType
from reshard.geometry.extents import span_elements
from reshard.geometry.sections import whole
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor
from reshard.plans.plan import Plan
from reshard.storage.files import VirtualFiles

Contents = dict[tuple[str, str], dict[str, Any]]
"""(name, kind) -> {"dtype": "BF16", "shape": [rows, columns], "sha256": of the elements in row-major order}."""


@value
class FormatCase:
    """A checkpoint on which the laws of a format are tested."""

    format: str
    """The format's name."""
    checkpoint: Path
    """The checkpoint. For WritingLaws it may be of another format, for the others the framework itself should have written it."""
    truth: Contents = field(default_factory=dict)
    """What the checkpoint holds, gathered by a program that is not reshard. WritingLaws do not need it."""
    model: Path | None = None
    """The folder with the model's config, if it does not lie in the checkpoint."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `reshard.plan` for a target of this format: sizes that split something, and the format's own options."""

    named: Mapping[str, str | None] = field(default_factory=dict)
    """File -> how the error names it where it is missing, if its own name cannot be known; None: no tensor needs it."""

    def open(self, **options: Any) -> reshard.Checkpoint:
        """The opened checkpoint."""
        return reshard.open(self.checkpoint, model=self.model, **options)

    def plan(self, **options: Any) -> Plan:
        """The plan of a conversion of the checkpoint to the format."""
        return reshard.plan(self.open(), to=self.format, **{**self.options, **options})

    def refusal(self, path: Path, content: bytes | None) -> ReshardError | None:
        """The error with which reshard refuses to open the checkpoint where one of its files has this content, or is missing. None: it
        opens. Any other exception is a broken law."""
        before = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        try:
            self.open(format=self.format)
        except ReshardError as error:
            return error
        finally:
            path.write_bytes(before)
        return None


def read_truth(path: Path) -> Contents:
    """The contents in a file such as {"tensors": {"norm.weight": {"weight": {"dtype": "BF16", "shape": [32], "sha256": "..."}}}}."""
    tensors = json.loads(path.read_text())["tensors"]
    return {(name, kind): content for name, kinds in tensors.items() for kind, content in kinds.items()}


def contents(opened: reshard.Checkpoint) -> Contents:
    """All tensors of a checkpoint, read by reshard."""
    result: Contents = {}
    for tensor in opened.index.tensors:
        words = LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, opened.files).words()
        result[tensor.name, tensor.kind] = described(tensor.dtype, tensor.shape, words.tobytes())
    return result


def described(dtype: DType, shape: tuple[int, ...], content: bytes) -> dict[str, Any]:
    """A tensor as a truth describes it. content: its elements in row-major order."""
    return {"dtype": dtype.name, "shape": list(shape), "sha256": hashlib.sha256(content).hexdigest()}


class TruthLaws:
    """What a format reads is what the framework had in memory."""

    def test_every_tensor_reads_bit_exactly(self, case: FormatCase) -> None:
        opened = case.open()
        assert opened.format == case.format
        # State of the run, and a count of steps that the files keep once for all parameters, belong to no parameter.
        aside = {"state"} if any(kind == "step" for _, kind in case.truth) else {"state", "step"}
        assert case.truth == {key: content for key, content in contents(opened).items() if key in case.truth or key[1] not in aside}

    def test_every_element_lies_in_one_place(self, case: FormatCase) -> None:
        for tensor in case.open().index.tensors:
            counts = np.zeros(tensor.shape, np.int64)
            for piece in tensor.without_replicas().pieces():
                counts[tuple(map(slice, piece.box.offsets, piece.box.stops))] += 1
            assert (counts == 1).all(), f"elements of {tensor.name} ({tensor.kind}) lie in {counts.min()} to {counts.max()} places"


class ReadingLaws(TruthLaws):
    """A format also reads no weight to open a checkpoint, and refuses damage in an error of reshard's own."""

    FLIPS = 64
    """How many bits outside of the tensors are flipped, one at a time."""

    @pytest.fixture
    def copied(self, case: FormatCase, tmp_path: Path) -> FormatCase:
        """A copy of the case, to be damaged."""
        return replace(case, checkpoint=Path(shutil.copytree(case.checkpoint, tmp_path / "copied" / case.checkpoint.name)))

    def test_the_index_is_read_without_the_weights(self, case: FormatCase) -> None:
        opened, format = case.open(), registry.named(case.format)
        hidden = VirtualFiles(opened.files.root)
        weights = [tensor for tensor in opened.index.tensors if tensor.kind == "weight"]
        for path, is_weight in _bytes_of(weights, opened).items():
            content = path.read_bytes()
            edges = np.flatnonzero(np.diff(~is_weight, prepend=False, append=False)).reshape(-1, 2).tolist()
            hidden.add(
                path.relative_to(opened.files.root).as_posix(), len(content), [(start, content[start:stop]) for start, stop in edges]
            )
        hints = Hints(opened.model_files.config, architecture=opened.architecture)
        assert _outline(format.read(hidden, hints)) == _outline(format.read(opened.files, hints))

    def test_a_missing_file_is_named(self, copied: FormatCase) -> None:
        for path in _files_of(copied.open()):
            error, name = copied.refusal(path, None), copied.named.get(path.name, path.name)
            assert name is None or (error and name in str(error)), f"without {path.name}: {error}"

    def test_a_truncated_file_is_refused(self, copied: FormatCase) -> None:
        for path in _files_of(copied.open()):
            content = path.read_bytes()
            for nbytes in (0, len(content) // 2, len(content) - 1):
                assert copied.refusal(path, content[:nbytes]), f"{path.name}: {nbytes} of {len(content)} bytes are not refused"

    def test_a_flipped_length_is_refused_or_harmless(self, copied: FormatCase) -> None:
        opened = copied.open()
        headers = {path: np.flatnonzero(~is_tensor) for path, is_tensor in _bytes_of(opened.index.tensors, opened).items()}
        random, refused = Random(0), 0
        for path in random.choices([path for path in headers if len(headers[path])], k=self.FLIPS):
            content = bytearray(path.read_bytes())
            content[random.choice(headers[path])] ^= 1 << random.randrange(8)
            error = copied.refusal(path, bytes(content))
            assert not isinstance(error, UnexpectedContentError), f"{path.name}: the reader does not check what it reads: {error}"
            refused += error is not None
        assert refused, "no flip was refused: the header is not checked"


class WritingLaws:
    """What a format writes is read back, and is the same each time."""

    def test_the_way_there_and_back_is_the_identity(self, case: FormatCase) -> None:
        assert reshard.roundtrip(case.plan()).losses == ()

    def test_what_is_written_is_read_back(self, case: FormatCase, tmp_path: Path) -> None:
        reshard.convert(case.plan(), tmp_path / "out")
        assert reshard.open(tmp_path / "out").format == case.format
        reshard.verify(case.open(), tmp_path / "out").raise_if_different()

    def test_a_second_conversion_writes_the_same_bytes(self, case: FormatCase, tmp_path: Path) -> None:
        written = []
        for workers in (1, 3):
            out = tmp_path / str(workers)
            reshard.convert(case.plan(), out, workers=workers)
            files = [path for path in out.rglob("*") if path.is_file() and path.name != "reshard.json"]
            written.append({path.relative_to(out): path.read_bytes() for path in files})
        assert written[0] == written[1]

    def test_options_are_declared_and_others_refused(self, case: FormatCase) -> None:
        own = {option.name: option for option in registry.named(case.format).options}
        for option in own.values():
            assert option.help.endswith("."), option.name
            with pytest.raises(RequestError, match=option.name):
                option.parse(object())
        for name in {"no_such_option", *(option.name for option in registry.options())} - own.keys():
            with pytest.raises(RequestError, match=name):
                case.plan(**{name: "1"})

    def test_it_is_not_loaded_for_another_format(self, case: FormatCase, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
        module = type(registry.named(case.format)).__module__
        code = (
            f"import sys, reshard, {module}; light = {{*sys.modules}}; name = reshard.open({str(tmp_path)!r}).format\n"
            f"print(name, *light & {{'numpy', 'torch'}}, *(name for name in {{*sys.modules}} - light if name.startswith('{module}.')))"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        name, *loaded = done.stdout.split()
        assert name == case.format or not loaded, f"import {module} and opening another format have loaded {', '.join(loaded)}"


class FormatLaws(ReadingLaws, WritingLaws):
    """All laws of a format that is read and written."""


def _bytes_of(tensors: Iterable[Tensor], opened: reshard.Checkpoint) -> dict[Path, npt.NDArray[np.bool_]]:
    """File -> for each of its bytes, whether it belongs to one of these tensors."""
    root = Path(opened.files.root)
    marked = {path: np.zeros(path.stat().st_size, np.bool_) for path in sorted(root.rglob("*")) if path.is_file()}
    for piece in (piece for tensor in tensors for piece in tensor.pieces()):
        extent = piece.extent
        if piece.box.volume and root / extent.path in marked:
            nbytes = span_elements(piece.box.sizes, extent.strides) * extent.dtype.itemsize
            marked[root / extent.path][extent.byte_offset : extent.byte_offset + nbytes] = True
    return marked


def _files_of(opened: reshard.Checkpoint) -> list[Path]:
    """The files that hold tensors."""
    return [Path(opened.files.root) / file.path for file in opened.index.files]


def _outline(index: Index) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {(tensor.name, tensor.kind): (tensor.dtype, tensor.shape, *tensor.pieces()) for tensor in index.tensors}
