"""What reshard writes as a Hugging Face folder is taken by the engines' releases, of every declared type; other names are judged by data
that vLLM's own loader gave (tests/serving/release.py)."""

from __future__ import annotations

import json
import struct
import sys

import pytest
from helpers.declared_models import declared_models, type_of_model
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard

import reshard as library
from reshard.adapter import registry
from reshard.adapter.serving_format.release import forms_of
from reshard.models.lookup import built_in_model_types, find_model

sys.path.append(str(FIXTURES))
import named_weights

RELEASES = {name: registry.named(name).release for name in ("vllm", "sglang")}
CONFIGS = {}
for _name, _config, _about in declared_models():
    if _name == type_of_model(_name) or type_of_model(_name) not in CONFIGS:
        CONFIGS[type_of_model(_name)] = _config, _about.get("types", {})
# Whose configs are too large to be made small here.
LARGE = {"deepseek_v41", "isaac", "minicpmo", "voxtral"}
# What an engine's class does not take of the model, whatever the names: the finding.
REFUSED = {
    **{(model_type, "vllm"): "not-served" for model_type in ("dbrx", "internlm", "minimax_m1", "olmo_hybrid", "qwen")},
    **{(model_type, "vllm"): "not-served" for model_type in ("refinedweb", "refinedwebmodel")},
    ("mixtral", "sglang"): "not-served",  # its class ignores head_dim, which is not hidden / heads here
    ("qwen3_moe", "sglang"): "not-served",  # its class has experts in every layer, and the model has a dense one
    ("glm5_next_text", "sglang"): "no-class",
}
# Types that vLLM was not asked about: without a class there, or in need of a package or a device that the environment lacks.
NOT_ASKED = {
    *("dbrx", "deepseekocr", "internlm", "longcat_flash_ngram", "minimax_m1", "qwen", "refinedweb", "refinedwebmodel"),
    *("deepseek_vl_v2", "molmo2", "olmo_hybrid", "step3p7", *LARGE),
}


def folder_of(model_type, folder, form=None):
    """A folder of a small model with the names of a form, its weights zeros that take no place; the model."""
    config, types = CONFIGS[model_type]
    if any(config["model_type"] not in release.model_types for release in RELEASES.values()):
        config = {**config, "auto_map": {"AutoConfig": "configuration.Config"}}  # its code comes with the published checkpoint
    model = find_model(config)
    names = [*model.as_published()]
    config = {**config, "architectures": config.get("architectures") or [model.architecture.class_name]}
    renames = forms_of(model, names)[form] if form else {}
    header, stop = {}, 0
    for name, weight in ((name, weight) for name, weight in model.as_published().items() if not weight.optional):
        dtype, start = named_weights.type_of(name, types), stop
        size = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}.get(dtype, 1)
        for number in weight.shape:
            size *= number
        stop += size
        header[renames.get(name, name)] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [start, stop]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + stop)
    return folder


def findings(folder, *options):
    result = reshard("serve-check", folder, "--json", *options)
    return result.code, {each["id"]: each["detail"] for each in result.document["findings"]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model_type", sorted({*built_in_model_types()} - LARGE))
def test_what_is_written_of_a_declared_type_is_taken(model_type, engine, tmp_path):
    source = folder_of(model_type, tmp_path / "source")
    library.convert(library.plan(source, to="hf"), tmp_path / "out")
    code, said = findings(tmp_path / "out", "--engine", engine)
    refusal = REFUSED.get((model_type, engine))
    assert (code == 1 and refusal in said) if refusal else code == 0, said


def test_vllm_was_asked_for_the_names_of_every_declared_type():
    assert {*built_in_model_types()} - RELEASES["vllm"].names.keys() == NOT_ASKED


@pytest.mark.parametrize(
    ("model_type", "form", "code", "found"),
    [
        ("arcee", "bare", 0, set()),
        ("arcee", "_orig_mod", 1, {"unknown-name"}),
        ("opt", "bare", 0, set()),
        ("granite", "bare", 1, {"unknown-name"}),
        ("qwen2_vl", "in-memory-5", 0, set()),
        ("paligemma", "module", 1, {"unknown-name"}),
        ("phimoe", "bare", 0, {"not-known"}),
        ("olmo_hybrid", "bare", 1, {"not-known", "not-served"}),
    ],
)
def test_names_are_judged_by_what_the_loader_took(model_type, form, code, found, tmp_path):
    found_code, said = findings(folder_of(model_type, tmp_path / "model", form), "--engine", "vllm")
    assert (found_code, {*said}) == (code, found), said
