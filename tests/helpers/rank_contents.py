"""What ranks hold of weights in bfloat16, computed without files."""

import hashlib
import itertools
import json
import sys
from types import MappingProxyType

import numpy as np

from helpers.fixture_places import FIXTURES, rules_of
from reshard.engine.casts import cast
from reshard.geometry.dtypes import BF16, from_safetensors
from reshard.geometry.meshes import Parallel
from reshard.serving.legality import check_degrees
from reshard.serving.ranks import rank_tensors
from reshard.serving.weights import stored_dtypes

sys.path.insert(0, str(FIXTURES))
from named_weights import type_of


def sizes_of(degree):
    """tp2-pp2 and tp2-ep as the options of a plan."""
    words = degree.split("-")
    sizes = {word[:2]: int(word[2:]) for word in words if word != "ep"}
    return {**sizes, "ep": sizes["tp"] if "ep" in words else 1}


def published_shapes(model):
    """The shapes of a model's tensors under the names that published files have, in which some weights lie in pieces."""
    return {name: weight.shape for name, weight in model.as_published().items() if not weight.optional}


def canonical_weights(model, published):
    """The weights under the model's own names, from the published tensors: pieces are joined."""
    whole = {}
    for name, array in model.pieces.items():
        whole.setdefault(array.names[0], []).append(published[name])
    return {name: words for name, words in published.items() if name not in model.pieces} | {
        name: np.concatenate(words) for name, words in whole.items()
    }


def elements_of(stored, weights, value_of):
    """The bytes of a stored tensor whose sections are boxes of `weights`, which are words of bfloat16, or of the stored type."""
    fill = stored.fill * stored.dtype.itemsize if len(stored.fill) == 1 else stored.fill
    flat = np.frombuffer(bytearray(fill) * (stored.nbytes // stored.dtype.itemsize), stored.dtype.word)
    for section in stored.sections:
        block = weights[section.name][tuple(slice(at, at + size) for at, size in zip(section.box.offsets, section.box.sizes, strict=True))]
        if stored.dtype.function:
            block = value_of(block, stored.dtype)
        elif stored.dtype.name == "F32":
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


def laid_out(model, weights, sizes, value_of, types=MappingProxyType({})):
    """What every rank of vLLM would hold by the declaration, without a file; in vLLM's order of ranks. types: as for
    named_weights.type_of."""
    parallel, rules = Parallel(**sizes), rules_of("vllm", model)
    check_degrees(model, rules, parallel)
    dtypes = stored_dtypes(model, rules, {name: from_safetensors(type_of(name, types), where="test") for name in weights})
    for pp_rank, tp_rank in itertools.product(range(parallel.pp), range(parallel.tp)):
        yield described(rank_tensors(model, dtypes, rules, parallel, tp_rank, pp_rank), weights, value_of)


def described(tensors, weights, value_of):
    """Name -> element type, shape and a digest of the elements, of a rank's stored tensors."""
    return {
        stored.name: {
            "dtype": stored.dtype.name,
            "shape": list(stored.shape),
            "sha256": hashlib.sha256(elements_of(stored, weights, value_of)).hexdigest(),
        }
        for stored in tensors
    }
