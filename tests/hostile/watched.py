"""A command line in a limited process, with an audit hook that watches what the process does to the machine."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from hostile.limits import MEMORY, limited

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GOOD = ("refused", "unforeseen", "done", "no such mutation")
_UNFORESEEN = "has a form that reshard does not expect"
# The ends of a command that `limited` and `_watched` tell by their first words.
_ENDS = ("CRASH", "WROTE ELSEWHERE", "CONNECTED ELSEWHERE")


def outcome_of(arguments: list[str], target: Path, *, server: tuple[str, int] | None = None) -> tuple[str, str]:
    """The outcome of a command line, and what it printed.

    The command may write in the folder of the target, except in `source` beside the target, and connect to `server` alone; then it may
    wait longer, and have more address space for threads, but no more memory. What it does by the code of a store is not seen here; that
    server sees it.
    """
    assert server is None or "obstore" not in sys.modules, "a forked child would wait for threads of obstore that it does not have"
    more: dict[str, int] = {"memory": 6 * MEMORY, "patience": 18} if server else {}
    answer = limited(lambda: _watched(arguments, target, server), **more)
    outcome = next((end for end in _ENDS if answer.startswith(end)), answer.partition(" ")[0])
    return outcome, f"reshard {' '.join(arguments)}\n{answer.removeprefix(outcome).strip()}"


def _watched(arguments: list[str], target: Path, server: tuple[str, int] | None) -> str:
    """In the child: the outcome of a command line."""
    seen: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # a forked child begins with the pages of its parent
    roots = tuple({str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, FIXTURES.parent, *filter(os.path.isabs, sys.path))})

    def is_ours(path: object) -> bool:
        return str(path).startswith((*roots, "<frozen", "<__array_function__", "<string>", "<unknown>"))

    def watch(event: str, args: tuple[Any, ...]) -> None:
        code = {"exec": lambda: args[0].co_filename, "compile": lambda: args[1], "import": lambda: args[1]}.get(event, lambda: None)()
        if event in _FOREIGN or (event.startswith("socket.") and server is None) or (code and not is_ours(code)):
            seen.append(f"EXECUTED {event} {args!r}"[:300])
        elif event == "socket.connect" and tuple(args[1][:2]) != server:
            seen.append(f"CONNECTED ELSEWHERE: {args[1]}")
        elif (event == "open" and _writes(args)) or event in _CHANGES:
            seen.extend(f"WROTE ELSEWHERE: {event} {path}" for path in _paths_outside(event, args, target))

    out, err = io.StringIO(), io.StringIO()
    run = import_module("reshard.cli.main").run
    tempfile.tempdir = str(target.parent)
    # A path that is not absolute, which only descriptors of folders explain, would leave something here.
    nowhere = target.parent / "nowhere"
    nowhere.mkdir(exist_ok=True)
    os.chdir(nowhere)
    sys.dont_write_bytecode = True  # Python would write elsewhere what it compiles
    sys.addaudithook(watch)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    message = err.getvalue()
    if seen or os.listdir(nowhere):
        return (seen or ["WROTE ELSEWHERE: in the working directory"])[0]
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > MEMORY >> 10:
        return "MEMORY by its peak"
    if "MemoryError" in message or message.endswith("[no-memory]\n"):
        return f"MEMORY {message[-3000:]}"
    if code == 0:
        return f"done {out.getvalue()[-200:]}"
    *earlier, last = message.splitlines() or [""]
    # Where several checkpoints lie, a table of them comes before the paragraph.
    is_table = code == 2 and last.endswith("[ambiguous]") and "none is chosen" in last
    if (
        code in range(1, 7)
        and last.startswith("reshard: ")
        and (is_table or all(line.startswith("reshard: warning: ") for line in earlier))
    ):
        return f"{'unforeseen' if _UNFORESEEN in message else 'refused'} {message}"
    if code == 1 and not message:
        return f"refused {out.getvalue()[-300:]}"
    return f"TRACEBACK exit code {code}\n{message[-6000:]}"


_FOREIGN = {
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "ctypes.dlopen",
    "pty.spawn",
    "os.kill",
}
# Events that change files: how many of their arguments are paths, and at which place the descriptors of those paths' folders start.
_CHANGES: dict[str, tuple[int, int | None]] = {
    "os.remove": (1, 1),
    "os.rmdir": (1, 1),
    "os.mkdir": (1, 2),
    "os.rename": (2, 2),
    "os.link": (2, 2),
    "os.symlink": (2, None),
    "os.truncate": (1, None),
    "os.chmod": (1, 2),
    "shutil.rmtree": (1, 1),
}


def _writes(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return (
        bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if isinstance(flags, int) and mode is None
        else any(c in str(mode) for c in "wax+")
    )


def _paths_outside(event: str, args: tuple[Any, ...], target: Path) -> Iterable[str]:
    """The paths of an event that do not lie where the command may write."""
    paths, folders = _CHANGES.get(event, (1, None))
    for i in range(paths):
        within = args[folders + i] if folders is not None and isinstance(args[folders + i], int) else -1
        if isinstance(args[i], str | bytes | os.PathLike) and not _inside(args[i], within, target):
            yield os.fsdecode(args[i])[:200]


def _inside(path: Any, within: int, target: Path) -> bool:
    """Whether the path lies beside or in the target, and not in the source. within: a descriptor of its folder, or -1."""
    text = os.path.abspath(os.path.join(os.readlink(f"/proc/self/fd/{within}") if within >= 0 else "", os.fsdecode(path)))
    return text == os.devnull or (Path(text).is_relative_to(target.parent) and not Path(text).is_relative_to(target.parent / "source"))
