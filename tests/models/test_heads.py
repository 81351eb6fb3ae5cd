"""A model is what its class says: every head is carried by every format that keeps names and by vLLM's files of ranks, as the class that
vLLM makes of it holds it (compared with real ranks by tests/serving/head_ranks.py); no other target writes it."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
from helpers.fixture_places import HF, stored
from helpers.reshard_command import reshard

import reshard as library
from reshard.errors import ReshardError
from reshard.models.lookup import find_model

SCORE = {"score.weight": (1, 64)}
BIASED = {"score.weight": (3, 64), "score.bias": (3,)}
MLP = {"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (1, 64), "score.2.bias": (1,)}
TRL = {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}
# Class in the config, further keys of it, the head that is stored, and what inspect calls the model; None: lm_head stays.
HEADS = {
    "reward": ("LlamaForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, SCORE, "a reward model: score, 1 label"),
    "labels-in-a-number": ("LlamaForSequenceClassification", {"num_labels": 1}, SCORE, "a reward model: score, 1 label"),
    "labels-nowhere": ("LlamaForSequenceClassification", {}, SCORE, "a reward model: score, 1 label"),
    "biased": ("LlamaForSequenceClassification", {"num_labels": 3}, BIASED, "a classifier: score, 3 labels"),
    "tokens": ("LlamaForTokenClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, BIASED, "a token classifier: score, 3 labels"),
    "critic-of-verl": ("LlamaForCausalLM", {}, {"score.weight": (1, 64), "score.bias": (1,)}, "a critic: score, 1 label"),
    "mlp": ("LlamaForSequenceClassification", {"num_labels": 1}, MLP, "a reward model: score, 1 label"),
    "openrlhf": ("RewardModel", {"value_head_prefix": "value_head"}, {"value_head.weight": (1, 64)}, "a reward model: value_head, 1 label"),
    "openrlhf-critic": ("CriticModel", {"value_head_prefix": "score"}, SCORE, "a critic: score, 1 label"),
    "trl": ("LlamaForCausalLM", {}, TRL, "a language model with a value head: v_head.summary, 1 label"),
    "wrapped": ("FSDPLlamaForSequenceClassification", {"num_labels": 1}, SCORE, "a reward model: score, 1 label"),
    "embedding": ("LlamaModel", {}, {}, "an embedding model: no head"),
    "embedding-bare": ("LlamaModel", {}, {}, "an embedding model: no head"),
    "embedding-tied": ("MistralModel", {"tie_word_embeddings": True, "model_type": "mistral"}, {}, "an embedding model: no head"),
}


def write(path, tensors):
    """A safetensors file, by hand."""
    header, start = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + len(raw)]}
        start += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for *_, raw in tensors.values()))


def made(case, folder):
    """The folder of a case, and its tensors."""
    named, keys, head, _ = HEADS[case]
    folder.mkdir()
    config = json.loads((HF / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [named], **keys}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = stored(HF / "llama" / "model.safetensors")
    if case != "trl":
        tensors.pop("lm_head.weight")
    if case == "embedding-bare":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    dtype, (_, width), _ = next(iter(tensors.values()))
    for number, (name, shape) in enumerate(head.items()):
        shape = [width if size == 64 else size for size in shape]
        count = 1
        for size in shape:
            count *= size
        tensors[name] = dtype, shape, bytes((number + place) % 120 for place in range(count * (4 if dtype == "F32" else 2)))
    write(folder / "model.safetensors", tensors)
    return folder, tensors


@pytest.fixture(params=HEADS)
def case(request, tmp_path):
    return (request.param, *made(request.param, tmp_path / "model"))


def same(folder, tensors):
    return {name: (dtype, list(shape), raw) for name, (dtype, shape, raw) in stored(folder / "model.safetensors").items()} == {
        name: (dtype, list(shape), raw) for name, (dtype, shape, raw) in tensors.items()
    }


def test_every_format_that_keeps_names_carries_the_head_and_makes_no_other(case, tmp_path):
    _, folder, tensors = case
    library.convert(library.plan(folder, to="hf"), tmp_path / "hf")
    assert same(tmp_path / "hf", tensors), "under the same names, bit by bit"
    for format in ("dcp", "fsdp"):
        library.convert(library.plan(folder, to=format), tmp_path / format)
        assert library.verify(folder, tmp_path / format).equal
        library.convert(library.plan(tmp_path / format, to="hf", model=folder), tmp_path / f"{format}-hf")
        assert same(tmp_path / f"{format}-hf", tensors), format


def test_inspect_and_doctor_judge_by_the_class(case):
    name, folder, _ = case
    text = reshard("inspect", folder).out
    assert f"complete  {len(case[2])} tensors" in text and HEADS[name][3] in text
    assert not [finding for finding in library.doctor(folder).findings if finding.severity != "info"]


@pytest.mark.parametrize("target", ["sglang", "trtllm", "megatron", "megatron-dist", "nanotron", "consolidated"])
def test_targets_that_cut_by_role_refuse_it_with_the_truth(case, target):
    name, folder, _ = case
    with pytest.raises(ReshardError) as refused:
        library.plan(folder, to=target)
    assert "lm_head" not in str(refused.value)
    assert HEADS[name][3].partition(":")[0] in str(refused.value) or "this is mistral" in str(refused.value)
    assert not library.open(folder).model.is_tied or name == "trl"


# Heads that vLLM's classes do not have, and what the refusal says.
NOT_IN_VLLM = {
    "mlp": "one matrix, score.weight, where the model has score.0.weight",
    "openrlhf": "has no class RewardModel",
    "trl": "no slot for it",
}


def widened(raw, dtype):
    """The bytes of bfloat16 as float32."""
    return raw if dtype == "F32" else b"".join(b"\0\0" + raw[place : place + 2] for place in range(0, len(raw), 2))


@pytest.mark.parametrize("tp", [1, 2])
def test_each_rank_of_vllm_holds_the_whole_head_in_float32(case, tp, tmp_path):
    name, folder, tensors = case
    if name in NOT_IN_VLLM:
        with pytest.raises(ReshardError, match=NOT_IN_VLLM[name]):
            library.plan(folder, to="vllm", tp=tp)
        return
    library.convert(library.plan(folder, to="vllm", tp=tp), tmp_path / "ranks")
    head = {tensor for tensor in tensors if tensor.startswith("score.")}
    for rank in range(tp):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        assert {tensor for tensor in held if not tensor.startswith("model.")} == head, "under model., and no lm_head"
        for tensor in head:
            dtype, shape, raw = tensors[tensor]
            assert held[tensor] == ("F32", list(shape), widened(raw, dtype))
    assert library.verify(folder, tmp_path / "ranks").equal
    library.convert(library.plan(tmp_path / "ranks", to="hf"), tmp_path / "hf")
    again = stored(tmp_path / "hf" / "model.safetensors")
    front = "model." if not HEADS[name][2] else ""  # as transformers names the weights of such a class
    assert {tensor: value for tensor, value in again.items() if tensor not in head} == {
        tensor.removeprefix(front): (dtype, list(shape), raw) for tensor, (dtype, shape, raw) in tensors.items() if tensor not in head
    }


def test_every_stage_of_vllm_holds_the_head_and_a_tied_one_is_refused(tmp_path):
    folder, _ = made("tokens", tmp_path / "model")
    library.convert(library.plan(folder, to="vllm", tp=1, pp=2), tmp_path / "ranks")
    stages = [stored(tmp_path / "ranks" / f"model-pp-{stage}-tp-0-part-0.safetensors") for stage in (0, 1)]
    assert all({"score.weight", "score.bias"} <= stage.keys() for stage in stages)
    assert library.verify(folder, tmp_path / "ranks").equal
    tied, _ = made("embedding-tied", tmp_path / "tied")
    with pytest.raises(ReshardError, match="the embedding on the last stage"):
        library.plan(tied, to="vllm", tp=1, pp=2)


def test_the_head_of_trl_is_left_out_on_purpose(tmp_path):
    folder, _ = made("trl", tmp_path / "model")
    library.convert(library.plan(folder, to="vllm", tp=2, exclude="v_head.*"), tmp_path / "ranks")
    assert "lm_head.weight" in stored(tmp_path / "ranks" / "model-rank-0-part-0.safetensors")


def rewritten(folder, **keys):
    """A folder whose config has other values; None takes a key out."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        ("reward", {"architectures": ["JambaForSequenceClassification"]}, "own class JambaForSequenceClassification was not compared"),
        ("reward", {"architectures": ["NoSuchForSequenceClassification"]}, "has no class NoSuchForSequenceClassification"),
        ("reward", {"architectures": ["Qwen2ForRewardModel"]}, "is an MLP, where the model has one matrix"),
        ("mlp", {"architectures": ["Qwen2ForProcessRewardModel"]}, "has 2 labels, where the model has 1"),
        ("reward", {"head_dtype": "int8"}, "head_dtype 'int8'"),
        ("embedding", {"architectures": ["Gemma3TextModel"]}, "takes no names with `model.`"),
        ("reward", {"architectures": ["Gemma3TextForSequenceClassification"]}, "takes Gemma3TextModel for it, whose names lack `model.`"),
    ],
)
def test_what_vllm_does_not_take_is_refused_by_name(base, keys, message, tmp_path):
    folder = rewritten(made(base, tmp_path / "model")[0], **keys)
    with pytest.raises(ReshardError, match=message):
        library.plan(folder, to="vllm", tp=2)


def test_a_classifier_out_of_rows_of_the_head_is_refused_and_its_folder_is_served(tmp_path):
    config = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    folder, _ = made("trl", tmp_path / "model")
    tensors = stored(folder / "model.safetensors")
    write(folder / "model.safetensors", {name: tensor for name, tensor in tensors.items() if not name.startswith("v_head")})
    rewritten(folder, **config)
    with pytest.raises(ReshardError, match="classifier_from_token names"):
        library.plan(folder, to="vllm", tp=2)
    assert reshard("serve-check", folder, "--engine", "vllm").code == 0
    assert "own part of the vocabulary" not in reshard("serve-check", folder, "--engine", "vllm").out
    assert "own part of the vocabulary" in reshard("serve-check", folder, "--engine", "vllm", "--tp", "2").out


def test_the_mlp_of_a_reward_model_is_shared_by_ranks(tmp_path):
    folder, tensors = made("mlp", tmp_path / "model")
    rewritten(folder, architectures=["Qwen2ForRewardModel"])
    library.convert(library.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    held = [stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors") for rank in (0, 1)]
    width = tensors["score.0.weight"][1][0]
    shapes = {"score.0.weight": [width // 2, width], "score.0.bias": [width // 2], "score.2.weight": [1, width // 2], "score.2.bias": [1]}
    assert [{name: held[rank][name][1] for name in shapes} for rank in (0, 1)] == [shapes, shapes]
    assert library.verify(folder, tmp_path / "ranks").equal


def test_ranks_of_a_bare_class_hold_names_without_the_front(tmp_path):
    folder = rewritten(made("embedding-bare", tmp_path / "model")[0], architectures=["Gemma3TextModel"])
    library.convert(library.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    held = [stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors") for rank in (0, 1)]
    assert all("norm.weight" in names and not any(name.startswith("model.") for name in names) for names in held)
    assert library.verify(folder, tmp_path / "ranks").equal
    library.convert(library.plan(tmp_path / "ranks", to="hf"), tmp_path / "hf")
    assert same(tmp_path / "hf", stored(folder / "model.safetensors"))


@pytest.mark.parametrize(("base", "code"), [("embedding", 1), ("embedding-bare", 0)])
def test_a_bare_class_is_served_without_the_front_alone(base, code, tmp_path):
    folder = rewritten(made(base, tmp_path / "model")[0], architectures=["Gemma3TextModel"])
    checked = reshard("serve-check", folder, "--engine", "vllm")
    assert checked.code == code
    assert ("has no names with `model.`" in checked.out) == (code == 1)


def test_a_class_of_which_vllm_takes_the_bare_model_is_not_served(tmp_path):
    folder = rewritten(made("reward", tmp_path / "model")[0], architectures=["Gemma3TextForSequenceClassification"])
    checked = reshard("serve-check", folder, "--engine", "vllm")
    assert checked.code == 1 and "Gemma3TextModel" in checked.out


def test_a_tie_that_the_class_assumes_does_not_matter_without_a_head_of_the_language_model(tmp_path):
    folder = rewritten(shutil.copytree(HF / "gemma2", tmp_path / "model"), tie_word_embeddings=False)
    tensors = stored(folder / "model.safetensors")
    dtype, (_, width), raw = tensors["model.embed_tokens.weight"]
    tensors["score.weight"] = dtype, (1, width), raw[: len(raw) // tensors["model.embed_tokens.weight"][1][0]]
    write(folder / "model.safetensors", tensors)
    rewritten(folder, architectures=["Gemma2ForSequenceClassification"], num_labels=1)
    library.convert(library.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    assert library.verify(folder, tmp_path / "ranks").equal


def test_views_and_the_sizes_of_engines_know_what_vllm_serves(case):
    name, folder, _ = case
    document = reshard("inspect", folder, "--json").document
    is_served = name not in NOT_IN_VLLM or name == "trl"
    assert [*document["outlook"]["engines"]] == (["vllm"] if is_served else []) and document["outlook"]["problem"] is None
    if name in NOT_IN_VLLM:
        with pytest.raises(ReshardError, match=NOT_IN_VLLM[name]):
            library.open(folder).view(to="vllm", tp=2)
        return
    view = library.open(folder).view(to="vllm", tp=2, rank=1)
    assert "model.norm.weight" in view and "lm_head.weight" not in view
    assert "model.norm.weight" in library.open(folder).view(to="vllm", tp=2)[0] if False else True
    assert reshard("degrees", folder, "--to", "vllm").code == 0


@pytest.mark.parametrize("format", ["dcp", "fsdp"])
@pytest.mark.parametrize("name", ["critic-of-verl", "openrlhf-critic", "embedding-bare"])
def test_a_checkpoint_of_the_trainer_gives_the_same_ranks(name, format, tmp_path):
    folder, _ = made(name, tmp_path / "model")
    library.convert(library.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    library.convert(library.plan(folder, to=format), tmp_path / format)
    library.convert(library.plan(tmp_path / format, to="vllm", tp=2, model=folder), tmp_path / f"{format}-ranks")
    for rank in (0, 1):
        file = f"model-rank-{rank}-part-0.safetensors"
        assert stored(tmp_path / "ranks" / file) == stored(tmp_path / f"{format}-ranks" / file)
    config = json.loads((tmp_path / f"{format}-ranks" / "config.json").read_text())
    expected = {"critic-of-verl": "LlamaForTokenClassification", "openrlhf-critic": "LlamaForSequenceClassification"}
    assert config["architectures"] == [expected.get(name, "LlamaModel")]


def test_files_of_ranks_are_checked_by_the_class(tmp_path):
    folder, _ = made("reward", tmp_path / "model")
    library.convert(library.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    assert reshard("serve-check", tmp_path / "ranks").code == 0
    (tmp_path / "ranks" / "reshard.json").unlink()  # whose digests would speak first
    path = tmp_path / "ranks" / "model-rank-1-part-0.safetensors"
    write(path, {name: tensor for name, tensor in stored(path).items() if name != "score.weight"})
    checked = reshard("serve-check", tmp_path / "ranks")
    assert checked.code == 1 and "score.weight" in checked.out


def test_a_bias_that_the_loader_of_vllm_has_no_place_for_is_said(tmp_path):
    folder, _ = made("tokens", tmp_path / "model")
    plan = library.plan(folder, to="vllm", tp=2)
    assert any("score.bias" in note and "--load-format reshard" in note for note in plan.layout.notes)
    library.convert(plan, tmp_path / "ranks")
    checked = reshard("serve-check", tmp_path / "ranks")
    assert checked.code == 1 and "score.bias" in checked.out and "KeyError" in checked.out
    assert reshard("serve-check", folder, "--engine", "vllm").code == 0, "the Hugging Face folder is served"


@pytest.mark.parametrize("named", ["LlamaForRewardModelWithGating", "LlamaForSequenceClassification", "LlamaForRewardModel", "ColLlama"])
def test_a_head_of_the_class_s_own_code_is_carried_and_not_served(named, tmp_path):
    """ArmoRM has regression_layer, gating and reward_transform_matrix; nobody has declared them."""
    folder, tensors = made("reward", tmp_path / "model")
    del tensors["score.weight"]
    tensors |= {"regression_layer.weight": ("F32", [2, 64], bytes(512)), "gating.layers.0.bias": ("F32", [2], bytes(8))}
    write(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
    assert "a head of its own class" in reshard("inspect", folder).out
    assert not any(finding.severity == "error" for finding in library.doctor(folder).findings)
    assert library.serve_check(folder).findings[0].id == ("unknown-name" if named.endswith("SequenceClassification") else "no-class")
    library.convert(folder, tmp_path / "hf", to="hf")
    assert stored(tmp_path / "hf" / "model.safetensors") == tensors
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [named]
    with pytest.raises(ReshardError, match="its class alone knows"):
        library.plan(folder, to="vllm", tp=2)
    del tensors["model.embed_tokens.weight"]
    write(folder / "model.safetensors", tensors)
    assert any(finding.id == "missing-weight" for finding in library.doctor(folder).findings), "an incomplete save is no head of its own"


def test_a_value_head_has_one_output_whatever_labels_the_config_has(tmp_path):
    folder, tensors = made("trl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    library.convert(folder, tmp_path / "hf", to="hf")
    assert stored(tmp_path / "hf" / "model.safetensors") == tensors


def test_labels_that_no_config_states_are_written(tmp_path):
    folder, _ = made("labels-nowhere", tmp_path / "model")
    plan = library.plan(folder, to="vllm", tp=2)
    library.convert(plan, tmp_path / "ranks")
    assert json.loads((tmp_path / "ranks" / "config.json").read_text())["num_labels"] == 1
    assert any("num_labels" in note for note in plan.layout.notes)


def test_the_class_that_is_written_is_the_one_that_loads_the_weights(tmp_path):
    for name, expected in (("wrapped", "LlamaForSequenceClassification"), ("critic-of-verl", "LlamaForTokenClassification")):
        folder, _ = made(name, tmp_path / name)
        plan = library.plan(folder, to="hf")
        library.convert(plan, tmp_path / f"{name}-hf")
        assert json.loads((tmp_path / f"{name}-hf" / "config.json").read_text())["architectures"] == [expected]
        assert any(expected in note and HEADS[name][0] in note for note in plan.layout.notes)


def test_what_really_lacks_is_named_with_the_class(tmp_path):
    folder, tensors = made("tokens", tmp_path / "model")
    del tensors["score.weight"]
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ReshardError, match=r"score\.weight.*LlamaForTokenClassification"):
        library.plan(folder, to="hf")
    assert [finding.tensor for finding in library.doctor(folder).findings if finding.severity == "error"] == ["score.weight"]
    tensors["score.weight"] = "F32", [7, 64], bytes(4 * 7 * 64)
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ReshardError, match=r"\[7, 64\].*\[3, "):
        library.plan(folder, to="hf")


def test_language_models_are_as_they_were(tmp_path):
    config = json.loads((HF / "llama" / "config.json").read_text())
    for named in (["LlamaForCausalLM"], None, [], ["LLaMAForCausalLM"], ["MyOwnForCausalLM"], ["LlamaModel", "x"][:0]):
        model = find_model({**config, "architectures": named})
        assert model.architecture.head is None and "lm_head.weight" in model.weights
    headed = find_model({**config, "architectures": ["LlamaModel"]}, stored={"model.norm.weight": (64,), "lm_head.weight": (96, 64)})
    assert headed.architecture.head is None, "a class whose files hold a head of a language model has one"
    of_rows = {**config, "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    assert find_model(of_rows).architecture.head is None, "vLLM computes such a classifier from rows of lm_head"


def test_an_adapter_of_a_reward_model_merges(tmp_path):
    folder, tensors = made("reward", tmp_path / "model")
    dtype, (_, width), _ = tensors["model.embed_tokens.weight"]
    adapter, q = tmp_path / "adapter", tensors["model.layers.0.self_attn.q_proj.weight"]
    adapter.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "modules_to_save": ["score"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    front, size, one = "base_model.model.", 4 if dtype == "F32" else 2, bytes((0, 0, 128, 63)[-4 if dtype == "F32" else -2 :])
    score = bytes(range(1, 1 + width * size))[: width * size] if width * size < 255 else bytes(5 for _ in range(width * size))
    parts = {
        f"{front}model.layers.0.self_attn.q_proj.lora_A.weight": (dtype, [2, width], one * (2 * width)),
        f"{front}model.layers.0.self_attn.q_proj.lora_B.weight": (dtype, [q[1][0], 2], one * (2 * q[1][0])),
        f"{front}score.weight": (dtype, [1, width], score),
    }
    write(adapter / "adapter_model.safetensors", parts)
    library.convert(library.plan(folder, to="hf", merge_adapter=adapter), tmp_path / "merged")
    untouched = {name: tensor for name, tensor in tensors.items() if name != "model.layers.0.self_attn.q_proj.weight"}
    merged = stored(tmp_path / "merged" / "model.safetensors")
    changed = merged.pop("model.layers.0.self_attn.q_proj.weight")
    assert changed[2] != q[2], "the update was added"
    assert {name: (dtype, list(shape), raw) for name, (dtype, shape, raw) in merged.items()} == {
        name: (dtype, list(shape), raw)
        for name, (dtype, shape, raw) in (untouched | {"score.weight": (dtype, [1, width], score)}).items()
    }  # fmt: skip
    library.convert(library.plan(folder, to="vllm", tp=2, merge_adapter=adapter), tmp_path / "ranks")
    for rank in (0, 1):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        assert held["score.weight"] == ("F32", [1, width], widened(score, dtype)), "what the adapter trained, on each rank"
    assert library.verify(tmp_path / "merged", tmp_path / "ranks").equal
