"""The journal: the blocks of a conversion that are on the disk, with their digests, so that an interrupted conversion can be resumed.

    {"identity": digest of the plan, "replaces": [files of an older checkpoint that the result replaces], "version": 1,
     "to": format, "nbytes": bytes of all blocks, "arguments": [the command line]}
    {"blocks": [[route, block, digest], ...], "nbytes": bytes of all blocks that are finished, "source": trace of the source's files}
    ...
    {"commit": "begun"}

A line is written only after the bytes of its blocks have been synced. An incomplete last line is ignored. From the last line on, the target
holds no complete checkpoint until the journal is removed. If a cast made values of a block infinite, their number follows its digest.

The parts of a conversion share the first line and the last one. Each process writes its blocks into a file of its own, parts/*.jsonl.

RunHeader says which conversion writes a destination; a store keeps it in its records. Records are hostile input.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import CheckpointError, TargetError
from reshard.geometry.value import value
from reshard.storage.files import inside
from reshard.storage.own_files import JOURNAL, WORK_FOLDER, json_object, open_own, own_lines
from reshard.storage.system_calls import sync_folder, system_errors

if TYPE_CHECKING:
    from reshard.plans.tasks import BlockKey
    from reshard.storage.staging import Staging

_OF_PARTS = ("--part", "--parts")


@value
class RunHeader:
    """Which conversion writes a destination."""

    identity: str = ""
    """The identity of the plan."""
    replaces: tuple[str, ...] = ()
    """The files of an older checkpoint that are removed when the new one is complete."""
    to: str = "another format"
    """The format that is written."""
    nbytes: int = 0
    """The bytes of all blocks; 0 if the journal, of version 0.1.0, does not say it."""
    arguments: tuple[str, ...] = ()
    """The arguments of the `reshard` command that began it; empty if Python code did."""

    def record(self) -> dict[str, object]:
        """The JSON object of the record."""
        return {**asdict(self), "version": 1}

    @staticmethod
    def of(record: dict[str, Any]) -> RunHeader:
        """The header from the JSON object of a record. Raises ValueError or TypeError if reshard did not write it."""
        identity, to, nbytes = record.get("identity"), record.get("to", "another format"), record.get("nbytes", 0)
        return RunHeader(
            identity=text(identity),
            replaces=tuple(inside(text(path), where=JOURNAL) for path in record.get("replaces", ())),
            to=text(to),
            nbytes=natural(nbytes),
            arguments=tuple(map(text, record.get("arguments", ()))),
        )

    def command(self) -> str:
        """What finishes the conversion."""
        # The arguments come from a file. The name of the command does not, and the shell gets each argument quoted.
        if self.arguments[:1] != ("convert",):
            return "Repeat the conversion with `resume=True` (in Python: resume=True)"
        options = [argument for argument in self.arguments if argument not in ("--resume", "--overwrite", "--if-changed")]
        return f"Finish it with `reshard {shlex.join([*_without_parts(options), '--resume'])}`"


def _without_parts(arguments: list[str]) -> Iterator[str]:
    """The arguments without --part and --parts: one process finishes what several have begun."""
    is_value = False
    for argument in arguments:
        if not is_value and argument.partition("=")[0] not in _OF_PARTS:
            yield argument
        is_value = argument in _OF_PARTS and not is_value


def blocks_of(record: Mapping[str, Any]) -> Iterator[tuple[BlockKey, bytes]]:
    """The finished blocks in a record, each with its digest. Raises ValueError or TypeError if reshard did not write it."""
    for route, block, digest, *_ in record.get("blocks", ()):
        yield (natural(route), natural(block)), bytes.fromhex(digest)


def beyond_of(record: Mapping[str, Any]) -> Iterator[tuple[BlockKey, int]]:
    """The blocks in a record in which values became infinite, each with their number. Raises: as `blocks_of` does."""
    for route, block, _, *beyond in record.get("blocks", ()):
        if beyond:
            yield (natural(route), natural(block)), natural(beyond[0])


def natural(value: object) -> int:
    """A whole number that is not negative. Raises ValueError for another value."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:100]} is not a whole number")
    return value


def text(value: object) -> str:
    """A string. Raises ValueError for another value."""
    if not isinstance(value, str):
        raise ValueError("a text is expected")
    return value


# How long the journal waits between syncs: eight times as long as the last one took, within these limits. Each costs processor time, and a
# run that is killed does again what was not synced. (The disk begins to write without it, see begin_sync.)
_SHORTEST_WAIT, _LONGEST_WAIT, _OF_LAST_SYNC = 0.25, 1.0, 8
# So that a line stays far below the limit of own_files.py, however long a sync takes.
_BLOCKS_OF_A_LINE = 1 << 16
_PARTS = "parts"


class Journal:
    """Appends finished blocks to the journal file, several times a second, in a thread of its own.

    source: the trace of the source's files, as this run sees them. header: for a new journal; None continues the journal of an earlier run,
    which has finished `finished` bytes. path: the file, if the process is a part of a conversion, and writes one of its own.

    Raises: SystemRefusal if the journal cannot be written.
    """

    def __init__(self, staging: Staging, source: str, header: RunHeader | None, *, finished: int = 0, path: Path | None = None) -> None:
        self._staging, self._source, self._finished, self._path = staging, source, finished, path or staging.journal
        self._pending: list[tuple[int | str, ...]] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        with system_errors("written", self._path):
            name = str(self._path.relative_to(staging.root))
            if not header and not path:
                _remove_incomplete_line(staging.root, name)
            flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if header else os.O_APPEND)
            self._file = open(open_own(staging.root, name, flags), "w")  # noqa: SIM115  (closed by `end`)
            if header:
                self._append(header.record())
            if header or path:
                sync_folder(self._path.parent)
        self._thread = threading.Thread(target=self._tick, name="reshard-journal", daemon=True)
        self._thread.start()

    def add(self, key: BlockKey, digest: bytes, nbytes: int, beyond: int = 0) -> None:
        """Add a block whose bytes have been written. beyond: how many values became infinite.

        Raises: the error of the last sync, if it failed.
        """
        if self._error:
            raise self._error
        with self._lock:
            self._pending.append((*key, digest.hex(), *filter(None, [beyond])))
            self._finished += nbytes

    def stop(self) -> None:
        """Stop after an error or an interruption. Pending blocks are written if that is possible. May be called twice."""
        with suppress(Exception):
            self.end()

    def withdraw(self) -> None:
        """Stop, and remove the journal: its blocks do not count as finished."""
        self._stop.set()
        self._thread.join()
        self._pending = []
        with system_errors("removed", self._path):
            self._path.unlink(missing_ok=True)

    def begin_commit(self) -> None:
        """Write the pending blocks and the line that says that the commit begins, and stop. Raises: as `end` does."""
        self.end({"commit": "begun"})

    def end(self, *records: dict[str, object]) -> None:
        """Write the pending blocks and these records, and stop.

        Raises: SystemRefusal if they, or any blocks before them, could not be written.
        """
        self._stop.set()
        self._thread.join()
        try:
            # After a sync that failed, the system takes the lost bytes for written: a second sync would succeed and prove nothing.
            if self._error:
                raise self._error
            self._flush()
            with system_errors("written", self._path):
                for record in records:
                    self._append(record)
        finally:
            with suppress(OSError):  # Every line that counts was synced.
                self._file.close()

    def _tick(self) -> None:
        wait = _SHORTEST_WAIT
        while not self._stop.wait(wait):
            began = time.monotonic()
            try:
                self._flush()
            except BaseException as error:
                self._error = error
                return
            wait = min(max(_SHORTEST_WAIT, _OF_LAST_SYNC * (time.monotonic() - began)), _LONGEST_WAIT)

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending, finished = self._pending, [], self._finished
        if pending:
            self._staging.sync()
            with system_errors("written", self._path):
                for i in range(0, len(pending), _BLOCKS_OF_A_LINE):
                    self._append({"blocks": pending[i : i + _BLOCKS_OF_A_LINE], "nbytes": finished, "source": self._source})

    def _append(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@value
class Unfinished:
    """A conversion that was interrupted, or that is running, as its journal describes it."""

    root: Path
    """The target directory."""
    header: RunHeader
    """The first line of the journal."""
    blocks: dict[BlockKey, bytes]
    """The digests of the finished blocks."""
    sources: dict[str, set[BlockKey]]
    """The blocks by the trace of the source that they were copied from; of older journals under "", as they do not say it."""
    beyond: dict[BlockKey, int]
    """The blocks in which values became infinite, and how many."""
    nbytes: int
    """The bytes of the finished blocks."""
    nbytes_of_journal: int
    """The bytes of those that the journal itself lists, and not the journals of parts."""
    committing: bool
    """Whether the commit has begun, so that the target holds no complete checkpoint."""

    def of_other_sources(self, trace: str) -> dict[BlockKey, bytes]:
        """The blocks whose run saw other files than those of this trace, which may have other bytes; none if the trace is empty."""
        others = (keys for source, keys in self.sources.items() if trace and source != trace)
        return {key: self.blocks[key] for keys in others for key in keys}

    @property
    def progress(self) -> str:
        """How far it is: ", 63 % done"; empty if the journal does not tell."""
        return f", {100 * self.nbytes // self.header.nbytes} % done" if self.header.nbytes else ""

    def refusal(self) -> CheckpointError:
        """The error for somebody who wants to read the target as a checkpoint, with the command that finishes it."""
        from reshard.storage.lock import is_locked

        running = is_locked(self.root)
        return CheckpointError(
            f"{'a conversion is running here' if running else 'an interrupted conversion'} to {self.header.to}{self.progress}",
            where=str(self.root),
            why="The checkpoint is not complete yet" if running else "The checkpoint is not complete",
            do="Wait until it has ended" if running else self.header.command(),
        )


def read_journal(root: Path) -> Unfinished | None:
    """The conversion in the work folder of a target; None if there is none, or none that has noted which plan it follows.

    Raises: TargetError if the journal was not written by reshard, SystemRefusal if it cannot be read.
    """
    if (header := read_header(root)) is None:
        return None
    work, unfinished = root / WORK_FOLDER, Unfinished(root, header, {}, {}, {}, 0, 0, committing=False)
    with system_errors("read", work), _written_by_reshard(work):
        try:
            of_one, committing = _read(unfinished, JOURNAL)
            parts = sorted(work.glob(f"{_PARTS}/*.jsonl"))
            of_parts = sum(_read(unfinished, f"{_PARTS}/{part.name}")[0] for part in parts)
        except FileNotFoundError:  # The run has ended meanwhile.
            return None
    # Two processes may have converted the same blocks.
    nbytes = min(of_one + of_parts, header.nbytes or of_one + of_parts)
    return replace(unfinished, nbytes=nbytes, nbytes_of_journal=of_one, committing=committing)


def progress(root: Path) -> str:
    """How far the conversion in the work folder of a target is: ", 63 % done"; empty if there is none or it does not tell."""
    unfinished = read_journal(root)
    return unfinished.progress if unfinished else ""


def read_header(root: Path) -> RunHeader | None:
    """The first line of the journal in the work folder of a target; None if there is none. Raises: as `read_journal` does."""
    work = root / WORK_FOLDER
    with system_errors("read", work), _written_by_reshard(work):
        try:
            record = json_object(next(own_lines(root, f"{WORK_FOLDER}/{JOURNAL}"), b""))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return RunHeader.of(record) if "identity" in record else None


@contextmanager
def _written_by_reshard(work: Path) -> Iterator[None]:
    """Inside this context, a journal that holds other values than reshard writes is a TargetError."""
    try:
        yield
    except (ValueError, TypeError, CheckpointError):
        raise TargetError(
            "the journal was not written by reshard", where=str(work / JOURNAL), do=f"Remove {work}, or choose another directory"
        ) from None


def _read(unfinished: Unfinished, name: str) -> tuple[int, bool]:
    """Add the blocks of one journal; returns the bytes of those that the journal lists, and whether the commit has begun."""
    nbytes, committing = 0, False
    for i, line in enumerate(own_lines(unfinished.root, f"{WORK_FOLDER}/{name}")):
        record = json_object(line)
        blocks = dict(blocks_of(record))
        unfinished.blocks.update(blocks)
        unfinished.beyond.update(beyond_of(record))
        unfinished.sources.setdefault(text(record.get("source", "")), set()).update(blocks)
        if i or name != JOURNAL:
            nbytes = max(nbytes, natural(record.get("nbytes", 0)))
        committing |= "commit" in record
    return nbytes, committing


def journal_of_part(staging: Staging) -> Path:
    """A path for the journal of a process that is a part of a conversion. Its folder is created."""
    path = staging.work / _PARTS / f"{uuid.uuid4().hex}.jsonl"
    with system_errors("created", path.parent):
        path.parent.mkdir(exist_ok=True)
    return path


def _remove_incomplete_line(root: Path, name: str) -> None:
    """Remove what follows the last complete line of a journal, so that the next line is one of its own."""
    length = sum(map(len, own_lines(root, name)))
    with open(open_own(root, name, os.O_WRONLY), "wb", buffering=0) as file:
        os.ftruncate(file.fileno(), length)
