"""Fragments of changes/ become a section of CHANGELOG.md at a release (.ci/changes.py)."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("changes", ROOT / ".ci" / "changes.py")
changes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changes)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nOf all versions.\n\n## [0.2.0] - 2026-11-24\n\n- Older.\n")
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "b.fix.md").write_text("A flipped bit is found.\n")
    (folder / "a.feature.md").write_text(f"`push` sends weights {'to a server ' * 20}\nwithout a file.\n")
    (folder / "c.removal.md").write_text("`explain` is gone.\n")
    return tmp_path


def test_a_release_begins_with_what_is_removed_and_leaves_no_fragment(root):
    changes.release(root, "0.3.0", "2026-12-20")
    text = (root / "CHANGELOG.md").read_text()
    order = [
        "Of all versions.",
        "## [0.3.0] - 2026-12-20",
        "### Removed",
        "explain",
        "### What you can do now",
        "push",
        "### What was mended",
    ]
    places = [text.index(words) for words in [*order, "flipped bit", "## [0.2.0]", "Older"]]
    assert places == sorted(places) and not list((root / "changes").iterdir())
    assert max(map(len, text.splitlines())) <= 140 and "\n  " in text and "\n\n\n" not in text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("a.md", "x", "NAME.KIND.md"), ("a.news.md", "x", "feature"), ("a.fix.txt", "x", "KIND"), ("a.fix.md", "x\n\ny", "one paragraph")],
)
def test_what_is_no_fragment_is_named(root, name, text, said):
    (root / "changes" / name).write_text(text)
    with pytest.raises(SystemExit, match=said) as caught:
        changes.release(root, "0.3.0", "2026-12-20")
    assert name in str(caught.value) and "0.3.0" not in (root / "CHANGELOG.md").read_text()


def test_the_fragments_of_this_tree_can_be_released():
    assert changes.section(changes.fragments(ROOT / "changes")).startswith("### ")
