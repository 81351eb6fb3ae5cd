"""Changes since the last release: fragments `changes/NAME.KIND.md`, one paragraph each, become a section of CHANGELOG.md.

python .ci/changes.py                       print the section
python .ci/changes.py 0.3.0 2026-12-20      write it into CHANGELOG.md as that version, and remove the fragments
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# In the order of a section: first what must be known before an upgrade.
KINDS = {
    "removal": "Removed",
    "change": "Before you upgrade",
    "feature": "What you can do now",
    "fix": "What was mended",
}


def fragments(folder: Path) -> dict[str, list[Path]]:
    """Kind -> its files, by name. A file that is no fragment ends the program."""
    by_kind: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.iterdir()):
        name, _, kind = path.name.removesuffix(".md").rpartition(".")
        if not name or kind not in KINDS or path.suffix != ".md":
            sys.exit(f"{path}: a fragment is called NAME.KIND.md, with one of the kinds {', '.join(KINDS)}")
        if "\n\n" in path.read_text().strip() or not path.read_text().strip():
            sys.exit(f"{path}: a fragment is one paragraph")
        by_kind[kind].append(path)
    return by_kind


def section(by_kind: dict[str, list[Path]]) -> str:
    """The changes as a list for each kind."""
    return "\n".join(f"### {KINDS[kind]}\n\n{''.join(map(item, paths))}" for kind, paths in by_kind.items() if paths)


def item(path: Path) -> str:
    """A fragment as an item of a list."""
    wrap = textwrap.TextWrapper(140, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return wrap.fill(path.read_text()) + "\n"


def release(root: Path, version: str, date: str) -> None:
    """Write the section into CHANGELOG.md, before the last version, and remove the fragments."""
    by_kind, changelog = fragments(root / "changes"), root / "CHANGELOG.md"
    head, mark, rest = changelog.read_text().partition("\n## [")
    changelog.write_text(f"{head}\n## [{version}] - {date}\n\n{section(by_kind)}{mark}{rest}")
    for path in (path for paths in by_kind.values() for path in paths):
        path.unlink()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        release(ROOT, *sys.argv[1:])
    else:
        print(section(fragments(ROOT / "changes")), end="")
