"""Spellings against numpy: what a fused or renamed tensor holds is what slicing it gives, however it is cut."""

import numpy as np
import pytest
from helpers.random_shardings import partitions
from hypothesis import given
from hypothesis import strategies as st

from reshard.canonical.name_variants import PREFIXES, Names, with_canonical_names
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import from_torch
from reshard.geometry.extents import Extent, Piece
from reshard.index.index import Index, ParamGroup, RunFacts, Tensor
from reshard.index.shards import Shards
from reshard.models.architecture import Weight
from reshard.models.lookup import find_architecture
from reshard.models.model import Model

GPT2, LLAMA, MIXTRAL = (find_architecture(name) for name in ("gpt2", "llama", "mixtral"))
I32 = from_torch("int32", where="test")
SIZES = {"vocab_size": 7, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
EXPERTS, INNER, HIDDEN = 3, 5, 6
MOE = Model(MIXTRAL, SIZES | {"intermediate_size": INNER, "num_local_experts": EXPERTS})
DENSE = Model(LLAMA, SIZES | {"intermediate_size": INNER})
# As phi3 is: what llamas have apart is fused.
FUSED = Model(
    LLAMA.extended(
        Weight(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            "attention.qkv",
            ("heads * head_dim + 2 * kv_heads * head_dim", "hidden"),
            fuses={"attention.q": "heads * head_dim", "attention.k": "kv_heads * head_dim", "attention.v": "kv_heads * head_dim"},
        ),
        Weight(
            "model.layers.{layer}.mlp.gate_up_proj.weight",
            "mlp.gate_up",
            ("2 * intermediate", "hidden"),
            fuses={"mlp.gate": "intermediate", "mlp.up": "intermediate"},
        ),
        model_type="fused",
        without=[
            weight.name for weight in LLAMA.weights if weight.role in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        ],
    ),
    SIZES | {"intermediate_size": INNER},
)
FC1 = "model.layers.1.mlp.experts.gate_up_proj"


def numbers(shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def stored(name, array, boxes=None, role="weight", files=None):
    """A tensor of which each box lies in a file of its own."""
    pieces = []
    for i, box in enumerate(boxes or [Box.whole(array.shape)]):
        path = f"{role} {name} {i}"
        files[path] = np.ascontiguousarray(array[box.index]).reshape(-1)
        pieces.append(Piece(box, Extent(path, 0, row_major(box.sizes), I32)))
    return Tensor(name, I32, array.shape, role, Shards.of(pieces))


def index_of(*tensors, groups=()):
    return Index("test", tensors, (), RunFacts(), param_groups=lambda: groups)


def values(tensor, files):
    found = np.full(tensor.shape, -1, np.int32)
    for piece in tensor.pieces():
        flat = files[piece.extent.path][piece.extent.byte_offset // 4 :]
        held = np.lib.stride_tricks.as_strided(flat, piece.box.sizes, tuple(4 * step for step in piece.extent.strides))
        assert (found[piece.box.index] == -1).all(), "two pieces hold an element"
        found[piece.box.index] = held
    return found


@given(st.data())
def test_fused_experts_are_their_slices_however_they_are_cut(data):
    fused, files = numbers((EXPERTS, 2 * INNER, HIDDEN)), {}
    boxes = [box for box in data.draw(partitions(fused.shape)) if box.volume]
    found = {t.name: values(t, files) for t in with_canonical_names(index_of(stored(FC1, fused, boxes, files=files)), MOE).tensors}
    expected = {}
    for expert in range(EXPERTS):
        at = f"model.layers.1.block_sparse_moe.experts.{expert}."
        expected |= {at + "w1.weight": fused[expert, :INNER], at + "w3.weight": fused[expert, INNER:]}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_what_is_fused_in_the_model_is_read_from_its_parts():
    files, at = {}, "model.layers.0."
    parts = {
        at + "self_attn.q_proj.weight": numbers((12, 6)),
        at + "self_attn.k_proj.weight": 100 + numbers((6, 6)),
        at + "self_attn.v_proj.weight": 200 + numbers((6, 6)),
        at + "mlp.gate_proj.weight": 300 + numbers((5, 6)),
        at + "mlp.up_proj.weight": 400 + numbers((5, 6)),
    }
    found = {
        t.name: values(t, files)
        for t in with_canonical_names(index_of(*(stored(n, a, files=files) for n, a in parts.items())), FUSED).tensors
    }
    held = list(parts.values())
    assert found.keys() == {at + "self_attn.qkv_proj.weight", at + "mlp.gate_up_proj.weight"}
    assert np.array_equal(found[at + "self_attn.qkv_proj.weight"], np.concatenate(held[:3]))
    assert np.array_equal(found[at + "mlp.gate_up_proj.weight"], np.concatenate(held[3:]))


def test_what_the_model_has_apart_is_read_from_what_is_fused():
    files, fused = {}, numbers((24, 6))
    found = with_canonical_names(index_of(stored("model.layers.0.self_attn.qkv_proj.weight", fused, files=files)), DENSE).tensors
    parts = zip(found, np.split(fused, [12, 18]), "qkv", strict=True)
    for tensor, part, letter in parts:
        assert tensor.name == f"model.layers.0.self_attn.{letter}_proj.weight" and np.array_equal(values(tensor, files), part)


def test_the_optimizers_state_goes_with_its_weights():
    files, shape = {}, (EXPERTS, 2 * INNER, HIDDEN)
    tensors = [stored(FC1, role=role, array=numbers(shape), files=files) for role in ("weight", "master", "moment1", "moment2")]
    tensors += [
        stored(FC1, np.array(3, np.int32), role="step", files=files),
        stored(f"{FC1}.max", numbers(shape), role="state", files=files),
    ]
    found = with_canonical_names(index_of(*tensors, groups=(ParamGroup((FC1, "lm_head.weight"), {"lr": 1.0}),)), MOE)
    up = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    for role in ("weight", "master", "moment1", "moment2"):
        assert len(found.by_kind(role)) == 2 * EXPERTS
        assert np.array_equal(values(found.by_kind(role)[up], files), numbers(shape)[2, INNER:])
    assert np.array_equal(values(found.by_kind("state")[f"{up}.max"], files), numbers(shape)[2, INNER:])
    assert len(found.by_kind("step")) == 2 * EXPERTS and values(found.by_kind("step")[up], files) == 3
    (group,) = found.param_groups()
    assert set(group.names) == {*found.by_kind("weight"), "lm_head.weight"}


@pytest.mark.parametrize("prefix, own", PREFIXES)
def test_prefixes_of_other_classes_are_known(prefix, own):
    names, given = Names(GPT2_MODEL), "transformer.h.0.mlp.c_fc.weight"
    array = names.array(prefix + given.removeprefix(own.format(base="transformer.")))
    assert array is not None and array.names == (given,) and array.shape == GPT2_MODEL.weights[given].shape


GPT2_MODEL = Model(GPT2, {"vocab_size": 7, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 9})


def test_what_nobody_needs_is_known_under_other_names():
    files = {}
    found = with_canonical_names(index_of(stored("h.0.attn.bias", numbers((1, 1, 9, 9)), files=files)), GPT2_MODEL)
    assert GPT2_MODEL.reason_to_drop(found.tensors[0].name)


def test_canonical_names_are_left_alone():
    files = {}
    for model in (MOE, DENSE, FUSED, GPT2_MODEL):
        index = index_of(*(stored(name, numbers(weight.shape), files=files) for name, weight in model.weights.items()))
        assert with_canonical_names(index, model) is index and with_canonical_names(index, None) is index


def test_published_names_need_no_sizes():
    """A config that does not say all of them, or says too much, is no reason not to compare what is stored."""
    files, layer = {}, "model.layers.700."
    index = index_of(
        stored(layer + "block_sparse_moe.experts.9.w1.weight", numbers((2, 2)), files=files),
        stored("lm_head.weight", numbers((2, 2)), files=files),
    )
    assert with_canonical_names(index, Model(MIXTRAL, {})) is index
    fused = index_of(stored(layer + "mlp.experts.down_proj", numbers((1, 2, 2)), files=files))
    with pytest.raises(RequestError, match="vocab_size"):
        with_canonical_names(fused, Model(MIXTRAL, {"vocab_size": None}))


def test_names_of_another_model_mean_nothing():
    names = Names(DENSE)
    for name in (
        "lm_head",
        "model.layers.9.mlp.gate_proj.weight",
        FC1,
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
    ):
        assert names.array(name) is None


def test_another_shape_than_the_name_says_is_refused():
    files = {}
    turned = stored(FC1, numbers((EXPERTS, HIDDEN, 2 * INNER)), files=files)
    with pytest.raises(CheckpointError, match=r"\[3, 6, 10\].*experts\.0\.w1\.weight.*\[3, 10, 6\]"):
        with_canonical_names(index_of(turned), MOE)


def test_parts_of_different_element_types_are_no_weight():
    files = {}
    q, k = (
        stored(f"model.layers.0.self_attn.{letter}_proj.weight", numbers((rows, 6)), files=files) for letter, rows in (("q", 12), ("k", 6))
    )
    wide = Tensor(k.name, from_torch("int64", where="test"), k.shape, "weight", k.shards)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight says I32.*k_proj\.weight says I64"):
        with_canonical_names(index_of(q, wide), FUSED)
