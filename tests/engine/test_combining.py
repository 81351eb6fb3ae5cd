"""Several checkpoints as one: against float64 numpy on whole tensors bit for bit, whatever their formats and degrees; and every refusal."""

import hashlib
import itertools
import json
import math
import shutil
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF
from helpers.reshard_command import result_tree
from helpers.zip_checksums import with_right_checksums
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
import reshard.engine.transfer
import reshard.geometry.boxes
from reshard.canonical.combining import ema_weights, wsm_weights
from reshard.engine.casts import cast_once
from reshard.engine.origins import mixed
from reshard.errors import CheckpointError, RequestError
from reshard.geometry import dtypes as dtype_table

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
         "F8_E5M2": ml_dtypes.float8_e5m2}  # fmt: skip
NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "F8_E5M2": "float8_e5m2"}
# One model, trained by three frameworks: whole, as DTensors of a mesh of 2 x 2, and split by tensor parallelism with ZeRO-1.
THREE = (FSDP / "full-ddp", FSDP / "hsdp", FIXTURES / "deepspeed_parallel" / "autotp2-z1")
MEGATRON = (FIXTURES / "megatron" / "llama-tp2", FIXTURES / "megatron" / "llama-fp32")

# How many of the 5,360 elements of their mean are another number if it is computed in float32.
FLOAT32_DIFFERS = 2


def nearest(values, dtype):
    """Float64 values as the nearest numbers of a narrow type, ties to the even word: looked up among all numbers of the type."""
    if dtype in ("F32", "F64"):
        return values.astype(NUMPY[dtype])
    bits = 8 * np.dtype(NUMPY[dtype]).itemsize
    words = np.arange(1 << (bits - 1), dtype=f"u{bits // 8}")
    numbers = words.view(NUMPY[dtype])
    finite = numbers[: int(np.isfinite(numbers.astype(np.float32)).sum())].astype(np.float64)
    assert (np.diff(finite) > 0).all()
    size = np.abs(values)
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    middle = (finite[above - 1] + finite[above]) / 2  # exact: the two are neighbours in a narrow type
    even_below = words[above - 1] % 2 == 0
    chosen = np.where((size < middle) | ((size == middle) & even_below), above - 1, above)
    assert (size < finite[-1]).all()
    return np.copysign(finite[chosen], values).astype(NUMPY[dtype])


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def whole(path):
    """The weights of a checkpoint as whole arrays, whose bytes are those that its framework had in memory."""
    checkpoint = reshard.open(path / "checkpoint" if (path / "checkpoint").exists() else path, model=model_of(path))
    content = checkpoint.content()
    found = {name: checkpoint[name].numpy() for name in content.weights}
    dtypes = {name: content.weights[name].dtype.name for name in found}
    arrays = {name: array.view(NUMPY[dtypes[name]]) if array.dtype.kind in "uV" else array for name, array in found.items()}
    if (path / "truth.json").exists():
        truth = json.loads((path / "truth.json").read_text())["tensors"]
        told = [name for name in arrays if "sha256" in truth.get(name, {}).get("weight", {})]
        assert told and all(hashlib.sha256(arrays[name].tobytes()).hexdigest() == truth[name]["weight"]["sha256"] for name in told)
    return arrays


def model_of(path):
    return path / "model" if (path / "model").exists() else None


def sources(paths):
    return [reshard.open(path / "checkpoint", model=model_of(path)) for path in paths]


def written(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, entry in header.items():
                if name != "__metadata__":
                    file.seek(start + entry["data_offsets"][0])
                    data = file.read(entry["data_offsets"][1] - entry["data_offsets"][0])
                    dtype = NUMPY.get(entry["dtype"], np.int64)
                    found[name] = np.frombuffer(data, dtype).reshape(entry["shape"])
    return found


def averaged(inputs, weights, name):
    total = np.float64(weights[0]) * inputs[0][name].astype(np.float64)
    for weight, tensors in zip(weights[1:], inputs[1:], strict=True):
        product = np.float64(weight) * tensors[name].astype(np.float64)
        total = total + product
    return total


def check_average(folder, inputs, weights, dtype="BF16"):
    """Every tensor of an output has the bits of the average of whole arrays."""
    for name, array in written(folder).items():
        assert (bits(array) == bits(nearest(averaged(inputs, weights, name), dtype))).all(), name


def steps(tmp_path, count=3, source=HF / "llama", scale=0.02, dtype=None):
    """Checkpoints of a run that differ a little."""
    found = []
    for i in range(count):
        folder = tmp_path / "run" / f"step-{100 * (i + 1)}"
        shutil.copytree(source, folder)
        (file,) = folder.glob("*.safetensors")
        random, tensors = np.random.default_rng(i), safetensors.numpy.load_file(file)
        changed = {
            name: (array.astype(np.float32) + random.standard_normal(array.shape).astype(np.float32) * scale).astype(dtype or array.dtype)
            for name, array in tensors.items()
        }
        safetensors.numpy.save_file(changed, file, {"format": "pt"})
        found.append(folder)
    return found


def rewritten(folder, change):
    (file,) = folder.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(change(tensors) or tensors, file, {"format": "pt"})


# ---- the bits ----


@pytest.mark.parametrize("weights", [None, (0.2, 0.3, 0.5), (1 / 7, 2 / 7, 4 / 7)], ids=["equal", "decimal", "sevenths"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"])
def test_the_average_of_three_formats_is_that_of_whole_arrays(weights, dtype, tmp_path):
    inputs = [whole(path) for path in THREE]
    asked = True if weights is None else list(weights)
    plan = reshard.plan(sources(THREE), to="hf", average=asked, dtype=None if dtype == "BF16" else NAMES[dtype])
    reshard.convert(plan, tmp_path / "out")
    assert written(tmp_path / "out").keys() == inputs[0].keys() and len(inputs[0]) == 12
    check_average(tmp_path / "out", inputs, weights or (np.float64(1) / 3,) * 3, dtype)


def long_tensors(tmp_path, count):
    """Checkpoints of one tensor that is longer than what is combined at once, and ends in the middle of it."""
    paths, arrays = [], []
    for i in range(count):
        folder, random = tmp_path / f"long-{i}", np.random.default_rng(i)
        folder.mkdir()
        arrays.append({"w": (random.integers(0, 5, (601, 1000)) * 2.0**-7 + 1).astype(ml_dtypes.bfloat16)})
        safetensors.numpy.save_file(arrays[-1], folder / "model.safetensors", {"format": "pt"})
        paths.append(folder)
    return paths, arrays


@pytest.mark.parametrize("count", [2, 3, 9, 40])
def test_long_tensors_are_combined_part_by_part(count, tmp_path):
    paths, inputs = long_tensors(tmp_path, count)
    assert inputs[0]["w"].size > 4 * mixed._STRIP
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "mean")
    total = averaged(inputs, (1 / count,) * count, "w")
    assert (bits(written(tmp_path / "mean")["w"]) == bits(nearest(total, "BF16"))).all()
    scales = [0.3] * (count - 1)
    reshard.convert(reshard.plan(paths[1:], to="hf", task_arithmetic=paths[0], average=scales), tmp_path / "task")
    start = inputs[0]["w"].astype(np.float64)
    total = start
    for scale, tensors in zip(scales, inputs[1:], strict=True):
        difference = tensors["w"].astype(np.float64) - start
        total = total + np.float64(scale) * difference
    assert (bits(written(tmp_path / "task")["w"]) == bits(nearest(total, "BF16"))).all()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8, 64]))
def test_a_mean_of_powers_of_two_has_the_bits_of_float64(data, count):
    """Any words that are finite: zeros of both signs, subnormal numbers, the largest ones, exponents just near and too far apart."""
    finite = st.one_of(st.integers(0, 0x7F7F), st.sampled_from([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F]))
    near = st.tuples(finite, st.lists(st.integers(-17, 17), min_size=count, max_size=count), st.integers(0, (1 << count) - 1))
    columns = data.draw(st.lists(near, min_size=1, max_size=12))
    words = np.zeros((count, len(columns)), np.uint16)
    for at, (word, steps_of_exponent, signs) in enumerate(columns):
        for i, step in enumerate(steps_of_exponent):
            words[i, at] = min(max(word + 128 * step, 0), 0x7F7F) | (signs >> i & 1) << 15
    tensor = SimpleNamespace(values_dtype=dtype_table.BF16)
    average = SimpleNamespace(rule="average", inputs=[tensor] * count)
    found, _ = mixed.combine(average, (1 / count,) * count, words, dtype_table.BF16)
    expected, _ = mixed.combine(average, (1 / count,) * count, list(words), dtype_table.BF16)
    assert (found == expected).all()


def test_a_small_rest_that_float32_loses_decides_a_tie(tmp_path):
    """(1 + 2^-7) + 1 + 2^-17 (1 + 2^-7) - 2^-17: without the 2^-24, which float32 cannot hold, a quarter of it is a tie of bfloat16."""
    rows = [1 + 2.0**-7, 1, 2.0**-17 * (1 + 2.0**-7), -(2.0**-17)]
    paths = []
    for i, number in enumerate(rows):
        (tmp_path / f"{i}").mkdir()
        array = np.array([number, -number], ml_dtypes.bfloat16)
        safetensors.numpy.save_file({"w": array}, tmp_path / f"{i}" / "model.safetensors", {"format": "pt"})
        paths.append(tmp_path / f"{i}")
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "mean")
    above = 0.5 + 2.0**-8
    assert written(tmp_path / "mean")["w"].astype(np.float64).tolist() == [above, -above]


def test_a_tie_that_float64_misses_by_little_is_rounded_to_its_side(tmp_path):
    """Six inputs, half of them the next number: the mean is a tie or beside it, as 1/6 is rounded. In float32 all of them are ties."""
    (first, second), inputs = long_tensors(tmp_path, 2)
    middle = (inputs[0]["w"].astype(np.float64) + 2.0**-8).astype(np.float32)
    total = averaged([inputs[i // 3] for i in range(6)], (1 / 6,) * 6, "w")
    exact, near = total == middle.astype(np.float64), total.astype(np.float32) == middle
    assert (near & ~exact).sum() > 1000
    reshard.convert(reshard.plan([first] * 3 + [second] * 3, to="hf", average=True), tmp_path / "mean")
    assert (bits(written(tmp_path / "mean")["w"]) == bits(nearest(total, "BF16"))).all()


def test_one_rounding_differs_from_two(tmp_path):
    """Else the test above would pass with a rounding to float32 in between."""
    inputs = [whole(path) for path in THREE]
    twice = once = 0
    for name in inputs[0]:
        total = averaged(inputs, (np.float64(1) / 3,) * 3, name)
        once += total.size
        twice += int((bits(nearest(total, "BF16")) != bits(total.astype(np.float32).astype(ml_dtypes.bfloat16))).sum())
    assert 0 < twice < once


def test_megatrons_rule_is_at_most_one_unit_away(tmp_path):
    """Its tool multiplies and adds in float32, in the order of the checkpoints, then casts (Megatron-LM's pull request 5114)."""
    inputs, weights = [whole(path) for path in THREE], (0.2, 0.3, 0.5)
    reshard.convert(reshard.plan(sources(THREE), to="hf", average=list(weights)), tmp_path / "out")
    different = 0
    for name, array in written(tmp_path / "out").items():
        total = np.zeros(array.shape, np.float32)
        for weight, tensors in zip(weights, inputs, strict=True):
            total += np.float32(weight) * tensors[name].astype(np.float32)
        ours, theirs = (bits(each).astype(np.int64) for each in (array, total.astype(ml_dtypes.bfloat16)))
        assert np.abs(ours - theirs).max() <= 1, name  # words of one sign are in the order of the numbers
        different += int((ours != theirs).sum())
    assert different == FLOAT32_DIFFERS


def test_tensor_parallel_ranks_of_an_average_are_slices_of_it(tmp_path):
    paths = steps(tmp_path)
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "hf")
    reshard.convert(reshard.plan(paths, to="vllm", tp=2, average=True), tmp_path / "vllm")
    assert reshard.verify(tmp_path / "hf", tmp_path / "vllm").equal
    halves = [paths[0], tmp_path / "tp4", tmp_path / "dcp"]
    reshard.convert(reshard.plan(paths[1], to="vllm", tp=4), halves[1])
    reshard.convert(reshard.plan(paths[2], to="dcp", dp=3), halves[2])
    reshard.convert(reshard.plan(halves, to="hf", average=True), tmp_path / "mixed")
    assert result_tree(tmp_path / "mixed")["model.safetensors"] == result_tree(tmp_path / "hf")["model.safetensors"]


@pytest.mark.parametrize("parts", [0, 3])
def test_bases_with_deltas_are_combined(parts, tmp_path):
    paths = steps(tmp_path)
    for i, encoding in ((1, "xor"), (2, "overwrite")):
        reshard.delta(paths[i - 1], paths[i], tmp_path / f"d{i}", encoding=encoding)
    chains = [str(paths[0]), f"{paths[0]}+{tmp_path}/d1", f"{paths[0]}+{tmp_path}/d1+{tmp_path}/d2"]
    plan = reshard.plan(chains, to="hf", average=[0.2, 0.3, 0.5])
    for part in range(parts):
        reshard.convert_part(plan, tmp_path / "out", f"{part}/{parts}")
    if not parts:
        reshard.convert(plan, tmp_path / "out")
    inputs = [written(path) for path in paths]
    check_average(tmp_path / "out", inputs, (0.2, 0.3, 0.5))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_bases_with_deltas_may_come_in_any_order_and_from_a_plan_file(order, tmp_path):
    paths = steps(tmp_path)
    for i in (1, 2):
        reshard.delta(paths[i - 1], paths[i], tmp_path / f"d{i}")
    chains = [str(paths[0]), f"{paths[0]}+{tmp_path}/d1", f"{paths[0]}+{tmp_path}/d1+{tmp_path}/d2"]
    reshard.save_plan(reshard.plan([chains[i] for i in order], to="hf", average=[0.2, 0.3, 0.5]), tmp_path / "plan")
    reshard.convert(reshard.load_plan(tmp_path / "plan", [chains[i] for i in order]), tmp_path / "out")
    inputs = [written(paths[i]) for i in order]
    check_average(tmp_path / "out", inputs, (0.2, 0.3, 0.5))
    recorded = json.loads((tmp_path / "out" / "reshard.json").read_text())["combined"]["sources"]
    assert [each["path"] for each in recorded] == [chains[i] for i in order]
    assert [each["fingerprint"] for each in recorded] == [reshard.fingerprint(paths[i]).root for i in order]


def test_types_that_differ_need_a_type_for_the_result(tmp_path):
    first, second = sources(MEGATRON)
    with pytest.raises(RequestError, match=r"embed_tokens.*is BF16 in .*llama-tp2.*, and F32 in .*llama-fp32.*dtype="):
        reshard.plan([first, second], to="hf", average=True)
    reshard.convert(reshard.plan([first, second], to="hf", average=[0.25, 0.75], dtype="fp32"), tmp_path / "out")
    inputs = [whole(path) for path in MEGATRON]
    check_average(tmp_path / "out", inputs, (0.25, 0.75), "F32")


def test_task_arithmetic_adds_weighted_differences_to_the_base(tmp_path):
    base, *others = steps(tmp_path)
    reshard.convert(reshard.plan(others, to="hf", task_arithmetic=base, average=[0.3, 0.4]), tmp_path / "out")
    origin, *changed = (written(path) for path in (base, *others))
    for name, array in written(tmp_path / "out").items():
        start = origin[name].astype(np.float64)
        total = start
        for weight, tensors in zip((0.3, 0.4), changed, strict=True):
            difference = tensors[name].astype(np.float64) - start
            total = total + np.float64(weight) * difference
        assert (bits(array) == bits(nearest(total, "BF16"))).all(), name
    with pytest.raises(RequestError, match="`task_arithmetic=` without `average=`"):
        reshard.plan(others, to="hf", task_arithmetic=base)


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_the_ends_of_slerp_are_the_inputs(t, tmp_path):
    paths = steps(tmp_path, 2)
    # The other input holds ones there: a sum with zero times one would lose the sign of the zero.
    rewritten(paths[int(t)], lambda tensors: tensors["model.norm.weight"].__setitem__(slice(None, 4), -0.0))
    reshard.convert(reshard.plan(paths, to="hf", slerp=t), tmp_path / "out")
    assert written(tmp_path / "out").keys() == written(paths[0]).keys()
    assert all((bits(array) == bits(written(paths[int(t)])[name])).all() for name, array in written(tmp_path / "out").items())


@pytest.mark.parametrize("t", [0.25, 0.5, 0.9])
def test_slerp_is_the_formula_within_its_bound(t, tmp_path):
    """The coefficients are compared with those of numpy's long double: 64 bits of mantissa, and sums in another order."""
    paths = steps(tmp_path, 2, scale=0.5, dtype=ml_dtypes.bfloat16)
    reshard.convert(reshard.plan(paths, to="hf", slerp=t, dtype="fp64"), tmp_path / "out")
    first, second, found = (written(path) for path in (*paths, tmp_path / "out"))
    for name, array in found.items():
        x, y = (tensors[name].astype(np.longdouble) for tensors in (first, second))
        cosine = (x * y).sum() / (np.sqrt((x * x).sum()) * np.sqrt((y * y).sum()))
        angle = np.arccos(cosine)
        assert abs(cosine) < 0.9995
        expected = np.sin((1 - np.longdouble(t)) * angle) / np.sin(angle) * x + np.sin(np.longdouble(t) * angle) / np.sin(angle) * y
        assert (np.abs(array - expected) <= 2.0**-33 * (np.abs(x) + np.abs(y))).all(), name


def test_slerp_between_parallel_tensors_is_the_straight_line(tmp_path):
    paths = steps(tmp_path, 2, scale=0.0)
    rewritten(paths[1], lambda tensors: {name: (array.astype(np.float32) * 2).astype(array.dtype) for name, array in tensors.items()})
    reshard.convert(reshard.plan(paths, to="hf", slerp=0.25), tmp_path / "out")
    inputs = [written(path) for path in paths]
    check_average(tmp_path / "out", inputs, (0.75, 0.25))


OPTIONS = {"average": {"average": "wsm:cosine"}, "slerp": {"slerp": 0.3}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_threads_blocks_strips_and_parts_do_not_change_a_bit(options, tmp_path, monkeypatch):
    paths = steps(tmp_path, 2, scale=0.5)
    reshard.convert(reshard.plan(paths, to="hf", **options), tmp_path / "one", workers=1)
    reshard.convert(reshard.plan(paths, to="hf", **options), tmp_path / "four", workers=4, memory=1 << 30)
    plan = reshard.plan(paths, to="hf", **options)
    for part in ("1/3", "0/3", "2/3"):
        reshard.convert_part(plan, tmp_path / "parts", part)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "four") == result_tree(tmp_path / "parts")
    monkeypatch.setattr(reshard.engine.transfer, "STRIP_BYTES", 1 << 10)
    monkeypatch.setattr(mixed, "_STRIP", 100)
    reshard.convert(reshard.plan(paths, to="hf", **options), tmp_path / "strips", workers=3, memory=1 << 30)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "strips")


def test_slerp_of_many_blocks_shares_the_pass_between_threads(tmp_path, monkeypatch):
    """With blocks of 2,048 elements, tensors have several, which the workers of a tensor sum together."""
    paths = steps(tmp_path, 2, scale=0.5)
    for module in (reshard.geometry.boxes, reshard.engine.pool, reshard.engine.transfer):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 2048)
    for workers in (1, 4):
        reshard.convert(reshard.plan(paths, to="hf", slerp=0.3), tmp_path / f"w{workers}", workers=workers)
    assert result_tree(tmp_path / "w1") == result_tree(tmp_path / "w4")


def test_packed_weights_are_combined_as_values(tmp_path):
    """Inputs: weights in FP8 with scales per block, and the same model in bfloat16."""
    packed = FIXTURES / "hf_fp8" / "llama-fp8-block"
    reshard.convert(reshard.plan(packed, to="hf", dequantize=True, dtype="fp32"), tmp_path / "values")
    with pytest.raises(RequestError, match=r"quantized in .*llama-fp8-block.*dequantize="):
        reshard.plan([packed, packed], to="hf", average=True)
    reshard.convert(reshard.plan([packed, tmp_path / "values"], to="hf", average=True, dequantize=True, dtype="fp32"), tmp_path / "out")
    values = written(tmp_path / "values")
    for name, array in written(tmp_path / "out").items():
        assert (bits(array) == bits(values[name])).all(), name
    reshard.convert(reshard.plan([packed, packed], to="hf", average=[0.3, 0.7], dequantize=True), tmp_path / "bf16")
    check_average(tmp_path / "bf16", [values, values], (0.3, 0.7))


def stored(folder, tensors):
    """A folder of one safetensors file and no config. tensors: {name: (element type, shape)}; all bytes are 1."""
    folder.mkdir(parents=True)
    sizes = {"F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I64": 8}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * sizes.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes([1]) * end)
    return folder


NORM = {"model.norm.weight": ("BF16", [4])}
CODES = {
    "FP8 blocks": {"model.w.weight": ("F8_E4M3", [4, 4]), "model.w.weight_scale_inv": ("F32", [1, 1])},
    "FP8 E5M2": {"model.w.weight": ("F8_E5M2", [4, 4]), "model.w.weight_scale": ("F32", [1])},
    "DeepSeek's scale": {"layers.0.wq.weight": ("F8_E4M3", [4, 4]), "layers.0.wq.scale": ("F8_E8M0", [1, 1])},
    "FP8 whose scales lie elsewhere": {"model.w.weight": ("F8_E4M3", [4, 4])},
    "INT8": {"model.w.weight": ("I8", [4, 4]), "model.w.weight_scale": ("BF16", [4, 1])},
    "bitsandbytes INT8": {"model.w.weight": ("I8", [4, 4]), "model.w.SCB": ("F32", [4])},
    "NF4": {"model.w.weight": ("U8", [8, 1]), "model.w.weight.absmax": ("F32", [1]), "model.w.weight.quant_map": ("F32", [16])},
    "compressed-tensors": {"model.w.weight_packed": ("I32", [4, 1]), "model.w.weight_scale": ("BF16", [4, 1])},
    "NVFP4": {"model.w.weight_packed": ("U8", [4, 8]), "model.w.weight_scale": ("F8_E4M3", [4, 1])},
    "GPTQ": {"w.qweight": ("I32", [1, 4]), "w.qzeros": ("I32", [1, 1]), "w.scales": ("F16", [1, 4]), "w.g_idx": ("I32", [8])},
    "MXFP4 of experts": {"mlp.experts.down_proj_blocks": ("U8", [2, 4, 1, 16]), "mlp.experts.down_proj_scales": ("U8", [2, 4, 1])},
    "MLX": {"w.weight": ("U32", [4, 1]), "w.scales": ("F16", [4, 1]), "w.biases": ("F16", [4, 1])},
    "codes of experts": {"experts.w13": ("U8", [2, 4, 4]), "experts.w13_scale": ("F32", [2])},
}


@pytest.mark.parametrize("form", CODES)
def test_codes_have_no_mean_whatever_the_config_says(form, tmp_path):
    """Their element type and the names beside them tell, where no config.json does."""
    a, b, plain = (
        stored(tmp_path / name, tensors) for name, tensors in (("a", {**NORM, **CODES[form]}), ("b", {**NORM, **CODES[form]}), ("p", NORM))
    )
    codes = next(iter(CODES[form]))
    for sources, options in (
        ([a, b], {}),
        ([a, b], {"dtype": "bf16"}),
        ([a, b], {"average": None, "slerp": 0.5}),
        ([plain, b], {"include": "*norm*"}),
    ):
        if "include" in options:  # codes that are left out do not matter
            reshard.convert(reshard.plan(sources, to="hf", average=True, **options), tmp_path / "out")
            continue
        with pytest.raises(RequestError, match=rf"{codes}.*: it is quantized in .*/a.*Codes and scales have no mean"):
            reshard.plan(sources, to="hf", **{"average": True, **options})


def test_integers_that_are_no_codes_may_be_equal_in_an_average(tmp_path):
    tensors = {
        **NORM, "logit_scale": ("F32", []), "position_ids": ("I64", [1, 4]), "embeddings.position_ids": ("I32", [1, 4]),
        "bn.num_batches_tracked": ("I64", []), "bn.scale": ("F32", [4]), "bn.counts": ("I32", [4]), "router.tid2eid": ("I32", [4]),
        "attn.bias": ("U8", [4, 4]), "norm.zero_centered": ("BF16", [4]),
    }  # fmt: skip
    a, b = stored(tmp_path / "a", tensors), stored(tmp_path / "b", tensors)
    reshard.convert(reshard.plan([a, b], to="hf", average=True), tmp_path / "out")
    assert reshard.verify(tmp_path / "out", a).equal


def test_codes_have_no_mean_in_a_published_form_without_its_config(tmp_path):
    packed = shutil.copytree(FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "a")
    (packed / "config.json").unlink()
    with pytest.raises(RequestError, match="Codes and scales have no mean"):
        reshard.plan([packed, packed], to="hf", average=True)


def test_codes_have_no_mean_in_a_chain_of_deltas_or_in_the_last_steps_of_a_run(tmp_path):
    run = tmp_path / "run"
    paths = [stored(run / f"step-{step}", {**NORM, **CODES["FP8 blocks"]}) for step in (100, 200)]
    reshard.delta(*paths, tmp_path / "delta")
    with pytest.raises(RequestError, match="Codes and scales have no mean"):
        reshard.plan([paths[0], f"{paths[0]}+{tmp_path}/delta"], to="hf", average=True)
    for path in run.rglob("*"):
        shutil.os.utime(path, (1, 1))
    with pytest.raises(RequestError, match="Codes and scales have no mean"):
        reshard.plan(run, to="hf", average=True, last=2)


def test_an_average_can_be_quantized_in_the_same_conversion(tmp_path):
    paths = steps(tmp_path, 2)
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "mean")
    reshard.convert(reshard.plan(tmp_path / "mean", to="hf", quantize="fp8-block"), tmp_path / "two-steps")
    reshard.convert(reshard.plan(paths, to="hf", average=True, quantize="fp8-block"), tmp_path / "one-step")
    trees = [result_tree(tmp_path / name) for name in ("two-steps", "one-step")]
    assert trees[0]["model.safetensors"] == trees[1]["model.safetensors"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(["BF16", "F16", "F8_E5M2"]),
)
def test_a_float64_is_rounded_once(numbers, dtype):
    limit = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    values = np.array([math.remainder(number, limit) for number in numbers])
    words = cast_once(values, dtype_table.from_user(NAMES[dtype]))
    assert (words == bits(nearest(values, dtype))).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_ties_and_their_neighbours_are_rounded_once(dtype):
    size = 8 * np.dtype(NUMPY[dtype]).itemsize
    numbers = np.arange(1 << (size - 1), dtype=f"u{size // 8}").view(NUMPY[dtype])
    numbers = numbers[np.isfinite(numbers.astype(np.float32))].astype(np.float64)[:-1]
    middles = (numbers[:-1] + numbers[1:]) / 2
    values = np.concatenate([numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf), [5e-324, 1e-310]])
    values = np.concatenate([values, -values])
    words = cast_once(values, dtype_table.from_user(NAMES[dtype]))
    assert (words == bits(nearest(values, dtype))).all()


# ---- weights ----


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_wsm_weights_are_the_steps_of_the_decay(count):
    assert wsm_weights("linear", count) == (1 / count,) * count
    with localcontext() as context:
        context.prec = 60
        roots = [1 - (Decimal(i) / count).sqrt() for i in range(count + 1)]
        assert wsm_weights("1-sqrt", count) == tuple(float(a - b) for a, b in pairwise(roots))
    cosines = [(1 + math.cos(math.pi * i / count)) / 2 for i in range(count + 1)]
    for found, here, after in zip(wsm_weights("cosine", count), cosines, cosines[1:], strict=False):
        assert abs(found - (here - after)) < 2e-16
    assert all(abs(math.fsum(wsm_weights(name, count)) - 1) < 1e-15 for name in ("linear", "1-sqrt", "cosine"))


@pytest.mark.parametrize("d", ["0.99", "0.5", "1/3"])
def test_ema_weights_are_those_of_the_running_mean(d):
    """The running mean itself: m = x0, then m = d*m + (1 - d)*x."""
    mean = {0: Fraction(1)}
    for i in range(1, 6):
        mean = {key: value * Fraction(d) for key, value in mean.items()} | {i: 1 - Fraction(d)}
        assert ema_weights(Fraction(d), i + 1) == tuple(float(mean[key]) for key in range(i + 1))


def test_the_formulas_reach_the_record(tmp_path):
    paths = steps(tmp_path)
    for asked, expected in (
        ("wsm:1-sqrt", wsm_weights("1-sqrt", 3)),
        ("ema:0.9", ema_weights(Fraction("0.9"), 3)),
        ("1/4,1/4,1/2", (0.25, 0.25, 0.5)),
    ):
        reshard.convert(reshard.plan(paths, to="hf", average=asked), tmp_path / "out", overwrite=(tmp_path / "out").exists())
        inputs = [written(path) for path in paths]
        assert all(
            (bits(a) == bits(nearest(averaged(inputs, expected, name), "BF16"))).all() for name, a in written(tmp_path / "out").items()
        )
        recorded = json.loads((tmp_path / "out" / "reshard.json").read_text())["combined"]
        assert [(each["path"], each["step"], each["weight"]) for each in recorded["sources"]] == [
            (str(path), 100 * (i + 1), weight) for i, (path, weight) in enumerate(zip(paths, expected, strict=True))
        ]
    notes = " ".join(reshard.open(tmp_path / "out").index.facts.notes)
    assert "step 100 (0.25), step 200 (0.25), step 300 (0.5)" in notes


# ---- refusals ----


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("0.2,0.3,0.6", "sum of the weights is 1.1.*any_sum"),
        ("0.5,0.5", "2 weights for 3 checkpoints"),
        ("wsm:linaer", "no such decay.*Did you mean linear"),
        ("ema:1", "a number between 0 and 1"),
        ("ema:1e999999999", "not weights"),
        ("nonsense", "not weights.*wsm:linear"),
        ("nan,0.5,0.5", "not weights"),
        ("1/0,0,0", "not weights"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(asked, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        reshard.plan(steps(tmp_path), to="hf", average=asked)


def test_another_sum_is_taken_if_it_is_said(tmp_path):
    paths = steps(tmp_path)
    reshard.convert(reshard.plan(paths, to="hf", average="1,1,1", any_sum=True), tmp_path / "out")
    inputs = [written(path) for path in paths]
    assert all((bits(a) == bits(nearest(averaged(inputs, (1, 1, 1), name), "BF16"))).all() for name, a in written(tmp_path / "out").items())


def refused(paths, message, **options):
    with pytest.raises((RequestError, CheckpointError), match=message):
        reshard.convert(reshard.plan(paths, to="hf", **{"average": True, **options}), paths[0].parent / "never")
    assert not (paths[0].parent / "never").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_value_that_is_not_finite_is_refused_with_its_checkpoint(value, number, tmp_path):
    paths = steps(tmp_path)
    rewritten(paths[number], lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__setitem__((5, 7), value))
    what = "a NaN" if np.isnan(value) else "infinite"
    refused(paths, rf"layers\.1\.mlp\.up_proj\.weight: element \[5, 7\] is {what} in .*step-{100 * (number + 1)}")
    refused(paths, "up_proj", average="0.5,0.5,0" if number == 2 else "0,0.5,0.5" if number == 0 else "0.5,0,0.5")


def test_a_nan_is_refused_by_slerp_in_every_thread(tmp_path):
    paths = steps(tmp_path, 2)
    rewritten(paths[1], lambda tensors: tensors["lm_head.weight"].__setitem__((5, 7), np.nan))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: element \[5, 7\] is a NaN in .*step-200"):
        reshard.convert(reshard.plan(paths, to="hf", slerp=0.3), tmp_path / "never", workers=4, memory=1 << 30)


def test_a_missing_tensor_is_refused_with_its_checkpoint(tmp_path):
    paths = steps(tmp_path, 2, HF / "mixtral")
    gone = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    rewritten(paths[1], lambda tensors: {name: array for name, array in tensors.items() if name != gone})
    refused(paths, rf"{gone}.*step-200")


def test_another_vocabulary_is_refused(tmp_path):
    paths = steps(tmp_path, 2, HF / "llama")
    config = json.loads((paths[1] / "config.json").read_text())
    (paths[1] / "config.json").write_text(json.dumps({**config, "vocab_size": 240}))
    rewritten(paths[1], lambda t: t | {name: t[name][:240] for name in ("lm_head.weight", "model.embed_tokens.weight")})
    refused(paths, r"\[250, 32\] in .*step-100, and \[240, 32\] in .*step-200.*vocab_size 250 -> 240")


def test_another_number_of_experts_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"experts\.\d.*has no such tensor.*num_local_experts"):
        reshard.plan([HF / "mixtral", HF / "mixtral-6"], to="hf", average=True)


def test_another_tie_is_refused(tmp_path):
    paths = steps(tmp_path, 2)
    config = json.loads((paths[1] / "config.json").read_text())
    (paths[1] / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    rewritten(paths[1], lambda tensors: {name: array for name, array in tensors.items() if name != "lm_head.weight"})
    refused(paths, r"lm_head\.weight: .*step-200 has no such tensor.*tie_word_embeddings false -> true")


def test_integers_must_be_equal(tmp_path):
    for number, value in enumerate((3, 3, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = np.full((4, 4), number, np.float32)
        safetensors.numpy.save_file({"a.weight": weights, "a.steps": np.array([7, value])}, folder / "model.safetensors")
    reshard.convert(reshard.plan([tmp_path / "0", tmp_path / "1"], to="hf", average=True), tmp_path / "out")
    assert written(tmp_path / "out")["a.steps"].tolist() == [7, 3] and (written(tmp_path / "out")["a.weight"] == 0.5).all()
    with pytest.raises(CheckpointError, match=r"a\.steps: element \[1\] differs in .*/0 and .*/2.*exclude="):
        reshard.convert(reshard.plan([tmp_path / "0", tmp_path / "2"], to="hf", average=True), tmp_path / "never")
    reshard.convert(reshard.plan([tmp_path / "0", tmp_path / "2"], to="hf", average=True, exclude="a.steps"), tmp_path / "without")
    assert (written(tmp_path / "without")["a.weight"] == 1).all()


def test_optimizer_state_is_left_out_and_said(tmp_path):
    both = [DCP / "fsdp2-tp", DCP / "accelerate"]
    plan = reshard.plan(sources(both), to="hf", average=True)
    assert sum(drop.kind == "moment1" for drop in plan.drops) == 24
    with pytest.raises(RequestError, match="Optimizer state is not combined"):
        reshard.plan(sources(both), to="dcp", average=True, optimizer=True)
    with pytest.raises(RequestError, match="Optimizer state is not combined"):
        reshard.plan(sources(both), to="deepspeed", average=True)


def test_several_sources_need_a_word_on_how_they_become_one(tmp_path):
    paths = steps(tmp_path, 2)
    with pytest.raises(RequestError, match="2 sources are given, and nothing says how they become one"):
        reshard.plan(paths, to="hf")
    with pytest.raises(RequestError, match=r"one checkpoint cannot be combined \(average"):
        reshard.plan(paths[0], to="hf", average=True)
    with pytest.raises(RequestError, match="goes between two checkpoints, and 3"):
        reshard.plan([*paths, paths[0]], to="hf", slerp=0.5)
    with pytest.raises(RequestError, match="contradict each other"):
        reshard.plan(paths, to="hf", slerp=0.5, average=True)
    with pytest.raises(RequestError, match="LoRA adapters are not combined"):
        reshard.plan([FIXTURES / "peft" / "plain" / "adapter", FIXTURES / "peft" / "plain" / "adapter"], to="peft", average=True)


def test_steps_in_another_order_are_noted_where_order_counts(tmp_path):
    paths = [FSDP / "full-ddp", FSDP / "hsdp"]
    plan = reshard.plan(sources(paths), to="hf", average="ema:0.9")
    assert any("ema:0.9" in note for note in plan.layout.notes)


# ---- as for `convert` ----


def test_the_last_steps_of_a_run_are_taken_by_their_numbers(tmp_path):
    paths = steps(tmp_path, 3)
    paths[0].rename(tmp_path / "run" / "step-1000")  # the newest, which comes first by its name
    with pytest.raises(RequestError, match="0 complete steps"):
        reshard.plan(tmp_path / "run", to="hf", average=True, last=2)
    for path in (tmp_path / "run").rglob("*"):
        shutil.os.utime(path, (1, 1))
    plan = reshard.plan(tmp_path / "run", to="hf", average="0.25,0.75", last=2)
    assert [source.path.rpartition("/")[2] for source in plan.content.combined.sources] == ["step-300", "step-1000"]
    with pytest.raises(RequestError, match="3 complete steps"):
        reshard.plan(tmp_path / "run", to="hf", average=True, last=4)
    with pytest.raises(RequestError, match="takes the folder of a run, and several sources are given"):
        reshard.plan(paths[1:], to="hf", average=True, last=2)


def test_a_plan_file_records_all_sources(tmp_path):
    paths = steps(tmp_path)
    plan = reshard.plan(paths, to="hf", average="wsm:linear")
    reshard.save_plan(plan, tmp_path / "plan")
    found = reshard.load_plan(tmp_path / "plan", paths)
    assert found.identity() == plan.identity() and found.drops == plan.drops
    reshard.convert(plan, tmp_path / "one")
    for part in ("0/2", "1/2"):
        reshard.convert_part(found, tmp_path / "two", part)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    moved = [tmp_path / "elsewhere" / path.name for path in paths]
    assert reshard.load_plan(tmp_path / "plan", moved).identity() == plan.identity()
    with pytest.raises(RequestError, match="1 source for a plan of 3"):
        reshard.load_plan(tmp_path / "plan", moved[0])
    with pytest.raises(CheckpointError, match=r"was written since|other content"):
        reshard.load_plan(tmp_path / "plan", [moved[0], moved[2], moved[1]])


def test_an_interrupted_average_is_finished_and_a_changed_input_is_noticed(tmp_path):
    from reshard.verbs.convert import conversion

    paths = steps(tmp_path)
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "whole")
    running = conversion(reshard.plan(paths, to="hf", average=True), tmp_path / "out").run()
    next(running)
    running.close()
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "out", resume=True)
    assert result_tree(tmp_path / "out") == result_tree(tmp_path / "whole")
    assert reshard.verify(tmp_path / "out").equal
    assert reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "out", if_changed=True).unchanged
    rewritten(paths[2], lambda tensors: tensors["model.norm.weight"].__setitem__(0, 3))
    assert not reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "out", if_changed=True).unchanged
    assert not reshard.convert(reshard.plan(paths, to="hf", average="1/2,1/4,1/4"), tmp_path / "out", if_changed=True).unchanged


def test_a_target_inside_of_any_source_is_refused(tmp_path):
    paths = steps(tmp_path, 2)
    with pytest.raises(RequestError, match="inside of the source"):
        reshard.convert(reshard.plan(paths, to="hf", average=True), paths[1] / "out")


def test_every_source_is_recorded_with_its_fingerprint_and_compared_with_what_reshard_recorded(tmp_path):
    paths = steps(tmp_path)
    reshard.convert(reshard.plan(paths[1], to="dcp", dp=2), tmp_path / "dcp")
    mixed = [paths[0], tmp_path / "dcp", paths[2]]
    reshard.convert(reshard.plan(mixed, to="vllm", tp=2, average=True), tmp_path / "out", workers=2)
    recorded = json.loads((tmp_path / "out" / "reshard.json").read_text())["combined"]["sources"]
    assert [each["fingerprint"] for each in recorded] == [reshard.fingerprint(path).root for path in mixed]
    (file,) = [path for path in (tmp_path / "dcp").glob("*.distcp") if path.stat().st_size > 50_000][:1]
    data = bytearray(file.read_bytes())
    data[-3000] ^= 1
    file.write_bytes(with_right_checksums(data))
    with pytest.raises(CheckpointError, match=r"does not match reshard\.json.*dcp"):
        reshard.convert(reshard.plan(mixed, to="hf", average=True), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_stores_work_as_for_one_source(tmp_path):
    paths = steps(tmp_path)
    reshard.convert(reshard.plan(paths, to="hf", average=True), tmp_path / "local")
    urls = [f"memory://averages/step-{i}" for i in range(3)]
    for url, path in zip(urls, paths, strict=True):
        reshard.convert(reshard.plan(path, to="hf"), url)
    for sources_of_it in (urls, [urls[0], *paths[1:]], [paths[0], *urls[1:]]):
        reshard.convert(reshard.plan(sources_of_it, to="hf", average=True), "memory://averages/out", overwrite=sources_of_it is not urls)
        assert reshard.verify(tmp_path / "local", "memory://averages/out").equal
