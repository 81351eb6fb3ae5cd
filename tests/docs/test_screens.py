"""The pictures of a terminal and of a page that README.md shows are what the commands print and write."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.doc_pages import ROOT, masked

sys.path.insert(0, str(ROOT / "docs"))

import page_picture
from screens import PICTURE, drawn, printed


@pytest.mark.slow
def test_the_terminal_of_the_readme_is_what_the_commands_print():
    picture = PICTURE.read_text()
    assert masked(drawn(printed())) == masked(picture), "run `python docs/screens.py`"
    assert "docs/screens/terminal.svg" in (ROOT / "README.md").read_text()


def test_colours_and_names_of_a_terminal_become_classes_and_text():
    assert 'class="bold red">a&lt;b</tspan>c' in drawn(["\x1b[1m\x1b[31ma<b\x1b[0mc"])
    ElementTree.fromstring(PICTURE.read_text())


def test_the_page_of_the_readme_has_the_text_of_its_picture(tmp_path):
    """Fonts differ between machines, so the picture itself is not compared."""
    found = page_picture.text(page_picture.page(Path(sys.executable).parent / "reshard", tmp_path))
    assert found == page_picture.TEXT.read_text(), "run `.venv-pictures/bin/python docs/page_picture.py`"
    picture = page_picture.PICTURE.read_bytes()
    assert picture[:4] + picture[8:12] == b"RIFFWEBP" and len(picture) < 60_000
    assert "docs/screens/page.webp" in (ROOT / "README.md").read_text()
