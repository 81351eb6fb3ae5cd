"""Declared models against what real vLLM ranks held (fixtures/vllm_declared): every rank of every degree, bit by bit.

The weights follow from their names and shapes (fixtures/named_weights.py), so that a reference is a config and one digest for each rank.
A name or shape that a declaration gets wrong gives other weights, hence other digests.
"""

import hashlib
import itertools
import json
import sys

import numpy as np
import pytest
from places import FIXTURES, ranks, rules_of

import reshard
from reshard.canonical.name_variants import Names
from reshard.engine.casts import cast
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import BF16
from reshard.geometry.parallel import Parallel
from reshard.models.lookup import find_model
from reshard.models.model import Model
from reshard.serving.legality import check_degrees
from reshard.serving.ranks import rank_tensors
from reshard.serving.served_model import check_served
from reshard.serving.weights import stored_dtypes, weights_without_slot

sys.path.insert(0, str(FIXTURES))
import named_weights

REFERENCES = {path.stem: path for path in sorted((FIXTURES / "vllm_declared").glob("*.json"))}


def digest(lines):
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def digest_of(state):
    """As fixtures/vllm_declared/make.py computes it."""
    return digest(f"{name} {entry['dtype']} {entry['shape']} {entry['sha256']}\n" for name, entry in sorted(state.items()))


def sizes_of(degree):
    """tp2-pp2 and tp2-ep as the options of a plan."""
    words = degree.split("-")
    sizes = {word[:2]: int(word[2:]) for word in words if word != "ep"}
    return {**sizes, "ep": sizes["tp"] if "ep" in words else 1}


def elements_of(stored, weights, value_of):
    """The bytes of a stored tensor whose sections are boxes of `weights`, which are words of bfloat16."""
    fill = stored.fill * stored.dtype.itemsize if len(stored.fill) == 1 else stored.fill
    flat = np.frombuffer(bytearray(fill) * (stored.nbytes // stored.dtype.itemsize), stored.dtype.word)
    for section in stored.sections:
        block = weights[section.name][tuple(slice(at, at + size) for at, size in zip(section.box.offsets, section.box.sizes, strict=True))]
        if stored.dtype.function:
            block = value_of(block, stored.dtype)
        elif stored.dtype.name != "BF16":
            block = block.astype("<u4") << 16
        strides = tuple(stride * stored.dtype.itemsize for stride in section.strides)
        np.lib.stride_tricks.as_strided(flat[section.start :], block.shape, strides)[...] = block
    return flat.tobytes()


def our_value(words, dtype):
    """A function of words of bfloat16 as `convert` writes it."""
    return cast(words, BF16, dtype)


def value_in_vllm(words, dtype):
    """A function of words of bfloat16 as torch computed it in the real ranks: our value, or its neighbour where the list says so."""
    apart = np.zeros(1 << 16, np.int64)
    for word, distance in json.loads((FIXTURES / "functions/exp.json").read_text())["apart"].items():
        apart[int(word, 16)] = distance
    return (our_value(words, dtype) + apart[words]).astype("<u4")


def laid_out(model, weights, sizes, value_of=value_in_vllm):
    """What every rank would hold, without a file; vLLM's order of ranks."""
    parallel, rules = Parallel(**sizes), rules_of("vllm", model)
    check_degrees(model, rules, parallel)
    dtypes = stored_dtypes(model, rules, dict.fromkeys(weights, BF16))
    for pp_rank, tp_rank in itertools.product(range(parallel.pp), range(parallel.tp)):
        yield {
            stored.name: {
                "dtype": stored.dtype.name,
                "shape": list(stored.shape),
                "sha256": hashlib.sha256(elements_of(stored, weights, value_of)).hexdigest(),
            }
            for stored in rank_tensors(model, dtypes, rules, parallel, tp_rank, pp_rank)
        }


def written(folder, sizes, target):
    """What `convert` writes for every rank."""
    reshard.convert(reshard.plan(folder, to="vllm", **sizes), target)
    return ranks(target).values()


@pytest.mark.parametrize("name", REFERENCES)
def test_every_rank_of_a_declared_model_holds_what_real_vllm_holds(name, tmp_path):
    reference = json.loads(REFERENCES[name].read_text())
    model = find_model(reference["config"])
    shapes = {weight.name: weight.shape for weight in model.weights.values() if not weight.optional}
    saved = {"count": len(shapes), "sha256": digest(f"{name} {list(shape)}\n" for name, shape in sorted(shapes.items()))}
    order = reference["tensors"].pop("order", None)
    assert saved == reference["tensors"], "transformers saves other names or shapes"
    assert order in (None, digest("\n".join(shapes))), "the model's parameters have another order"
    for name_in_memory, shape in reference.get("in_memory", {}).items():
        array = Names(model).array(name_in_memory)
        assert array and array.shape == tuple(shape), name_in_memory
    if not reference["degrees"]:
        with pytest.raises(UnsupportedError, match=r"does not load a .* model from such files"):
            check_served(model, rules_of("vllm", model))
        return
    weights = {name: named_weights.elements_of(name, shape) for name, shape in shapes.items()}
    model = Model(model.architecture, {**model.config, str(model.architecture.mtp_layers): 0})
    different = []
    for degree, expected in reference["degrees"].items():
        if isinstance(expected, dict):
            with pytest.raises(RequestError, match="does not fit this model"):
                list(laid_out(model, weights, sizes_of(degree)))
        elif list(map(digest_of, laid_out(model, weights, sizes_of(degree)))) != expected:
            different.append(degree)
    assert not different, "fixtures/vllm_declared/make.py --details shows every tensor of vLLM's ranks"
    named_weights.write(tmp_path / "model", reference["config"], shapes)
    exclude = weights_without_slot(model, rules_of("vllm", model))
    states = written(tmp_path / "model", {"tp": 2, "exclude": exclude}, tmp_path / "out")
    assert list(map(digest_of, states)) == list(map(digest_of, laid_out(model, weights, {"tp": 2}, our_value)))


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
