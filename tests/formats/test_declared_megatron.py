"""Declared models against what real megatron-core held (fixtures/megatron_declared): every rank, bit by bit, and back.

The weights follow from their names and shapes (fixtures/named_weights.py), so that a reference is a config and a digest for each rank. What
the models compute is compared by tests/megatron/check.py.
"""

import hashlib
import json
import shutil
import sys
import types
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import RequestError, ReshardError, UnsupportedError
from reshard.models.lookup import built_in_model_types, find_architecture, find_model

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

sys.path.insert(0, str(FIXTURES))
import named_weights  # noqa: E402
import safetensors.torch  # noqa: E402

lacking_for = import_module("reshard.formats.megatron.write.check_model").lacking_for
MTP_COPIES = import_module("reshard.formats.megatron.layout.tensors").MTP_COPIES
REFERENCES = {path.stem: path for path in sorted((FIXTURES / "megatron_declared").glob("*.json"))}


def options_for(reference):
    """Transformer Engine's layers, with further options, where Megatron-Core has no others (tests/megatron/check.py, BUILT_OF_TE)."""
    if "options" not in reference:
        return {"transformer_impl": "local", "vocab_multiple": 8}
    words = [word.removeprefix("--") for word in reference["options"]]
    return {"transformer_impl": "transformer_engine", "vocab_multiple": 8, **dict(zip(words[::2], words[1::2], strict=True))}


def digest(lines):
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def line(name, value):
    return f"{name} {list(value.shape)} {hashlib.sha256(value.float().contiguous().numpy().tobytes()).hexdigest()}\n"


def ranks_of(save):
    """The digest of what each rank's file holds, as tests/megatron/settled.py computes it of a live rank."""
    found = {}
    for path in save.glob("mp_rank_*/model_optim_rng.pt"):
        model = torch.load(path, weights_only=False)["model"]
        found[path.parent.name] = digest(line(f"0.{name}", value) for name, value in model.items() if isinstance(value, torch.Tensor))
    return found


def keys_of(save):
    stored = FileSystemReader(save).read_metadata().state_dict_metadata
    return digest(f"{key} {list(stored[key].size)}\n" for key in sorted(stored) if isinstance(stored[key], TensorStorageMetadata))


@pytest.fixture
def hub(request, tmp_path, monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.enums"):  # args name an enum of a package that is not installed here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = lambda number: number
    reference = json.loads(REFERENCES[request.param].read_text())
    weights = find_model(reference["config"]).weights.values()
    stored = [weight for weight in weights if not weight.optional or (request.param.endswith("-mtp") and weight.role not in MTP_COPIES)]
    shapes = {weight.name: weight.shape for weight in stored}
    named_weights.write(tmp_path / "hub", reference["config"], shapes)
    return tmp_path / "hub", reference


@pytest.mark.parametrize("hub", REFERENCES, indirect=True)
def test_every_rank_of_a_declared_model_holds_what_real_megatron_holds(hub, tmp_path):
    model, reference = hub
    for to in ("megatron", "megatron-dist"):
        sizes = reference[to]["sizes"]
        reshard.convert(reshard.plan(model, to="megatron", **options_for(reference), **sizes), tmp_path / f"legacy-{to}")
        assert ranks_of(tmp_path / f"legacy-{to}" / "release") == reference[to]["ranks"], to
        reshard.convert(reshard.plan(model, to="megatron-dist", **options_for(reference), **sizes), tmp_path / f"dist-{to}")
        assert keys_of(tmp_path / f"dist-{to}" / "release") == reference[to]["keys"], to
        for written in ("legacy", "dist"):
            # Megatron keeps a router's correction in fp32.
            reshard.verify(model, tmp_path / f"{written}-{to}", cast=True).raise_if_different()


def test_every_declared_model_is_written_or_refused_with_what_megatron_lacks():
    """docs/reference/megatron-models.md is made of this."""
    architectures = [find_architecture(model_type) for model_type in built_in_model_types()]
    unclear = [each.model_type for each in architectures if "megatron" not in each.frameworks and not lacking_for(each)]
    assert unclear == ["chatglm", "deepseek", "sarvam_mla"], "a model type is compared (tests/megatron/check.py), or what it needs is named"
    compared = {stem.partition("-")[0] for stem in REFERENCES}
    runs = {json.loads(path.read_text())["model_type"] for path in FIXTURES.glob("megatron*/*/model/config.json")}
    for each in architectures:
        assert bool(lacking_for(each)) or each.model_type in unclear or each.family in compared | runs, each.model_type


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [("olmo2", "norms after attention"), ("olmoe", "norms of q and k over all heads at once"), ("granite", "multipliers")],
)
def test_what_megatron_lacks_is_named(model_type, needs, tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    config = {"model_type": model_type, **sizes, "intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values()}
    named_weights.write(tmp_path / "model", config, shapes)
    with pytest.raises(UnsupportedError, match=rf"of the type {model_type} need {needs}"):
        reshard.plan(tmp_path / "model", to="megatron")


def test_mimos_layers_for_several_tokens_are_refused_by_name_and_can_be_left_out(tmp_path):
    """Megatron Bridge has them, with the halves of input_proj exchanged; they were not compared."""
    config = json.loads(REFERENCES["mimo"].read_text())["config"] | {"num_nextn_predict_layers": 1}
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values()}
    named_weights.write(tmp_path / "mimo", config, shapes | {"model.mtp_layers.0.input_proj.weight": (16, 32)})
    with pytest.raises(
        UnsupportedError, match=r"model\.mtp_layers\.0\.input_proj.*no layer that was compared.*`exclude='model\.mtp_layers\.\*'`"
    ):
        reshard.plan(tmp_path / "mimo", to="megatron")
    plan = reshard.plan(tmp_path / "mimo", to="megatron", exclude="model.mtp_layers.*")
    assert [drop.name for drop in plan.drops] == ["model.mtp_layers.0.input_proj.weight"]


def changed(model, changes, to):
    shutil.copytree(model, to)
    config = json.loads((model / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not None}))
    return to


@pytest.mark.parametrize(
    ("hub", "changes", "reason"),
    [
        ("glm4_moe", {"norm_topk_prob": False}, "sets norm_topk_prob to False"),
        ("stablelm", {"use_parallel_residual": True}, "sets use_parallel_residual to True"),
        ("arcee", {"hidden_act": "silu"}, "without a gate whose activation is 'silu'"),
        ("seed_oss", {"hidden_act": "gelu"}, "with a gate whose activation is 'gelu'"),
        ("llama4_text", {"use_qk_norm": True}, "sets use_qk_norm to True"),
        ("llama4_text", {"use_qk_norm": None}, "sets use_qk_norm to True"),
        ("llama4_text", {"attention_chunk_size": 4}, "sets attention_chunk_size to 4"),
        ("deepseek_v2", {"topk_group": 1}, "by their 2 best scores, the model by 1"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, "attention_factor"),
    ],
    indirect=["hub"],
)
def test_what_megatron_would_compute_otherwise_is_refused(hub, changes, reason, tmp_path):
    model = changed(hub[0], changes, tmp_path / "changed")
    with pytest.raises(UnsupportedError, match=reason):
        reshard.plan(model, to="megatron", etp=1)


@pytest.mark.parametrize("model_type", ["llama4_text", "smollm3"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"no_rope_layers": [1, 0, 1, 1]}, [0, 1, 0, 0]),
        ({"no_rope_layers": None}, [0, 0, 0, 1]),
        ({"no_rope_layer_interval": 2}, [0, 1, 0, 1]),
        ({"no_rope_layers": []}, [0, 0, 0, 1]),
    ],
)
def test_a_config_says_which_layers_have_no_rotary_positions_by_a_list_or_an_interval(model_type, given, expected):
    config = json.loads(REFERENCES[model_type].read_text())["config"]
    named = {key: value for key, value in config.items() if key not in ("no_rope_layers", "no_rope_layer_interval")}
    model = find_model(named | {"num_hidden_layers": 4} | given)
    assert import_module("reshard.formats.megatron.layout.settings").model_settings(model)["no_rope_freq"] == expected


@pytest.mark.parametrize("hub", ["gpt_oss"], indirect=True)
def test_experts_with_biases_are_not_shared_by_ranks(hub):
    with pytest.raises(RequestError, match="Add `etp=1`"):
        reshard.plan(hub[0], to="megatron", tp=2)
    with pytest.raises(RequestError, match="GroupedMLP"):
        reshard.plan(hub[0], to="megatron", experts="grouped")


@pytest.mark.parametrize("hub", ["glm", "glm4_moe", "gpt_oss", "llama4_text", "nemotron_h", "qwen3_next", "smollm3"], indirect=True)
def test_a_run_that_its_settings_do_not_describe_needs_its_config(hub, tmp_path):
    reshard.convert(reshard.plan(hub[0], to="megatron"), tmp_path / "out")
    for companion in ("config.json", "reshard.json"):
        (tmp_path / "out" / companion).unlink(missing_ok=True)
    with pytest.raises(ReshardError, match="`model="):
        reshard.plan(tmp_path / "out", to="hf")


@pytest.mark.parametrize("hub", ["seed_oss", "glm4_moe"], indirect=True)
def test_transformer_engine_finds_a_state_of_every_module_that_keeps_one(hub, tmp_path):
    """Attention and separate norms; without the option linear layers only, as before."""
    model, _ = hub
    found = {}
    for option in ({}, {"extra_state": True}):
        out = tmp_path / f"out{len(option)}"
        reshard.convert(reshard.plan(model, to="megatron", **option), out / "legacy")
        legacy = torch.load(next((out / "legacy").rglob("model_optim_rng.pt")), weights_only=False)["model"]
        reshard.convert(reshard.plan(model, to="megatron-dist", **option), out / "dist")
        stored = FileSystemReader(next((out / "dist").glob("release"))).read_metadata().state_dict_metadata
        assert all(legacy[name] is None for name in legacy if name.endswith("_extra_state"))
        found[len(option)] = {name for name in legacy if name.endswith("_extra_state")}, {key for key in stored if "_extra_state/" in key}
        reshard.verify(model, out / "legacy", cast=True).raise_if_different()
    norms = {"final_layernorm"} if model and "seed_oss" in str(hub[1]["config"]) else {"final_layernorm", "q_layernorm", "k_layernorm"}
    more = {name.removesuffix("._extra_state").rpartition(".")[2] for name in found[1][0] - found[0][0]}
    assert more == norms | {"core_attention"} | ({"pre_mlp_layernorm"} if len(norms) > 1 else set())
    more = {key.partition("._extra_state")[0].rpartition(".")[2] for key in found[1][1] - found[0][1]}
    assert more == norms | {"core_attention"} | ({"pre_mlp_layernorm"} if len(norms) > 1 else set())


@pytest.mark.parametrize("hub", ["nemotron_h", "qwen3_next", "gemma2"], indirect=True)
def test_layers_that_are_built_of_transformer_engine_only(hub):
    with pytest.raises(RequestError, match="no local layers for a"):
        reshard.plan(hub[0], to="megatron", transformer_impl="local")


@pytest.mark.parametrize(("hub", "what"), [("nemotron_h", "groups of a Mamba"), ("qwen3_next", "heads of a gated")], indirect=["hub"])
def test_ranks_share_whole_groups_of_layers_with_a_state(hub, what):
    with pytest.raises(RequestError, match=f"`tp=4` does not divide 2 {what}"):
        reshard.plan(hub[0], to="megatron", tp=4)


@pytest.mark.parametrize("hub", ["nemotron_h", "qwen3_next"], indirect=True)
def test_the_parts_of_a_projection_are_tensors_of_a_distributed_save(hub, tmp_path):
    """And the experts of MambaModel are grouped, unless the user wants others."""
    reshard.convert(reshard.plan(hub[0], to="megatron-dist"), tmp_path / "out")
    stored = FileSystemReader(tmp_path / "out" / "release").read_metadata().state_dict_metadata
    module = "mixer" if "nemotron" in hub[1]["config"]["model_type"] else "self_attention"
    parts = {key.rpartition(".")[2] for key in stored if key.startswith(f"decoder.layers.0.{module}.in_proj.weight.")}
    assert parts == ({"z", "x", "B", "C", "dt"} if module == "mixer" else {"query", "key", "value", "z", "beta", "alpha"})
    experts = reshard.plan(hub[0], to="megatron", dtype="fp32")
    names = {placed.tensor.name for file in experts.layout.files for placed in file.tensors}
    assert any("mlp.experts.linear_fc1.weight0" in name for name in names) == (module == "mixer")


@pytest.mark.parametrize("hub", ["qwen3_next"], indirect=True)
def test_one_norm_is_stored_minus_one_and_comes_back(hub, tmp_path):
    """Values near one, as trained norms have them, come back bit by bit; `verify` sees one changed bit."""
    from safetensors.torch import load_file, save_file

    model, _ = hub
    name = "model.layers.0.linear_attn.norm.weight"
    weights = load_file(model / "model.safetensors")
    weights[name] = (1 + 0.2 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))).to(weights[name].dtype)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    plan = reshard.plan(model, to="megatron")
    assert any("stores x-1" in note for note in plan.layout.notes)
    reshard.convert(plan, tmp_path / "legacy")
    saved = torch.load(next((tmp_path / "legacy").rglob("model_optim_rng.pt")), weights_only=False)
    stored = saved["model"]["decoder.layers.0.self_attention.out_norm.weight"]
    assert torch.equal(stored, (weights[name].float() - 1).to(stored.dtype))
    reshard.convert(reshard.plan(tmp_path / "legacy", to="hf"), tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[name], weights[name])
    weights[name][0] += 0.25
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReshardError, match="the values differ"):
        reshard.verify(model, tmp_path / "legacy", cast=True).raise_if_different()


@pytest.mark.parametrize(
    ("hub", "changes"), [("nemotron_h", {"layers_block_type": ["mamba", "mamba", "attention", "mlp"]})], indirect=["hub"]
)
def test_a_run_of_layers_of_other_kinds_is_not_read_with_this_config(hub, changes, tmp_path):
    model = changed(hub[0], changes, tmp_path / "changed")
    reshard.convert(reshard.plan(hub[0], to="megatron"), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ReshardError, match="the layers are of other kinds"):
        reshard.plan(tmp_path / "out", to="hf")


def test_the_copies_in_layers_for_multi_token_prediction_are_spoken_of(tmp_path):
    """A published folder holds the embedding and the head once more in such a layer; Megatron holds them once."""
    reference = json.loads(REFERENCES["glm4_moe-mtp"].read_text())
    weights = find_model(reference["config"]).weights.values()
    named_weights.write(tmp_path / "hub", reference["config"], {w.name: w.shape for w in weights if w.role not in MTP_COPIES})
    (copied,) = {weight.layer for weight in weights if weight.role in MTP_COPIES}
    stored = safetensors.torch.load_file(tmp_path / "hub" / "model.safetensors")
    stored[f"model.layers.{copied}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"model.layers.{copied}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    safetensors.torch.save_file(stored, tmp_path / "hub" / "model.safetensors")
    names = (f"model.layers.{copied}.embed_tokens.weight", f"model.layers.{copied}.shared_head.head.weight")
    there = reshard.convert(reshard.plan(tmp_path / "hub", to="megatron-dist"), tmp_path / "there")
    (note,) = (note for note in there.notes if "does not write them again" in note)
    assert all(name in note for name in names) and "of model.embed_tokens.weight" in note
    back = reshard.plan(tmp_path / "there", to="hf", model=tmp_path / "hub", vocab_size=reference["config"]["vocab_size"])
    (note,) = (note for note in back.layout.notes if note.startswith("not written: "))
    assert all(name in note for name in names) and "copies of the embedding and the head" in note
    assert not any("not written" in note for note in reshard.plan(tmp_path / "hub", to="hf").layout.notes)
