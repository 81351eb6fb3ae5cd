"""Quantized engines: what each target rank holds after an update is, byte by byte, what `convert --quantize` writes for it.

Sources compute the blocks that they hold whole, targets the others. The recipes on tensors are compared with those on arrays.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from live.in_memory import earlier, updated
from live.source_rank import free_port, source_ranks
from live.test_transfers import assert_equal, by_rows, hellos, of_rank, stored
from safetensors.torch import save_file

import reshard
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import from_safetensors
from reshard.live.agreement import agreed_plan
from reshard.live.memory.description import MemoryBox, RankDescription
from reshard.live.plan.schedule import HeldTensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 100, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama whose linear layers have some blocks of 128 x 128."""
    torch.manual_seed(0)
    hidden, inner, at = 256, 768, "model.layers.0."
    shapes = {f"{at}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes |= {f"{at}mlp.down_proj.weight": (hidden, inner), "model.embed_tokens.weight": (100, hidden), "lm_head.weight": (100, hidden)}
    shapes |= dict.fromkeys((f"{at}input_layernorm.weight", f"{at}post_attention_layernorm.weight", "model.norm.weight"), (hidden,))
    made = tmp_path_factory.mktemp("llama")
    save_file({name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def by_columns(tensors, ranks):
    """Descriptions and arrays of ranks that hold columns of every matrix, and all of every vector."""
    said, arrays = [], []
    for rank in range(ranks):
        boxes, held = [], {}
        for name, (dtype, words) in tensors.items():
            width = words.shape[-1] // ranks
            chosen = slice(rank * width, (rank + 1) * width) if words.ndim > 1 else slice(None)
            local = np.ascontiguousarray(words[..., chosen])
            strides = tuple(stride // words.itemsize for stride in local.strides)
            box = Box((0, chosen.start), local.shape) if words.ndim > 1 else Box((0,), local.shape)
            boxes.append(MemoryBox(HeldTensor(name, dtype, local.shape, strides), name, words.shape, box, strides))
            held[name] = local
        said.append(RankDescription(rank, tuple(boxes)))
        arrays.append(held)
    return said, arrays


def copies(tensors, ranks):
    """Descriptions and arrays of ranks that each hold everything."""
    (said,), (held,) = by_rows(tensors, 1)
    return [RankDescription(rank, said.boxes) for rank in range(ranks)], [held] * ranks


def wide(tensors):
    """The same values as F32."""
    return {name: (from_safetensors("F32", where=name), words.astype(np.uint32) << 16) for name, (_, words) in tensors.items()}


# How a run holds the model, and whether its ranks hold all blocks whole.
HELD = {
    "rows of 2": (by_rows, 2, wide, True),
    "rows of 3": (by_rows, 3, dict, False),
    "rows of 8": (by_rows, 8, dict, False),
    "columns of 2": (by_columns, 2, dict, True),
    "columns of 4": (by_columns, 4, wide, False),
    "copies of 3": (copies, 3, dict, True),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("form", ["fp8-block", "mxfp4", "mxfp8"])
def test_ranks_of_a_quantized_engine_hold_what_convert_writes(form, held, tp, folder, tmp_path):
    describe, ranks, typed, is_whole = HELD[held]
    said, arrays = describe(typed(stored(folder)), ranks)
    plan = reshard.transfers(said, config=CONFIG, to="vllm", tp=tp, quantize=form, dtype="bfloat16")
    reshard.convert(reshard.plan(folder, to="vllm", tp=tp, quantize=form), tmp_path / "out")
    staged, nbytes = updated(plan, arrays)
    changed, _ = updated(plan, earlier(arrays), arrays)
    for rank in range(tp):
        expected = of_rank(tmp_path / "out", rank)
        assert_equal(staged[rank], expected)
        assert_equal(changed[rank], expected)
    assert nbytes == plan.nbytes == sum(plan.report.bytes_out) == sum(plan.report.bytes_in)
    assert bool(plan.beside_ranks) != (is_whole and form == "fp8-block")


def quantized_config(folder, form, tmp_path):
    """The config with which the model is written in a form."""
    reshard.convert(reshard.plan(folder, to="hf", quantize=form), tmp_path / form)
    return json.loads((tmp_path / form / "config.json").read_text())


def test_ranks_that_hold_whole_rows_are_sent_scales_of_rows(folder, tmp_path):
    """The values travel, and the rank computes. A rank that has parts of rows cannot: o_proj and down_proj at TP 2."""
    reshard.convert(reshard.plan(folder, to="vllm", tp=1, quantize="fp8-channel"), tmp_path / "out")
    expected = of_rank(tmp_path / "out", 0)
    for describe, ranks in ((by_rows, 3), (by_columns, 2)):
        said, arrays = describe(wide(stored(folder)), ranks)
        plan = reshard.transfers(said, config=CONFIG, to="vllm", tp=1, quantize="fp8-channel", dtype="bfloat16")
        assert_equal(updated(plan, arrays)[0][0], expected)
    with pytest.raises(UnsupportedError, match=r"down_proj.*not made of whole blocks"):
        reshard.transfers(said, config=CONFIG, to="vllm", tp=2, quantize="fp8-channel", dtype="bfloat16")


def test_a_global_scale_is_not_computed_in_a_live_update(folder):
    """It follows from weights that several ranks hold."""
    said, _ = by_rows(stored(folder), 2)
    with pytest.raises(UnsupportedError, match=r"global scale"):
        reshard.transfers(said, config=CONFIG, to="vllm", tp=2, quantize="nvfp4", dtype="bfloat16")


@pytest.mark.parametrize("form", ["fp8-block", "mxfp4", "mxfp8"])
def test_the_form_of_the_engine_is_that_of_its_config(form, folder, tmp_path):
    config = quantized_config(folder, form, tmp_path)
    said, arrays = by_rows(wide(stored(folder)), 3)
    reshard.convert(reshard.plan(folder, to="vllm", tp=2, quantize=form), tmp_path / "out")
    staged, _ = updated(agreed_plan(said, hellos(config, 2)), arrays)
    for rank in range(2):
        assert_equal(staged[rank], of_rank(tmp_path / "out", rank))


def test_an_engine_may_call_the_scales_otherwise_and_leave_modules_out(folder, tmp_path):
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {**CONFIG, "quantization_config": {**settings, "modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}}
    said, arrays = by_rows(stored(folder), 3)
    reshard.convert(reshard.plan(folder, to="vllm", tp=2, quantize="fp8-block"), tmp_path / "out")
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "plain")
    staged, _ = updated(agreed_plan(said, hellos(config, 2)), arrays)
    for rank in range(2):
        # What attention holds of its own depends on the method, and nothing is sent for it.
        written, plain = (
            {name: each for name, each in of_rank(tmp_path / out, rank).items() if ".attn." not in name} for out in ("out", "plain")
        )
        expected = {name.replace("weight_scale", "weight_scale_inv"): each for name, each in written.items()}
        name = "model.layers.0.self_attn.o_proj.weight"
        del expected[f"{name}_scale_inv"]
        assert_equal({name: each for name, each in staged[rank].items() if ".attn." not in name}, expected | {name: plain[name]})


def test_a_form_that_is_not_computed_is_refused_by_its_name(folder, tmp_path):
    said, _ = by_rows(stored(folder), 2)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    with pytest.raises(RequestError, match=r"INT4 \(GPTQ, group 128\).*fp8-block and mxfp4"):
        agreed_plan(said, hellos({**CONFIG, "quantization_config": settings}, 2))


@pytest.mark.parametrize("form", ["fp8-block", "mxfp4"])
def test_ranks_of_processes_compute_what_convert_writes(form, folder, tmp_path):
    reshard.convert(reshard.plan(folder, to="vllm", tp=2, quantize=form), tmp_path / "out")
    with source_ranks(2) as trainer:
        trainer.ask("load", files=str(folder), copies=True)
        trainer.ask("stand_in", tp=2, port=free_port(), served=quantized_config(folder, form, tmp_path), quantize=form)
        planned = trainer.ask("join")[0]["nbytes"]
        assert {report["nbytes"] for report in trainer.ask("update")} == {planned}
        for rank, found in enumerate(trainer.ask("stand_in_held")[0]):
            written = {name: words for name, (_, words) in of_rank(tmp_path / "out", rank).items() if ".attn." not in name}
            expected = {name: hashlib.sha256(words.tobytes()).hexdigest() for name, words in written.items()}
            assert {name: digest for name, digest in found.items() if ".attn." not in name} == expected
