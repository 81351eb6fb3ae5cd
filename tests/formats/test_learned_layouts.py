"""Models by layouts that were learned from an engine's own loader, against digests of real ranks (fixtures/learned)."""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
from helpers.fixture_places import FIXTURES, HF, patch_stored, ranks
from helpers.learned_models import digest_of_rank, write_weights
from helpers.reshard_command import reshard as command

import reshard
from reshard.adapter.serving_format.learned import read_layout
from reshard.errors import CheckpointError, RequestError, UnsupportedError

LEARNED = FIXTURES / "learned"
MODELS = sorted(path.name for path in LEARNED.iterdir() if path.is_dir())
assert len(MODELS) >= 7, "without fixtures these tests would pass by testing nothing"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Model -> its Hugging Face folder, made again from the names and shapes in its layout."""
    folder = tmp_path_factory.mktemp("learned")

    def made(name):
        target = folder / name
        if not target.exists():
            target.mkdir()
            shutil.copy(LEARNED / name / "config.json", target)
            write_weights(read_layout(str(LEARNED / name / "layout.json")), target)
        return target

    return made


def layout_of(name):
    return str(LEARNED / name / "layout.json")


def engine_of(name):
    return name.partition("-")[2] or "vllm"


def convert(source, target, to="vllm", **options):
    return reshard.convert(reshard.plan(source, to=to, **options), target)


def edited(name, tmp_path, change):
    """The layout of a model with a change in its document."""
    document = json.loads((LEARNED / name / "layout.json").read_text())
    document.pop("digest")
    change(document)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_converted_files_hold_what_real_ranks_hold(models, name, tp, tmp_path):
    convert(models(name), tmp_path / "out", engine_of(name), tp=tp, layout=layout_of(name), accept_platform=True)
    expected = json.loads((LEARNED / name / "ranks.json").read_text())[f"tp{tp}"]
    assert {rank: digest_of_rank(state) for rank, state in ranks(tmp_path / "out").items()} == expected


def test_the_result_is_read_by_the_layout_beside_it(models, tmp_path):
    source, out = models("qwen3_next"), tmp_path / "out"
    result = convert(source, out, tp=2, layout=layout_of("qwen3_next"), accept_platform=True)
    # vLLM keeps A_log in float32.
    assert any("3 weights are cast" in note and "A_log to F32" in note for note in result.notes)
    assert reshard.verify(source, out, cast=True).equal and reshard.verify(out).equal
    assert reshard.open(out).index.facts.parallel == {"tp": 2, "pp": 1}
    (out / "reshard.layout.json").rename(tmp_path / "layout.json")
    assert command("verify", source, out, "--cast", "--layout", tmp_path / "layout.json").code == 0


@pytest.mark.parametrize("name", [name for name in MODELS if engine_of(name) == "sglang"])
def test_sglangs_files_are_read_by_their_layout(models, name, tmp_path):
    """The file names are vLLM's: the manifest or --format tells them apart, the layout tells what they hold."""
    source, out = models(name), tmp_path / "out"
    result = convert(source, out, "sglang", tp=2, layout=layout_of(name), accept_platform=True)
    assert any("--disable-shared-experts-fusion" in note for note in result.notes) == (not name.startswith("gemma3"))
    opened = reshard.open(out)
    assert opened.format == "sglang" and opened.index.facts.parallel == {"tp": 2}
    assert reshard.verify(source, out, cast=True).equal and reshard.verify(out).equal
    plan = reshard.plan(source, to="sglang", tp=2, layout=layout_of(name), accept_platform=True)
    assert reshard.roundtrip(plan).losses == ()
    split = next(tensor for tensor in ranks(out)["rank-1"] if tensor.endswith("o_proj.weight"))
    patch_stored(out / "model-rank-1-part-0.safetensors", split)
    assert not reshard.verify(source, out, cast=True).equal
    with pytest.raises(RequestError, match="split by tp, ep only"):
        reshard.plan(source, to="sglang", tp=2, pp=2, layout=layout_of(name), accept_platform=True)


def test_experts_of_sglang_depend_on_the_platform(models):
    with pytest.raises(UnsupportedError, match=r"experts.*depends on the platform.*flashinfer_trtllm.*`accept_platform=True`"):
        reshard.plan(models("deepseek_v3-sglang"), to="sglang", tp=2, layout=layout_of("deepseek_v3-sglang"))


def test_a_changed_byte_in_a_rank_is_a_difference(models, tmp_path):
    source, out = models("olmo2"), tmp_path / "out"
    convert(source, out, tp=2, layout=layout_of("olmo2"))
    patch_stored(out / "model-rank-1-part-0.safetensors", "model.layers.1.mlp.down_proj.weight")
    assert not reshard.verify(source, out).equal and not reshard.verify(out).equal


def test_a_training_checkpoint_with_the_same_names_gives_the_same_files(models, tmp_path):
    """Names are all that a learned layout needs of a source."""
    source = models("olmo2")
    reshard.convert(reshard.plan(source, to="dcp"), tmp_path / "dcp")
    for name, given in (("hf", source), ("dcp", tmp_path / "dcp")):
        options = {} if name == "hf" else {"model": source}
        convert(given, tmp_path / f"from-{name}", tp=2, layout=layout_of("olmo2"), **options)
    assert ranks(tmp_path / "from-hf") == ranks(tmp_path / "from-dcp")


def test_a_round_trip_loses_nothing(models):
    plan = reshard.plan(models("gpt_oss"), to="vllm", tp=2, layout=layout_of("gpt_oss"), accept_platform=True)
    assert reshard.roundtrip(plan).losses == ()


def test_a_tensor_whose_shape_depends_on_the_platform_is_refused(models, tmp_path):
    with pytest.raises(UnsupportedError, match=r"experts.*depends on the platform.*FLASHINFER.*`accept_platform=True`"):
        reshard.plan(models("gpt_oss"), to="vllm", tp=2, layout=layout_of("gpt_oss"))
    # Without experts nothing depends on it.
    assert reshard.plan(models("olmo2"), to="vllm", tp=2, layout=layout_of("olmo2")).layout.files


def test_another_model_is_refused_with_the_first_difference_and_the_command(models):
    with pytest.raises(RequestError, match=r"another config\.json: architectures differs.*reshard learn MODEL --engine vllm --tp 1,2,4"):
        reshard.plan(models("qwen3_next"), to="vllm", tp=2, layout=layout_of("olmo2"))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d["sources"][1][3].__setitem__(0, 999), r"model.*: it is \[\d+, 64\], the layout was learned from \[999, 64\]"),
        (lambda d: d["sources"].pop(2), r"model\.layers\.0.*has no such tensor"),
        (lambda d: d["config"].update(hidden_size="00000000"), "hidden_size differs"),
        (lambda d: d["config"].update(new_key="00000000"), "new_key is not in this config"),
        (lambda d: d.update(engine="sglang"), "learned from sglang, the target is vllm.*`to=sglang`"),
    ],
    ids=["shape", "surplus", "config", "key", "engine"],
)
def test_a_layout_that_does_not_fit_is_refused(models, change, words, tmp_path):
    with pytest.raises(RequestError, match=words):
        reshard.plan(models("olmo2"), to="vllm", tp=2, layout=edited("olmo2", tmp_path, change))


def test_a_weight_that_the_checkpoint_lacks_is_named(models, tmp_path):
    with pytest.raises(RequestError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*no such tensor"):
        reshard.plan(models("olmo2"), to="vllm", tp=2, layout=layout_of("olmo2"), exclude="model.layers.2.mlp.up_proj.weight")


def test_sizes_that_the_layout_does_not_cover_are_refused_with_those_that_it_covers(models):
    with pytest.raises(RequestError, match=r"TP 3.*It covers TP 1, 2, 4.*--tp 3 -o"):
        reshard.plan(models("olmo2"), to="vllm", tp=3, layout=layout_of("olmo2"))
    with pytest.raises(RequestError, match=r"pipeline-parallel size 2 was not traced"):
        reshard.plan(models("olmo2"), to="vllm", tp=2, pp=2, layout=layout_of("olmo2"))


def test_another_version_of_the_engine_is_refused(models):
    with pytest.raises(RequestError, match=r"learned from vllm 0\.32\.0, `engine_version=` asks for 0\.31\.0"):
        reshard.plan(models("olmo2"), to="vllm", tp=2, layout=layout_of("olmo2"), engine_version="0.31.0")


def test_degrees_lists_the_sizes_that_the_layout_covers(models):
    report = reshard.degrees(models("olmo2"), to="vllm", tp=(1, 2, 3, 4, 8), layout=layout_of("olmo2"))
    problems = {row.parallel.tp: row.problem for row in report.rows}
    assert problems[1] is problems[2] is problems[4] is problems[8] is None
    assert "TP 3" not in (problems[3] or "") and problems[3]
    plan = reshard.plan(models("olmo2"), to="vllm", tp=2, layout=layout_of("olmo2"))
    written = max(sum(item.tensor.nbytes for item in file.tensors) for file in plan.layout.files)
    assert {row.parallel.tp: row.fullest and row.fullest.weights for row in report.rows}[2] == written


def test_other_formats_refuse_a_layout():
    with pytest.raises(RequestError, match="`layout=` does not apply to hf"):
        reshard.plan(HF / "llama", to="hf", layout=layout_of("olmo2"))


def test_a_layout_that_is_not_there_is_an_error_of_the_option(models):
    with pytest.raises(RequestError, match="there is no such file"):
        reshard.plan(models("olmo2"), to="vllm", layout="nowhere.json")


def test_files_of_another_size_than_the_layout_are_refused(models, tmp_path):
    convert(models("olmo2"), tmp_path / "out", tp=2, layout=layout_of("olmo2"))
    (tmp_path / "out" / "reshard.json").unlink()
    shutil.copy(tmp_path / "out" / "model-rank-1-part-0.safetensors", tmp_path / "out" / "model-rank-2-part-0.safetensors")
    with pytest.raises(CheckpointError, match="other shapes than the layout"):
        reshard.open(tmp_path / "out")


def test_conversion_by_a_layout_imports_neither_torch_nor_vllm(models, tmp_path):
    script = (
        "import sys, reshard\n"
        f"plan = reshard.plan({str(models('olmo2'))!r}, to='vllm', tp=2, layout={layout_of('olmo2')!r})\n"
        f"reshard.convert(plan, {str(tmp_path / 'out')!r})\n"
        "assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_learn_needs_a_model_an_engine_and_a_python_that_has_it(models, tmp_path):
    with pytest.raises(RequestError, match=r"no config\.json"):
        reshard.learn(tmp_path, engine="vllm")
    with pytest.raises(RequestError, match=r"cannot trace its loader.*vllm"):
        reshard.learn(models("olmo2"), engine="trtllm")
    with pytest.raises(RequestError, match="`engine_python="):
        reshard.learn(models("olmo2"), engine="vllm", engine_python="/nowhere/python")
    with pytest.raises(UnsupportedError, match="must have the engine and torch"):
        reshard.learn(models("olmo2"), engine="vllm", engine_python=sys.executable)
    with pytest.raises(RequestError, match=r"`pp=2` does not apply to SGLang's files. Leave out `pp="):
        reshard.learn(models("olmo2"), engine="sglang", pp=(1, 2))
    with pytest.raises(RequestError, match="Give it sizes of `tp="):
        reshard.learn(models("olmo2"), engine="vllm", tp=(2,), ep=(4,))


def _numbers(value, at=()):
    """The places of all numbers of a document, and of texts with numbers, such as the names and ranges of its rows."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _numbers(inner, (*at, key)) if key not in ("config", "schema_version", "digest") else ()
    is_text = isinstance(value, str) and any(char.isdigit() for char in value) and at[0] in ("sources", "stages")
    if (isinstance(value, int) and not isinstance(value, bool)) or is_text:
        yield at


def _at(document, at):
    for key in at:
        document = document[key]
    return document


def _is_free(document, at):
    return (at[0] == "stages" and at[-1] == 0) or (at[0] == "templates" and "fill" in document["templates"][at[1]])


def _changed(name, seed, folder, *, digest):
    """The path of a layout with one changed number, and what was changed. digest: whether the digest of the unchanged one is kept."""
    document, chance = json.loads((LEARNED / name / "layout.json").read_text()), random.Random(seed)
    if not digest:
        document.pop("digest")
    # Nothing but the digest tells how the engine calls a tensor, and how far it pads one.
    is_free = [
        at for at in _numbers(document) if not digest and (isinstance(_at(document, at), str) or "shape" in at) and _is_free(document, at)
    ]
    *above, last = chance.choice([at for at in _numbers(document) if at not in is_free])
    inner = document
    for key in above:
        inner = inner[key]
    old = inner[last]
    if isinstance(old, int):
        inner[last] = chance.choice([old + 1, max(0, old - 1), 2 * old + 3, 10**6, 10**15, 10**30, -1])
    else:
        number = chance.choice(list(re.finditer(r"\d+", old)))
        new = chance.choice([int(number[0]) + 1, max(0, int(number[0]) - 1), 99999, 10**15])
        inner[last] = f"{old[: number.start()]}{new}{old[number.end() :]}"
    (folder / "changed.json").write_text(json.dumps(document))
    return folder / "changed.json", inner[last] != old, f"{above} {last}: {old} -> {inner[last]}"


@pytest.mark.parametrize("name", ["olmo2", "qwen3_next", "gpt_oss"])
def test_one_changed_number_gives_no_other_bytes_and_no_traceback(models, name, tmp_path):
    def convert_by(layout, out):
        words = ("--to", "vllm", "--tp", 2, "--layout", layout, "--accept-platform", "-q")
        return command("convert", models(name), out, *words)

    assert convert_by(layout_of(name), tmp_path / "right").code == 0
    right = {path.name: path.read_bytes() for path in (tmp_path / "right").glob("*.safetensors")}
    outcomes = Counter()
    for seed in range(24):
        for digest in (True, False) if seed < 4 else (False,):
            layout, is_other, what = _changed(name, seed, tmp_path, digest=digest)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            began = time.process_time()
            done = convert_by(layout, tmp_path / "out")
            assert time.process_time() - began < 20, what
            assert done.code in (0, 2, 3), (what, done.err)
            if digest and is_other:
                assert done.code == 2 and "its digest is not that of its content" in done.err.lower(), what
            if done.code == 0:
                assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")} == right, what
            outcomes[done.code] += 1
    assert outcomes[2] > 12


def test_a_layout_of_before_without_a_digest_is_used_and_told(models, tmp_path):
    path = edited("olmo2", tmp_path, lambda document: [document.pop(key) for key in ("unread", "twice")])
    notes = reshard.plan(models("olmo2"), to="vllm", tp=2, layout=path).layout.notes
    assert any(f"in {path}; it has no digest" in note for note in notes), notes
    notes = reshard.plan(models("olmo2"), to="vllm", tp=2, layout=layout_of("olmo2")).layout.notes
    assert any(note.endswith(layout_of("olmo2")) for note in notes), "the file is named, wherever it was taken from"


@pytest.mark.parametrize("ranges", [["0-99999"] * 3, ["0-1048575,0-1048575"], ["5,3"], ["0,0"]])
def test_a_layout_of_too_many_names_is_refused_at_once(models, ranges, tmp_path):
    def change(document):
        document["sources"][2][:2] = "a" + "".join(f".{{{i}}}" for i in range(len(ranges))), ranges

    began = time.process_time()
    with pytest.raises(RequestError, match="not a layout file"):
        reshard.plan(models("olmo2"), to="vllm", tp=2, layout=edited("olmo2", tmp_path, change))
    assert time.process_time() - began < 10
