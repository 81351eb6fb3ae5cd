"""README.md and docs/: short where they should be, complete where they must be, current where they are generated."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import click
import pytest
from helpers.doc_pages import PAGES, README, ROOT, read_page

import reshard
from reshard.adapter import registry

DOCS = ROOT / "docs"
SECTIONS = [
    "Install", "Sixty seconds", "I want to ...", "Formats", "Architectures", "Python", "Speed", "How it works", "What it is not for",
    "Contributing", "Licence",
]  # fmt: skip
OF_A_FORMAT = ["On disk", "Versions", "What is read", "What is written", "Options", "How it was verified", "What is refused"]
_LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(page: Path, level: str = "##") -> list[str]:
    return re.findall(rf"^{level} (.+)$", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as hosting sites make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_has_what_a_newcomer_needs_in_order():
    """What it is, how to install it, one conversion from start to end, where to go on. What is longer belongs to docs/."""
    text = README.read_text()
    assert headings(README) == SECTIONS
    for command in ("pip install", "make demo", "make test", "reshard inspect", "reshard convert", "reshard verify"):
        assert command in text, command
    assert "import reshard" in text and "docs/nouns.md" in text


# Paths of the repository in prose and in examples. <words> and * stand for any name.
_PATH = re.compile(
    r"(?<![\w/.\-:*<>{}])(?:reshard|formats|cli|plugins|tests|fixtures|docs|benchmarks|requirements|\.ci)/[\w./\-*<>]*[\w*>]"
)
_OF_AN_EXAMPLE = ("npy", "npz")  # docs/extending/format.md adds this format


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=label)
def test_the_paths_of_a_page_exist(page):
    for path in _PATH.findall(page.read_text()):
        glob = re.sub(r"<\w+>", "*", path)
        found = [inside for folder in (ROOT, page.parent) for inside in folder.glob(glob)]
        assert found or any(word in path for word in _OF_AN_EXAMPLE), f"{label(page)} names {path}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_tables_have_short_cells(page):
    for line in prose(page).split("\n"):
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                assert len(cell.strip()) <= 120, f"{label(page)}: {cell}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page):
    for link in _LINK.finditer(prose(page)):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), f"{label(page)} links to {link['path']}"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{label(page)} links to {link['path']}#{link['anchor']}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_pages_name_no_path_of_one_machine(page):
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|opt)/", page.read_text())


@pytest.mark.parametrize("name", registry.formats())
def test_every_format_has_a_page_with_its_options(name):
    page = DOCS / "formats" / f"{name}.md"
    assert page.exists(), f"the format {name} has no page: write {label(page)}"
    found = headings(page)
    assert [title for title in found if title in OF_A_FORMAT] == OF_A_FORMAT, f"{label(page)} lacks headings, or has another order"
    section = re.search(r"^## Options$(.*?)^## ", page.read_text(), re.MULTILINE | re.DOTALL)
    told = {flag for row in re.findall(r"^\| (`--[^|]*)\|", section[1], re.MULTILINE) for flag in re.findall(r"--[\w-]+", row)}
    flags = {"--" + option.name.replace("_", "-") for option in registry.formats()[name].options}
    opposites = {f"--{option.opposite.replace('_', '-')}" for option in registry.formats()[name].options if option.opposite}
    assert told == flags | opposites
    assert f"[{name}](docs/formats/{name}.md)" in README.read_text() and f"[{name}]({name}.md)" in (DOCS / "formats/index.md").read_text()


def test_every_page_is_in_the_contents_of_the_site():
    contents = imported(DOCS / "conf.py").CONTENTS
    named = {DOCS / f"{page}.md" for pages in contents.values() for page in pages.split()}
    pages = {page for page in PAGES if page.is_relative_to(DOCS)} - {DOCS / "index.md"}
    assert named == pages, "CONTENTS in docs/conf.py names every page, and no other"


def test_the_site_wraps_what_commands_print():
    """Copying a wrapped command, and joining the lines of a sentence, gives what was printed."""
    conf = imported(DOCS / "conf.py")
    words = " ".join(f"word{i}" for i in range(40))
    command = conf.wrapped(f"$ reshard convert step-1000 out {' '.join(f'--include {i}' for i in range(20))}")
    assert len(command) > 1 and all(line.endswith(" \\") and len(line) <= conf.COLUMNS for line in command[:-1])
    assert " ".join(line.removesuffix("\\").strip() for line in command).split()[-1] == "19"
    note = conf.wrapped(f"  note      {words}")
    assert len(note) > 1 and all(line.startswith(" " * 12) for line in note[1:]) and "".join(note).split() == ["note", *words.split()]
    assert all(len(line) <= conf.COLUMNS for line in (*note, *conf.wrapped(f"reshard: {words}")))
    row = f"  {'name':120}  BF16  12 kB"
    assert conf.wrapped(row) == [row]


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_blocks_of_code_fit_the_site(page):
    """`<!-- columns: 120 -->` before a block runs it on a terminal of that width."""
    conf = imported(DOCS / "conf.py")
    blocks = read_page(page).blocks
    lines = [part for block in blocks for line in block.lines for part in (conf.wrapped(line) if block.language == "console" else [line])]
    assert [line for line in lines if len(line) > conf.COLUMNS] == []


def test_options_of_the_readme_are_in_a_recipe():
    recipes = "".join(path.read_text() for path in (DOCS / "recipes").glob("*.md"))
    for flag in set(re.findall(r"--[a-z][\w-]+", README.read_text())):
        assert flag in recipes, f"README.md names {flag}, and no recipe does"


def test_generated_pages_are_current():
    for path, page in imported(DOCS / "generate.py").PAGES.items():
        # The texts are long, and their difference helps nobody.
        is_current = (DOCS / path).read_text() == page()
        assert is_current, f"docs/{path} is not current: run python docs/generate.py"


def test_the_page_of_the_command_line_says_each_option_once():
    text = (DOCS / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| (`-.*) \|$", text, re.MULTILINE)
    assert len(rows) > 100 and not [row for row, count in Counter(rows).items() if count > 1]
    main = importlib.import_module("reshard.cli.main")
    context = click.Context(main.cli, info_name="reshard")
    for name in main.COMMANDS:
        section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
        for option in main.cli.get_command(context, name).params:
            title = getattr(option, "section", "")
            if isinstance(option, click.Option) and not option.hidden and title != "Log":
                named = title.removeprefix("Only for ").split(", ")[0] if title.startswith("Only for ") else f"`{option.opts[0]}"
                assert named in section, f"{name} has {option.opts[0]}, and its section does not say so"


def test_the_page_of_python_says_each_keyword_once():
    text = (DOCS / "reference" / "python.md").read_text().partition("## Values")[0]
    rows = re.findall(r"^- (`.*)$", text, re.MULTILINE)
    assert len(rows) > 50 and not [row for row, count in Counter(rows).items() if count > 1]
    for name in [name for name in reshard.__all__ if inspect.isfunction(getattr(reshard, name))]:
        section = re.search(rf"^### reshard\.{name}$(.*?)^##", text, re.MULTILINE | re.DOTALL)[1]
        groups = "".join(
            re.search(rf"^### {group}$(.*?)^##", f"{text}##", re.MULTILINE | re.DOTALL)[1]
            for group in set(re.findall(r"\[(\w+)\]\(#", section))
        )
        for keyword in inspect.signature(getattr(reshard, name)).parameters:
            assert keyword in ("options", "fields") or re.search(rf"\b{keyword}\b", section + groups), (
                f"{name} has {keyword}, which the page does not name"
            )


def test_the_counts_of_formats_and_models_are_current():
    generate = imported(DOCS / "generate.py")
    for path in generate.COUNTS:
        is_current = (DOCS / path).read_text() == generate.counted(path)
        assert is_current, f"a count in docs/{path} is not current: run python docs/generate.py"


def imported(path: Path) -> ModuleType:
    """A module that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
