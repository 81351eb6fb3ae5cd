"""Every mistake that `explain` knows, made on purpose in a real checkpoint and named; and no correct checkpoint is accused."""

from __future__ import annotations

import shutil
import weakref

import numpy as np
import pytest
import torch
from helpers.fixture_places import HF
from helpers.reshard_command import reshard
from safetensors.torch import load_file, save_file

import reshard as library
from reshard.measures import mistakes

LAYER = "model.layers.{}."
PARTS = {
    name: f"{LAYER}{module}.{name}_proj.weight"
    for module, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
}


def part(name, layer=0):
    return PARTS[name].format(layer)


def rotary(weight, heads):
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def exchanged(a, b):
    def change(w):
        for layer in (0, 1):
            w[part(a, layer)], w[part(b, layer)] = w[part(b, layer)], w[part(a, layer)]

    return change


def interleaved(w):
    for layer in (0, 1):
        both = torch.stack((w[part("gate", layer)], w[part("up", layer)]), 1).reshape(-1, w[part("gate")].shape[1])
        w[part("gate", layer)], w[part("up", layer)] = (half.clone() for half in both.chunk(2))


def fused_by_groups(w):
    """q, k and v taken in the wrong order out of a fused tensor of query groups."""
    q, k, v = (w[part(name)] for name in "qkv")
    groups = [torch.cat((a, b, c)) for a, b, c in zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)]
    fused = torch.cat(groups)
    w[part("q")], w[part("k")], w[part("v")] = (each.clone() for each in fused.split([len(q), len(k), len(v)]))


def permuted_heads(w):
    w[part("q")] = w[part("q")].view(8, -1, w[part("q")].shape[1])[[1, 0, 3, 2, 5, 4, 7, 6]].reshape(w[part("q")].shape)


def copied_heads(w):
    w[part("k")] = w[part("k")].view(2, -1, w[part("k")].shape[1])[[0, 0]].reshape(w[part("k")].shape)


def set_all(pattern, change):
    def apply(w):
        for name in [name for name in w if pattern in name]:
            w[name] = change(w[name])

    return apply


def swapped_layers(w):
    for name in PARTS:
        w[part(name, 0)], w[part(name, 1)] = w[part(name, 1)], w[part(name, 0)]


def columns_of_ranks(w):
    w[part("down")] = torch.cat(w[part("down")].chunk(4, 1)[::-1], 1)


def stale_rank(w):
    random = torch.Generator().manual_seed(0)
    for name in ("q", "gate", "up"):
        rows = w[part(name)].chunk(4)[2]
        rows += torch.randn(rows.shape, generator=random).bfloat16()
    columns = w[part("down")].chunk(4, 1)[2]
    columns += torch.randn(columns.shape, generator=random).bfloat16()


MISTAKES = {
    "gate and up exchanged": (exchanged("gate", "up"), "holds mlp.gate_proj.weight", 4),
    "k and v exchanged": (exchanged("k", "v"), "holds self_attn.k_proj.weight", 4),
    "gate and up interleaved": (interleaved, "mlp.gate_proj.weight and mlp.up_proj.weight, interleaved row by row", 4),
    "fused in another order": (fused_by_groups, "holds rows of", 3),
    "rotary order": (set_all("q_proj", lambda w: rotary(w, 8)), "halves of each of 8 heads are interleaved", 2),
    "heads permuted": (permuted_heads, "permuted: 1, 0, 3, 2, 5, 4, 7, 6", 1),
    "KV heads copied": (copied_heads, "copies of the right blocks 0, 0", 1),
    "transposed": (set_all("o_proj", lambda w: w.T.contiguous()), "transposed", 2),
    "columns of ranks": (columns_of_ranks, "4 blocks of 22 columns are permuted: 3, 2, 1, 0", 1),
    "layers exchanged": (swapped_layers, "layer 0 holds layer 1", 14),
    "norm plus one": (set_all("norm", lambda w: (w.float() + 1).bfloat16()), "has one added", 5),
    "norm minus one": (set_all("norm", lambda w: (w.float() - 1).bfloat16()), "has one subtracted", 5),
    "cast too many": (set_all("mlp", lambda w: w.to(torch.float8_e4m3fn).bfloat16()), "a cast to float8_e4m3fn and back", 6),
    "padded vocabulary": (
        set_all("lm_head", lambda w: torch.cat((w, torch.zeros(6, w.shape[1], dtype=w.dtype)))),
        "6 rows of zeros too many",
        1,
    ),
    "stale rank": (stale_rank, "the file of rank 2 is from another save", 4),
}


@pytest.fixture
def broken(tmp_path):
    def written(change):
        target = tmp_path / "bad"
        shutil.copytree(HF / "llama", target)
        (target / "config.json").unlink()  # with it, a wrong shape is refused before it is compared
        (file,) = target.glob("*.safetensors")
        weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(weights)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={"format": "pt"})
        return target

    return written


@pytest.mark.distinct
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_made_on_purpose_is_named(name, broken):
    change, text, count = MISTAKES[name]
    result = reshard("explain", broken(change), HF / "llama", "--json")
    document = result.document
    assert result.code == 1 and document["unexplained"] == [] and document["missing"] == []
    assert any(text in each["text"] for each in document["mistakes"]), document["mistakes"]
    assert sum(len(each["tensors"]) for each in document["mistakes"]) == count


def test_a_correct_checkpoint_is_not_accused(tmp_path):
    for model in ("llama", "qwen3_moe", "gpt2"):
        out = tmp_path / model
        assert reshard("convert", HF / model, out, "--to", "hf").code == 0
        result = reshard("explain", out, HF / model)
        assert result.code == 0 and "nothing to explain" in result.out


def test_a_change_that_is_no_mistake_stays_unexplained(broken):
    def trained(w):
        w[part("up")] = (w[part("up")].float() * 1.01).bfloat16()

    found = library.explain(broken(trained), HF / "llama")
    assert found.unexplained == [part("up")] and found.mistakes == [] and not found.equal


def test_one_wrong_bit_spoils_an_explanation(broken):
    def change(w):
        exchanged("gate", "up")(w)
        w[part("gate")].view(torch.int16)[3, 5] ^= 1

    found = library.explain(broken(change), HF / "llama")
    assert found.unexplained == [part("gate")] and sum(len(each.tensors) for each in found.mistakes) == 3


def test_mistakes_across_layouts_are_named_with_ranges(broken, tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "good", "--to", "vllm", "--tp", 2).code == 0
    shown = reshard("explain", broken(exchanged("gate", "up")), tmp_path / "good").out
    assert "  holds mlp.up_proj.weight" in shown and "\n    model.layers.{0..1}.mlp.gate_proj.weight\n" in shown


def test_the_tensors_of_a_layer_are_read_one_at_a_time():
    read = []

    def reader(start):
        def right():
            assert not [reference for reference in read if reference() is not None]
            block = np.arange(start, start + 6, dtype=np.uint16).reshape(3, 2)
            read.append(weakref.ref(block))
            return block

        return right

    wrong = np.array([[6, 7], [12, 13], [0, 1]], np.uint16)
    text = mistakes.row_mistake("b", wrong, {"a": reader(0), "b": reader(6), "c": reader(12)})
    assert text == "holds rows of b and c and a, interleaved row by row" and len(read) == 3


def test_a_mistake_in_values_must_explain_every_part():
    """A tensor of several parts: the first was cast to bfloat16 and back, the second was not, or is another."""
    from types import SimpleNamespace

    import numpy as np

    from reshard.geometry.dtypes import F32
    from reshard.verbs.look.explain import _value_mistake

    right = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    cast = (((right.view(np.uint32) + 0x7FFF + (right.view(np.uint32) >> 16 & 1)) >> 16) << 16).view(np.float32)

    def tensor(*parts):
        made = [SimpleNamespace(words=lambda part=part: part.view(np.uint32)) for part in parts]
        return SimpleNamespace(dtype=F32, parts=lambda: iter(made))

    assert "bfloat16" in _value_mistake(tensor(*cast), tensor(*right))
    assert _value_mistake(tensor(cast[0], right[1]), tensor(*right)) is None
    assert _value_mistake(tensor(cast[0], right[1] + 1), tensor(*right)) is None
