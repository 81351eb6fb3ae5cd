"""Advice is run: an error that names a command or an option is raised, and what it says is done word by word.

Every template of such advice in the code is either followed here or listed in advice_not_followed.txt, with the file that it stands in.
A new one fails the test until it is one of both.
"""

import ast
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_name("advice_not_followed.txt")
LLAMA, GPT2, DCP, RUN = HF / "llama", HF / "gpt2", FIXTURES / "dcp" / "fsdp2" / "checkpoint", FIXTURES / "delta"
MODEL, PLAIN = DCP.parent / "model", FIXTURES / "peft" / "plain"
CONVERT = ("convert", LLAMA, "OUT", "--to", "hf")

# What is typed; the advice, in which {} is any text; what the advice does to the command line. "-x" takes an option away, "+x" puts one in,
# with the words of the advice in place of a value; "*" is another command line.
CASES = [
    ((*CONVERT, "--dequantize"), "Leave it out, or give the model's own config with `model=DIR`", ["-dequantize"], None),
    ((*CONVERT, "--weights", "master"), "Use `weights=model`, or leave it out", ["+weights"], None),
    ((*CONVERT, "--weights", "master"), "Use `weights=model`, or leave it out", ["-weights"], None),
    ((*CONVERT, "--root", "x"), "Leave out `root=`", ["-root"], None),
    (("degrees", DCP), "Add `model=DIR`, the directory with the model's config", ["+model"], {"DIR": MODEL}),
    ((*CONVERT, "--model", GPT2), "Leave out `model=`, or add `model_wins=True` if the checkpoint's own config is wrong", ["-model"], None),
    ((*CONVERT, "--model", "EMPTY"), "Give `model=` the directory that holds the model's config", ["=model"], {"model": LLAMA}),
    (("convert", LLAMA, *CONVERT[1:]), "Add `average=`, or convert each by itself", ["+average"], None),
    ((*CONVERT, "--keep-dtype", "*norm*"), "Leave it out, or name the element type of the other tensors with `dtype=`",
     ["-keep-dtype"], None),
    ((*CONVERT, "--keep-dtype", "*norm*"), "Leave it out, or name the element type of the other tensors with `dtype=`",
     ["=dtype"], {"dtype": "fp32"}),
    (("convert", RUN, *CONVERT[2:], "--last", 2),
     "Add `average=` with the weight of each, such as 0.5,0.5, or without a value for equal weights",
     ["=average"], {"average": "0.5,0.5"}),
    ((*CONVERT, "--last", 2, "--average"),
     "Give the folder that holds the folders of the steps, or leave out `last=` and name the checkpoints",
     ["*"], {"*": ("convert", RUN, "OUT", "--to", "hf", "--last", 2, "--average")}),
    (("convert", RUN, *CONVERT[2:], "--last", 9, "--average"), "Look at them with `reshard inspect`, and give a number from 1 to that",
     ["*"], {"*": ("inspect", RUN)}),
    (("diff", LLAMA, LLAMA, "--threshold", "x"), "Use for example `threshold=0.01`", ["+threshold"], None),
    (("watch", RUN, "--into", "OUT/{step}", "--all"), "Give for example `to=hf`", ["+to"], None),
    (("watch", RUN, "--to", "hf", "--into", "OUT/x", "--all"), "Use for example `into=OUT/{step}`", ["+into"], None),
    (("watch", RUN, "--to", "hf", "--into", "OUT/step-{step}", "--all", "--full-every", 3), "Add `delta=True`, or leave it out",
     ["+delta"], None),
    (("watch", RUN, "--to", "hf", "--into", "OUT/{step}", "--all", "--full-every", 3), "Add `delta=True`, or leave it out",
     ["-full-every"], None),
    (("inspect", LLAMA, LLAMA, "--html", "OUT.html"), "Give one of the {}, or leave --html out", ["-html"], None),
    (("inspect", RUN, "--by", "rank"), "Choose one, such as with --step latest or by its path, or leave the option out", ["+step"], None),
    (("inspect", RUN, "--by", "rank"), "Choose one, such as with --step latest or by its path, or leave the option out", ["-by"], None),
    (("roundtrip", LLAMA, "--to", "hf", "--work", "EMPTY"), "Add --materialize, or leave it out", ["+materialize"], None),
    (("plan", LLAMA), "Did you mean `reshard degrees {}`, which lists the parallel sizes that a model can be served at?", ["`"], None),
    (("convert", LLAMA, "OUT"), "{}Give one, such as --to vllm, --to hf or --to megatron; `reshard formats` lists all", ["`"], None),
    (("convert", LLAMA, "OUT", "--to", "vllm", "--ep", 2), "Leave out `ep=`", ["-ep"], None),
    (("convert", LLAMA, "OUT", "--to", "vllm", "--pp", 2, "--engine-version", "0.8.5"), "Use `pp=1`, or vLLM {} or newer", ["+pp"], None),
    (("convert", LLAMA, "OUT", "--to", "vllm", "--pp", 2, "--pp-layers", "3,3"), "Give the layers of each stage, such as `pp_layers={}`",
     ["+pp-layers"], None),
    ((*CONVERT, "--parts", 3, "--part", "0/8"), "Leave out --parts, or say --part auto", ["-parts"], None),
    ((*CONVERT, "--part", "auto"), "Say it, for example --part 0/8", ["+part"], None),
    (("convert", LLAMA, *CONVERT[1:], "--average", "0.5,0.9"), "Correct them, or say `any_sum=True`", ["+any-sum"], None),
    ((*CONVERT, "--keep-unknown", "--drop-unknown"), "Give one of them, and `exclude=GLOB`",
     ["-drop-unknown", "+exclude"], {"GLOB": "*.0.*"}),
    (("convert", DCP, "OUT", "--to", "hf", "--quantize", "fp8-block"), "Add `model=DIR` with its config", ["+model"], {"DIR": MODEL}),
    ((*CONVERT, "--storage-option", "x"), "Give for example `storage_option=` endpoint=http://minio:9000", ["+storage-option"], None),
    (("convert", PLAIN / "adapter", "OUT", "--to", "hf"),
     "Write the adapter with `to=peft`, or convert the base model with `merge_adapter=` and this directory",
     ["+to"], None),
    (("convert", PLAIN / "adapter", "OUT", "--to", "hf"),
     "Write the adapter with `to=peft`, or convert the base model with `merge_adapter=` and this directory",
     ["*"], {"*": ("convert", LLAMA, "OUT", "--to", "hf", "--merge-adapter", PLAIN / "adapter")}),
    ((*CONVERT, "--exclude", "*"), "Look at the names with `reshard inspect`, and at `include=`, `exclude=` and `weights=`",
     ["*"], {"*": ("inspect", LLAMA)}),
    ((*CONVERT, "--nonsense"), "`{} --help` shows how to use it", ["`"], None),
    (("convert", LLAMA, "FULL", "--to", "hf"), "Choose another {}, or say `overwrite=True`", ["+overwrite"], None),
]  # fmt: skip


def places(words, tmp_path):
    for name in ("EMPTY", "FULL"):
        (tmp_path / name).mkdir(exist_ok=True)
    if "FULL" in words and not any((tmp_path / "FULL").iterdir()):
        assert reshard("convert", HF / "llama", tmp_path / "FULL", "--to", "hf", "--dtype", "fp32").code == 0
    return [re.sub(r"^(OUT|EMPTY|FULL)", lambda match: f"{tmp_path}/{match[1]}", str(word)) for word in words]


def pattern_of(template):
    """What matches the advice as the command line spells it."""
    spelled = import_module("reshard.cli.spelling").with_flags(template.replace("{}", "\0"))
    return re.escape(spelled).replace("\0", "(.*?)").replace(re.escape("\0"), "(.*?)")


def without(words, flag):
    at = words.index(flag)
    has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
    return words[:at] + words[at + 1 + has_value :]


def followed(words, advice, steps, given):
    """The command line after each step of what the advice says."""
    given = given or {}
    for step in steps:
        name, flag = step[1:], f"--{step[1:]}"
        if step == "*":
            words = [str(word) for word in given["*"]]
        elif step == "`":
            words = shlex.split(re.search(r"`reshard ([^`]*)`", advice)[1])
        elif step[0] == "-":
            words = without(words, flag)
        else:
            words = without(words, flag) if flag in words else words
            said = re.search(rf"{flag}(?: ([^\s;]*[^\s;,.]))?", advice)
            assert said, f"the advice does not name {flag}: {advice}"
            is_switch = step[0] == "+" and (said[1] is None or said[1] in ("or", "if"))
            value = given[name] if step[0] == "=" else given.get(said[1], said[1])
            words = [*words, flag, *([] if is_switch else [str(value)])]
    return words


@pytest.mark.slow
@pytest.mark.parametrize(("words", "template", "steps", "given"), CASES)
def test_advice_is_followed_word_by_word(words, template, steps, given, tmp_path):
    follow(words, template, steps, given, tmp_path)


@pytest.mark.parametrize("every", range(4))
def test_some_of_the_advice_is_followed_each_day(every, tmp_path):
    for number, case in enumerate(CASES[every::12]):
        place = tmp_path / str(number)
        place.mkdir()
        follow(*case, place)


def follow(words, template, steps, given, tmp_path):
    first = places(words, tmp_path)
    refused = reshard(*first)
    advice = re.search(pattern_of(template), refused.err)
    assert refused.code != 0 and advice, refused.err
    shutil.rmtree(tmp_path / "OUT", ignore_errors=True)
    start = advice.end(1) if template.startswith("{}") else advice.start()
    again = places(followed(first, refused.err[start:], steps, given), tmp_path)
    done = reshard(*again)
    assert done.code == 0, f"{shlex.join(again)}\n{done.err}"


def test_each_template_of_advice_is_followed_or_listed():
    listed = [line for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    stated = {template for template, _ in templates()}
    run = {template for _, template, _, _ in CASES}
    assert not {*listed} & run, "a template that is followed is not listed"
    assert sorted(stated - run - {*listed}) == [], "follow new advice in CASES, or list it"
    assert sorted({*listed} - stated) == [], "advice that is no longer given"


def templates():
    """(advice with {} for what is put in, where it stands) of each error that names an option or a command."""
    for top in ("reshard", "formats", "cli"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg == "do":
                    for value in (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,):
                        text = text_of(value)
                        if text and re.search(r"`\w+=|`reshard |--\w", text):
                            yield text, path.relative_to(ROOT).as_posix()


def text_of(node):
    """The text of a literal with {} for values in it; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "{}") + (text_of(node.right) or "{}")
    return None
