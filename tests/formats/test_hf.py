import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from helpers.fixture_places import DCP, FIXTURES, HF, MODELS, described, open_case, stored, truth
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import CheckpointError, RequestError
from reshard.models.lookup import changed_keys

SAME_AS_LLAMA = ("llama-sharded", "llama-bin", "llama-bin-sharded", "mistral")


@pytest.mark.parametrize("other", SAME_AS_LLAMA)
def test_the_same_weights_in_other_files_are_equal(other):
    result = reshard.verify(HF / "llama", HF / other)
    assert result.equal and result.tensors == 21
    assert reshard.fingerprint(HF / other).root == reshard.fingerprint(HF / "llama").root


@pytest.mark.parametrize("model", MODELS)
def test_what_is_read_is_what_the_file_holds(model):
    import hashlib

    opened = reshard.open(HF / model)
    expected = {
        name: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in stored(HF / model / "model.safetensors").items()
    }
    assert {t.name: described(t, opened.files) for t in opened.index.tensors} == expected


def test_what_is_written_opens_in_the_safetensors_library_with_the_truth(tmp_path):
    reshard.convert(reshard.plan(open_case("fsdp2-3"), to="hf"), tmp_path / "hf")
    expected = {name: value for (name, role), value in truth("fsdp2-3").items() if role == "weight"}
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(list(found[name].shape) == expected[name]["shape"] for name in found)
    assert (tmp_path / "hf" / "config.json").exists()
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_files_are_cut_at_the_size_asked_for_and_the_index_is_right(tmp_path):
    plan = reshard.plan(HF / "llama", to="hf", max_shard_size=40_000)
    printed = reshard.convert(plan, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 3
    assert index["weight_map"] == {name: file for file in files for name in stored(tmp_path / "out" / file)}
    assert index["metadata"]["total_size"] == sum(len(data) for f in files for *_, data in stored(tmp_path / "out" / f).values())
    assert printed.fingerprint.root == reshard.fingerprint(HF / "llama").root


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    reshard.convert(reshard.plan(open_case("odd"), to="hf"), tmp_path / "out")
    opened = reshard.open(tmp_path / "out")
    for tensor in opened.index.tensors:
        assert tensor.shards.extent(0).byte_offset % min(tensor.dtype.itemsize, 8) == 0
    assert reshard.verify(open_case("odd"), opened).equal


def test_a_cast_is_recorded_in_the_config(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32", keep_dtype=("*norm*",)), tmp_path / "mixed")
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32"), tmp_path / "out")
    assert "float32" in (tmp_path / "out" / "config.json").read_text()
    kinds = {name: dtype for name, (dtype, *_) in stored(tmp_path / "mixed" / "model.safetensors").items()}
    assert {dtype for name, dtype in kinds.items() if "norm" in name} == {"BF16"}
    assert {dtype for name, dtype in kinds.items() if "norm" not in name} == {"F32"}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_of_several_element_types_the_config_names_the_one_of_most_weights(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32"), tmp_path / "wide")
    reshard.convert(reshard.plan(tmp_path / "wide", to="hf", dtype="bf16", keep_dtype=("*norm*",)), tmp_path / "mixed")
    assert config_of(tmp_path / "wide")["dtype"] == "float32" and config_of(tmp_path / "mixed")["dtype"] == "bfloat16"
    reshard.convert(reshard.plan(tmp_path / "wide", to="hf", dtype="fp8", keep_dtype=("*norm*", "lm_head*")), tmp_path / "scaled")
    assert config_of(tmp_path / "scaled")["dtype"] == "float32", "a model does not compute with 8 bits"


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_the_element_type_is_recorded_under_the_keys_that_the_config_has(tmp_path, keys):
    model = shutil.copytree(HF / "llama", tmp_path / "m")
    config = {key: value for key, value in config_of(model).items() if key != "dtype"} | dict.fromkeys(keys, "bfloat16")
    (model / "config.json").write_text(json.dumps(config))
    reshard.convert(reshard.plan(model, to="hf", dtype="fp16"), tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert {key: found[key] for key in found if "dtype" in key} == dict.fromkeys(keys or ("torch_dtype",), "float16")
    assert {key: value for key, value in found.items() if "dtype" not in key} == {k: v for k, v in config.items() if k not in keys}


def test_without_a_cast_the_config_keeps_its_bytes(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf"), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (HF / "llama" / name).read_bytes()


def test_the_files_of_the_model_directory_go_along(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(DCP / "fsdp2" / "model" / "config.json", model)
    along = (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "chat_template.jinja",
        "README.md",
    )
    for name in along:
        (model / name).write_text(f"{{}} {name}")
    for name in ("training_args.bin", "pytorch_model.bin"):
        (model / name).write_text("not for an engine")
    reshard.convert(reshard.plan(DCP / "fsdp2" / "checkpoint", to="hf", model=model), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *along,
        "config.json",
        "model.safetensors",
        "reshard.json",
        "reshard.digests",
    }
    assert all((tmp_path / "out" / name).read_bytes() == (model / name).read_bytes() for name in along)


def test_a_config_without_architectures_is_told(tmp_path):
    model = shutil.copytree(HF / "llama", tmp_path / "m")
    config = config_of(model)
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "architectures"}))
    assert any("architectures: ['LlamaForCausalLM']" in note for note in reshard.plan(model, to="hf").layout.notes)
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mymodel", "architectures": None}))
    assert any("names no architectures" in note for note in reshard.plan(model, to="hf").layout.notes)
    assert not reshard.plan(HF / "llama", to="hf").layout.notes


@pytest.mark.parametrize("case, dtype", [("llama-fp16", "float16"), ("llama-fp32", "float32"), ("mixtral-etp1", "bfloat16")])
def test_megatrons_settings_become_a_config_that_names_its_class_and_element_type(tmp_path, case, dtype):
    found = next(path for path in (FIXTURES / "megatron" / case).iterdir() if path.is_dir() and path.name == "checkpoint")
    opened = reshard.open(found, vocab_size=50)
    reshard.convert(reshard.plan(opened, to="hf"), tmp_path / "own")
    reshard.convert(reshard.plan(opened, to="hf", dtype="bf16"), tmp_path / "cast")
    config = config_of(tmp_path / "own")
    assert config["torch_dtype"] == dtype and config["architectures"] and config["vocab_size"] == 50
    assert config_of(tmp_path / "cast")["torch_dtype"] == "bfloat16"


def test_files_are_cut_as_transformers_cuts_them(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", max_shard_size=60_000), tmp_path / "out")
    wanted, found = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (HF / "llama-sharded", tmp_path / "out")
    )
    assert found["weight_map"] == wanted["weight_map"] and found["metadata"]["total_size"] == wanted["metadata"]["total_size"]


def test_a_tensor_that_is_larger_than_a_file_should_be_is_alone_and_does_not_end_another_file(tmp_path):
    most = 10_000
    reshard.convert(reshard.plan(HF / "llama", to="hf", max_shard_size=most), tmp_path / "out")
    files = [[len(data) for *_, data in stored(path).values()] for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert all(len(sizes) == 1 or sum(sizes) <= most for sizes in files)
    shared = [sizes for sizes in files if max(sizes) <= most]
    assert len(shared) > 1 and all(sum(one) + sum(next_one) > most for one, next_one in pairwise(shared))
    assert reshard.verify(HF / "llama", tmp_path / "out").equal


def test_widening_and_back_is_the_identity(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp32"), tmp_path / "wide")
    printed = reshard.convert(reshard.plan(tmp_path / "wide", to="hf", dtype="bf16"), tmp_path / "back")
    assert printed.fingerprint.root == reshard.fingerprint(HF / "llama").root
    assert reshard.verify(HF / "llama", tmp_path / "wide", cast=True).equal
    assert not reshard.verify(HF / "llama", tmp_path / "wide").equal


def test_a_stale_file_beside_an_index_is_not_read(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    stale = {"lm_head.weight": np.zeros((250, 32), np.float32)}
    safetensors.numpy.save_file(stale, copy / "model.safetensors")
    assert reshard.verify(HF / "llama", copy).equal
    assert "model.safetensors" in reshard.open(copy).index.facts.notes[0]


def test_a_file_named_by_the_index_must_be_there(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    lost = sorted(copy.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"names {lost.name}, which is not there"):
        reshard.open(copy)


def test_without_an_index_the_numbering_tells_what_is_missing(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (copy / "model.safetensors.index.json").unlink()
    assert reshard.verify(HF / "llama", copy).equal
    lost = sorted(copy.glob("model-*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        reshard.open(copy)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (copy / "model.safetensors.index.json").unlink()
    first = sorted(copy.glob("model-*.safetensors"))[0]
    shutil.copy(first, copy / "extra.safetensors")
    with pytest.raises(CheckpointError, match="two files hold it: "):
        reshard.open(copy)


@pytest.mark.parametrize("path", ["../llama/model.safetensors", "/etc/passwd", "..\\x.safetensors", "a/../../b.safetensors"])
def test_an_index_may_not_point_outside(tmp_path, path):
    copy = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = path
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        reshard.open(copy)


def test_parallel_sizes_do_not_apply():
    with pytest.raises(RequestError, match="is whole"):
        reshard.plan(HF / "llama", to="hf", tp=2)


def test_a_model_that_is_not_declared_still_becomes_hf_but_not_vllm(tmp_path):
    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "somebodys_own"}))
    printed = reshard.convert(reshard.plan(copy, to="hf"), tmp_path / "out")
    assert printed.fingerprint.root == reshard.fingerprint(HF / "llama").root
    with pytest.raises(RequestError, match=r"somebodys_own.*not declared.*reshard architectures"):
        reshard.plan(copy, to="vllm")


def test_a_missing_weight_is_not_passed_on(tmp_path):
    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    safetensors.torch.save_file(kept, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*no such weight"):
        reshard.plan(copy, to="hf")


def test_accelerates_and_dcps_own_forms_have_one_fingerprint_with_hf(tmp_path):
    for case in ("accelerate", "hsdp", "fsdp2-tied"):
        opened = open_case(case)
        reshard.convert(reshard.plan(opened, to="hf"), tmp_path / case)
        assert reshard.fingerprint(tmp_path / case).root == reshard.fingerprint(opened).root
    assert (DCP / "accelerate").exists()


def config_at(folder, **changes):
    """A folder with llama's config, in which some keys have other values; None removes a key."""
    config = {**json.loads((HF / "llama" / "config.json").read_text()), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


# Every weight has the shape that they give it.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}


@pytest.mark.parametrize("own", [".", "huggingface", ".."], ids=["beside the weights", "in verl's folder", "in the parent"])
def test_a_model_that_contradicts_the_checkpoints_own_config_is_refused(own, tmp_path):
    source, wrong = tmp_path / "run" / "step", config_at(tmp_path / "wrong", **HEADS)
    config_at(source / own if own != ".." else tmp_path / "run")
    source.mkdir(exist_ok=True)
    shutil.copy(HF / "llama" / "model.safetensors", source)
    with pytest.raises(RequestError, match="contradicts the checkpoint's own config") as caught:
        reshard.plan(source, to="vllm", tp=2, model=wrong)
    for text in ("num_attention_heads 8 -> 4", "num_key_value_heads 2 -> 1", "head_dim 32 -> 64", "`model_wins=True`"):
        assert text in str(caught.value)
    plan = reshard.plan(source, to="vllm", tp=1, model=wrong, model_wins=True)
    assert any("`model=` wins over" in note and "num_attention_heads 8 -> 4" in note for note in plan.to_json()["notes"])
    assert plan.content.model.dimensions["heads"] == 4


def test_keys_that_no_layout_follows_from_may_differ(tmp_path):
    other = {"torch_dtype": "float16", "transformers_version": "5.0", "attention_bias": None, "rms_norm_eps": 1e-5, "num_local_experts": 3}
    assert reshard.open(HF / "llama", model=config_at(tmp_path, **other)).model_files.notes == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias false -> true"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings false -> true"),
        ({"vocab_size": 256}, "vocab_size 250 -> 256"),
        ({"num_key_value_heads": None}, "num_key_value_heads 2 -> not set"),
        ({"hidden_size": "x", "use_cache": False}, 'hidden_size 32 -> "x"'),
        ({"model_type": "qwen2"}, 'model_type "llama" -> "qwen2"'),
    ],
    ids=str,
)
def test_only_the_keys_that_change_the_layout_are_listed(changes, said, tmp_path):
    with pytest.raises(RequestError, match="`model_wins=True`") as caught:
        reshard.open(HF / "llama", model=config_at(tmp_path, **changes))
    assert str(caught.value).count("->") == 1 and said in str(caught.value)


def test_keys_of_an_inner_config_are_listed_with_its_name():
    def config(intermediate, hidden, cache):
        llama = json.loads((HF / "llama" / "config.json").read_text())
        text = {**llama, "model_type": "mistral", "intermediate_size": intermediate, "use_cache": cache}
        vision = {
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "num_channels": 3,
            "head_dim": 16,
        }
        return {"model_type": "mistral3", "text_config": text, "vision_config": {**vision, "hidden_size": hidden}, "spatial_merge_size": 2}

    found = changed_keys(config(88, 32, True), config(96, 64, False))
    assert [str(each) for each in found] == ["text_config.intermediate_size 88 -> 96", "vision_config.hidden_size 32 -> 64"]


def test_a_config_that_ties_two_heads_that_differ_is_named_by_its_key(tmp_path):
    """The two copies are of one model: the config is wrong, or one of them is. No file is."""
    shutil.copytree(HF / "llama", tmp_path / "llama")
    config = json.loads((HF / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refused = run("convert", tmp_path / "llama", tmp_path / "out", "--to", "hf")
    assert refused.code == 3 and "embed_tokens.weight: it and lm_head.weight disagree, first at element [0, 0]" in refused.err
    assert "tie_word_embeddings: true" in refused.err and "set tie_word_embeddings to false" in refused.err
    found = run("doctor", tmp_path / "llama", "--deep").out
    assert "tied-mismatch" in found and "lm_head.weight: it and model.embed_tokens.weight disagree" in found


# Files of published folders: of Llama 3, Llama 2, T5, XLM-R, Mistral v0.3, Mistral Small, GPT-2, BERT, Qwen 1, Kimi, xGen, Marian.
TOKENIZERS = [
    ["tokenizer.json", "tokenizer_config.json"],
    ["tokenizer.model"],
    ["spiece.model"],
    ["sentencepiece.bpe.model"],
    ["tokenizer.model.v3"],
    ["tekken.json"],
    ["vocab.json", "merges.txt"],
    ["vocab.txt"],
    ["qwen.tiktoken", "tokenization_qwen.py"],
    ["tiktoken.model", "tokenization_kimi.py"],
    ["tokenization_xgen.py"],
    ["source.spm", "target.spm", "vocab.json"],
]


@pytest.mark.parametrize("names", TOKENIZERS, ids=",".join)
@pytest.mark.parametrize("to", ["hf", "vllm"])
def test_a_tokenizer_of_any_kind_is_known_and_copied(names, to, tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    for name in names:
        (source / name).write_text("vocabulary")
    result = reshard.convert(reshard.plan(source, to=to), tmp_path / "out")
    assert not result.findings and not reshard.doctor(source).findings
    copied = {path.name for path in (tmp_path / "out").iterdir() if path.read_bytes() == b"vocabulary"}
    assert copied == {*names}
    if "vocab.json" not in names:
        (source / names[0]).unlink()
        assert bool(reshard.doctor(source).findings) is (len(names) == 1 or "tokenizer.json" in names)


@pytest.mark.parametrize("to", ["hf", "vllm", "sglang", "trtllm"])
def test_a_missing_tokenizer_is_said_before_anything_is_written_and_after(to, tmp_path):
    line = "missing   tokenizer (tokenizer.json, tokenizer.model, ...): engines that serve the model need it; name a folder"
    out = tmp_path / "out"
    assert line in run("convert", HF / "llama", out, "--to", to, "--dry-run").out and not out.exists()
    said = json.loads(run("plan", HF / "llama", "--to", to, "--json").out)["findings"]
    assert [(finding["id"], finding["severity"]) for finding in said] == [("missing-tokenizer", "warning")]
    assert line in run("convert", HF / "llama", out, "--to", to).out
    assert json.loads(run("convert", HF / "llama", out, "--to", to, "--if-changed", "--json").out)["findings"] == said
    about = {} if to == "hf" else {"model": HF / "llama"}
    # In Python the keyword is named, and on the command line its flag.
    spelled = [
        {**finding.to_json(), "do": finding.do.replace("`model=DIR`", "--model DIR")} for finding in reshard.doctor(out, **about).findings
    ]
    assert spelled == said


def test_a_missing_config_is_said_in_the_same_way(tmp_path):
    shown = run("convert", FIXTURES / "dcp" / "fsdp2" / "checkpoint", tmp_path / "out", "--to", "hf").out
    assert (
        "\n  missing   config.json: engines choose the model's class by it; name a folder" in shown and "give one with --model" not in shown
    )
    assert {finding.id for finding in reshard.doctor(tmp_path / "out").findings} >= {"missing-config", "missing-tokenizer"}


def test_nothing_is_missed_where_no_engine_loads_the_folder(tmp_path):
    for to in ("dcp", "fsdp", "megatron"):
        assert not reshard.convert(reshard.plan(HF / "llama", to=to), tmp_path / to).findings
        assert not [finding for finding in reshard.doctor(tmp_path / to).findings if finding.severity != "info"]
    draft = shutil.copytree(HF / "llama", tmp_path / "draft")
    config_at(draft, architectures=["LlamaForCausalLMEagle3"])  # it has the tokenizer of the model that it drafts for
    assert not reshard.convert(reshard.plan(draft, to="hf"), tmp_path / "hf").findings


def test_inspect_says_that_a_tokenizer_is_needed(tmp_path):
    assert "needed    a tokenizer (tokenizer.json, tokenizer.model, ...) to serve it: --model DIR" in run("inspect", HF / "llama").out
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    (source / "tokenizer.json").write_text("{}")
    assert "needed" not in run("inspect", source).out


def test_another_config_than_the_checkpoints_own_is_refused(tmp_path):
    config = json.loads((HF / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}))
    shown = run("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2, "--model", tmp_path)
    assert shown.code == 2 and "num_attention_heads" in shown.err and not (tmp_path / "out").exists()
