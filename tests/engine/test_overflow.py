"""A cast that makes finite values infinite is refused, or counted where it is allowed. The oracle is numpy on whole arrays, and torch."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers.fixture_places import HF
from helpers.reshard_command import reshard as run
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.engine import casts
from reshard.engine.casts import cast, cast_once, values_beyond
from reshard.errors import TargetError, ValuesOverflow
from reshard.geometry import dtypes
from reshard.verbs.convert import Sharing, conversion

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
         "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz}  # fmt: skip
# The largest value that is rounded to the largest finite one: half a step above that, if a tie goes to it.
LARGEST = {"F16": (65520.0, False), "F8_E4M3": (464.0, True), "F8_E5M2": (61440.0, False), "F8_E4M3FNUZ": (248.0, False),
           "F8_E5M2FNUZ": (61440.0, False), "BF16": (float(np.float64(2) ** 128 - np.float64(2) ** 119), False)}  # fmt: skip


def counted(array, source, target, convert=cast):
    """How many values a cast counts as too large."""
    values_beyond()
    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    convert(words, dtypes.from_safetensors(source, where=""), dtypes.from_safetensors(target, where=""))
    return values_beyond()


def too_large(values, target):
    limit, tie_is_finite = LARGEST[target]
    sizes = np.abs(values.astype(np.float64))
    return int((np.isfinite(sizes) & (sizes > limit if tie_is_finite else sizes >= limit)).sum())


PAIRS = [(source, target) for source in ("F32", "F16", "BF16") for target in LARGEST if source != target]


@pytest.mark.distinct
@pytest.mark.parametrize("source, target", PAIRS)
def test_every_value_of_a_type_is_counted_if_it_is_too_large(source, target):
    """All words of 16 bits, as they are or as float32, NaN and infinities included, which are not counted."""
    words = np.arange(1 << 16, dtype=np.uint16)
    values = (words.astype(np.uint32) << 16).view(np.float32) if source == "F32" else words.view(NUMPY[source])
    with np.errstate(all="ignore"):
        assert counted(values, source, target) == too_large(values, target)


@pytest.mark.parametrize("target", LARGEST)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_neighbours_of_the_limit_are_told_apart(target, sign):
    limit, tie_is_finite = LARGEST[target]
    single, expected = np.float32(limit), [0, int(not tie_is_finite), 1]
    neighbours = np.array([np.nextafter(single, np.float32(0)), single, np.nextafter(single, np.float32(np.inf))]) * np.float32(sign)
    assert [counted(np.append(np.ones(1000, np.float32), value), "F32", target) for value in neighbours] == expected

    def once(words, _, to):
        cast_once(words.view(np.float64), to)

    # 464 and what is less than a float32 above it both become 448 in F8_E4M3, which no count needs to tell apart.
    doubles = np.array([np.nextafter(limit, 0), limit, float(neighbours[2]) * sign]) * sign
    assert [counted(value, "F64", target, once) for value in doubles.reshape(3, 1)] == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=40),
    st.sampled_from([("F16", torch.float16), ("BF16", torch.bfloat16), ("F8_E5M2", torch.float8_e5m2)]),
)
def test_the_count_is_that_of_infinities_that_torch_makes(values, target):
    name, dtype = target
    numbers = torch.tensor(values, dtype=torch.float32)
    expected = int((torch.isinf(numbers.to(dtype).float()) & torch.isfinite(numbers)).sum())
    assert counted(numbers.numpy(), "F32", name) == expected


def test_a_wider_type_is_not_looked_at(monkeypatch):
    """What holds all values of the source costs nothing."""
    monkeypatch.setattr(np, "bitwise_and", None)
    for source, target in (("BF16", "F32"), ("F16", "F32"), ("F16", "BF16"), ("F32", "F64"), ("F8_E5M2", "F16")):
        first = casts._first_beyond(*(dtypes.from_safetensors(name, where="") for name in (source, target)))
        assert first == casts._first_beyond(*[dtypes.from_safetensors(source, where="")] * 2), (source, target)


# ---- conversions ----


def model_with(folder, **too_large):
    """A copy of a bfloat16 model in which some elements of q_proj or of others are large, beside some that were not finite before."""
    shutil.copytree(HF / "llama", folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:2] = np.array([np.inf, np.nan]).astype(ml_dtypes.bfloat16)
    for name, count in too_large.items():
        (full,) = (key for key in tensors if key.endswith(f"layers.0.self_attn.{name}.weight"))
        tensors[full].reshape(-1)[:count] = np.array([1.6e7, -1.6e7] * count).astype(ml_dtypes.bfloat16)[:count]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
SENTENCE = rf"4 elements of 2 tensors are beyond float16 and become inf: {K} \(1\), {Q} \(3\)"


@pytest.mark.parametrize("to", ["hf", "vllm", "dcp", "megatron"])
def test_a_cast_that_makes_values_infinite_is_refused_and_leaves_nothing(to, tmp_path):
    model = model_with(tmp_path / "model", q_proj=3, k_proj=1)
    options = {"tp": 2} if to == "vllm" else {}
    with pytest.raises(ValuesOverflow, match=SENTENCE + ".*allow_overflow=True") as refused:
        reshard.convert(reshard.plan(model, to=to, dtype="fp16", **options), tmp_path / "out")
    assert (refused.value.id, refused.value.exit_code) == ("overflow", 1) and not (tmp_path / "out").exists()
    result = reshard.convert(reshard.plan(model, to=to, dtype="fp16", allow_overflow=True, **options), tmp_path / "out")
    assert result.overflow == {Q: 3, K: 1} == result.to_json()["overflow"] and len(result.notes) >= 1
    assert reshard.convert(reshard.plan(model, to=to, dtype="bf16", **options), tmp_path / "bf16").overflow == {}


def test_the_command_says_it_and_takes_the_switch(tmp_path):
    model = model_with(tmp_path / "model", q_proj=1)
    command = ("convert", model, tmp_path / "out", "--to", "hf", "--dtype", "fp16")
    refused = run(*command)
    assert refused.code == 1 and f"1 element of 1 tensor is beyond float16 and becomes inf: {Q} (1)" in refused.err
    assert "--allow-overflow" in refused.err and "[overflow]" in refused.err and not (tmp_path / "out").exists()
    allowed = run(*command, "--allow-overflow", "--json")
    assert allowed.code == 0 and json.loads(allowed.out)["overflow"] == {Q: 1}
    compared = run("verify", model, tmp_path / "out", "--cast")
    assert compared.code == 0 and "1 element of 1 tensor is beyond float16 and becomes inf" in compared.out
    assert run(*command[:2], tmp_path / "kept", *command[3:], "--keep-dtype", Q).code == 0


def test_what_was_there_is_kept_when_a_replacement_is_refused(tmp_path):
    model = model_with(tmp_path / "model", q_proj=1)
    reshard.convert(reshard.plan(model, to="hf"), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    for options in ({"overwrite": True}, {"if_changed": True}):
        with pytest.raises(ValuesOverflow):
            reshard.convert(reshard.plan(model, to="hf", dtype="fp16"), tmp_path / "out", **options)
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == before and reshard.verify(tmp_path / "out").equal


@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_part_that_overflows_leaves_its_task_open_and_the_result_counts_all_parts(place, tmp_path):
    model = model_with(tmp_path / "model", q_proj=3, k_proj=1)
    out = tmp_path / "out" if place == "folder" else f"memory://{tmp_path.name}/out"
    plan = reshard.plan(model, to="hf", dtype="fp16", max_shard_size=4000)
    refused = 0
    for part in range(3):
        try:
            assert not reshard.convert_part(plan, out, f"{part}/3").complete
        except ValuesOverflow:
            refused += 1
    assert refused
    with pytest.raises(TargetError, match=r"\d+ of \d+ tasks are missing"):
        conversion(plan, out, sharing=Sharing(finish=True))
    allowed = reshard.plan(model, to="hf", dtype="fp16", max_shard_size=4000, allow_overflow=True)
    results = [reshard.convert_part(allowed, out, f"{part}/3") for part in range(3)]
    assert results[-1].result.overflow == {Q: 3, K: 1}
    assert reshard.verify(model, out, cast=True).equal
    assert reshard.convert(allowed, out, if_changed=True).overflow == {Q: 3, K: 1}


def test_a_resumed_run_counts_what_the_first_one_wrote(tmp_path):
    model = model_with(tmp_path / "model", q_proj=3, k_proj=1)
    plan = reshard.plan(model, to="hf", dtype="fp16", allow_overflow=True)
    reshard.convert_part(plan, tmp_path / "out", "1/2")
    result = reshard.convert(plan, tmp_path / "out", resume=True)
    assert result.overflow == {Q: 3, K: 1}


def test_averages_deltas_merges_and_dequantized_weights_are_counted(tmp_path):
    model, other = model_with(tmp_path / "model", q_proj=3), model_with(tmp_path / "other", q_proj=1)
    for folder in (model, other):  # an average refuses what is not finite
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][:2] = 1
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = np.mean(
        [safetensors.numpy.load_file(folder / "model.safetensors")[Q].astype(np.float64) for folder in (model, other)], axis=0
    )
    with pytest.raises(ValuesOverflow, match=rf"{int((np.abs(expected) >= 65520).sum())} elements of 1 tensor are beyond float16"):
        reshard.convert(reshard.plan([model, other], to="hf", average=True, dtype="fp16"), tmp_path / "average")
    reshard.delta(other, model, tmp_path / "delta")
    with pytest.raises(ValuesOverflow, match="3 elements of 1 tensor"):
        reshard.convert(reshard.plan(f"{other}+{tmp_path}/delta", to="hf", dtype="fp16"), tmp_path / "applied")
    reshard.convert(reshard.plan(HF / "llama", to="hf", dtype="fp16"), tmp_path / "fp16")
    with pytest.raises(ValuesOverflow, match=rf"3 elements of 1 tensor are beyond float16 and become inf: {Q} \(3\).*base of a wider type"):
        reshard.delta(tmp_path / "fp16", model, tmp_path / "cast", cast=True)
    assert not (tmp_path / "cast").exists()
    with pytest.raises(ValuesOverflow, match="1 element of 1 tensor is beyond float16 and becomes inf"):
        reshard.cache(reshard.plan(other, to="vllm", dtype="fp16"), root=tmp_path / "cache")


def test_a_sum_of_exact_floats_is_counted_once(tmp_path):
    """The mean of bfloat16 numbers is computed in float32 first, and where that may be inexact again in float64."""
    large = np.full((4, 4), 3e38).astype(ml_dtypes.bfloat16)
    for name in "ab":
        (tmp_path / name).mkdir()
        safetensors.numpy.save_file({"w.weight": large}, tmp_path / name / "model.safetensors")
    plan = reshard.plan([tmp_path / "a", tmp_path / "b"], to="hf", average=[1, 1], any_sum=True)
    with pytest.raises(ValuesOverflow, match=r"16 elements of 1 tensor are beyond bfloat16 and become inf: w.weight \(16\)"):
        reshard.convert(plan, tmp_path / "out")


def test_saturation_and_nan_are_named_as_what_they_become(tmp_path):
    (tmp_path / "a").mkdir()
    safetensors.numpy.save_file({"w.weight": np.array([[500, 460, np.inf]], np.float32)}, tmp_path / "a" / "model.safetensors")
    for dtype, what in (("fp8", "float8_e4m3fn and becomes 448"), ("float8_e4m3fnuz", "float8_e4m3fnuz and become nan")):
        with pytest.raises(ValuesOverflow, match=what):
            reshard.convert(reshard.plan(tmp_path / "a", to="hf", dtype=dtype), tmp_path / "out")
