"""convert --card: a section of README.md that says what the files were made from, and whose commands run as they are printed."""

import re
import shlex
import shutil
import subprocess

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import command, reshard, result_tree
from hypothesis import given
from hypothesis import strategies as st

import reshard as library
from reshard.plans.card import has_card, with_card
from reshard.verbs.convert import conversion

BEGIN, END = "<!-- reshard:card -->", "<!-- /reshard:card -->"
MODEL_CARD = b"---\nlicense: apache-2.0\n---\r\n# A model\n\n| a | b |\n\nno newline at the end"
DCP = FIXTURES / "dcp" / "fsdp2"


@pytest.fixture
def source(tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "step")
    (tmp_path / "step" / "README.md").write_bytes(MODEL_CARD)
    return tmp_path / "step"


def section_of(folder):
    text = (folder / "README.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    return text[text.index(BEGIN) : text.index(END)]


@given(st.binary(max_size=40), st.binary(max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_only_the_section_changes(before, after, first, second):
    made = with_card(before, first)
    assert made.startswith(before) and has_card(made)
    assert with_card(made + after, second).startswith(before) and with_card(made + after, second).endswith(after)
    assert with_card(with_card(before, first), second) == with_card(before, second)


@pytest.mark.parametrize("broken", [f"{END} mine {BEGIN}", f"mine {BEGIN} not closed", f"{END} alone"])
def test_a_mark_without_its_other_one_swallows_nothing(broken):
    made = with_card(broken.encode(), "card")
    assert made.startswith(broken.encode()) and with_card(made, "other").startswith(broken.encode())


def test_the_card_stands_below_the_readme_of_the_source_which_stays(source, tmp_path):
    assert reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--card").code == 0
    readme = (tmp_path / "out" / "README.md").read_bytes()
    assert readme.startswith(MODEL_CARD + b"\n\n" + BEGIN.encode()) and readme.endswith(END.encode() + b"\n")
    section = section_of(tmp_path / "out")
    for part in ("`step`", "`vllm`, tp 2", library.fingerprint(source).root, "reshard verify ."):
        assert part in section
    assert str(tmp_path) not in section
    assert reshard("verify", tmp_path / "out").code == 0
    (tmp_path / "out" / "README.md").write_bytes(readme.replace(b"vllm", b"VLLM"))
    assert "README.md" in reshard("verify", tmp_path / "out").out and reshard("verify", tmp_path / "out").code == 1


def test_a_second_conversion_replaces_its_own_section_alone(source, tmp_path):
    library.convert(source, tmp_path / "one", to="vllm", tp=2, card=True)
    library.convert(tmp_path / "one", tmp_path / "two", to="hf", card=True)
    assert (tmp_path / "two" / "README.md").read_bytes().startswith(MODEL_CARD)
    section = section_of(tmp_path / "two")
    assert "`one`, format `vllm`" in section and f"fingerprint `{library.fingerprint(source).root}`" in section and "tp 2" not in section
    without = tmp_path / "three"
    library.convert(source, without, to="hf")
    assert (without / "README.md").read_bytes() == MODEL_CARD


@pytest.mark.parametrize(
    ("folder", "options", "absent"),
    [
        ("dcp/fsdp2/checkpoint", ("--to", "vllm", "--tp", 2, "--model", DCP / "model", "--checksums"), ()),
        ("dcp/fsdp2/checkpoint", ("--to", "megatron", "--model", DCP / "model", "--optimizer"), ("fingerprint .",)),
        ("hf/llama", ("--to", "hf", "--dtype", "fp16"), ()),
        ("hf/llama", ("--to", "hf", "--quantize", "fp8-block"), ("SOURCE",)),
    ],
)
def test_its_commands_run_as_they_are_printed(folder, options, absent, tmp_path):
    source = FIXTURES / folder
    assert reshard("convert", source, tmp_path / "out", *options, "--card").code == 0
    section = section_of(tmp_path / "out")
    listed = re.search(r"```sh\n(.*?)\n```", section, re.S)[1].splitlines()
    for line in listed:
        words = [str(source) if word == "SOURCE" else word for word in shlex.split(line, comments=True)]
        done = subprocess.run(command(*words[1:]) if words[0] == "reshard" else words, cwd=tmp_path / "out", capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if "fingerprint" in words:
            assert done.stdout.split()[0] in section
    assert len(listed) >= 2 and not [word for word in absent if word in "\n".join(listed)]
    assert ("cast to another element type" in section) == ({"fp16", "--optimizer"} & {*options} != set())
    assert ("computed" in section) == ("--quantize" in options)


def test_if_changed_writes_a_card_that_is_missing_and_keeps_what_was_edited_around_it(source, tmp_path):
    out, words = tmp_path / "out", ("--to", "hf", "--if-changed", "--json")

    def unchanged(*more):
        result = reshard("convert", source, out, *words, *more)
        assert result.code == 0, result.err
        return result.document["unchanged"]

    assert unchanged() is False and unchanged() is True
    assert unchanged("--card") is False and unchanged("--card") is True and unchanged() is True
    edited = (out / "README.md").read_bytes().replace(b"# A model", b"# Our model")
    (out / "README.md").write_bytes(edited + b"\nand below\n")
    assert unchanged("--card") is False and unchanged("--card") is True
    assert (out / "README.md").read_bytes() == edited + b"\nand below\n"
    assert reshard("convert", source, out, "--to", "hf", "--overwrite").code == 0
    assert (out / "README.md").read_bytes() == MODEL_CARD


def test_a_readme_that_somebody_wrote_in_the_target_is_kept(tmp_path):
    library.convert(HF / "llama", tmp_path / "out", to="hf")
    (tmp_path / "out" / "README.md").write_text("mine\n")
    library.convert(HF / "llama", tmp_path / "out", to="hf", overwrite=True, card=True)
    assert (tmp_path / "out" / "README.md").read_text().startswith(f"mine\n\n{BEGIN}")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "out" / "README.md").unlink()
    (tmp_path / "out" / "README.md").symlink_to(tmp_path / "secret")
    library.convert(HF / "llama", tmp_path / "out", to="hf", overwrite=True, card=True)
    assert "secret" not in (tmp_path / "out" / "README.md").read_text() and (tmp_path / "secret").read_text() == "secret"


def test_resumed_and_in_parts_the_card_is_the_same(source, tmp_path):
    plan = library.plan(source, to="vllm", tp=2)
    library.convert(plan, tmp_path / "whole", card=True)
    running = conversion(plan, tmp_path / "resumed").run()
    next(running)
    running.close()
    library.convert(plan, tmp_path / "resumed", resume=True, card=True)
    parts = [library.convert_part(plan, tmp_path / "parts", f"{i}/2", card=True) for i in (0, 1)]
    assert parts[-1].complete
    assert result_tree(tmp_path / "whole") == result_tree(tmp_path / "resumed") == result_tree(tmp_path / "parts")
    library.convert(plan, tmp_path / "without")
    with pytest.raises(library.RequestError, match=r"made without a card in README.md.*`card=True`"):
        library.convert(plan, tmp_path / "without", resume=True, card=True)
    assert reshard("convert", source, tmp_path / "without", "--to", "vllm", "--tp", 2, "--card", "--resume").code == 2


def test_names_of_a_source_do_no_markdown(tmp_path):
    odd = tmp_path / "a`b|c\n<img src=x>"
    shutil.copytree(HF / "llama", odd)
    library.convert(odd, tmp_path / "out", to="hf", card=True)
    assert "| source | `a_b_c_<img_src=x>`, format `hf` |" in section_of(tmp_path / "out")
