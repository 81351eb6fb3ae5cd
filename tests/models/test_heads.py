"""A model is what its class says: every head is carried by every format that keeps names, and no other target writes it."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm", "megatron", "megatron-dist", "nanotron", "consolidated"])
def test_targets_that_cut_by_role_refuse_it_with_the_truth(case, target):
    name, folder, _ = case
    with pytest.raises(ReshardError) as refused:
        library.plan(folder, to=target)
    assert "lm_head" not in str(refused.value)
    assert HEADS[name][3].partition(":")[0] in str(refused.value) or "this is mistral" in str(refused.value)
    assert not library.open(folder).model.is_tied or name == "trl"


def test_views_and_the_sizes_of_engines_refuse_it(case):
    _, folder, _ = case
    with pytest.raises(ReshardError, match="language models"):
        library.open(folder).view(to="vllm", tp=2)
    document = reshard("inspect", folder, "--json").document
    assert document["outlook"]["engines"] == {} and document["outlook"]["problem"] is None


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
    front, size = "base_model.model.", 4 if dtype == "F32" else 2
    score = bytes(range(1, 1 + width * size))[: width * size] if width * size < 255 else bytes(5 for _ in range(width * size))
    parts = {
        f"{front}model.layers.0.self_attn.q_proj.lora_A.weight": (dtype, [2, width], bytes(2 * width * size)),
        f"{front}model.layers.0.self_attn.q_proj.lora_B.weight": (dtype, [q[1][0], 2], bytes(2 * q[1][0] * size)),
        f"{front}score.weight": (dtype, [1, width], score),
    }
    write(adapter / "adapter_model.safetensors", parts)
    library.convert(library.plan(folder, to="hf", merge_adapter=adapter), tmp_path / "merged")
    assert same(tmp_path / "merged", tensors | {"score.weight": (dtype, [1, width], score)})
