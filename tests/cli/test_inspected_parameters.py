"""`inspect` never says "0 parameters" of a checkpoint that holds some: without the model's sizes, it counts what is stored, and says so."""

import gzip
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard
from safetensors import safe_open
from safetensors.numpy import save_file

import reshard as library
from reshard.models.lookup import built_in_model_types

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"
with safe_open(HF / "gpt2" / "model.safetensors", "pt") as _file:
    STORED = sum(math.prod(_file.get_slice(name).get_shape()) for name in _file.keys())  # noqa: SIM118

NONE = r"(?<![\d,.])0 parameters"


def with_config(folder, config):
    """The gpt2 fixture with another config."""
    folder.mkdir()
    shutil.copy(HF / "gpt2" / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def said(folder):
    """The document and the first line of `inspect`, after a check that lines, document and page agree on the number."""
    document, lines = reshard("inspect", folder, "--json").document, reshard("inspect", folder)
    page = folder / "page.html"
    assert lines.code == 0 and reshard("inspect", folder, "--html", page).code == 0
    as_stored = document["parameters_as_stored"]
    assert ("parameters as stored" in page.read_text()) == as_stored == (" parameters as stored" in lines.out.splitlines()[0])
    assert not re.search(NONE, lines.out) and "parameters</dt><dd>0<" not in page.read_text()
    assert not re.search(NONE, repr(library.open(folder)))
    page.unlink()
    return document, lines.out


@pytest.mark.parametrize("name", ["unheard_of", None, "strange"])
def test_without_a_declaration_the_stored_elements_are_counted(name, tmp_path):
    """An unknown type; no config; a known type, quantized in an unknown way."""
    known = json.loads((HF / "gpt2" / "config.json").read_text())
    config = {"model_type": name} if name == "unheard_of" else {**known, "quantization_config": {"quant_method": "strange"}}
    folder = with_config(tmp_path / "model", config)
    if name is None:
        (folder / "config.json").unlink()
    document, _ = said(folder)
    assert (document["parameters"], document["parameters_as_stored"]) == (STORED, True)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_attention_heads": "many", "n_head": "many"}, {"num_hidden_layers": -1, "n_layer": -1}, {"text_config": 3}],
    ids=["nothing", "words", "negative", "no inner config"],
)
@pytest.mark.parametrize("model_type", ["gpt2", "bailing_moe", "exaone", "chatglm", "qwen2_vl", "gemma3"])
def test_a_config_that_lacks_the_models_sizes_does_not_hide_the_parameters(model_type, settings, tmp_path):
    document, lines = said(with_config(tmp_path / "model", {"model_type": model_type, **settings}))
    assert document["parameters"] >= STORED and document["model_type"] == model_type
    if document["parameters_as_stored"]:
        assert "a positive number is needed" in " ".join(document["outlook"]["needed"])
        assert "needed    a config with the sizes of the model: --model DIR" in lines
        assert document["outlook"]["next"].endswith("--model DIR")


def test_no_declared_type_shows_none_whatever_its_config_lacks(tmp_path):
    folder = with_config(tmp_path / "model", {})
    for model_type in built_in_model_types():
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}, "text_config": {}}))
        assert reshard("inspect", folder, "--json").document["parameters"] >= STORED, model_type


def test_towers_whose_config_leaves_everything_to_the_class_are_counted_by_the_model(tmp_path):
    """AIN-qwen2-vl-7b is published with a vision_config of three keys: the sizes are the defaults of transformers' class."""
    vision = {"in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": vision}))
    save_file({"visual.patch_embed.proj.weight": np.zeros((1280, 3, 2, 14, 14), np.float16)}, folder / "model.safetensors")
    document, _ = said(folder)
    assert (document["parameters"], document["parameters_as_stored"]) == (1280 * 3 * 2 * 14 * 14, False)


@pytest.mark.parametrize(
    "checkpoint, parameters",
    [("peft/plain/adapter", 864), ("dcp/accelerate/checkpoint/optimizer_0", 0)],
    ids=["an adapter without its base", "optimizer state alone"],
)
def test_what_holds_no_model_says_what_it_holds(checkpoint, parameters):
    document, lines = reshard("inspect", FIXTURES / checkpoint, "--json").document, reshard("inspect", FIXTURES / checkpoint).out
    assert document["parameters"] == parameters and not re.search(NONE, lines)


def test_a_head_that_is_the_embedding_counts_once_only_if_the_type_is_declared(tmp_path):
    config = json.loads((HF / "llama" / "config.json").read_text()) | {"tie_word_embeddings": True}
    for name, model_type, expected in (("declared", "llama", 74_016 - 250 * 32), ("unknown", "unheard_of", 74_016)):
        folder = shutil.copytree(HF / "llama", tmp_path / name)
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        document = reshard("inspect", folder, "--json").document
        assert (document["parameters"], document["parameters_as_stored"]) == (expected, name == "unknown")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="../shared/published, the configs and indexes of published checkpoints, is not there")
def test_no_published_folder_has_none(tmp_path):
    """With their own configs and names; every weight has one element, as the indexes do not say the shapes."""
    for published in sorted(path for path in PUBLISHED.iterdir() if path.is_dir()):
        names = json.loads(gzip.decompress((published / "index.json.gz").read_bytes()))["weight_map"]
        if len(names) > 3000:  # their types are among the others
            continue
        folder = tmp_path / published.name
        folder.mkdir()
        shutil.copy(published / "config.json", folder)
        save_file({name: np.zeros(1, np.float16) for name in names}, folder / "model.safetensors")
        document = reshard("inspect", folder, "--json").document
        buffers = sum(kind["tensors"] for kind in document["kinds"] if kind["kind"] == "buffer")
        assert 0.8 * (len(names) - buffers) <= document["parameters"] <= len(names), published.name
