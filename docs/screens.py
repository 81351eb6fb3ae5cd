"""Draw what commands print on a terminal, with its colours, as docs/screens/terminal.svg, which README.md shows.

    python docs/screens.py

The commands run for real, in a pseudo-terminal of 100 columns, on DeepSeek-V3: its config, and sparse files with the headers of its 46,183
weights and without their data (benchmarks/sparse.py). tests/docs/test_screens.py compares the picture with what they
print today, but for times and rates.
"""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
sparse = import_module("sparse")
PICTURE = ROOT / "docs" / "screens" / "terminal.svg"
COLUMNS, ROWS = 100, 40
COMMANDS = (
    "reshard inspect deepseek-v3 --depth 2",
    "reshard convert deepseek-v3 served --to vllm --tp 8 --dry-run",
)
# SGR codes as classes of the picture.
_CLASSES = {"1": "bold", "2": "dim", "4": "bold"} | {
    str(code): name for base in (30, 90) for code, name in enumerate(("dim", "red", "green", "yellow", "blue", "purple", "cyan", ""), base)
}
_STYLE = """
rect{fill:#0f151b}text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#dbe3ea;white-space:pre}
.bold{font-weight:700}.dim{fill:#8794a1}.red{fill:#ff8a7a}.green{fill:#6fd09c}.yellow{fill:#e6bf6a}.blue{fill:#78b2f2}.purple{fill:#c595d8}
.cyan{fill:#6fc7cf}.prompt{fill:#6fd09c}
"""


def printed() -> list[str]:
    """The lines of a session, with their escape sequences: each command after its prompt, then what it prints."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="reshard-screen-") as folder:
        model = Path(folder) / "deepseek-v3"
        sparse.write_deepseek(model, layers=sparse.DEEPSEEK["num_hidden_layers"], experts=sparse.DEEPSEEK["n_routed_experts"])
        (model / "tokenizer.json").write_text("{}")
        for command in COMMANDS:
            lines += [f"$ {command}", *_run(command, folder), ""]
    return lines[:-1]


def _run(command: str, folder: str) -> list[str]:
    """What a command prints on a terminal."""
    inside, outside = pty.openpty()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "PYTEST_CURRENT_TEST", "CI")}
    environment = {**kept, "PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(command.split(), cwd=folder, env=environment, stdout=outside, stderr=subprocess.DEVNULL, stdin=outside)
    os.close(outside)
    content = b""
    try:
        while part := os.read(inside, 1 << 16):
            content += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(inside)
    process.wait()
    return content.decode().replace("\r\n", "\n").rstrip("\n").split("\n")


def drawn(lines: list[str]) -> str:
    """The lines as SVG."""
    width, height = COLUMNS * 7.83 + 40, len(lines) * 19 + 36
    texts = [f'<text x="20" y="{30 + number * 19}">{_spans(line)}</text>' for number, line in enumerate(lines)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" '
        f'aria-label="reshard on a terminal"><style>{_STYLE}</style><rect width="100%" height="100%" rx="10"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def _spans(line: str) -> str:
    parts, classes = [], set[str]()
    if line.startswith("$ "):
        return f'<tspan class="prompt">$</tspan> <tspan class="bold">{html.escape(line[2:])}</tspan>'
    for i, part in enumerate(re.split(r"\x1b\[([\d;]*)m", line)):
        if i % 2:
            for code in part.split(";"):
                classes = set() if code in ("", "0") else classes | {_CLASSES.get(code, "")}
        elif part:
            names = " ".join(sorted(classes - {""}))
            text = html.escape(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part))
            parts.append(f'<tspan class="{names}">{text}</tspan>' if names else text)
    return "".join(parts)


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(printed()))
