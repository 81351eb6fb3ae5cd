"""Declared models against what real vLLM ranks held (fixtures/vllm_declared): every rank of every degree, bit by bit.

The weights follow from their names and shapes (fixtures/named_weights.py), so that a reference is a config and one digest for each rank.
A name or shape that a declaration gets wrong gives other weights, hence other digests.
"""

import hashlib
import json
import re
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.fixture_places import FIXTURES, ranks, rules_of
from helpers.rank_contents import canonical_weights, described, laid_out, our_value, published_shapes, sizes_of, value_in_vllm
from helpers.reshard_command import reshard as command

import reshard
from reshard.canonical.content import Selection
from reshard.canonical.name_variants import Names
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.dtypes import BF16, F32, from_safetensors
from reshard.geometry.meshes import Parallel
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.serving.legality import check_degrees, check_served
from reshard.serving.ranks import rank_tensors
from reshard.serving.weights import left_out_by_class, stored_dtypes, weights_without_slot

sys.path.insert(0, str(FIXTURES))
import named_weights

DTYPES = {"BF16": BF16, "F32": F32, "I64": from_safetensors("I64", where="test")}
REFERENCES = {path.stem: path for path in sorted((FIXTURES / "vllm_declared").glob("*.json"))}


def digest(lines):
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def digest_of(state):
    """As fixtures/vllm_declared/make.py computes it."""
    return digest(f"{name} {entry['dtype']} {entry['shape']} {entry['sha256']}\n" for name, entry in sorted(state.items()))


def in_memory(model, weights, names):
    """What the name variants say about arrays that transformers holds in memory under these names. fixtures/vllm_declared/make.py says what
    its conversion mapping made of the same weights."""
    arrays = ((name, Names(model).array(name), DTYPES[entry["dtype"]]) for name, entry in names.items())
    weights = {**weights, **{alias: weights[name] for alias, name in model.aliases.items()}}
    found = described((array.stored(name, dtype) for name, array, dtype in arrays if array), weights, our_value)
    return {name: {**entry, "sha256": entry["sha256"][:32]} for name, entry in found.items()}


def written(folder, sizes, target):
    """What `convert` writes for every rank."""
    reshard.convert(reshard.plan(folder, to="vllm", **sizes), target)
    return ranks(target).values()


@pytest.mark.parametrize("name", REFERENCES)
def test_every_rank_of_a_declared_model_holds_what_real_vllm_holds(name, tmp_path):
    reference = json.loads(REFERENCES[name].read_text())
    model = find_model(reference["config"])
    shapes = published_shapes(model)
    saved = {"count": len(shapes), "sha256": digest(f"{name} {list(shape)}\n" for name, shape in sorted(shapes.items()))}
    order = reference["tensors"].pop("order", None)
    assert saved == reference["tensors"], "transformers saves other names or shapes"
    assert order in (None, digest("\n".join(shapes))), "the model's parameters have another order"
    types = reference.get("types", {})
    weights = canonical_weights(model, named_weights.weights_of(shapes, reference.get("zeros"), types))
    assert in_memory(model, weights, reference.get("in_memory", {})) == reference.get("in_memory", {}), (
        "transformers converts in another way"
    )
    if not reference["degrees"]:
        with pytest.raises(UnsupportedError, match=r"does not load a .* model from such files"):
            check_served(model, rules_of("vllm", model))
        return
    model = Model(model.architecture, {**model.config, str(model.architecture.mtp_layers): 0})
    different = []
    for degree, expected in reference["degrees"].items():
        if isinstance(expected, dict):
            with pytest.raises(RequestError, match="does not fit this model"):
                list(laid_out(model, weights, sizes_of(degree), value_in_vllm, types))
        elif list(map(digest_of, laid_out(model, weights, sizes_of(degree), value_in_vllm, types))) != expected:
            different.append(degree)
    assert not different, "fixtures/vllm_declared/make.py --details shows every tensor of vLLM's ranks"
    named_weights.write(tmp_path / "model", reference["config"], shapes, reference.get("zeros"), types)
    exclude = weights_without_slot(model, rules_of("vllm", model))
    tp = 2 if "tp2" in reference["degrees"] else 4  # what was quantized on four ranks goes to four ranks
    states = written(tmp_path / "model", {"tp": tp, "exclude": exclude}, tmp_path / "out")
    assert list(map(digest_of, states)) == list(map(digest_of, laid_out(model, weights, {"tp": tp}, our_value, types)))


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3n_text", "gemma4-experts", "minimax_m3_vl", "mimo_v2_flash", "internvl-qwen3_moe"),
        *("deepseek_v4", "deepseek_v4-published", "bailing_hybrid", "bailing_hybrid-3", "deepseek_ocr2", "deepseek_vl_v2", "molmo"),
        *("kimi_k3", "kimi_k3-published", "mimo_v2", "mimo_v2-published"),
        *("glm5_next", "qwen4_exp", "inkling_mm_model"),
    ],
)
def test_files_with_names_of_their_own_are_read_back(name, tmp_path):
    """Lists of some layers, keys in the place of values, layers that differ: what was written means the model's own weights again."""
    reference = json.loads(REFERENCES[name].read_text())
    shapes = published_shapes(find_model(reference["config"]))
    named_weights.write(tmp_path / "model", reference["config"], shapes, types=reference.get("types", {}))
    reshard.convert(reshard.plan(tmp_path / "model", to="vllm", tp=4), tmp_path / "served")
    reshard.convert(reshard.plan(tmp_path / "served", to="hf"), tmp_path / "back")
    reshard.verify(tmp_path / "model", tmp_path / "back", cast=True).raise_if_different()


@pytest.mark.parametrize("experts", [8, 64])
def test_the_boxes_of_one_tensor_for_all_experts_do_not_grow_with_the_experts(experts):
    """Inkling has 256 experts in each of 64 layers, with 6,144 rows that change places: a box for each row of each is 100 million boxes."""
    config = json.loads(REFERENCES["inkling_mm_model"].read_text())["config"]
    model = find_model({**config, "text_config": {**config["text_config"], "n_routed_experts": experts}})
    tensors = rank_tensors(model, dict.fromkeys(model.weights, BF16), rules_of("vllm", model), Parallel(tp=2), 0, 0)
    boxes = {tensor.name: len(tensor.sections) for tensor in tensors}
    assert boxes["model.layers.1.mlp.experts.routed_experts.w13_weight"] == 2 * 128 // 2
    assert boxes["model.layers.1.mlp.experts.routed_experts.w2_weight"] == 1


def write(folder, name, **changes):
    """A Hugging Face folder of the model of a reference. changes: of its config."""
    config = {**json.loads(REFERENCES[name].read_text())["config"], **changes}
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values() if not weight.optional}
    named_weights.write(folder, config, shapes)
    return shapes


def test_weights_that_a_class_leaves_out_are_named_with_the_reason_and_stay_away(tmp_path):
    """vLLM's class of llava ends its tower at the feature layer, -2: it has neither the last of 3 blocks nor the norm behind it."""
    shapes = write(tmp_path / "model", "llava")
    left_out = {name for name in shapes if "encoder.layers.2." in name or "post_layernorm" in name}
    plan = reshard.plan(tmp_path / "model", to="vllm", tp=2)
    reasons = {drop.name: drop.reason for drop in plan.drops}
    assert reasons.keys() == left_out and len(set(reasons.values())) == 2
    (note,) = [note for note in plan.layout.notes if "left out" in note]
    globs = tuple(re.findall("'([^']+)'", note))
    reshard.convert(plan, tmp_path / "served")
    reshard.verify(tmp_path / "model", tmp_path / "served", selection=Selection(exclude=globs)).raise_if_different()
    served = reshard.open(tmp_path / "served")
    assert set(served.index.facts.left_out) == left_out
    assert len(served.index.facts.notes) == 2 and all(why in "".join(served.index.facts.notes) for why in reasons.values())
    assert [finding.id for finding in reshard.doctor(tmp_path / "served").findings] == ["missing-tokenizer"]
    reshard.convert(reshard.plan(tmp_path / "served", to="vllm", tp=4), tmp_path / "four")
    real = json.loads(REFERENCES["llava"].read_text())["degrees"]["tp4"]
    assert [digest_of(state) for state in ranks(tmp_path / "four").values()] == real
    back = reshard.plan(tmp_path / "served", to="hf")
    assert back.content.tensors.keys() == shapes.keys() - left_out and sum("not there" in note for note in back.layout.notes) == 2
    with pytest.raises(RequestError, match="was not compared"):
        reshard.plan(tmp_path / "served", to="sglang", tp=2)


@pytest.mark.parametrize(
    "number, blocks",
    [(-1, 3), (-2, 2), (-3, 1), (3, 3), (1, 1), (0, 0), (-5, None), (4, None), ([-2, -1], None)],
)
def test_a_tower_ends_at_the_block_that_the_config_names(number, blocks, tmp_path):
    """As get_layer_index of vLLM 0.32: 0 is what goes into the first block."""
    config = {**json.loads(REFERENCES["llava"].read_text())["config"], "vision_feature_layer": number}
    model = find_model(config)
    if blocks is None:
        with pytest.raises(RequestError, match="for vision_feature_layer; the number of one of the 3 blocks is expected"):
            left_out_by_class(model, rules_of("vllm", model).left_out)
        return
    left = left_out_by_class(model, rules_of("vllm", model).left_out)
    assert {int(name.split(".")[4]) for name in left if ".layers." in name} == set(range(blocks, 3))


def test_a_bias_that_only_the_class_has_is_zeros_and_the_plan_says_so(tmp_path):
    """k of Whisper has no bias: neither in the encoder nor in the decoder, whose layers also attend to the encoder."""
    shapes = write(tmp_path / "model", "whisper")
    plan = reshard.plan(tmp_path / "model", to="vllm", tp=2)
    (note,) = [note for note in plan.layout.notes if "zeros are written" in note]
    assert "8 biases" in note and "model.encoder.layers.0.self_attn.k_proj.bias" in note
    reshard.convert(plan, tmp_path / "served")
    (rank, _) = sorted((tmp_path / "served").glob("*.safetensors"))
    tensors = safetensors.torch.load_file(rank)
    for name, k in (("encoder.layers.1.self_attn.qkv_proj", slice(128, 256)), ("decoder.layers.2.encoder_attn.kv_proj", slice(0, 128))):
        bias = tensors[f"model.{name}.bias"].view(torch.int16).numpy()
        assert not bias[k].any() and np.delete(bias, np.r_[k]).all()
    reshard.convert(reshard.plan(tmp_path / "served", to="hf"), tmp_path / "back")
    assert reshard.verify(tmp_path / "model", tmp_path / "back").equal
    assert {tensor.name for tensor in reshard.open(tmp_path / "back").index.tensors} == shapes.keys()


@pytest.mark.parametrize("sizes", [{"hidden_size": 384}, {"moe_intermediate_size": 192}])
def test_packed_experts_that_a_kernel_rounds_up_are_refused(sizes):
    """vLLM would look for the rows of `up` behind rows that a file does not have."""
    model = find_model(json.loads(REFERENCES["deepseek_v4-published"].read_text())["config"] | sizes)
    with pytest.raises(UnsupportedError, match="rounds them up for its kernel"):
        rules_of("vllm", model)


@pytest.mark.parametrize("sizes", [{"routed_expert_hidden_size": 384}, {"moe_intermediate_size": 192}])
def test_the_experts_of_kimi_k3_are_measured_by_the_width_that_they_have(sizes):
    config = json.loads(REFERENCES["kimi_k3-published"].read_text())["config"]
    model = find_model({**config, "text_config": {**config["text_config"], **sizes}})
    with pytest.raises(UnsupportedError, match="their input is a multiple of 256, and a rank's part of them of 128"):
        rules_of("vllm", model)


def test_rows_of_padding_that_a_checkpoint_stores_are_left_out_with_a_note(tmp_path):
    """Kimi K3 is published with 128 rows of A_log for 96 heads. Real ranks of vLLM hold the same of both forms."""
    reference = json.loads(REFERENCES["kimi_k3"].read_text())
    shapes = {weight.name: weight.shape for weight in find_model(reference["config"]).weights.values() if not weight.optional}
    padded = {name: (24,) if name.endswith("A_log") else shape for name, shape in shapes.items()}
    for folder, stored in (("own", shapes), ("padded", padded)):
        named_weights.write(tmp_path / folder, reference["config"], stored)
    result = reshard.convert(reshard.plan(tmp_path / "padded", to="vllm", tp=2), tmp_path / "served")
    assert [digest_of(state) for state in ranks(tmp_path / "served").values()] == [
        digest_of(state) for state in written(tmp_path / "own", {"tp": 2}, tmp_path / "served-own")
    ]
    said = "A_log is stored with 24 rows; the last 8 are padding and are left out, and so are those of 1 other tensor"
    assert any(said in note for note in result.notes)
    reshard.convert(reshard.plan(tmp_path / "padded", to="dcp"), tmp_path / "trained")
    reshard.verify(tmp_path / "own", tmp_path / "trained").raise_if_different()


def test_rows_that_a_class_adds_to_a_fused_weight_are_zeros(tmp_path):
    """in_proj_qkvgfab of Kimi K3 has 404 rows of its parts at TP 2, and 416 in vLLM."""
    reference = json.loads(REFERENCES["kimi_k3"].read_text())
    model = find_model(reference["config"])
    shapes = {weight.name: weight.shape for weight in model.weights.values() if not weight.optional}
    named_weights.write(tmp_path / "model", reference["config"], shapes)
    plan = reshard.plan(tmp_path / "model", to="vllm", tp=2)
    fused = next(tensor for file in plan.layout.files for tensor in file.tensors if "layers.0.self_attn.in_proj" in tensor.tensor.name)
    assert (fused.tensor.shape, fused.tensor.filled) == ((416, 64), 12 * 64)


def test_weights_that_were_quantized_rank_by_rank_go_to_as_many_ranks(tmp_path):
    """vLLM quantizes the q, k and v of MiMo-V2.5 again for any other number of ranks, and no other order of their rows has these scales."""
    reference = json.loads(REFERENCES["mimo_v2-published"].read_text())
    model = find_model(reference["config"])
    check_degrees(model, rules_of("vllm", model), Parallel(4))
    with pytest.raises(RequestError, match="2 ranks cannot share its 4 runs of rows") as refused:
        check_degrees(model, rules_of("vllm", model), Parallel(2))
    assert "Legal tensor-parallel sizes are 4." in str(refused.value)
    shapes = {weight.name: weight.shape for weight in model.weights.values() if not weight.optional}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight_scale_inv"] == (4 * 6, 2), "5.5 blocks for each of 4 ranks"
    named_weights.write(tmp_path / "model", reference["config"], shapes, types=reference["types"])
    with pytest.raises(UnsupportedError, match="its rows in another order"):
        reshard.plan(tmp_path / "model", to="hf", dequantize=True)


def test_rows_that_a_class_leaves_unset_are_zeros():
    """vLLM fills [input_mix_weight_down; block_inject_weight] up to 16 rows (qwen4_exp, GatedResidual): here 10 + 2 are set."""
    config = json.loads(REFERENCES["qwen4_exp"].read_text())["config"]
    model = find_model(config | {"text_config": config["text_config"] | {"hc_lowrank": 10}})
    types = {".*(multipliers|sizes|offsets)": "I64"}
    weights = canonical_weights(model, named_weights.weights_of(published_shapes(model), types=types))
    rank = next(laid_out(model, weights, {"tp": 1}, our_value, types))
    module = "language_model.model.layers.0.mlp_hyper_connection.input_mix_weight_down_block_inject.weight"
    mixer = "model.language_model.layers.0.mlp_hyper_connection"
    parts = [weights[f"{mixer}.{part}.weight"] for part in ("input_mix_weight_down", "block_inject_weight")]
    expected = b"".join(part.tobytes() for part in parts) + bytes(4 * 128 * 2)
    assert (rank[module]["shape"], rank[module]["sha256"]) == ([16, 128], hashlib.sha256(expected).hexdigest())


@pytest.mark.parametrize("name", ["paddleocr_vl", "idefics3", "minicpmv4_6", "glm4v", "llama4"])
def test_a_side_of_an_image_that_is_no_multiple_of_the_patch_is_rounded_down(name):
    """As in transformers and vLLM: SigLIP's images of 384 pixels have 27 patches of 14 on a side."""
    config = json.loads(REFERENCES[name].read_text())["config"]
    vision = config["vision_config"]
    assert vision["image_size"] % vision["patch_size"] == 0 < vision["patch_size"] - 1
    larger = {**config, "vision_config": {**vision, "image_size": vision["image_size"] + vision["patch_size"] - 1}}
    shapes, expected = ({weight.name: weight.shape for weight in find_model(each).weights.values()} for each in (larger, config))
    assert shapes == expected


@pytest.mark.parametrize(
    "name, stored, canonical",
    [
        ("gemma3", "vision_tower.post_layernorm.bias", "vision_tower.vision_model.post_layernorm.bias"),
        ("gemma3", "model.vision_tower.post_layernorm.bias", "vision_tower.vision_model.post_layernorm.bias"),
        ("gemma3", "model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("internvl", "lm_head.weight", "language_model.lm_head.weight"),
        ("cohere2_vision", "model.vision_tower.post_layernorm.bias", "model.vision_tower.vision_model.post_layernorm.bias"),
        ("qwen2_audio", "model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("mistral3", "model.vision_tower.ln_pre.weight", "vision_tower.ln_pre.weight"),
        ("deepseek_v4", "model.layers.1.attn.norm.weight", "layers.1.attn.kv_norm.weight"),
        ("deepseek_v4", "model.layers.1.attn.compressor.norm.weight", "layers.1.attn.compressor.norm.weight"),
        ("deepseek_v4", "model.hc_head.hc_base", "hc_head_base"),
        ("bailing_hybrid-3", "model.embed_tokens.weight", "model.word_embeddings.weight"),
        ("bailing_hybrid-3", "model.layers.0.self_attn.g_proj.weight", "model.layers.0.attention.g_proj.weight"),
        ("bailing_hybrid-3", "model.layers.0.attention.dense.weight", "model.layers.0.attention.o_proj.weight"),
        ("bailing_hybrid-3", "model.layers.1.self_attn.o_proj.weight", "model.layers.1.attention.dense.weight"),
        ("mimo_v2_flash", "model.layers.1.self_attn.sinks", "model.layers.1.self_attn.attention_sink_bias"),
    ],
)
def test_towers_are_known_by_the_names_that_transformers_gives_them(name, stored, canonical):
    model = find_model(json.loads(REFERENCES[name].read_text())["config"])
    assert Names(model).array(stored).names == (canonical,)


@pytest.mark.parametrize("training", ["dcp", "fsdp"])
@pytest.mark.parametrize("name", ["glm4_moe", "apertus", "granitemoe"])
def test_training_checkpoints_of_declared_models_are_served(name, training, tmp_path):
    """Formats that keep a model's names need nothing beyond its declaration."""
    reference = json.loads(REFERENCES[name].read_text())
    shapes = {weight.name: weight.shape for weight in find_model(reference["config"]).weights.values() if not weight.optional}
    named_weights.write(tmp_path / "model", reference["config"], shapes)
    reshard.convert(reshard.plan(tmp_path / "model", to=training), tmp_path / "trained")
    reshard.convert(reshard.plan(tmp_path / "trained", model=tmp_path / "model", to="vllm", tp=4), tmp_path / "served")
    assert [digest_of(state) for state in ranks(tmp_path / "served").values()] == reference["degrees"]["tp4"]


def in_other_layers(folder, name, change):
    """The weights of a folder, with one of a shared block also under its name in another layer. change: of that copy."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    alias = next(alias for alias, of in find_model(json.loads((folder / "config.json").read_text())).aliases.items() if of == name)
    safetensors.torch.save_file({**weights, alias: change(weights[name])}, folder / "model.safetensors")
    return alias


BLOCK_WEIGHT = "model.layers.2.shared_transformer.self_attn.linear_q_adapter_list.2.1.weight"


def test_a_copy_of_a_shared_block_under_the_name_of_another_layer_is_a_replica(tmp_path):
    """As in a training checkpoint, whose state dict has every name of a parameter."""
    write(tmp_path / "model", "zamba2")
    assert in_other_layers(tmp_path / "model", BLOCK_WEIGHT, torch.clone) == BLOCK_WEIGHT.replace("layers.2.", "layers.10.")
    reshard.convert(reshard.plan(tmp_path / "model", to="dcp"), tmp_path / "trained")
    reshard.convert(reshard.plan(tmp_path / "trained", model=tmp_path / "model", to="vllm", tp=4), tmp_path / "served")
    assert "model.layers.10.shared_transformer.self_attn.qkv_proj.weight" in ranks(tmp_path / "served")["rank-0"]
    reshard.verify(tmp_path / "model", tmp_path / "served").raise_if_different()
    in_other_layers(tmp_path / "model", BLOCK_WEIGHT, torch.zeros_like)
    with pytest.raises(CheckpointError, match=r"layers\.10\.\S+ disagree"):
        reshard.convert(reshard.plan(tmp_path / "model", to="vllm", tp=2), tmp_path / "other")
    in_other_layers(tmp_path / "model", BLOCK_WEIGHT, lambda copy: copy[:1].clone())
    with pytest.raises(CheckpointError, match="so they must be one tensor"):
        reshard.plan(tmp_path / "model", to="hf")


def test_each_layer_that_uses_a_shared_block_has_a_cache_of_its_own(tmp_path):
    """vLLM 0.32 has an Attention object for each use of a block (zamba2.py)."""
    write(tmp_path / "model", "zamba2")
    assert reshard.degrees(tmp_path / "model", to="vllm").rows[0].cache_per_token == 4 * 2 * 8 * 16 * BF16.itemsize


def test_a_class_with_as_many_kv_heads_as_heads_takes_no_other_model(tmp_path):
    write(tmp_path / "model", "zamba2-one", num_key_value_heads=4)
    reshard.plan(tmp_path / "model", to="dcp")
    with pytest.raises(UnsupportedError, match="works as if kv_heads were heads = 8, the config says 4"):
        reshard.plan(tmp_path / "model", to="vllm", tp=2)


def test_a_shared_block_may_be_stored_under_the_name_of_any_layer_that_uses_it(tmp_path):
    write(tmp_path / "model", "zamba2")
    weights = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    other = {name.replace("layers.2.shared", "layers.10.shared"): words for name, words in weights.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_bytes((tmp_path / "model/config.json").read_bytes())
    safetensors.torch.save_file(other, tmp_path / "other/model.safetensors")
    reshard.verify(tmp_path / "model", tmp_path / "other").raise_if_different()


def test_a_config_key_that_a_class_needs_is_written_into_an_inner_config(tmp_path):
    """Without it vLLM's class of glm4v has no slots for the biases of q, k and v."""
    reference = json.loads(REFERENCES["glm4v"].read_text())
    shapes = {weight.name: weight.shape for weight in find_model(reference["config"]).weights.values() if not weight.optional}
    assert reference["config"]["text_config"].pop("attention_bias") is True
    named_weights.write(tmp_path / "model", reference["config"], shapes)
    result = reshard.convert(reshard.plan(tmp_path / "model", to="vllm", tp=2), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"] == {**reference["config"]["text_config"], "attention_bias": True}
    assert any("text_config.attention_bias" in note for note in result.notes)
    assert [digest_of(state) for state in ranks(tmp_path / "out").values()] == reference["degrees"]["tp2"]


@pytest.mark.parametrize("name", ["mistral3", "internvl"])
def test_a_head_that_the_outer_config_alone_ties_is_the_embedding_if_none_is_stored(name, tmp_path):
    """As in vLLM 0.32 and transformers 5, which store and read two tensors where there are two."""
    config = {**json.loads(REFERENCES[name].read_text())["config"], "tie_word_embeddings": True}
    assert config["text_config"]["tie_word_embeddings"] is False
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values() if not weight.optional}
    head, table = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    named_weights.write(tmp_path / "two", config, shapes)
    assert {head, table} < reshard.plan(tmp_path / "two", to="hf").content.tensors.keys()
    named_weights.write(tmp_path / "one", config, {name: shape for name, shape in shapes.items() if name != head})
    for to in ("hf", "dcp", "vllm"):
        result = reshard.convert(reshard.plan(tmp_path / "one", to=to), tmp_path / to)
        (note,) = [note for note in result.notes if "tie_word_embeddings" in note]
        assert "text_config is changed" in note and reshard.verify(tmp_path / "one", tmp_path / to, cast=True).equal
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert written == {**config, "text_config": {**config["text_config"], "tie_word_embeddings": True}}
    (state,) = ranks(tmp_path / "vllm").values()
    assert len(state.keys() & {head, table}) == 1, "a tied table is stored once"
    reshard.convert(reshard.plan(tmp_path / "vllm", to="hf", dtype="bf16"), tmp_path / "back")
    assert reshard.verify(tmp_path / "hf", tmp_path / "back").equal


@pytest.mark.parametrize("name", ["kimi_k3", "bailing_hybrid", "deepseek_v4", "mamba2", "falcon_mamba"])
def test_a_model_without_kv_heads_is_inspected(name, tmp_path):
    reference = json.loads(REFERENCES[name].read_text())
    shapes = {weight.name: weight.shape for weight in find_model(reference["config"]).weights.values() if not weight.optional}
    named_weights.write(tmp_path / "model", reference["config"], shapes, types=reference.get("types", {}))
    shown = command("inspect", tmp_path / "model")
    assert (shown.code, shown.err) == (0, "") and "heads, vocabulary" in shown.out


def test_an_element_type_can_be_that_of_the_model(tmp_path):
    """Published routers of hunyuan_v1_moe are in float32; vLLM's ranks hold them as the other weights."""
    reference = json.loads(REFERENCES["hunyuan_v1_moe"].read_text())
    model = find_model(reference["config"])
    router = next(weight.name for weight in model.weights.values() if weight.role == "router")
    dtypes = stored_dtypes(model, rules_of("vllm", model), {**dict.fromkeys(model.weights, BF16), router: F32})
    assert dtypes[router] == BF16


def test_ranks_with_too_narrow_parts_of_experts_are_refused():
    """vLLM's class of kimi_linear would round the width up to 256 and leave the rest unset. Whole experts are not rounded."""
    reference = json.loads(REFERENCES["kimi_linear"].read_text())
    model = find_model({**reference["config"], "moe_intermediate_size": 512})
    rules = rules_of("vllm", model)
    check_degrees(model, rules, Parallel(2))
    check_degrees(model, rules, Parallel(4, ep=4))
    with pytest.raises(RequestError, match="4 ranks hold less than 256 each of an expert's width of 512") as refused:
        check_degrees(model, rules, Parallel(4))
    assert "Legal tensor-parallel sizes are 1, 2" in str(refused.value)


def test_a_name_can_have_another_role_in_other_layers():
    reference = json.loads(REFERENCES["kimi_linear"].read_text())
    model = find_model(reference["config"])
    assert [model.weights[f"model.layers.{layer}.self_attn.q_proj.weight"].role for layer in range(3)] == ["delta.q", "mla.q", "delta.q"]
    by_layer_types = {key: value for key, value in reference["config"].items() if key != "linear_attn_config"}
    sizes = {"linear_head_dim": 12, "linear_num_heads": 16, "linear_conv_kernel_dim": 4}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
    assert find_model({**by_layer_types, **sizes, **kinds}).weights.keys() == model.weights.keys()
