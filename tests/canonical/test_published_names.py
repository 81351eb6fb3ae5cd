"""The names in indexes of published checkpoints are those that follow from their configs, and so are their sizes.

../shared/published/ holds configs and indexes of published folders, without weights. They are third-party data and stay outside of the
repository; where they are not there, these tests are skipped.
"""

import gzip
import json
import math
from pathlib import Path

import pytest

from reshard.canonical.name_variants import Names
from reshard.models.lookup import find_model
from reshard.models.quantization import unknown_quantization

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"
FOLDERS = sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()) if PUBLISHED.is_dir() else []
# Folders of declared types whose names do not all follow from their configs -> why.
LISTED = {
    "Qwen3-30B-A3B-transgqa": "its weights have an indexer and biases that its config does not speak of",
    "scicore-omics-minicpmv": "a fine-tune of minicpmv with a tower of its own, for genes",
}
# Folders of types without a declaration -> what they are.
UNDECLARED = {
    "LocateAnything-3B": "MoonViT around qwen2",
    "Logics-Thinking": "two towers around qwen3",
    "oasst-pythia-1.4b-rm": "a reward model: no head",
    "phi-2-mixformer": "phi under the names of its first code",
    "xgen-mm": "a tower around phi3",
}
# Folders with quantized weights of a method that reshard does not know.
QUANTIZED = ("Molmo-7B-D-NF4", "mistral3-mlx-4bit", "qwen3.5-mlx-4bit")
# Folders of MLX, whose packed weights have components under the names of the weights (tests/formats/test_mlx.py).
MLX = ("Qwen3-14B-MLX-4bit", "qwen2-mlx-3bit")
# Folders whose total_size is not that of the weights -> the difference in bytes, and what it is.
BESIDE = {
    "DeepSeek-OCR": (257 * 8, "positions of CLIP"),
    "GLM-4.x-355B-merge": (-3_829_440, "counted by the tool that merged it"),
    "MiMo-7B-kor": (421_580_800, "layers for multi-token prediction"),
    "Pygmalion-7b": (32 * 64 * 2, "rotary frequencies"),
    "Qwen3-30B-A3B-transgqa": (2_113_536, "an indexer and biases"),
    "RedPajama-INCITE-7B-Base": (16_781_376, "buffers of the attention"),
    "chatglm-6b": (32 * 2, "rotary frequencies"),
    "falcon-180B-chat": (65024 * 14848 * 2, "a head that is the embedding"),
    "falcon-40b": (65024 * 8192 * 2, "a head that is the embedding"),
    "scicore-omics-minicpmv": (184_736_992, "a tower for genes"),
    "openpangu-7b": (34 * 64 * 4, "rotary frequencies"),
}

pytestmark = pytest.mark.skipif(not FOLDERS, reason="../shared/published, the configs and indexes of published checkpoints, is not there")


def read(folder):
    """The config of a folder, and its index."""
    return json.loads((PUBLISHED / folder / "config.json").read_text()), json.loads(
        gzip.decompress((PUBLISHED / folder / "index.json.gz").read_bytes())
    )


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name not in (*UNDECLARED, *QUANTIZED, *MLX)])
def test_the_names_of_a_published_checkpoint_follow_from_its_config(folder):
    config, index = read(folder)
    model = find_model(config)
    assert model is not None, "its type is not declared"
    names = Names(model)
    arrays = {name: names.array(name) for name in index["weight_map"]}
    strange = [
        name
        for name, array in arrays.items()
        if array is None and not model.reason_to_drop(name) and not model.reason_not_served(name) and not names.is_canonical(name)
    ]
    stored = {canonical for array in arrays.values() if array is not None for canonical in array.names}
    missing = [name for name, weight in model.weights.items() if not weight.optional and name not in stored]
    assert (bool(strange), missing) == (folder in LISTED, []), (strange[:5], missing[:5])
    total = index.get("metadata", {}).get("total_size")
    if not total:
        return
    elements = sum(math.prod(weight.shape) for name, weight in model.weights.items() if name in stored)
    rest, _ = BESIDE.get(folder, (0, ""))
    assert (int(total) - rest) / elements in (2, 4), (total, elements)


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name in UNDECLARED])
def test_what_is_listed_as_undeclared_is_undeclared(folder):
    assert find_model(read(folder)[0]) is None


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name in QUANTIZED])
def test_what_is_listed_as_quantized_is_quantized_in_an_unknown_way(folder):
    assert unknown_quantization(read(folder)[0])


def test_the_names_of_molmo_without_its_packed_form_follow_from_its_config():
    """Its index has the number of parameters, and names of what bitsandbytes stores beside them."""
    config, index = read("Molmo-7B-D-NF4")
    model = find_model({key: value for key, value in config.items() if key != "quantization_config"})
    beside = (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4")
    assert model.weights.keys() == {name for name in index["weight_map"] if not name.endswith(beside)}
    assert sum(math.prod(weight.shape) for weight in model.weights.values()) == index["metadata"]["total_parameters"]


def test_at_most_three_published_folders_differ():
    assert len(LISTED) <= 3
