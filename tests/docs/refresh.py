"""Write into README.md and docs/ what their commands print now, and the reference pages that are generated.

    python tests/docs/refresh.py [PAGE ...]

Output that differs only in times and rates stays as it is, so that a page changes only where a message has changed. Read the diff: what
the commands print is what the page promises.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.doc_pages import PAGES, ROOT, masked, read_page, run_page


def refresh(path: Path) -> bool:
    """Rewrite one page; returns whether it has changed."""
    page = read_page(path)
    lines = path.read_text().split("\n")
    with tempfile.TemporaryDirectory(prefix="reshard-docs-") as folder:
        results = list(run_page(page, Path(folder).resolve()))
    # From the last to the first, so that line numbers stay good.
    for i, (command, code, output) in reversed(list(enumerate(results))):
        if masked("\n".join(output)) != masked("\n".join(command.output)):
            lines[command.line + 1 : command.line + 1 + len(command.output)] = output
        if code and (i + 1 == len(results) or results[i + 1][0].text != "echo $?"):
            print(f"{page.name}:{command.line + 1}: exit code {code}: {command.text}", file=sys.stderr)
    text = "\n".join(lines)
    changed = text != path.read_text()
    path.write_text(text)
    return changed


def main() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py"], check=True)
    for path in [Path(word).resolve() for word in sys.argv[1:]] or PAGES:
        if refresh(path):
            print(f"changed: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
