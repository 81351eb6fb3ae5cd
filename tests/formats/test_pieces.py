"""A table that published files hold in pieces: the files of hf have the pieces, all others have it whole, and no piece may be missing."""

import sys
from hashlib import sha256

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, ranks
from helpers.reshard_command import reshard as command

import reshard
from reshard.errors import IncompleteTensor

sys.path.insert(0, str(FIXTURES))
import named_weights

DECLARATION = """language: 2
model_type: mymodel
extends: llama
like: llama
dimensions: {rows: table_rows, parts: pieces}
weights:
  model.layers.*.table.weight: {role: my.table, split: column, shape: [rows, hidden], pieces: "piece_{parts}.weight"}
"""
CONFIG = {
    "model_type": "mymodel", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "tie_word_embeddings": True, "table_rows": 20, "pieces": 3,
}  # fmt: skip
PIECES = {0: 7, 1: 7, 2: 6}


def name_of(layer, piece):
    return f"model.layers.{layer}.table.piece_{piece}.weight"


@pytest.fixture
def model(tmp_path):
    layer = {
        **{f"self_attn.{word}_proj.weight": (16, 16) for word in "qkvo"}, "mlp.gate_proj.weight": (32, 16), "mlp.up_proj.weight": (32, 16),
        "mlp.down_proj.weight": (16, 32), "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
        **{f"table.piece_{piece}.weight": (rows, 16) for piece, rows in PIECES.items()},
    }  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,),
        **{f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()},
    }  # fmt: skip
    (tmp_path / "my.yaml").write_text(DECLARATION)
    return written(tmp_path, "model", shapes)


def written(folder, name, shapes):
    named_weights.write(folder / name, CONFIG, shapes)
    (folder / name / "reshard.architecture.yaml").write_text(DECLARATION)
    return folder / name, shapes


def test_ranks_share_the_rows_of_the_whole_table(model, tmp_path):
    folder, shapes = model
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "served")
    table = np.concatenate([named_weights.elements_of(name_of(1, piece), shapes[name_of(1, piece)]) for piece in PIECES])
    for rank, state in enumerate(ranks(tmp_path / "served").values()):
        held = state["model.layers.1.table.weight"]
        assert (held["dtype"], held["shape"]) == ("BF16", [10, 16])
        assert held["sha256"] == sha256(table[10 * rank : 10 * rank + 10].tobytes()).hexdigest()


@pytest.mark.parametrize("via", ["hf", "dcp", "vllm"])
def test_a_folder_of_hugging_face_has_the_pieces_again(model, tmp_path, via):
    folder, _ = model
    reshard.convert(reshard.plan(folder, to=via), tmp_path / via)
    reshard.convert(reshard.plan(tmp_path / via, to="hf"), tmp_path / "back")
    stored = {tensor.name: tensor.shape for tensor in reshard.open(tmp_path / "back").index.tensors}
    assert [stored.get(name_of(0, piece)) for piece in PIECES] == [(rows, 16) for rows in PIECES.values()]
    reshard.verify(folder, tmp_path / "back").raise_if_different()


def test_a_missing_piece_is_named(model, tmp_path):
    _, shapes = model
    lacking, _ = written(tmp_path, "lacking", {name: shape for name, shape in shapes.items() if name != name_of(1, 1)})
    with pytest.raises(IncompleteTensor, match=r"model.layers.1.table.weight: \[7:14, 0:16\] of \[20, 16\] is in no file"):
        reshard.plan(lacking, to="vllm", tp=2)
    looked = command("inspect", lacking).out
    assert "partial" in looked and "[7:14, 0:16] of [20, 16] is in no file" in looked
    found = command("doctor", lacking, "--json").document
    missing = [finding["tensor"] for finding in found["findings"] if finding["id"] == "missing-weight"]
    assert missing == [name_of(1, 1)]
