"""nanotron's folders: read as the published model. The oracle is what nanotron's own code loads (fixtures/nanotron)."""

import hashlib
import json
import shutil
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from helpers.fixture_places import FIXTURES, described

import reshard
from reshard.errors import CheckpointError, MissingFile, RequestError, UnsupportedError

sys.path.insert(0, str(FIXTURES / "hf_packed"))

import seeded_models

NANOTRON = FIXTURES / "nanotron"
CASES = sorted(path.parent.name for path in NANOTRON.glob("*/truth.json"))
QKV = "model/model/decoder/0/pp_block/attn/qkv_proj"


def truth_of(case):
    return {name: roles["weight"] for name, roles in json.loads((NANOTRON / case / "truth.json").read_text())["tensors"].items()}


def weights_of(folder):
    opened = reshard.open(folder)
    return {name: described(tensor, opened.files) for name, tensor in opened.content().tensors.items()}


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(NANOTRON / "llama-tp2-pp2" / "checkpoint", tmp_path / "checkpoint")


def part(folder, rank=0):
    return folder / QKV / f"model_weight_pp-rank-0-of-2_tp-rank-{rank}-of-2.safetensors"


def rewritten(path, change):
    """A part, saved anew with other metadata."""
    with safetensors.safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_what_nanotron_loads(case, tmp_path):
    source = NANOTRON / case / "checkpoint"
    assert weights_of(source) == truth_of(case)
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "hf")
    assert weights_of(tmp_path / "hf") == truth_of(case)
    reshard.convert(reshard.plan(source, to="vllm", tp=2), tmp_path / "vllm")
    assert reshard.verify(source, tmp_path / "vllm").equal
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is ("tied" in case)


def test_what_the_folder_says_of_the_run_is_known():
    facts = reshard.open(NANOTRON / "llama-tp2-pp2" / "checkpoint").index.facts
    assert facts.step == 7 and dict(facts.parallel) == {"tp": 2, "pp": 2} and "in pairs" in facts.notes[-1]


def test_rows_stay_in_order_where_the_model_does_not_rotate_pairs(copy):
    config = json.loads((copy / "model_config.json").read_text())
    (copy / "model_config.json").write_text(json.dumps({**config, "rope_interleaved": False}))
    found, name = weights_of(copy), "model.layers.0.self_attn.{}_proj.weight"
    q = torch.cat([safetensors.torch.load_file(part(copy, rank))["data"][:8] for rank in range(2)])
    assert found[name.format("q")]["sha256"] == hashlib.sha256(q.view(torch.uint8).numpy().tobytes()).hexdigest()
    pairs = truth_of("llama-tp2-pp2")
    assert found[name.format("q")] != pairs[name.format("q")] and found[name.format("v")] == pairs[name.format("v")]


def test_names_and_fusions_are_written_back(tmp_path):
    source = NANOTRON / "llama-tp2-pp2" / "checkpoint"
    reshard.convert(reshard.plan(source, to="hf", names="nanotron"), tmp_path / "out")
    stored = {tensor.name for tensor in reshard.open(source).index.tensors}
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors").keys() == stored
    assert weights_of(tmp_path / "out") == truth_of("llama-tp2-pp2")


def headers_of(folder):
    """Path without the pipeline stage -> metadata, and the tensor's bytes, of each file of weights."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            name = str(path.relative_to(folder)).replace("pp-rank-1", "pp-rank-0").replace("of-2_tp", "of-1_tp")
            found[name] = dict(file.metadata() or {}), file.get_tensor("data").view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_nanotron_wrote(case, tmp_path):
    """From the published model. tests/nanotron lets nanotron load it."""
    source = NANOTRON / case / "checkpoint"
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "hf")
    reshard.convert(reshard.plan(tmp_path / "hf", to="nanotron", tp=2), tmp_path / "out")
    assert headers_of(tmp_path / "out") == headers_of(source)
    ours, theirs = (json.loads((folder / "model_config.json").read_text()) for folder in (tmp_path / "out", source))
    assert ours == theirs
    reshard.convert(reshard.plan(source, to="nanotron"), tmp_path / "one")
    assert weights_of(tmp_path / "one") == truth_of(case) and reshard.open(tmp_path / "one").index.facts.step == 7


def test_rows_are_written_in_halves_for_later_versions(tmp_path):
    source = NANOTRON / "llama-tp2-pp2" / "checkpoint"
    reshard.convert(reshard.plan(source, to="nanotron", tp=2, rotary_rows="halves"), tmp_path / "out")
    assert weights_of(tmp_path / "out") == truth_of("llama-tp2-pp2")
    assert json.loads((tmp_path / "out" / "model_config.json").read_text())["rope_interleaved"] is False
    differ = {name for name, found in headers_of(source).items() if headers_of(tmp_path / "out")[name] != found}
    assert {name.rpartition("/")[0] for name in differ} == {f"model/model/decoder/{layer}/pp_block/attn/qkv_proj" for layer in range(2)}


def test_another_rotary_base_is_written_for_later_versions(tmp_path):
    source = NANOTRON / "llama-tp2-pp2" / "checkpoint"
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    reshard.convert(reshard.plan(tmp_path / "hf", to="nanotron"), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "model_config.json").read_text())
    assert (written["rope_theta"], written["rope_interleaved"]) == (5e5, True)
    assert weights_of(tmp_path / "out") == truth_of("llama-tp2-pp2")


@pytest.mark.parametrize(
    "change, options, said",
    [
        ({}, {"tp": 4}, "`tp=4` does not divide the 2 heads of model.layers.0.self_attn.k_proj.weight"),
        ({}, {"tp": 3}, "`tp=3` does not divide the 32 rows of model.embed_tokens.weight"),
        ({}, {"pp": 2}, "`pp=2` does not apply to a nanotron folder"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {}, "rotary scaling llama3"),
    ],
)
def test_what_nanotron_would_not_load_is_not_written(change, options, said, tmp_path):
    source = NANOTRON / "llama-tp2-pp2" / "checkpoint"
    reshard.convert(reshard.plan(source, to="hf"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((RequestError, UnsupportedError, CheckpointError), match=said):
        reshard.plan(tmp_path / "hf", to="nanotron", **options)


def test_heads_of_another_width_are_not_written(tmp_path):
    """nanotron's heads have hidden_size / num_attention_heads rows."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 8, "vocab_size": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 1} | sizes
    seeded_models.write_random(config, tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="its heads have 16 rows, and nanotron's 16 / 2"):
        reshard.plan(tmp_path / "hf", to="nanotron")


def test_another_model_is_not_written(tmp_path):
    with pytest.raises(UnsupportedError, match="`to=nanotron`: the names of nanotron are known for llama, and this is qwen3"):
        reshard.plan(FIXTURES / "hf" / "qwen3", to="nanotron")


def test_a_missing_part_is_named(copy):
    part(copy, 1).unlink()
    with pytest.raises(MissingFile, match="tp-rank-1-of-2"):
        reshard.open(copy)


@pytest.mark.parametrize(
    "pairs, shape",
    [
        ("0,8,None|None,None,None#8,16,None|None,None,None", "(32, 16"),
        ("0,8,None|None,None,None#8,17,None|None,None,None", "(32, 16)"),
        ("0,99,None|None,None,None#0,99,None|None,None,None", "(99, 16)"),
        ("0,8,2|None,None,None#8,16,2|None,None,None", "(32, 16)"),
        ("0,8,None#8,16,None", "(32, 16)"),
        ("", "(32, 16)"),
    ],
)
def test_metadata_that_do_not_fit_the_part_are_refused(pairs, shape, copy):
    rewritten(part(copy), lambda tensors, metadata: metadata.update(local_global_slices_pairs=pairs, unsharded_shape=shape))
    with pytest.raises(CheckpointError, match="do not say where its part"):
        reshard.open(copy)


def test_a_hole_and_heads_that_are_cut_are_refused(copy):
    lost = "0,8,None|None,None,None#0,8,None|None,None,None"
    rewritten(part(copy), lambda tensors, metadata: metadata.update(local_global_slices_pairs=lost))
    with pytest.raises(CheckpointError, match="qkv_proj"):
        reshard.plan(copy, to="hf")
    cut = "0,3,None|None,None,None#0,3,None|None,None,None"
    rewritten(part(copy), lambda tensors, metadata: metadata.update(local_global_slices_pairs=cut))
    with pytest.raises(CheckpointError, match="do not begin and end where query or key heads"):
        reshard.open(copy)


def test_files_of_another_save_are_refused(copy):
    shutil.copy(part(copy), part(copy).with_name("model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors"))
    with pytest.raises(UnsupportedError, match="TP 1 PP 1 and TP 2 PP 2"):
        reshard.open(copy)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"is_llama_config": None, "is_qwen2_config": True}, "is_qwen2_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_attention_heads": 3}, "3 heads do not divide"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_other_models_are_refused(change, said, copy):
    config = json.loads((copy / "model_config.json").read_text()) | change
    (copy / "model_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        reshard.open(copy)


def test_pickles_of_the_run_are_named_and_not_read(copy):
    (copy / "optimizer").mkdir()
    (copy / "optimizer" / "optimizer_pp-0-of-2_tp-0-of-2.pt").write_bytes(b"no pickle")
    assert reshard.open(copy).index.objects == ("optimizer",)
    assert weights_of(copy) == truth_of("llama-tp2-pp2")
