"""The sentences above pictures, against values that are easy to add up by hand."""

from __future__ import annotations

import json
import struct

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.index.balance import shares
from reshard.measures.changes import Change
from reshard.pages.readings import change_reading, layers_reading, percent, reads_reading, share_reading


def changed(role, layer, squares, elements=100):
    return Change(role, layer, role, elements=elements, changed=elements if squares else 0, squares=squares, left_squares=1.0)


def test_a_change_of_one_role_is_named_with_its_layers():
    quiet = [changed("attention.q", layer, 1.0) for layer in range(32)]
    loud = [changed("mlp.down", layer, 20.0 if layer >= 20 else 0.0) for layer in range(32)]
    # 10 of the 12 loud layers have 83 % of what mlp.down has: 200 of all 272.
    text = change_reading([*quiet, *loud])
    assert text == "74 % of the change is in mlp.down of layers 20 to 29; 16 % of the elements are there."


def test_the_named_layers_hold_the_share_that_is_said():
    """The share is that of the very cells that the sentence names."""
    changes = [changed("mlp.down", layer, 30.0 if layer in (4, 5) else 1.0) for layer in range(8)] + [changed("norm", None, 34.0)]
    assert change_reading(changes) == "60 % of the change is in mlp.down of layers 4 to 5; 22 % of the elements are there."


def test_a_change_of_some_layers_in_all_roles_is_named_by_layers():
    changes = [changed(role, layer, 9.0 if layer == 7 else 0.1) for role in ("a", "b", "c", "d") for layer in range(10)]
    assert change_reading(changes) == "91 % of the change is in layer 7, most of all in a; 10 % of the elements are there."


def test_no_change_and_a_change_without_numbers_are_said():
    assert change_reading([changed("a", 0, 0.0)]) == "No weight changed."
    packed = [Change("a", 0, "a", elements=10, changed=10), Change("b", 0, "b", elements=30)]
    assert change_reading(packed) == "100 % of the changed elements is in a; 25 % of the elements are there."


def model(path, files):
    """safetensors files of BF16 matrices. files: {name: rows} for each file, 2 columns."""
    path.mkdir()
    for number, rows in enumerate(files):
        header, at = {}, 0
        for name, count in rows.items():
            header[name] = {"dtype": "BF16", "shape": [count, 2], "data_offsets": [at, at + 4 * count]}
            at += 4 * count
        raw = json.dumps(header).encode()
        (path / f"model-{number + 1:05}-of-{len(files):05}.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * at)
    return reshard.open(path).index


def test_the_fullest_holder_is_named_with_the_cause(tmp_path):
    layers = [{f"model.layers.{layer}.mlp.up_proj.weight": 100} for layer in range(4)]
    layers[2]["model.embed_tokens.weight"] = 44
    index = model(tmp_path / "vocabulary", layers)
    expected = "Of the 4 files, model-00003-of-00004.safetensors holds the most: 576 B, 30 % more than the mean, because of the vocabulary."
    assert share_reading(index, "file", shares(index, "file")) == expected
    assert share_reading(index, "layer", shares(index, "layer")) == "The 4 layers hold 400 B each."
    index = model(tmp_path / "layers", [{"model.layers.0.mlp.up_proj.weight": 300}, {"model.layers.1.mlp.up_proj.weight": 100}])
    text = share_reading(index, "layer", shares(index, "layer"))
    assert text == "Of the 2 layers, layer 0 holds the most: 1.2 kB, 50 % more than the mean, because of its layers."


def test_ranks_are_compared_with_their_mean():
    index = reshard.open(FIXTURES / "fsdp" / "hsdp-tp" / "checkpoint").index
    divided = {share.name: share.nbytes for share in shares(index, "rank")}
    largest, mean = max(divided.values()), sum(divided.values()) / len(divided)
    text = share_reading(index, "rank", shares(index, "rank"))
    assert f"{percent(largest / mean - 1)} more than the mean" in text and text.startswith(
        f"Of the {len(divided)} ranks, rank 0 holds the most"
    )


def test_layers_and_reads_are_counted():
    assert (
        layers_reading({"mlp.up": {0: 60, 1: 60}, "norm": {0: 40, 1: 40}})
        == "mlp.up is 60 % of the bytes of 2 layers; each layer has 100 B."
    )
    uneven = layers_reading({"mlp.up": {0: 60, 1: 60}, "experts": {1: 180}})
    assert uneven == "experts is 60 % of the bytes of 2 layers; layer 0 has the least, 60 B, and layer 1 the most, 240 B."
    sums = {("a", "x"): 75, ("b", "x"): 25, ("a", "y"): 100}
    assert reads_reading(sums) == "A target file reads from 1 to 2 of 2 source files; 88 % of its bytes come from the one that gives most."


@pytest.mark.parametrize("share, text", [(0, "0 %"), (0.0004, "0.04 %"), (0.05, "5 %"), (0.72, "72 %"), (1, "100 %")])
def test_a_share_that_is_not_nothing_never_reads_as_nothing(share, text):
    assert percent(share) == text
