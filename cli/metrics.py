"""--metrics-file: how a run ended, in the text format of Prometheus, for the textfile collector of node_exporter.

    # HELP reshard_last_run_success Whether the exit code was 0.
    # TYPE reshard_last_run_success gauge
    reshard_last_run_success{command="convert",format="vllm",target="out"} 1

The file is replaced as a whole, so that nobody reads half of it, and also after an error. What a run did not come to know is left out.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from reshard.storage.system_calls import system_errors

from .logs import check_folder

_MEANINGS = {
    "success": "Whether the exit code was 0.",
    "exit_code": "The exit code.",
    "seconds": "How long the run took.",
    "timestamp_seconds": "When the run ended, in Unix time.",
    "bytes_read": "Bytes of tensors that were read.",
    "bytes_written": "Bytes of the files of weights that were written.",
    "tensors": "Tensors that were written, compared or checked.",
    "dropped": "Tensors of the source that were left out.",
    "unchanged": "Whether --if-changed had nothing to do.",
    "differences": "Differences that verify found.",
    "findings": "Findings of doctor by severity.",
}


METERED = ("convert", "verify", "doctor")
"""The commands with --metrics-file."""


class Metrics:
    """What is known about one run. command: its name. file: where --metrics-file wants it; None: nowhere."""

    def __init__(self, command: str, file: str | None) -> None:
        self._file = Path(file) if file is not None and command in METERED else None
        self._began = time.monotonic()
        self._labels = {"command": command, "format": "", "target": ""}
        self._samples: dict[tuple[str, str], float] = {}

    def label(self, *, target: str | None = None, format: str | None = None) -> None:
        """Say what the run is about: the path that it writes or checks, and the format there. None: as before."""
        self._labels |= {name: text for name, text in (("target", target), ("format", format)) if text is not None}

    def record(self, **samples: float) -> None:
        """Add samples, each under a name of _MEANINGS."""
        self._samples |= {(name, ""): value for name, value in samples.items()}

    def record_findings(self, counts: dict[str, int]) -> None:
        """Add the number of findings of each severity."""
        self._samples |= {("findings", severity): count for severity, count in counts.items()}

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began

    def check_writable(self) -> None:
        """Raises RequestError or SystemRefusal if the file cannot be written."""
        if self._file is not None:
            check_folder("--metrics-file", self._file)
            with system_errors("written", self._file):
                temporary = _temporary(self._file)
                temporary.touch()
                temporary.unlink()

    def write(self, exit_code: int) -> None:
        """Replace the file by what is known about the run, which ends now. Raises SystemRefusal if that is not possible."""
        if self._file is None:
            return
        temporary = _temporary(self._file)
        try:
            with system_errors("written", self._file):
                temporary.write_text(self._text(exit_code), encoding="utf-8")
                os.replace(temporary, self._file)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _text(self, exit_code: int) -> str:
        ended = {
            "success": exit_code == 0,
            "exit_code": exit_code,
            "seconds": round(self.seconds, 3),
            "timestamp_seconds": int(time.time()),
        }
        samples = {**{(name, ""): value for name, value in ended.items()}, **self._samples}
        lines: list[str] = []
        for name, meaning in _MEANINGS.items():
            found = [(severity, value) for (each, severity), value in samples.items() if each == name]
            if found:
                lines += [f"# HELP reshard_last_run_{name} {meaning}", f"# TYPE reshard_last_run_{name} gauge"]
            for severity, value in found:
                labels = {**self._labels, "severity": severity} if severity else self._labels
                quoted = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
                lines.append(f"reshard_last_run_{name}{{{quoted}}} {value + 0}")
        return "\n".join(lines) + "\n"


def _temporary(path: Path) -> Path:
    """A name beside the file that node_exporter, which reads *.prom, does not read. Unlike a file of `tempfile`, others may read it."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
