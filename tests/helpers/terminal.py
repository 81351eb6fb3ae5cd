"""A terminal for tests: a command runs with a pseudo-terminal of a certain size, and the screen that a user would then see is read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
import uuid
from collections.abc import Sequence
from pathlib import Path

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def output(command: Sequence[object], columns: int, rows: int, *, work: Path, **environment: str) -> str:
    """What a command writes to a terminal of this size, which is its standard output and its standard error."""
    process, terminal = pty.fork()
    if process == 0:
        # The environment is given as a whole: GNU readline, which pytest loads, puts COLUMNS and LINES where os.environ does not see them.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        os.chdir(work)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execvpe(str(command[0]), [str(word) for word in command], {**inherited, "TERM": "xterm-256color", **environment})
    written = bytearray()
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # the process has ended
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    os.waitpid(process, 0)
    return written.decode()


def screen(written: str, columns: int, rows: int) -> list[str]:
    """The lines that a terminal shows after this was written: long lines continue in the next, and the first lines scroll away.

    Raises ValueError for a control character that a terminal would understand and this does not.
    """
    lines, at = [""], 0
    for char in _STYLE.sub("", written):
        if char == "\n":
            lines.append("")
        elif char == "\r":
            at = 0
            continue
        elif not char.isprintable():
            raise ValueError(f"the control character {char!r}")
        else:
            if at == columns:
                lines.append("")
                at = 0
            lines[-1] = lines[-1][:at].ljust(at) + char + lines[-1][at + 1 :]
            at += 1
            continue
        at = 0
    return [line.rstrip() for line in lines[-rows:]]


def tmux_screen(command: Sequence[object], columns: int, rows: int, *, work: Path) -> list[str]:
    """The lines that tmux, a terminal that others have written, shows when a command has ended."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "TMUX")}
    tmux = ["tmux", "-L", f"reshard-{uuid.uuid4().hex[:12]}", "-f", os.devnull]
    words = f"tmux set status off; clear; {shlex.join(map(str, command))}; tmux wait-for -S ended; sleep 100"

    def asked(*arguments: object) -> str:
        return subprocess.run([*tmux, *map(str, arguments)], env=environment, capture_output=True, check=True, text=True, timeout=60).stdout

    # The status line takes the last row until the command turns it off; the window has grown by a row then.
    asked("new-session", "-d", "-x", columns, "-y", rows, "-c", work, words)
    try:
        asked("wait-for", "ended")
        return [line.rstrip() for line in asked("capture-pane", "-p").rstrip("\n").split("\n")]
    finally:
        asked("kill-server")
