"""The picture of a terminal that README.md shows is what the commands print."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest
from helpers.doc_pages import ROOT, masked

sys.path.insert(0, str(ROOT / "docs"))

from screens import PICTURE, drawn, printed


@pytest.mark.slow
def test_the_terminal_of_the_readme_is_what_the_commands_print():
    picture = PICTURE.read_text()
    assert masked(drawn(printed())) == masked(picture), "run `python docs/screens.py`"
    assert "docs/screens/terminal.svg" in (ROOT / "README.md").read_text()


def test_colours_and_names_of_a_terminal_become_classes_and_text():
    assert 'class="bold red">a&lt;b</tspan>c' in drawn(["\x1b[1m\x1b[31ma<b\x1b[0mc"])
    ElementTree.fromstring(PICTURE.read_text())
