"""The console: words are wrapped, tables fit, colour is where a terminal is; and what ten commands show on screens of three sizes.

`python tests/cli/test_console.py` writes the screens (tests/cli/screens/) anew.
"""

import os
import re
import shlex
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import command, reshard
from helpers.sampled import sampled
from helpers.terminal import output, screen, tmux_screen

console = import_module("reshard.cli.console")
tables = import_module("reshard.cli.tables")
SCREENS = Path(__file__).resolve().parent / "screens"
SIZES = [(80, 24), (100, 30), (200, 50)]
COMMANDS = (
    "inspect step-10",
    "inspect run",
    "inspect moe",
    "convert -h",
    "convert llama out --to vllm --tp 2 --dry-run",
    "verify llama changed --no-progress",
    "diff llama changed --no-progress --limit 5",
    "stats llama --no-progress --limit 5",
    "doctor llama --no-progress",
    "plan llama --to megatron-dist --tp 2 --pp 2",
    "fingerprint run --no-progress",
    "formats vllm",
)


def made(folder):
    """A folder with what the commands are about."""
    changed = shutil.copytree(HF / "llama", folder / "changed")
    (file,) = changed.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    for name, source in (("llama", HF / "llama"), ("moe", HF / "qwen3_moe"), ("step-10", FIXTURES / "dcp" / "fsdp2" / "checkpoint")):
        shutil.copytree(source, folder / name)
    for step in (1000, 2000):
        for part in ("actor", "critic"):
            shutil.copytree(FIXTURES / "fsdp" / "verl" / "checkpoint", folder / "run" / f"global_step_{step}" / part)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("2000")
    then = time.time() - 7300
    for path in (folder / "run").rglob("*"):
        os.utime(path, (then, then))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("console"))


def shown(folder, words, columns, rows):
    written = output(command(*shlex.split(words)), columns, rows, work=folder)
    return written, screen(re.sub(r"\d+\.\d s\b", "0.0 s", written), columns, rows)


def screens(folder, columns, rows):
    """The screens of all commands as one text."""
    parts = [f"$ reshard {words}\n" + "\n".join(shown(folder, words, columns, rows)[1]).rstrip("\n") for words in COMMANDS]
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize(("columns", "rows"), sampled(SIZES, 3))
def test_the_screens_are_those_of_the_golden_files(folder, columns, rows):
    assert screens(folder, columns, rows) == (SCREENS / f"{columns}x{rows}.txt").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_tmux_shows_the_same_screens(folder, columns, rows):
    golden = (SCREENS / f"{columns}x{rows}.txt").read_text()
    for words in COMMANDS:
        seen = "\n".join(tmux_screen(command(*shlex.split(words)), columns, rows, work=folder))
        assert f"$ reshard {words}\n" + re.sub(r"\d+\.\d s\b", "0.0 s", seen) in golden, words


@pytest.mark.parametrize("columns", [60, 80, 133])
@pytest.mark.parametrize("words", COMMANDS)
def test_no_line_is_longer_than_the_terminal(folder, words, columns):
    written, _ = shown(folder, words, columns, 24)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written).replace("\r", "").split("\n")
    assert not [line for line in lines if len(line) > columns], words
    assert len(lines) > 1


def test_inspect_leaves_its_answer_on_the_screen(folder):
    for words in ("inspect step-10", "inspect moe", "inspect llama"):
        for columns, rows in SIZES:
            written, seen = shown(folder, words, columns, rows)
            assert written.count("\n") < rows and seen[0].startswith(words.split()[1] + ": "), (words, rows)


def test_a_command_that_is_wrapped_can_be_copied(folder, tmp_path):
    shutil.copytree(folder / "step-10", tmp_path / "the checkpoint of a run")
    _, seen = shown(tmp_path, "inspect 'the checkpoint of a run' --limit 1", 60, 40)
    at = next(number for number, line in enumerate(seen) if line.startswith("  next "))
    lines = [seen[at].removeprefix("  next")]
    while lines[-1].endswith("\\"):
        at += 1
        lines.append(seen[at])
    assert len(lines) > 1
    # What a shell makes of the lines as they stand there.
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    assert words == ["reshard", "convert", "the checkpoint of a run", "out", "--to", "hf", "--model", "DIR"]


def test_pipes_and_no_color_get_no_colour(folder):
    coloured = output(command("verify", "llama", "changed", "--no-progress"), 80, 24, work=folder)
    assert "\x1b[1;31mdifferent\x1b[0m" in coloured
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in output(command("verify", "llama", "changed", "--no-progress"), 80, 24, work=folder, **plain)
    assert "\x1b" not in reshard("verify", folder / "llama", folder / "changed").out
    assert "\x1b" not in reshard("inspect", folder / "none").err


@pytest.mark.parametrize("name", ["FORCE_COLOR", "CLICOLOR_FORCE"])
def test_colour_in_a_pipe_if_asked(monkeypatch, folder, name):
    monkeypatch.setenv(name, "1")
    assert "\x1b[32mcomplete" in reshard("inspect", folder / "llama").out
    assert "\x1b[1;31mreshard:" in reshard("inspect", folder / "none").err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in reshard("inspect", folder / "llama").out


@pytest.mark.parametrize(
    ("words", "painted"),
    [
        ("verify llama llama --no-progress", "\x1b[1;32mequal\x1b[0m"),
        ("inspect llama", "\x1b[32mcomplete\x1b[0m"),
        ("inspect llama", "\x1b[1mllama\x1b[0m: llama"),
        ("inspect llama", "\x1b[36mreshard convert llama out"),
        ("inspect none", "\x1b[1;31mreshard:\x1b[0m"),
        ("convert llama out --to vllm --dry-run", "\x1b[33mmissing\x1b[0m"),
        ("degrees llama", "\x1b[2massumed"),
        ("convert --help", "\x1b[36m--to FORMAT\x1b[0m"),
        ("--help", "\x1b[1mConvert:\x1b[0m"),
    ],
)
def test_colour(folder, words, painted):
    assert painted in output(command(*words.split()), 100, 60, work=folder)


def test_words_are_wrapped_below_the_text():
    line = "  note      the config says that the head is tied, and the checkpoint stores it"
    assert list(console.wrapped(line, 60)) == [
        "  note      the config says that the head is tied, and the",
        "            checkpoint stores it",
    ]
    assert list(console.wrapped("reshard: one two three", 16)) == ["reshard: one two", "  three"]


def test_a_word_longer_than_a_line_stays_whole():
    path = "/a" * 50
    assert list(console.wrapped(f"  where     {path} and more", 60)) == [f"  where     {path}", "            and more"]


def test_a_command_is_wrapped_with_backslashes_and_never_in_quotes():
    line = "  next      reshard convert 'a folder with spaces' out --to vllm --tp 8 --model tiny-llama"
    first, *others = console.wrapped(line, 60)
    assert first.endswith(" \\") and "'a folder with spaces'" in first and others == ["            --to vllm --tp 8 --model tiny-llama"]
    inside = "reshard: wrong. Use `reshard convert " + "x" * 30 + " " + "y" * 30 + " --to hf` instead"
    lines = list(console.wrapped(inside, 60))
    assert all(len(each) <= 62 for each in lines)
    copied = " ".join(each.strip().removesuffix("\\").strip() for each in lines)
    assert f"`reshard convert {'x' * 30} {'y' * 30} --to hf`" in copied


def fitted(rows, headings, width, optional=()):
    return tables._fitted(tables.Columns.of(rows, headings), optional, width, in_colour=False)


def test_a_table_drops_columns_then_wraps_cells_then_stacks():
    rows, headings = [("model.layers.0.self_attn.q_proj.weight", "a sentence of several words", 1)], ("tensor", "what", "count")
    assert len(fitted(rows, headings, None)) == 2
    assert fitted(rows, headings, 60, optional=(1,))[0].split() == ["tensor", "count"]
    narrow = fitted(rows, headings, 60)
    assert all(len(line) <= 60 for line in narrow) and len(narrow) > 2
    assert "".join(line[2:].split("  ")[0].strip() for line in narrow[1:]).startswith("model.layers.0.self_attn.")
    many = fitted([("name", *range(10**6, 10**6 + 9))], ("tensor", *map(str, range(9))), 60)
    assert many[0] == "  name" and many[1] == "    0  1,000,000" and len(many) == 10


def test_wrapping_and_colour_cost_little():
    lines = ["  note      " + "a word and another " * 20] * 100
    began = time.process_time()
    for line in lines:
        list(console.wrapped(line, 80))
    assert (time.process_time() - began) / len(lines) < 0.001


if __name__ == "__main__":
    import tempfile

    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for width, height in SIZES:
            (SCREENS / f"{width}x{height}.txt").write_text(screens(made(Path(place) / str(width)), width, height))


def test_wide_characters_take_two_columns_and_names_break_at_dots():
    assert tuple(map(tables.columns_of, ("abc", "モデル", "e\u0301"))) == (3, 6, 1)
    table = tables.Columns.of([("モデル", "hf"), ("b", "hf")], ("folder", "format"))
    lines = table.lines(table.widths)
    assert {tables.columns_of(line.partition("hf")[0]) for line in lines[1:]} == {10}, lines
    assert tables._broken("      input_layernorm.weight", 26) == ["      input_layernorm.", "weight"]
