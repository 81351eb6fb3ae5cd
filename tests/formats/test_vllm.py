"""sharded_state against what real vLLM's rank processes held (fixtures/vllm), and back again."""

import importlib
import json
import re
import shutil

import pytest
from helpers.fixture_places import (
    FIXTURES,
    HF,
    MODELS,
    OLDER,
    REFERENCES,
    UNPLACED,
    VLLM,
    config_of,
    digests_of,
    has_a_layer_per_stage,
    open_case,
    patch_stored,
    ranks,
    read_reference,
    rules_of,
    served,
    stored,
)

import reshard
from reshard.adapter import registry
from reshard.canonical.content import Selection
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.meshes import Parallel
from reshard.models.lookup import find_model
from reshard.serving.legality import check_degrees, legal_tensor_parallel_sizes
from reshard.serving.ranks import placeholder_dtypes, rank_tensors
from reshard.serving.weights import scale_aliases
from reshard.verbs.digests import expected_parameters
from reshard.verbs.server_comparison import compare_with_server

SERVED = (*MODELS, "llama-biased", "gemma2", "gpt2", "gpt_neox", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
READ_BACK = [(model, tp, pp, 1) for model in SERVED for tp, pp in ((1, 1), (8, 1), (2, 2)) if (model, pp) != ("qwen2", 2)]
READ_BACK += [(model, tp, pp, 1) for model in MODELS for tp, pp in ((2, 1), (4, 1))]
READ_BACK += [(model, tp, pp, tp) for model in WITH_EXPERTS for tp, pp in ((4, 1), (2, 2))]
READ_BACK += [("mixtral-2", 4, 1, 4)]  # two of the ranks have no expert
_OF_REFERENCES = [json.loads(path.read_text()) for path in filter(has_a_layer_per_stage, REFERENCES)]
OF_REFERENCES = {(said["model"], said["tp"], said["pp"], said.get("ep", 1)) for said in _OF_REFERENCES}
_FP8 = [json.loads(path.read_text()) for path in REFERENCES if not (HF / path.parent.name).is_dir()]
QUANTIZED = [(said["model"], said["tp"], said.get("ep", 1)) for said in _FP8]


@pytest.mark.parametrize("reference", list(filter(has_a_layer_per_stage, REFERENCES)), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_rank_holds_bit_by_bit_what_real_vllm_holds(reference, tmp_path):
    """And what was written reads back, and the digests of a server are those of the real ranks: of one conversion."""
    expected = read_reference(reference)
    sizes = {"tp": expected["tp"], "pp": expected["pp"], "ep": expected.get("ep", 1)}
    exclude = UNPLACED.get(("vllm", expected["model"]), ())
    plan = reshard.plan(served(expected["model"]), to="vllm", **sizes, exclude=exclude)
    printed = reshard.convert(plan, tmp_path / "out")
    assert ranks(tmp_path / "out") == expected["ranks"]
    checker = registry.named("vllm").weight_checker
    held = digests_of(expected)
    digests = expected_parameters(plan, held, checker)
    compared = compare_with_server(digests, held, checker)
    # The scales and zero points of the KV cache, which the engine makes itself, do not count.
    assert compared.equal is True and compared.matching == len(digests.digests) and compared.nbytes == compared.total_nbytes, compared
    if (expected["model"], *sizes.values()) in READ_BACK:
        reads_back(expected["model"], plan, printed, tmp_path / "out")


def reads_back(model, plan, printed, folder):
    """The plan loses nothing, and the files have the fingerprint of the source."""
    proof = reshard.roundtrip(plan)
    assert proof.losses == () and proof.boxes >= proof.tensors
    assert reshard.verify(served(model), folder).equal
    assert reshard.fingerprint(folder).root == printed.fingerprint.root == reshard.fingerprint(served(model)).root


@pytest.mark.parametrize("reference", OLDER, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_rank_holds_bit_by_bit_what_an_older_vllm_holds(reference, tmp_path):
    """And the last version before the next change of that model's keys holds the same."""
    expected = read_reference(reference)
    plan = reshard.plan(served(expected["model"]), to="vllm", tp=expected["tp"], engine_version=expected["vllm"])
    reshard.convert(plan, tmp_path / "out")
    assert ranks(tmp_path / "out") == expected["ranks"]
    assert reshard.verify(served(expected["model"]), tmp_path / "out", cast=True).equal


def test_there_are_references_for_every_model_and_degree():
    found = {(path.parent.name, path.stem) for path in REFERENCES}
    assert found >= {(model, degree) for model in SERVED for degree in ("tp1", "tp2", "tp4", "tp8", "tp2-pp2")}
    assert found >= {(model, degree) for model in WITH_EXPERTS for degree in ("tp2-ep", "tp4-ep")}


@pytest.mark.parametrize("model, tp, pp, ep", [case for case in READ_BACK if case not in OF_REFERENCES])
def test_what_no_real_ranks_held_reads_back(model, tp, pp, ep, tmp_path):
    plan = reshard.plan(served(model), to="vllm", tp=tp, pp=pp, ep=ep)
    reads_back(model, plan, reshard.convert(plan, tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize("model, tp, ep", QUANTIZED)
def test_quantized_weights_read_back_with_their_scales(model, tp, ep, tmp_path):
    """Scales are 32 bits wide in the engine, whatever the source has."""
    plan = reshard.plan(served(model), to="vllm", tp=tp, ep=ep)
    assert all("cast" in loss for loss in reshard.roundtrip(plan).losses)
    printed = reshard.convert(plan, tmp_path / "out")
    assert reshard.verify(served(model), tmp_path / "out", cast=True).equal
    assert reshard.fingerprint(tmp_path / "out").root == printed.fingerprint.root


@pytest.mark.parametrize("there, back", [((8, 1), (1, 1)), ((4, 1), (2, 2)), ((2, 2), (8, 1)), ((1, 2), (4, 1))])
def test_from_any_degree_to_any_other_is_as_from_the_whole_model(there, back, tmp_path):
    reshard.convert(reshard.plan(HF / "llama-tied", to="vllm", tp=there[0], pp=there[1]), tmp_path / "a")
    reshard.convert(reshard.plan(tmp_path / "a", to="vllm", tp=back[0], pp=back[1]), tmp_path / "b")
    reshard.convert(reshard.plan(HF / "llama-tied", to="vllm", tp=back[0], pp=back[1]), tmp_path / "c")
    assert ranks(tmp_path / "b") == ranks(tmp_path / "c")


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2-tp", "fsdp2-tied", "fsdp2-3", "accelerate"])
def test_a_training_checkpoint_becomes_what_its_hf_form_becomes(case, tmp_path):
    opened = open_case(case)
    reshard.convert(reshard.plan(opened, to="vllm", tp=4), tmp_path / "direct")
    reshard.convert(reshard.plan(opened, to="hf"), tmp_path / "hf")
    reshard.convert(reshard.plan(tmp_path / "hf", to="vllm", tp=4), tmp_path / "detour")
    assert ranks(tmp_path / "direct") == ranks(tmp_path / "detour")


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 16])
def test_an_illegal_degree_is_refused_with_the_legal_ones(tp):
    with pytest.raises(RequestError, match=r"Legal tensor-parallel sizes are 1, 2, 4, 8\."):
        reshard.plan(HF / "llama", to="vllm", tp=tp)


REFUSED = json.loads((VLLM / "refusals.json").read_text())["refusals"]


@pytest.mark.parametrize(
    "said", REFUSED, ids=lambda said: f"{said['model']}-tp{said['tp']}-{'-'.join(map(str, said['overrides'].values()))}"
)
def test_what_real_vllm_refuses_is_refused(said):
    model = find_model(config_of(said["model"], **said["overrides"]))
    rules = rules_of("vllm", model)
    for tp in legal_tensor_parallel_sizes(model, rules):
        check_degrees(model, rules, Parallel(tp))
    with pytest.raises(RequestError, match=r"Legal tensor-parallel sizes are (1|none)|no experts|fewer stages"):
        check_degrees(model, rules, Parallel(said["tp"], said["pp"], said.get("ep", 1)))


@pytest.mark.parametrize("version, scales", [("0.8.5", 0), ("0.13.0", 0), ("0.14.0", 8), ("0.30", 8), ("v0.32.0", 8), ("0.32.1rc1", 8)])
def test_the_scale_buffers_are_there_from_0_14_on(version, scales, tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", engine_version=version), tmp_path / "out")
    names = stored(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert sum(name.endswith("_scale") for name in names) == scales
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


@pytest.mark.parametrize(
    "model, version, versions",
    [
        ("llama", "0.8.5", ">=0.8.5,<0.14"),
        ("llama", "0.32", ">=0.14"),
        ("deepseek_v3", "0.10", ">=0.10,<0.10.2"),
        ("deepseek_v3", "0.20", ">=0.20,<0.21"),
    ],
)
def test_the_keys_tell_which_versions_load_the_files(model, version, versions, tmp_path):
    reshard.convert(reshard.plan(HF / model, to="vllm", tp=2, engine_version=version), tmp_path / "out")
    assert reshard.open(tmp_path / "out").index.facts.version == versions


def test_blocks_are_not_cut_even_where_the_engine_would_repeat_their_scales():
    with pytest.raises(
        RequestError, match=r"experts\.0\..* over 2 ranks give 64 each, .* not a multiple of the FP8 block of 128.*sizes are 1\."
    ):
        reshard.plan(served("qwen3_moe-fp8-block"), to="vllm", tp=2)
    assert reshard.plan(served("qwen3_moe-fp8-block"), to="vllm", tp=2, ep=2).totals().files == 2


def test_a_bias_that_the_engine_would_leave_out_without_a_word_is_refused(tmp_path):
    """Until that is said on purpose."""
    globs = UNPLACED["vllm", "qwen3-biased"]
    words = re.escape("no slot for it, nor for 1 more. It would ignore the weight without a message")
    with pytest.raises(
        RequestError,
        match=f"^{re.escape(globs[0].replace('*', '0'))}.*{words}.*`exclude=` '{re.escape(globs[0])}'",
    ):
        reshard.plan(HF / "qwen3-biased", to="vllm")
    assert "o_proj.bias and 1 more" in reshard.degrees(HF / "qwen3-biased", to="vllm").assumptions[-1]
    reshard.convert(reshard.plan(HF / "qwen3-biased", to="vllm", tp=2, exclude=globs), tmp_path / "out")
    assert reshard.verify(HF / "qwen3-biased", tmp_path / "out", selection=Selection(exclude=globs)).equal


@pytest.mark.parametrize("model, key, value", [("gemma2", "tie_word_embeddings", False), ("qwen2_moe", "qkv_bias", False)])
def test_what_a_class_does_whatever_the_config_says_is_refused(model, key, value):
    with pytest.raises(RequestError, match=f"works as if {key} were true, the config says false"):
        rules_of("vllm", find_model(config_of(model, **{key: value})))


def test_a_router_that_the_config_does_not_exclude_from_quantization_is_refused():
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    with pytest.raises(
        RequestError, match=r"the config does not say that model\.layers\.0\.mlp\.gate\.weight is not quantized.*Name the routers"
    ):
        rules_of("vllm", find_model(config_of("qwen3_moe-sparse", quantization_config=quantized)))
    quantized["modules_to_not_convert"] = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
    rules_of("vllm", find_model(config_of("qwen3_moe-sparse", quantization_config=quantized)))


def test_latent_attention_does_not_tie_its_tables():
    """What its class does not share has to be in the files twice."""
    model = find_model(config_of("deepseek_v2", tie_word_embeddings=True))
    held = {
        tensor.name: tensor.sections
        for tensor in rank_tensors(model, placeholder_dtypes(model, rules_of("vllm", model)), rules_of("vllm", model), Parallel(2), 1, 0)
    }
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"] != ()


def test_scales_of_layers_that_are_not_served_stand_for_no_others():
    static = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}
    model = find_model(config_of("deepseek_v3", num_nextn_predict_layers=1, quantization_config=static))
    copies = scale_aliases(model, rules_of("vllm", model))
    assert {int(name.split(".")[2]) for pair in copies.items() for name in pair} == model.sparse_layers - {model.dimensions["layers"]}


def test_stages_need_a_version_that_names_them():
    with pytest.raises(RequestError, match=r"0\.30 cannot load pre-sharded stages"):
        reshard.plan(HF / "llama", to="vllm", pp=2, engine_version="0.30")
    with pytest.raises(RequestError, match="oldest"):
        reshard.plan(HF / "llama", to="vllm", engine_version="0.6")
    with pytest.raises(RequestError, match="a version such as"):
        reshard.plan(HF / "llama", to="vllm", engine_version="latest")


@pytest.mark.parametrize(
    "layers, pp, expected",
    [
        (4, 3, (1, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
        (10, 4, (2, 3, 3, 2)),
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
        (32, 5, (6, 6, 7, 7, 6)),
        (2, 5, (0, 0, 1, 1, 0)),
    ],
)
def test_layers_are_dealt_to_stages_as_vllm_deals_them(layers, pp, expected):
    rules = importlib.import_module(type(registry.named("vllm")).__module__ + ".rules")
    assert rules.remainder_before_last_stage(layers, pp) == expected


def test_parts_start_where_the_size_would_be_passed(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2, max_shard_size=20_000), tmp_path / "out")
    parts = sorted(path.name for path in (tmp_path / "out").glob("model-rank-1-part-*.safetensors"))
    assert parts == [f"model-rank-1-part-{i}.safetensors" for i in range(len(parts))] and len(parts) > 2
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


@pytest.mark.parametrize(
    "name, at",
    [("lm_head.weight", 127 * 64 + 5), ("model.layers.0.self_attn.attn._k_scale", 3)],
    ids=["a padding row", "a scale that must be 1"],
)
def test_verify_finds_a_constant_that_is_another(name, at, tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    patch_stored(tmp_path / "out" / "model-rank-1-part-0.safetensors", name, at)
    result = reshard.verify(HF / "llama", tmp_path / "out")
    assert [difference.name for difference in result.differences] == [name]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight"])
def test_a_drifted_replica_is_found_and_both_files_are_named(name, tmp_path):
    """The norm is on all ranks; at TP 8 each of the 2 KV heads is on four."""
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=8), tmp_path / "out")
    last_row = -2 if name.endswith("qkv_proj.weight") else 0
    path = tmp_path / "out" / "model-rank-6-part-0.safetensors"
    patch_stored(path, name, len(stored(path)[name][2]) + last_row if last_row else 0)
    for act in (
        lambda: reshard.fingerprint(tmp_path / "out"),
        lambda: reshard.convert(reshard.plan(tmp_path / "out", to="hf"), tmp_path / "hf"),
    ):
        with pytest.raises(CheckpointError, match=r"two copies.*model-rank-\d.*model-rank-\d"):
            act()
    assert not (tmp_path / "hf").exists()


def test_a_missing_rank_is_named(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=4), tmp_path / "out")
    (tmp_path / "out" / "model-rank-2-part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-2-part-0\.safetensors: the file is missing\. .* lists 4 files, tp 4"):
        reshard.open(tmp_path / "out")
    (tmp_path / "out" / "reshard.json").unlink()
    with pytest.raises(CheckpointError, match="rank 2 is not there"):
        reshard.open(tmp_path / "out")


def test_the_last_rank_missing_shows_in_the_shapes_of_the_others(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=4), tmp_path / "out")
    (tmp_path / "out" / "model-rank-3-part-0.safetensors").unlink()
    (tmp_path / "out" / "reshard.json").unlink()
    with pytest.raises(CheckpointError, match="the file of rank 3 is not there"):
        reshard.open(tmp_path / "out")
    (tmp_path / "out" / "model-rank-2-part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the file of rank 2 is not there.* written for TP 4"):
        reshard.open(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 88', '"intermediate_size": 176'))
    with pytest.raises(CheckpointError, match=r"\[\d+, 32\] is expected"):
        reshard.open(tmp_path / "out")


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", max_shard_size=20_000), tmp_path / "out")
    parts = sorted((tmp_path / "out").glob("*part*"))
    lost = shutil.move(parts[-1], tmp_path / "kept")
    (tmp_path / "out" / "reshard.json").unlink()
    with pytest.raises(CheckpointError, match="does not hold it"):
        reshard.open(tmp_path / "out")
    shutil.move(lost, parts[-1])
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(CheckpointError, match="layers"):
        reshard.open(tmp_path / "out")


def test_without_a_config_the_model_is_asked_for(tmp_path):
    with pytest.raises(RequestError, match="`model="):
        reshard.plan(open_case("fsdp2").path, to="vllm")
    with pytest.raises(CheckpointError, match="config"):
        reshard.plan(reshard.open(open_case("fsdp2").path, model=HF / "qwen3"), to="vllm")


def test_weights_that_the_engine_does_not_know_are_refused_by_name(tmp_path):
    import safetensors.torch
    import torch

    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    safetensors.torch.save_file({**tensors, "probe.weight": torch.zeros(1, 32)}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"probe\.weight.*has no such weight"):
        reshard.plan(copy, to="vllm", keep_unknown=True)
    reshard.convert(reshard.plan(copy, to="vllm", keep_unknown=True, exclude=("probe*",)), tmp_path / "out")
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_experts_are_refused_where_there_are_none_or_the_ranks_are_not_those_of_tp():
    with pytest.raises(RequestError, match="no experts"):
        reshard.plan(HF / "llama", to="vllm", tp=2, ep=2)
    with pytest.raises(RequestError, match="Give `ep=4`"):
        reshard.plan(HF / "mixtral", to="vllm", tp=4, ep=2)


def test_layers_that_predict_further_tokens_are_left_out_by_name(tmp_path):
    """Engines serve them from the Hugging Face folder, as a model of their own."""
    plan = reshard.plan(open_case(FIXTURES / "megatron" / "deepseek3-mtp"), to="vllm", tp=2)
    left = {drop.name for drop in plan.drops if "predicts further tokens" in drop.reason}
    assert left and all(name.startswith("model.layers.2.") for name in left)
    reshard.convert(plan, tmp_path / "out")
    assert not any("layers.2." in name for name in stored(tmp_path / "out" / "model-rank-0-part-0.safetensors"))


def test_a_view_holds_what_the_file_would(tmp_path):
    opened = open_case("fsdp2-tp")
    reshard.convert(reshard.plan(opened, to="vllm", tp=4), tmp_path / "out")
    for rank in range(4):
        view = opened.view(to="vllm", tp=4, rank=rank)
        expected = stored(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors")
        assert {name: (str(view[name].dtype), list(view[name].shape), view[name].words().tobytes()) for name in view} == expected
    with pytest.raises(RequestError, match="no tp rank 4"):
        opened.view(to="vllm", tp=4, rank=4)


def test_a_view_reads_only_its_ranks_bytes(monkeypatch):
    pytest.importorskip("torch", reason="the view is read as a torch tensor")
    from reshard.storage.files import LocalFiles

    opened = reshard.open(HF / "llama")
    view = opened.view(to="vllm", tp=8, rank=3)
    read = []
    real = LocalFiles.read_into
    monkeypatch.setattr(LocalFiles, "read_into", lambda self, path, at, buffer: (read.append(len(buffer)), real(self, path, at, buffer))[1])
    tensor = view["model.layers.0.self_attn.qkv_proj.weight"]
    assert tensor.torch().shape == (96, 32) and sum(read) == tensor.nbytes
