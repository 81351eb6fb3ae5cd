"""--metrics-file: how a run ended, in the text format of Prometheus, for the textfile collector of node_exporter.

    # HELP reshard_last_run_success Whether the exit code was 0.
    # TYPE reshard_last_run_success gauge
    reshard_last_run_success{command="convert",format="vllm",target="out"} 1

The file is replaced as a whole, so that nobody reads half of it, and also after an error. What a run did not come to know is left out.
"""

from __future__ import annotations

import time

from reshard.secrets import masked
from reshard.storage.output_file import OutputFile

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
    "bytes_served": "Bytes that clients of hub got.",
    "requests": "Requests of clients that hub answered.",
}


METERED = ("convert", "verify", "doctor", "hub")
"""The commands with --metrics-file."""


class Metrics:
    """What is known about one run. command: its name. file: where --metrics-file wants it; None: nowhere."""

    def __init__(self, command: str, file: str | None) -> None:
        self._path = file if command in METERED else None
        self._file: OutputFile | None = None
        self._began = time.monotonic()
        self._labels = {"command": command, "format": "", "target": ""}
        self._samples: dict[tuple[str, str], float] = {}

    def label(self, *, target: str | None = None, format: str | None = None) -> None:
        """Say what the run is about: the path that it writes or checks, and the format there. None: as before."""
        self._labels |= {name: text for name, text in (("target", target), ("format", format)) if text is not None}

    def record(self, severity: str = "", **samples: float) -> None:
        """Add samples, each under a name of _MEANINGS. severity: of the findings that are counted."""
        self._samples |= {(name, severity): value for name, value in samples.items()}

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began

    def open(self) -> None:
        """Open the file, so that the run can end in it. Raises RequestError or SystemRefusal if it cannot be written."""
        if self._path is not None:
            self._file = OutputFile(self._path, option="--metrics-file")

    def write(self, exit_code: int) -> None:
        """Replace the file by what is known about the run, which ends now. Raises RequestError or SystemRefusal if that is not possible."""
        if self._file is not None:
            self._file.write(self._text(exit_code).encode())

    def _text(self, exit_code: int) -> str:
        seconds, now = round(self.seconds, 3), int(time.time())
        self.record(success=exit_code == 0, exit_code=exit_code, seconds=seconds, timestamp_seconds=now)
        lines: list[str] = []
        for name, meaning in _MEANINGS.items():
            samples = [(severity, value) for (metric, severity), value in self._samples.items() if metric == name]
            if samples:
                lines += [f"# HELP reshard_last_run_{name} {meaning}", f"# TYPE reshard_last_run_{name} gauge"]
            for severity, value in samples:
                labels = {**self._labels, "severity": severity} if severity else self._labels
                quoted = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
                lines.append(f"reshard_last_run_{name}{{{quoted}}} {value + 0}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A value of a label, in UTF-8. Of a path in another encoding, the other bytes stand as \\udcXX."""
    text = masked(text).encode("utf-8", "backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
