"""The pictures of docs/benchmarks.md show what its tables state."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from pictures import DOCS, Picture, drawn, pictures  # noqa: E402

ALL = list(pictures(DOCS / "benchmarks.md"))


@pytest.mark.parametrize("picture", ALL, ids=lambda picture: picture.path.stem)
def test_a_picture_is_that_of_its_table(picture: Picture) -> None:
    assert picture.path.read_text() == drawn(picture), "run `python benchmarks/pictures.py`"
    ElementTree.fromstring(drawn(picture))


def test_every_picture_is_asked_for() -> None:
    assert len(ALL) > 5
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {picture.path.name for picture in ALL}


def test_a_column_that_the_table_lacks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| case | reshard |\n| --- | --- |\n| `hf` | 1 164.5 MB (1..2) |\n\n![MB: reshard](pictures/a.svg)\n")
    assert next(pictures(page)).rows == [("hf", ("1164.5",))]
    page.write_text(page.read_text().replace("![MB: reshard]", "![MB: cp]"))
    with pytest.raises(ValueError, match="cp"):
        next(pictures(page))
