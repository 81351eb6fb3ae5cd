"""Weights that the declaration of a model lacks: formats that keep names carry them, serving engines and Megatron refuse them by name."""

import json
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, RequestError
from reshard.models.lookup import find_model

sys.path.insert(0, str(FIXTURES))
import named_weights

LLAMA = HF / "llama"
WEIGHTS = safetensors.torch.load_file(LLAMA / "model.safetensors")
# Weights that a later release of a class could have, and no declaration has.
UNKNOWN = {
    "qwen3_next": {"model.layers.3.self_attn.sinks": (8,), "model.layers.3.self_attn.o_proj.offset": (64,)},
    "afmoe": {"model.layers.0.self_attn.k_proj.offset": (64,)},
    "minicpm3": {"model.layers.0.self_attn.kv_a_proj_with_mqa.offset": (56,)},
    "stablelm": {"model.layers.1.self_attn.sinks": (32,)},
    "glm4v": {"model.visual.blocks.1.attn.sinks": (192,)},
}
NORM, HEAD = "model.layers.0.self_attn.q_norm.weight", "value_head.weight"


@pytest.fixture
def source(request, tmp_path):
    """The folder of a model with weights that its declaration lacks, the words of all its tensors, and the names of these weights."""
    unknown = UNKNOWN[request.param]
    config = json.loads((FIXTURES / "vllm_declared" / f"{request.param}.json").read_text())["config"]
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values() if not weight.optional} | unknown
    named_weights.write(tmp_path / "source", config, shapes)
    return tmp_path / "source", named_weights.weights_of(shapes), unknown


def words(folder):
    """Name -> the 16-bit words of each tensor in the files of a Hugging Face folder."""
    loaded = [safetensors.torch.load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor.view(torch.uint16).numpy() for state in loaded for name, tensor in state.items()}


def folder_of(path, tensors):
    path.mkdir()
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text((LLAMA / "config.json").read_text())
    return path


@pytest.mark.parametrize("way", [(), ("dcp",), ("fsdp",)], ids=["hf", "dcp", "fsdp"])
@pytest.mark.parametrize("source", UNKNOWN, indirect=True)
def test_formats_that_keep_names_carry_them_and_say_so(source, way, tmp_path):
    folder, expected, unknown = source
    here = folder
    for number, format in enumerate((*way, "hf")):
        result = reshard.convert(reshard.plan(here, to=format, model=None if here == folder else folder), tmp_path / str(number))
        (note,) = [note for note in result.notes if "`drop_unknown=True`" in note]
        assert "carried as they are" in note and next(iter(unknown)) in note and not result.dropped
        assert reshard.verify(folder, result.path).equal
        here = tmp_path / str(number)
    found = words(here)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("source", UNKNOWN, indirect=True)
def test_a_serving_engine_refuses_them_by_name_unless_they_are_left_out_on_purpose(source, tmp_path):
    folder, _, unknown = source
    refused = run("convert", folder, tmp_path / "out", "--to", "vllm")
    assert refused.code == 6 and next(iter(unknown)) in refused.err and "--exclude" in refused.err and "--drop-unknown" in refused.err
    assert not (tmp_path / "out").exists()
    dropped = run("convert", folder, tmp_path / "dropped", "--to", "vllm", "--drop-unknown")
    assert dropped.code == 0 and f"{len(unknown)} unknown" in dropped.out and next(iter(unknown)) in dropped.out
    globs = [word for name in unknown for word in ("--exclude", name)]
    assert run("convert", folder, tmp_path / "excluded", "--to", "vllm", *globs).code == 0
    assert run("verify", tmp_path / "dropped", tmp_path / "excluded").code == 0
    assert run("verify", folder, tmp_path / "dropped", "--drop-unknown", "--cast").code == 0
    different = run("verify", folder, tmp_path / "dropped", "--cast")
    assert different.code == 1 and all(name in different.out for name in unknown), different.out
    assert "--drop-unknown" in different.out


@pytest.mark.parametrize("source", ["qwen3_next"], indirect=True)
def test_megatron_and_the_view_of_a_rank_refuse_them_too(source, tmp_path):
    folder, _, unknown = source
    for to in ("megatron", "megatron-dist"):
        with pytest.raises(CheckpointError, match=r"sinks.*the declaration of qwen3_next has no such weight, nor 1 other"):
            reshard.plan(folder, to=to)
        assert {drop.name for drop in reshard.plan(folder, to=to, drop_unknown=True).drops} == set(unknown)
    opened = reshard.open(folder)
    with pytest.raises(CheckpointError, match="no such weight"):
        opened.view(to="vllm", tp=2, rank=1)
    assert opened.view(to="vllm", tp=2, rank=1, drop_unknown=True)
    assert set(unknown) < set(opened.view(to="hf"))


@pytest.mark.parametrize("source", ["minicpm3"], indirect=True)
def test_every_answer_counts_them(source, tmp_path):
    folder, expected, unknown = source
    document = json.loads(run("inspect", folder, "--json").out)
    assert document["parameters"] == sum(words.size for words in expected.values())
    assert document["outlook"]["engines"] == {} and "--drop-unknown" in " ".join(document["outlook"]["needed"])
    assert "kv_a_proj_with_mqa.offset" in run("inspect", folder).out and "--to hf" in document["outlook"]["next"]
    plan = json.loads(run("convert", folder, tmp_path / "out", "--to", "hf", "--dry-run", "--json").out)
    assert any("kv_a_proj_with_mqa.offset" in note and "--drop-unknown" in note for note in plan["notes"])
    findings = json.loads(run("doctor", folder, "--json").out)["findings"]
    assert {finding["tensor"] for finding in findings if finding["id"] == "unknown-weight"} == set(unknown)
    for to in ("hf", "dcp"):
        assert run("roundtrip", folder, "--to", to).code == run("roundtrip", folder, "--to", to, "--materialize").code == 0
    assert run("degrees", folder, "--to", "vllm").code == 0


def test_the_fingerprint_is_of_everything_that_is_carried(tmp_path):
    both = folder_of(tmp_path / "both", {**WEIGHTS, NORM: torch.ones(8)})
    assert reshard.fingerprint(both) != reshard.fingerprint(LLAMA)
    without = run("fingerprint", both, "--drop-unknown", "-v").out.split()[0]
    assert without == run("fingerprint", LLAMA, "-v").out.split()[0] == str(reshard.fingerprint(LLAMA))
    result = reshard.convert(reshard.plan(both, to="dcp"), tmp_path / "dcp")
    assert str(result.fingerprint) == run("fingerprint", both, "-v").out.split()[0]


def test_they_get_the_prefix_of_the_weights_around_them(tmp_path):
    """A model saved without its head, or in a model with towers, has names without "model." or with more before them."""
    for number, prefix in enumerate(("", "model.language_model.", "base_model.model.model.")):
        stored = {name.replace("model.", prefix, 1): tensor for name, tensor in WEIGHTS.items()}
        added = {NORM.replace("model.", prefix, 1): torch.ones(8), HEAD: torch.ones(1, 32)}
        source = folder_of(tmp_path / f"in{number}", {**stored, **added})
        reshard.convert(reshard.plan(source, to="hf"), tmp_path / f"out{number}")
        found = safetensors.torch.load_file(tmp_path / f"out{number}" / "model.safetensors")
        assert found.keys() == {*WEIGHTS, NORM, HEAD}
        assert reshard.verify(source, tmp_path / f"out{number}").equal


def test_packed_integers_are_weights_and_masks_tables_and_observers_are_buffers(tmp_path):
    layer = "model.layers.0.self_attn"
    packed = {f"{layer}.indexer.codes": torch.ones(4, 4, dtype=torch.int32)}
    buffers = {
        f"{layer}.bias": torch.ones(1, 1, 16, 16),
        f"{layer}.masked_bias": torch.tensor(-1e4),
        f"{layer}.rotary_emb.inv_freq": torch.ones(4),
        f"{layer}.rotary_emb.cos_cached": torch.ones(1, 1, 16, 8),
        f"{layer}.q_proj.activation_post_process.min_val": torch.tensor(1.0),
        f"{layer}.q_proj.weight_quantizer._amax": torch.ones(8),
    }
    old = folder_of(tmp_path / "old", {**WEIGHTS, **buffers})
    for to in ("vllm", "hf"):
        assert {drop.name: drop.kind for drop in reshard.plan(old, to=to).drops} == dict.fromkeys(buffers, "buffer")
    both = folder_of(tmp_path / "both", {**WEIGHTS, **buffers, **packed})
    with pytest.raises(CheckpointError, match=r"indexer\.codes.*no such weight"):
        reshard.plan(both, to="vllm")
    assert packed.keys() <= reshard.plan(both, to="hf").content.tensors.keys()
    # What the declaration itself says is computed from the config stays out.
    kept = {*packed, *buffers} - {f"{layer}.rotary_emb.inv_freq"}
    assert kept <= reshard.plan(both, to="hf", keep_unknown=True).content.tensors.keys()


def test_a_copy_of_the_model_under_another_root_is_withheld(tmp_path):
    teacher = {f"teacher.{name}": tensor + 1 for name, tensor in WEIGHTS.items()}
    source = folder_of(tmp_path / "in", {**WEIGHTS, **teacher, "teacher.projection.weight": torch.ones(4, 4), HEAD: torch.ones(1, 32)})
    plan = reshard.plan(source, to="hf")
    assert plan.content.tensors.keys() == {*WEIGHTS, HEAD}
    assert {drop.kind for drop in plan.drops} == {"other"} and "`root=` teacher" in plan.drops[0].reason
    reshard.convert(reshard.plan(source, to="hf", root="teacher", drop_unknown=True), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], WEIGHTS[name] + 1) for name in WEIGHTS) and len(found) == len(WEIGHTS)


def test_keeping_and_dropping_contradict_each_other():
    with pytest.raises(RequestError, match="`keep_unknown=True` and `drop_unknown=True` contradict"):
        reshard.plan(LLAMA, to="hf", keep_unknown=True, drop_unknown=True)
