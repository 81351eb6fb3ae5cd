"""`reshard serve-check`: every way in which an engine would refuse a folder, or serve it wrongly, is a finding before it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard
from safetensors.torch import load_file, save_file

import reshard as library
from reshard.health.findings import KINDS


def ids(result):
    return {each["id"] for each in result.document["findings"] if each["severity"] != "info"}


@pytest.fixture
def served(tmp_path):
    """A folder for vLLM at TP 2, with a tokenizer."""
    shutil.copytree(HF / "llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    library.convert(library.plan(tmp_path / "model", to="vllm", tp=2), tmp_path / "out")
    return tmp_path / "out"


def test_a_folder_that_an_engine_takes_has_no_findings(served):
    result = reshard("serve-check", served, "--tp", 2, "--json")
    assert result.code == 0 and not ids(result)
    assert reshard("serve-check", served).code == 0


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", "gpt2", "gemma2", "phi3"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_models_of_all_kinds_are_as_their_engine_asks(model, sizes, tmp_path):
    library.convert(library.plan(HF / model, to="vllm", **sizes), tmp_path / "out")
    assert ids(reshard("serve-check", tmp_path / "out", "--json")) <= {"missing-tokenizer"}


def test_other_sizes_and_engines(served):
    assert ids(reshard("serve-check", served, "--tp", 4, "--json")) == {"other-sizes"}
    assert ids(reshard("serve-check", served, "--pp", 2, "--json")) == {"other-sizes"}
    assert ids(reshard("serve-check", served, "--engine", "sglang", "--json")) == {"other-engine"}


def test_an_engine_of_another_version_asks_for_other_names(served, tmp_path):
    result = reshard("serve-check", served, "--engine-version", "0.11.0", "--json")
    assert result.code == 1 and ids(result) == {"unknown-on-rank"}
    library.convert(library.plan(tmp_path / "model", to="vllm", tp=2, engine_version="0.11.0"), tmp_path / "old")
    assert ids(reshard("serve-check", tmp_path / "old", "--json")) == {"missing-on-rank"}
    assert not ids(reshard("serve-check", tmp_path / "old", "--engine-version", "0.11.0", "--json"))


def test_a_tensor_of_another_type_than_this_version_asks_for(tmp_path):
    """vLLM before 0.10.2 held the router's correction bias in the model's type."""
    library.convert(library.plan(HF / "deepseek_v3", to="vllm", tp=2, engine_version="0.10.1"), tmp_path / "old")
    result = reshard("serve-check", tmp_path / "old", "--engine-version", "0.10.2", "--json")
    unlike = [each for each in result.document["findings"] if each["id"] == "unlike-on-rank"]
    assert unlike and all(each["tensor"].endswith("e_score_correction_bias") and "F32" in each["detail"] for each in unlike)
    assert len(unlike) == 2 * len({each["tensor"] for each in unlike}), "both ranks"


@pytest.mark.parametrize(("stages", "own"), [("1,2", False), ("2,1", True), ("1,1,1", True)])
def test_stages_are_judged_as_they_were_cut_and_the_engine_must_be_told(stages, own, tmp_path, monkeypatch):
    """A llama of three layers: vLLM's own two stages have 2 and 1 of them."""
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    pp, source = stages.count(",") + 1, of_three_layers(tmp_path / "three")
    library.convert(library.plan(source, to="vllm", pp=pp, tp=2, pp_layers=stages), tmp_path / "out")

    def judged(*options):
        result = reshard("serve-check", tmp_path / "out", "--json", *options)
        return result.code, {each["id"]: each["detail"] for each in result.document["findings"]}

    code, findings = judged()
    assert code == 0 and findings.keys() == (set() if own else {"not-told"}), findings
    assert own or "VLLM_PP_LAYER_PARTITION is not set here: start vLLM with VLLM_PP_LAYER_PARTITION=1,2" in findings["not-told"]
    assert judged("--fail-on", "warning")[0] == (0 if own else 1)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", stages.replace(",", ", "))
    assert judged() == (0, {})
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,0")
    expected = "start vLLM without VLLM_PP_LAYER_PARTITION" if own else f"start vLLM with VLLM_PP_LAYER_PARTITION={stages}"
    assert "VLLM_PP_LAYER_PARTITION is 3,0 here" in judged()[1]["not-told"] and expected in judged()[1]["not-told"]


def test_a_weight_that_an_uneven_stage_lacks_is_named(tmp_path):
    library.convert(library.plan(of_three_layers(tmp_path / "three"), to="vllm", pp=2, pp_layers="1,2"), tmp_path / "out")
    (tmp_path / "out" / "reshard.json").unlink()
    path = tmp_path / "out" / "model-pp-1-tp-0-part-0.safetensors"
    weights = load_file(path)
    save_file({name: value for name, value in weights.items() if "layers.1." not in name}, path)
    result = reshard("serve-check", tmp_path / "out", "--json")
    assert result.code == 1 and "1, 1 layers, which are not the model's 3" in json.dumps(result.document)


def of_three_layers(folder):
    shutil.copytree(HF / "llama", folder)
    (folder / "tokenizer.json").write_text("{}")
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    third = {name.replace("layers.1.", "layers.2."): value for name, value in weights.items() if "layers.1." in name}
    save_file({**weights, **{name: value.clone() for name, value in third.items()}}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    return folder


def test_every_finding_of_the_check_is_tested():
    """Here, or where the check of adapters, of names and of classes is tested."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    assert [kind.id for kind in KINDS.values() if kind.needs == "serve-check" and f'"{kind.id}"' not in text] == []


@pytest.mark.parametrize(("key", "value", "found"), [("model_type", None, "no-type"), ("hidden_size", 128, "inconsistent")])
def test_a_config_of_another_model(key, value, found, served):
    (served / "reshard.json").unlink()
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, key: value}))
    assert ids(reshard("serve-check", served, "--json")) == {found}
    (served / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    assert reshard("serve-check", served).code == 6


def test_files_that_are_not_there_or_not_as_written(served):
    (served / "tokenizer.json").unlink()
    assert "missing-tokenizer" in ids(reshard("serve-check", served, "--json"))
    file = served / "model-rank-1-part-0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "changed" in ids(reshard("serve-check", served, "--json"))
    file.unlink()
    result = reshard("serve-check", served, "--json")
    assert result.code == 1 and ids(result) & {"missing-file", "inconsistent", "incomplete-tensor"}


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer, which vLLM and SGLang serve."""
    shutil.copytree(HF / "llama", tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_text("{}")
    return tmp_path / "folder"


def changed(folder, *, names=None, **keys):
    """The folder with other keys in its config (None: without them), and with `names` of the names of its weights."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if names:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        text = json.dumps({name if name == "__metadata__" else names(name): entry for name, entry in header.items()}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return folder


def found_in(folder, *options):
    """The exit code, and the findings by id."""
    result = reshard("serve-check", folder, "--json", *options)
    return result.code, {each["id"]: each for each in result.document["findings"]}


def test_a_folder_as_it_is_published_has_no_findings(folder):
    assert found_in(folder) == (0, {}) == found_in(folder, "--engine", "sglang")


@pytest.mark.parametrize("front", ["language_model.", "_orig_mod.", "module.", "model.", "base_model.model."])
def test_names_that_reshard_repairs_and_the_engine_does_not(front, folder):
    """vLLM 0.32's own loader was asked (tests/serving/release.py)."""
    code, findings = found_in(changed(folder, names=lambda name: front + name))
    assert code == 1 and findings.keys() == {"unknown-name"} and front in findings["unknown-name"]["tensor"]
    library.convert(library.plan(folder, to="hf"), folder.parent / "mended")
    assert found_in(folder.parent / "mended") == (0, {}), "as the finding says"


def test_bare_names_are_taken_by_the_classes_that_take_them(tmp_path, folder):
    code, findings = found_in(changed(folder, names=lambda name: name.removeprefix("model.")))
    assert code == 1 and findings.keys() == {"unknown-name"}
    shutil.copytree(HF / "gpt2", tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").write_text("{}")
    assert found_in(changed(tmp_path / "gpt2", names=lambda name: name.removeprefix("transformer."))) == (0, {})


@pytest.mark.parametrize(
    ("keys", "expected", "said"),
    [
        ({"model_type": None}, "no-type", "no model_type"),
        ({"architectures": ["FSDPLlamaForCausalLM"]}, "no-class", "FSDPLlamaForCausalLM"),
        ({"architectures": ["PeftModelForCausalLM"]}, "no-class", "PeftModelForCausalLM"),
        ({"architectures": ["NovaForCausalLM"]}, "no-class", "NovaForCausalLM"),
        ({"architectures": ["MPTForCausalLM"]}, "no-class", "0.28.0 was the last version"),
        ({"num_attention_heads": "8"}, "unlike-value", "num_attention_heads"),
        ({"num_hidden_layers": "2"}, "unlike-value", "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "refused-setting", "bitsandbytes"),
        ({"quantization_config": {"quant_method": "some-method"}}, "refused-setting", "some-method"),
        ({"quantization_config": "fp8"}, "unlike-value", "quantization_config is 'fp8', of the kind str"),
        ({"architectures": "LlamaForCausalLM"}, "unlike-value", "architectures is 'LlamaForCausalLM', of the kind str"),
        ({"tie_word_embeddings": "false"}, "unlike-value", "tie_word_embeddings"),
        ({"use_cache": "true"}, "unlike-value", "use_cache is 'true', of the kind str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_engine_refuses_in_a_config(keys, expected, said, folder):
    code, findings = found_in(changed(folder, **keys))
    assert code == 1 and said in findings[expected]["detail"] and "vLLM 0.32.0" in str(findings) + "vLLM 0.32.0"
    assert {id for id, each in findings.items() if each["severity"] == "error"} == {expected}
    assert "to hf" not in findings[expected]["do"] or expected in ("no-type", "no-class"), "no advice to convert it to what it is"


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": None},
        {"architectures": ["BertForSequenceClassification"], "model_type": "bert"},
        {"my_own_key": {"a": 1}, "quantization_config": {"bits": 4}},
    ],
    ids=str,
)
def test_what_is_not_known_is_not_refused(keys, folder):
    """vLLM 0.32 serves the first two, and makes its configuration of the third."""
    code, findings = found_in(changed(folder, **keys))
    assert code == 0 and "not-known" in findings and all(each["severity"] == "info" for each in findings.values())


def test_values_that_the_config_class_does_not_check_are_not_refused(folder):
    """`vllm serve` starts with them: the number 0 counts as a float, and LlamaConfig has no key conv_bias."""
    assert found_in(changed(folder, attention_dropout=0, conv_bias="yes", n_inner="x")) == (0, {})


def test_what_convert_writes_is_taken_whatever_wrapped_the_model(folder, tmp_path):
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    changed(folder, architectures=["FSDPLlamaForCausalLM"], model_type="llama", num_attention_heads=str(heads))
    assert {"no-class", "unlike-value"} <= found_in(folder)[1].keys()
    for target in ({"to": "hf"}, {"to": "vllm", "tp": 2}):
        out = tmp_path / target["to"]
        library.convert(library.plan(folder, **target), out)
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and config["num_attention_heads"] == heads
        assert found_in(out)[0] == 0


def test_dense_sparsity_is_left_out_of_a_config(tmp_path):
    shutil.copytree(HF.parent / "hf_fp8" / "llama-ct-channel", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    dense = {"format": "dense", "targets": ["Linear"], "sparsity_structure": "unstructured"}
    changed(tmp_path / "model", quantization_config={**config["quantization_config"], "sparsity_config": dense})
    assert "refused-setting" in found_in(tmp_path / "model")[1]
    plan = library.plan(tmp_path / "model", to="hf")
    library.convert(plan, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"] == config["quantization_config"] and any("sparsity_config" in n for n in plan.layout.notes)


@pytest.mark.parametrize("module", ["value_head", "v_head.summary", "classifier"])
def test_heads_that_the_engine_s_class_has_no_place_for(module, folder):
    """vLLM makes a classifier of a language model's class with one matrix, `score`."""
    named = {"value_head": "LlamaForSequenceClassification", "v_head.summary": "LlamaForCausalLM"}.get(
        module, "LlamaForTokenClassification"
    )
    shape = json.loads((folder / "config.json").read_text())["hidden_size"]

    def renamed(name):
        return f"{module}.weight" if name == "lm_head.weight" and module != "v_head.summary" else name

    changed(folder, names=renamed, architectures=[named], num_labels=None if module == "v_head.summary" else 250)
    if module == "v_head.summary":
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header, end = json.loads(raw[8 : 8 + length]), len(raw) - 8 - length
        header["v_head.summary.weight"] = {"dtype": "F32", "shape": [1, shape], "data_offsets": [end, end + 4 * shape]}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :] + bytes(4 * shape))
    code, findings = found_in(folder)
    assert code == 1 and findings["unknown-name"]["tensor"].startswith(module)


def test_an_engine_that_is_none(folder):
    assert "no serving engine" in reshard("serve-check", folder, "--engine", "dcp").err


def test_a_hugging_face_folder_at_sizes_that_it_cannot_have():
    assert "not-served" in ids(reshard("serve-check", HF / "llama", "--tp", 3, "--json"))
    assert "not-served" not in ids(reshard("serve-check", HF / "llama", "--tp", 4, "--engine", "sglang", "--json"))


def test_the_page_and_the_text_say_the_same(served, tmp_path):
    result = reshard("serve-check", served, "--tp", 4, "--html", tmp_path / "page.html")
    assert result.code == 1 and "other-sizes" in result.out and "other-sizes" in (tmp_path / "page.html").read_text()


def test_a_warning_alone_fails_only_if_it_is_asked_for_and_the_change_is_announced(tmp_path):
    library.convert(library.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    for command in ("doctor", "serve-check"):
        done = reshard(command, tmp_path / "out")
        assert done.code == 0 and "missing-tokenizer" in done.out
        assert ("--fail-on warning asks for that" in done.err) == (command == "serve-check")
        for words in ("warning", "missing-tokenizer"):
            failed = reshard(command, tmp_path / "out", "--fail-on", words)
            assert failed.code == 1 and "asks for that" not in failed.err
        assert reshard(command, tmp_path / "out", "--fail-on", "warnings").code == 2
    assert reshard("serve-check", tmp_path / "out", "--tp", 4).code == 1, "an error fails without being asked for"
