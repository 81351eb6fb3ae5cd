"""`reshard architectures`: the declared models, the declaration of one of them, and the draft of a new one."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from helpers.fixture_places import DCP, FIXTURES, HF, VLLM, ranks, read_reference
from helpers.reshard_command import reshard

from reshard.errors import RequestError
from reshard.models.declared.reader import parse_declaration
from reshard.models.lookup import find_declaration, find_model

MODELS = (
    "llama", "llama-tied", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_neox", "gemma2",
    "phi3",
)  # fmt: skip
# Models whose names and shapes leave no question open.
CLEAR = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")


def renamed(model, to, **other):
    """A copy of a model whose config calls it `mymodel`."""
    copy = shutil.copytree(HF / model, to)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mymodel", **other}))
    return copy


def unrelated_name(name):
    """The name of a weight in a model that has hardly a name in common with any declared one."""
    return name if name == "lm_head.weight" else "net." + name.replace("block_sparse_moe", "moe.mlp")


def unrelated(model, to, **other):
    """A copy with names that no declared model has."""
    copy = renamed(model, to, **other)
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    safetensors.torch.save_file({unrelated_name(name): tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


def started(folder, *options):
    result = reshard("architectures", "--start", folder, *options)
    assert result.code == 0, result.err
    return result.out


def test_a_question_names_the_roles_that_have_the_shape(tmp_path):
    config = json.loads((HF / "llama" / "config.json").read_text())
    shapes = {"net.blk.{}.ff.wg": (88, 32), "net.blk.{}.ff.wd": (32, 88), "net.blk.{}.norm_a": (32,)}
    sizes = (config["intermediate_size"], config["hidden_size"])
    assert sizes == (88, 32)
    tensors = {name.format(layer) + ".weight": torch.zeros(shape) for layer in range(2) for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nova", "num_hidden_layers": 2}))
    safetensors.torch.save_file({**tensors, "net.tok.weight": torch.zeros(250, 32)}, tmp_path / "model.safetensors")
    questions = {line.split(":")[0].strip(): line for line in started(tmp_path).splitlines() if "by its shape" in line}
    answers = {name.rpartition(".weight")[0].rpartition(".")[2]: line.rpartition("by its shape ")[2] for name, line in questions.items()}
    assert answers["wg"] == "mlp.gate or mlp.up" and answers["wd"] == "mlp.down" and answers["tok"] == "embedding or head"
    assert "attention.norm" in answers["norm_a"] and "mlp.norm" in answers["norm_a"] and "final_norm" not in answers["norm_a"]


def test_the_list_is_that_of_the_declared_models():
    listed = reshard("architectures", "--json").document["architectures"]
    assert {"llama", "qwen2", "gpt_neox"} <= set(listed) and reshard("architectures").out.split() == listed


def test_one_declaration_is_shown(tmp_path):
    shown = reshard("architectures", "qwen2")
    assert shown.code == 0 and "\nextends: llama\nwithout: " in shown.out
    assert reshard("architectures", "qwen2", "--json").document == {"schema_version": 1, "declaration": shown.out}
    assert "Did you mean llama? Known: " in reshard("architectures", "lama").err
    assert "Give one of the two" in reshard("architectures", "qwen2", "--start", tmp_path).err


# ---- a draft that extends a declared model ----


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_the_names_and_shapes_of_a_declared_one_extends_it(model, tmp_path):
    text = started(renamed(model, tmp_path / "m"))
    base = {"llama-tied": "llama", "mistral": "llama"}.get(model, model)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["language: 2", "model_type: mymodel", f"extends: {base}"]
    assert f"\n# like: {base}    # add this line if it computes what {base} computes" in text
    (tmp_path / "my.yaml").write_text(text)
    made = reshard("convert", tmp_path / "m", tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", tmp_path / "my.yaml")
    if model in CLEAR:
        assert ranks(tmp_path / "out") == read_reference(VLLM / model / "tp2.json")["ranks"], made.err


def test_a_draft_states_only_what_differs_from_its_nearest_relative(tmp_path):
    source = renamed("qwen3", tmp_path / "m", adapter_rank=3)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    bias = torch.zeros(tensors["model.layers.0.self_attn.q_proj.weight"].shape[0])
    more = {f"model.layers.{layer}.self_attn.q_proj.bias": bias + layer for layer in (0, 1)}
    safetensors.torch.save_file({**tensors, **more, "model.adapter.weight": torch.zeros(3, 2)}, source / "model.safetensors")
    text = started(source)
    assert "14 of 14 weights" not in text and "weights have the names and shapes of qwen3 with this config." in text
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert body == [
        "language: 2",
        "model_type: mymodel",
        "extends: qwen3",
        "without:",
        "  - model.layers.*.mlp.up_proj.weight",
        "",
        "weights:    # in the order of the model's parameters",
        '  model.adapter.weight: "?"    # stored as [3, 2]',
        "  model.layers.*.self_attn.q_proj.bias: attention.q",
    ]
    with pytest.raises(RequestError, match=r'line 12: weights > model\.adapter\.weight: a "\?" marks an open question here'):
        parse_declaration(text.encode(), "my.yaml", find_declaration)
    answered = text.replace('"?"    #', "{role: my.adapter, split: column, shape: [adapter_rank, 2]}    #")
    answered = answered.replace("weights:    #", "dimensions: {adapter_rank: adapter_rank}\nweights:    #")
    (tmp_path / "my.yaml").write_text(answered)
    made = reshard("convert", source, tmp_path / "out", "--to", "hf", "--architecture", tmp_path / "my.yaml")
    assert made.code == 0 and reshard("verify", source, tmp_path / "out", "--architecture", tmp_path / "my.yaml").code == 0, made.err


def test_a_weight_of_some_layers_gets_the_kind_of_layers_that_the_relative_knows(tmp_path):
    source = renamed("qwen3_moe", tmp_path / "m")
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    sparse = sorted({name.split(".")[2] for name in tensors if ".experts." in name})
    more = {f"model.layers.{layer}.mlp.gate.bias": torch.zeros(5) for layer in sparse}
    safetensors.torch.save_file({**tensors, **more}, source / "model.safetensors")
    assert '\n  model.layers.*.mlp.gate.bias: {role: "?", layers: sparse}    # stored as [5]; the name is usual for a router' in started(
        source
    )


# ---- a draft of a model that has no relative ----


@pytest.mark.parametrize("model", CLEAR)
def test_where_no_question_is_open_the_draft_is_a_complete_declaration(model, tmp_path):
    source = unrelated(model, tmp_path / "m")
    (tmp_path / "my.yaml").write_text(started(source))
    target = ("--to", "vllm", "--tp", 4)
    made = reshard("convert", source, tmp_path / "out", *target, "--architecture", tmp_path / "my.yaml")
    assert made.code == 0, made.err
    expected = read_reference(VLLM / model / "tp4.json")["ranks"]
    assert ranks(tmp_path / "out") == {
        number: {unrelated_name(name): facts for name, facts in rank.items()} for number, rank in expected.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_role_that_is_written_is_the_built_in_one(model, tmp_path):
    text = started(unrelated(model, tmp_path / "m"))
    config = json.loads((HF / model / "config.json").read_text())
    built_in = {as_written(unrelated_name(w.declared.name)): w.declared for w in find_model(config).weights.values()}
    lines = [line.split("#")[0].strip() for line in text.split("\nweights:")[1].split("\n\n")[0].splitlines()[1:]]
    rows = dict(line.split(": ", 1) for line in lines if line)
    certain = {name: value.strip() for name, value in rows.items() if '"?"' not in value}
    for name, value in certain.items():
        role = value.split(":")[1].split(",")[0].strip(" }") if value.startswith("{") else value
        assert role == built_in[name].role and ("transposed: true" in value) == built_in[name].transposed
    assert len(certain) >= 5 and (len(certain) == len(rows)) == (model in CLEAR)
    if '"?"' in text.split("model_type:")[-1]:
        with pytest.raises(RequestError, match=r'a "\?" marks an open question here'):
            parse_declaration(text.encode(), "my.yaml", find_declaration)


def as_written(name):
    return name.replace(".{layer}.", ".*.").replace(".{expert}.", ".*.")


def test_fused_weights_and_square_matrices_are_left_open_with_what_is_known(tmp_path):
    text = started(unrelated("gpt2", tmp_path / "m"))
    lines = {line.split(": ")[0].strip(): line for line in text.splitlines()}
    assert 'c_attn.weight: "?"' in lines["net.transformer.h.*.attn.c_attn.weight"]
    assert "stored as [48, 144]; if it is several weights in one, write `fuses:" in lines["net.transformer.h.*.attn.c_attn.weight"]
    assert '{role: attention.o, transposed: "?"}' in lines["net.transformer.h.*.attn.c_proj.weight"]
    assert "{role: mlp.up, transposed: true}" in lines["net.transformer.h.*.mlp.c_fc.weight"]
    assert "extends:" not in text and '# "?" marks an open question' in text


def test_layers_that_differ_are_left_open(tmp_path):
    text = started(unrelated("qwen3_moe", tmp_path / "m"))
    assert 'layers: "?"' in text and '\nsparse_layers: "?"' in text and "only layers 0, 2 of 3 have it" in text
    assert "net.model.layers.*.mlp.experts.*.gate_proj.weight: {role: expert.gate" in text


def test_quantized_weights_are_declared_without_their_scales(tmp_path):
    source = shutil.copytree(FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mymodel"}))
    text = started(source)
    assert "_scale" not in text and '"?"' not in text.split("model_type:")[-1]
    (tmp_path / "my.yaml").write_text(text)
    made = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", tmp_path / "my.yaml")
    expected = reshard("convert", FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "expected", "--to", "vllm", "--tp", 2)
    assert (made.code, expected.code) == (0, 0), made.err + expected.err
    assert ranks(tmp_path / "out") == ranks(tmp_path / "expected") != {}


def test_where_all_layers_have_experts_all_are_sparse(tmp_path):
    assert started(unrelated("mixtral", tmp_path / "m")).endswith("\nsparse_layers: all\n")


FREQUENCIES = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}


@pytest.mark.parametrize("name_of", [str, unrelated_name], ids=["relative", "no relative"])
def test_a_missing_head_is_asked_about_and_rotary_frequencies_are_dropped(name_of, tmp_path):
    source = renamed("llama-tied", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    assert "tie_word_embeddings" not in started(source) and config.pop("tie_word_embeddings") is True
    (source / "config.json").write_text(json.dumps(config))
    tensors = {**safetensors.torch.load_file(source / "model.safetensors"), **FREQUENCIES}
    safetensors.torch.save_file({name_of(name): tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    text = started(source)
    assert '\ndefaults: {tie_word_embeddings: "?"}    # no head is stored' in text and "without:" not in text
    assert ("extends: llama" in text) == (name_of is str) == ("dropped:" not in text)
    if name_of is unrelated_name:
        assert "\ndropped:\n  net.model.layers.{layer}.self_attn.rotary_emb.inv_freq: every engine computes it" in text
    assert "inv_freq" not in text.split("dropped:")[0]
    (tmp_path / "my.yaml").write_text(text.replace('"?"}', "true}"))
    made = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--architecture", tmp_path / "my.yaml")
    assert made.code == 0 and "rotary_emb" in made.out, made.err


def test_a_usual_name_with_an_unusual_shape_is_left_open(tmp_path):
    source = renamed("qwen2", tmp_path / "m", head_dim=16)
    assert 'q_proj.weight: "?"    # stored as [256, 256]; the name is usual for an attention.q, which would be [128, 256]' in started(
        source
    )
    other = unrelated("qwen2", tmp_path / "n")
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    odd = {"net.model.layers.0.strange: thing #1": torch.zeros(3), "vision.blocks.0.x.weight": torch.zeros(2, 2)}
    safetensors.torch.save_file({**tensors, **odd}, other / "model.safetensors")
    text = started(other)
    assert '  "net.model.layers.*.strange: thing #1": "?"    # stored as [3]' in text
    assert '  vision.blocks.0.x.weight: "?"    # stored as [2, 2]' in text and "like:" not in text


def test_what_the_config_does_not_give_under_a_usual_key_is_left_open(tmp_path):
    source = renamed("qwen2", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config["width"] = config.pop("hidden_size")
    (source / "config.json").write_text(json.dumps(config))
    text = started(source)
    assert '  hidden: "?"    # the config\'s key; the config has none of hidden_size,' in text
    assert 'model.norm.weight: "?"' in text and "the name is usual for a final_norm" in text


def test_a_training_checkpoint_gives_a_draft_too(tmp_path):
    case = DCP / "fsdp2"
    text = started(case / "checkpoint", "--model", case / "model")
    assert '"?"' not in text and parse_declaration(text.encode(), "my.yaml", find_declaration).weights
    assert reshard("architectures", "--start", case / "checkpoint", "--model", case / "model", "--json").document["declaration"] == text


def test_without_a_config_or_without_the_models_names_there_is_no_draft():
    refused = reshard("architectures", "--start", DCP / "fsdp2" / "checkpoint")
    assert refused.code == 2 and "--model DIR" in refused.err
    refused = reshard("architectures", "--start", FIXTURES / "megatron" / "llama-tp2" / "checkpoint")
    assert refused.code == 2 and "do not have the model's own names" in refused.err
