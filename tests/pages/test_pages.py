"""The pages of --html: inert, deterministic, small, and what they draw is what the index says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.fixture_places import DCP, FIXTURES, HF, TRUTHS
from helpers.reshard_command import reshard
from helpers.sampled import sampled

import reshard as library
from reshard.index.balance import shares
from reshard.index.fold import fold
from reshard.pages.shard_maps import divided_axis, held_spans, lanes
from reshard.picture.page import Html, Page, element, escaped, table

FSDP2 = (DCP / "fsdp2" / "checkpoint", "--model", DCP / "fsdp2" / "model")
HOSTILE = "model.<img src=x onerror=alert(1)>\"'&\u202e\x1b[31m.weight"
_VOID = {"meta", "input", "br"}


class Checked(HTMLParser):
    """Reads a page as a browser does: every element is closed, and none can run or fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "action"), (tag, name, value)
            assert name != "href" or value.startswith("#"), "a link leads to a section of the same page"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(path):
    page = Checked()
    page.feed(path.read_text())
    assert page.open == []
    return page


def page_of(tmp_path, *arguments):
    """The page that a command writes, read as a browser does."""
    result = reshard(*arguments, "--html", tmp_path / "page.html", "-q")
    assert result.code in (0, 1), result.err
    return checked(tmp_path / "page.html")


COMMANDS = [
    ("inspect", *FSDP2),
    ("inspect", *FSDP2, "--tensor", "*embed*"),
    ("plan", *FSDP2, "--to", "vllm", "--tp", 8),
    ("verify", HF / "llama", HF / "qwen3"),
    ("diff", HF / "llama", HF / "qwen3"),
    ("doctor", DCP / "odd" / "checkpoint", "--deep"),
    ("degrees", HF / "llama", "--gpu-memory", "80GiB", "--tp", "1,2,3"),
    ("estimate", "--parameters", "7B", "--gpus", 8, "--pp", 4),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_page_is_inert_and_has_equal_bytes_each_time(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    page = page_of(tmp_path, *arguments)
    content = (tmp_path / "page.html").read_text()
    assert "script" not in page.tags and "default-src 'none'" in content and "script-src" not in content
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", content)
    page_of(tmp_path, *arguments)
    assert (tmp_path / "page.html").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_page_says_the_answer_first_and_what_made_it(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    text = " ".join(page_of(tmp_path, *arguments).text)
    says = {
        "inspect": ("complete", "61,728", "BF16", "next", "reshard convert"),
        "plan": ("proven", "21"),
        "verify": ("difference", "21 tensors"),
        "diff": ("relative L2", "elements changed"),
        "doctor": ("2 errors", "Go back to an earlier save"),
        "degrees": ("fewest GPUs",),
        "estimate": ("7 B parameters", "ZeRO-3"),
    }[arguments[0]]
    head = text[: text.index("Summary")] if "Summary" in text else text
    assert all(word in (head if arguments[0] in ("inspect", "plan", "verify", "diff") else text) for word in says), head
    assert f"Made by reshard {library.__version__} on 2009-02-13 with: reshard {arguments[0]}" in text


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(map(str, arguments[:1])))
def test_a_sentence_stands_above_every_picture(arguments, tmp_path):
    page_of(tmp_path, *arguments)
    content = (tmp_path / "page.html").read_text()
    pictures = [at.start() for at in re.finditer(r'<div class="draw|<svg xmlns="[^"]*" viewBox="0 0 360', content)]
    assert pictures or arguments[0] in ("verify", "doctor")
    for at in pictures:
        before = content[:at]
        assert re.search(r'<p class="says">[^<]+\.</p>$', before), before[-200:]


def test_a_headline_names_the_model_and_the_source(tmp_path):
    for arguments, words in (
        (("inspect", *FSDP2), ("llama, 61,728 parameters", "fsdp2")),
        (("plan", *FSDP2, "--to", "vllm", "--tp", 8), ("llama, 61,728 parameters", "dcp", "TP 8", "source", "fsdp2")),
        (("diff", HF / "llama", HF / "llama"), ("llama: from", "fixtures/hf/llama")),
        (("degrees", "llama-3-70b", "--gpu-memory", "80GB"), ("llama-3-70b, 70.6 B parameters",)),
        (("estimate", "llama-3-70b", "--tp", 8, "--gpus", 64, "--gpu-memory", "80GB"), ("llama-3-70b, 70.6 B", "fits with ZeRO-1")),
    ):
        page_of(tmp_path, *arguments)
        head = re.search(r"<header>.*?</header>", (tmp_path / "page.html").read_text(), re.DOTALL)[0]
        assert all(word in head for word in words), head


def test_ranks_and_files_stand_in_the_order_of_their_numbers(tmp_path):
    files = [{f"model.layers.{number}.w.weight": 4} for number in range(12)]
    names = [f"rank_{number}.safetensors" for number in range(12)]
    (tmp_path / "run").mkdir()
    for name, rows in zip(names, files, strict=True):
        header = json.dumps({key: {"dtype": "BF16", "shape": [n], "data_offsets": [0, 2 * n]} for key, n in rows.items()}).encode()
        (tmp_path / "run" / name).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert [share.name for share in shares(library.open(tmp_path / "run").index, "file")] == names


def test_many_holders_are_drawn_as_lanes():
    rows = {f"rank {i}": ([(i / 1000, (i + 1) / 1000)], []) for i in range(1000)}
    drawn = lanes(rows)
    assert len(drawn) == 32 and next(iter(drawn)) == "rank 0 .. rank 31"
    assert drawn["rank 0 .. rank 31"] == ([(0.0, 0.032)], []), "neighbours that touch are one span"
    covered = [span for spans, _ in drawn.values() for span in spans]
    assert sum(stop - start for start, stop in covered) == pytest.approx(1)


def test_an_interactive_page_runs_its_own_script_and_no_other(tmp_path):
    assert page_of(tmp_path, "inspect", *FSDP2, "--interactive").tags.count("script") == 1
    content = (tmp_path / "page.html").read_text()
    script = re.search(r"<script>(.*?)</script>", content, re.DOTALL)[1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in content
    assert "--interactive has a meaning only with --html" in reshard("inspect", HF / "llama", "--interactive").err


def test_names_in_a_checkpoint_are_hostile_text(tmp_path):
    header = json.dumps({HOSTILE: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    for arguments in (("inspect", tmp_path), ("inspect", tmp_path, "--tensor", "*"), ("doctor", tmp_path, "--deep")):
        for more in ((), ("--interactive",)):
            result = reshard(*arguments, "--html", tmp_path / "page.html", *more)
            assert result.code in (0, 1), result.err
            page = checked(tmp_path / "page.html")
            assert "img" not in page.tags and "\x1b" not in "".join(page.text)


def test_text_is_escaped_once_and_cut():
    assert escaped("<b>&") == "&lt;b&gt;&amp;" and escaped(Html("<b>")) == "<b>" and len(escaped("x" * 10_000)) == 200
    assert element("p", "a<b", title='"') == '<p title="&quot;">a&lt;b</p>'
    assert 'class="n">1,234<' in table(("a",), [(1234,)]) and 'class="n">1.5 kB<' in table(("a",), [("1.5 kB",)])
    assert 'class="n"' not in table(("a",), [("1.5 kB",), ("[4, 2]",)]), "a column of other text stands to the left"
    page = Page("<script>alert(1)</script>")
    page.add("a</section>", "<script>")
    assert "<script>" not in page.render()


@pytest.mark.parametrize("case", sampled(TRUTHS, 6), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_map_agrees_with_the_index(case, tmp_path):
    """The spans of every tensor cover its most divided axis, and each lies where its piece lies."""
    result = reshard("inspect", case / "checkpoint", "--html", tmp_path / "page.html", "-q")
    if result.code:
        pytest.skip("it needs options to be opened")
    checked(tmp_path / "page.html")
    for tensor in library.open(case / "checkpoint").index.tensors:
        if not tensor.shape or not tensor.elements:
            continue
        axis, spans = divided_axis(tensor), list(held_spans(tensor))
        expected = [(piece.box.offsets[axis], piece.box.stops[axis]) for piece in tensor.pieces() if piece.box.sizes[axis]]
        size = tensor.shape[axis]
        assert [(round(start * size), round(stop * size)) for _, start, stop, _ in spans] == expected
        covered = np.zeros(size, bool)
        for _, start, stop, is_copy in spans:
            covered[round(start * size) : round(stop * size)] |= not is_copy
        assert covered.all()


@pytest.mark.parametrize("case", sampled(TRUTHS, 6), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_shares_and_the_tree_count_every_byte(case):
    try:
        index = library.open(case / "checkpoint").index
    except library.ReshardError:
        pytest.skip("it needs options to be opened")
    stored = {}
    for tensor in index.tensors:
        for i, piece in enumerate(tensor.pieces()):
            rank = None if tensor.shards.ranks is None else int(tensor.shards.ranks[i])
            for key in (("file", tensor.shards.path(i)), ("kind", tensor.kind), ("dtype", tensor.dtype.name), ("rank", rank)):
                stored[key] = stored.get(key, 0) + piece.box.volume * tensor.dtype.itemsize
    for by in ("kind", "file", "dtype"):
        assert {(by, share.name): share.nbytes for share in shares(index, by)} == {k: v for k, v in stored.items() if k[0] == by}
    ranks = {("rank", int(share.name.split()[1])): share.nbytes for share in shares(index, "rank")}
    assert ranks == {k: v for k, v in stored.items() if k[0] == "rank" and k[1] is not None}
    assert sum(share.nbytes for share in shares(index, "layer")) == sum(v for k, v in stored.items() if k[0] == "kind")
    tree = fold(index.tensors)
    assert (tree.tensors, tree.nbytes) == (len(index.tensors), sum(tensor.nbytes for tensor in index.tensors))
    for _, branch in tree.walk():
        if branch.children:
            assert branch.nbytes == sum(child.nbytes for child in branch.children)


def names_of(leaf, prefix):
    """The names that a folded name stands for."""
    if "{" not in prefix:
        return {prefix}
    before, _, rest = prefix.partition("{")
    inside, _, after = rest.partition("}")
    numbers = range(int(inside.split("..")[0]), int(inside.split("..")[1]) + 1) if ".." in inside else map(int, inside.split(","))
    return {name for number in numbers for name in names_of(leaf, f"{before}{number}{after}")}


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3", "gpt2", "qwen2_moe"])
def test_a_fold_stands_for_exactly_the_tensors_that_are_alike(model):
    tensors = {tensor.name: tensor for tensor in library.open(HF / model).index.tensors}
    path, found = [], []
    for level, branch in library.open(HF / model).tree.walk():
        path[level:] = [branch.name]
        if branch.stored:
            same = names_of(branch, ".".join(path))
            assert len(same) == branch.tensors and {(tensors[name].shape, tensors[name].dtype) for name in same} == {
                (branch.stored[0].shape, branch.stored[0].dtype)
            }
            found += same
    assert sorted(found) == sorted(tensors)


def test_layers_that_differ_are_not_folded():
    names = [branch.name for _, branch in library.open(HF / "qwen3_moe").tree.walk()]
    assert "layers.{0,2}" in names and "layers.1" in names, "layer 1 of this model is dense"
    assert "experts.{0..7}" in names


def test_the_answer_names_the_sizes_that_convert_accepts(tmp_path):
    document = reshard("inspect", HF / "qwen2", "--json").document
    for engine, sizes in document["outlook"]["engines"].items():
        for tp in (1, 2, 4, 8, 16):
            code = reshard("convert", HF / "qwen2", tmp_path / "no", "--to", engine, "--tp", tp, "--dry-run").code
            assert (code == 0) == (tp in sizes), (engine, tp)


def test_the_answer_names_a_weight_that_is_missing(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "out", "--to", "hf", "--exclude", "*norm.weight").code == 0
    shown = reshard("inspect", tmp_path / "out").out
    assert "partial" in shown and "input_layernorm.weight" in shown and "reshard doctor" in shown and "serves" not in shown


def test_limit_depth_and_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = reshard("inspect", HF / "llama", "--limit", 5).out
    assert "more; --limit 0 shows all" in shown and "self_attn" not in shown
    tree = reshard("inspect", HF / "qwen3_moe", "--depth", 2).out.split("\n\n")[-1]
    assert max(map(len, tree.split("\n"))) <= 60 and "q_proj" not in tree
    rows = reshard("inspect", HF / "llama", "--sort", "bytes", "--depth", 2).out
    assert rows.index("layers.{0..1}") < rows.index("embed_tokens") < rows.index("norm.weight")
    monkeypatch.setenv("COLUMNS", "200")
    assert "4 along axis 0" in reshard("inspect", *FSDP2).out


def test_by_rank_says_so_where_the_files_do_not_tell():
    assert "--by file shows" in reshard("inspect", *FSDP2, "--by", "rank").out
    shown = reshard("inspect", FIXTURES / "fsdp" / "hsdp-tp" / "checkpoint", "--by", "rank").out
    assert shown.count("rank ") >= 8


def test_a_notebook_shows_pictures_of_what_verbs_return(tmp_path):
    ckpt = library.open(HF / "llama")
    plan = library.plan(ckpt, to="vllm", tp=2)
    shown = (
        ckpt,
        ckpt.tensors(),
        plan,
        library.diff(ckpt, ckpt),
        library.degrees(HF / "llama", to="vllm"),
        library.estimate(7_000_000_000),
    )
    for value in shown:
        content = value._repr_html_()
        page = Checked()
        page.feed(content)
        assert page.open == [] and "script" not in page.tags and len(content) < 100_000
    assert plan.picture().count("<svg") == 1, "the source is whole; the target is drawn"


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    assert "is a directory" in reshard("inspect", HF / "llama", "--html", tmp_path).err
    result = reshard("inspect", HF / "llama", "--html", tmp_path / "no" / "page.html")
    assert result.code == 2 and "does not exist" in result.err


def test_a_folder_of_checkpoints_and_a_model_without_weights_have_a_page(tmp_path):
    for name in ("step-1", "step-2"):
        shutil.copytree(HF / "llama", tmp_path / "run" / name)
    assert reshard("inspect", tmp_path / "run", "--html", tmp_path / "run.html", "-q").code == 0
    content = (tmp_path / "run.html").read_text()
    assert "<h1>" in content and "step-2" in content and "Checkpoints" in content
    (tmp_path / "bare").mkdir()
    shutil.copy(HF / "llama" / "config.json", tmp_path / "bare")
    assert reshard("inspect", tmp_path / "bare", "--html", tmp_path / "bare.html", "-q").code == 0
    assert "vllm" in (tmp_path / "bare.html").read_text()
