"""Plans of transfers: what the ranks of an engine get from the memory of a run is, byte by byte, what `convert` writes for them."""

import ctypes
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.sampled import sampled

import reshard
from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import from_safetensors
from reshard.live.agreement import agreed_plan
from reshard.live.hello import Hello
from reshard.live.memory.description import MemoryBox, RankDescription
from reshard.live.plan.balance import chosen_holders
from reshard.live.plan.schedule import HeldTensor, Schedule
from reshard.models.lookup import find_model

ROOT = Path(__file__).resolve().parents[2]
HF = ROOT / "fixtures" / "hf"
sys.path += [str(ROOT / "fixtures"), str(ROOT / "examples" / "live")]
import named_weights  # noqa: E402
from nixl_descriptors import descriptors  # noqa: E402

SCRIPT = Path(__file__).resolve().parent / "torch_memory.py"


def stored(folder):
    """name -> (dtype, array of words) of a folder of safetensors files, read by plain numpy."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                dtype = from_safetensors(entry["dtype"], where=name)
                found[name] = dtype, np.frombuffer(raw[start:stop], dtype.word).reshape(entry["shape"])
    return found


def of_rank(folder, rank):
    """The tensors of one rank of vLLM's files."""
    found = {}
    for path in Path(folder).glob(f"model-rank-{rank}-part-*.safetensors"):
        part = path.parent / f"part-{path.name}-only"
        part.mkdir()
        (part / path.name).symlink_to(path)
        found |= stored(part)
    return found


def by_rows(tensors, ranks):
    """Descriptions and arrays of ranks that hold the rows of every tensor as FSDP2 cuts them."""
    said, arrays = [], []
    for rank in range(ranks):
        boxes, held = [], {}
        for name, (dtype, words) in tensors.items():
            per = -(-words.shape[0] // ranks)
            start = min(rank * per, words.shape[0])
            local = words[start : start + per].copy()
            strides = tuple(stride // words.itemsize for stride in local.strides)
            array = HeldTensor(name, dtype, local.shape, strides)
            boxes.append(MemoryBox(array, name, words.shape, Box((start, *(0,) * (words.ndim - 1)), local.shape), strides))
            held[name] = local
        said.append(RankDescription(rank, tuple(boxes)))
        arrays.append(held)
    return said, arrays


def strided(array, sizes, strides, start):
    flat = array.reshape(-1) if array.flags.c_contiguous else np.lib.stride_tricks.as_strided(array, (array.size,), (array.itemsize,))
    return np.lib.stride_tricks.as_strided(flat[start:], sizes, [stride * array.itemsize for stride in strides])


def received(plan, arrays, rank):
    """What a rank holds after an update, box by box, with nothing of the exchange of the product."""
    staged = {each.name: np.zeros(each.shape, each.dtype.word) for each in plan.targets(rank)}
    for name, constant in plan.fills(rank).items():  # in F32 or BF16: the upper bytes of a float32
        word = staged[name].dtype
        staged[name][...] = np.frombuffer(np.float32(constant).tobytes()[-word.itemsize :], word)[0]
    schedule = Schedule.from_bytes(plan.receives(rank).to_bytes())
    for way in schedule.ways:
        for i in range(len(way)):
            form = schedule.forms[way.forms[i]]
            source = arrays[way.source_rank][schedule.sources[way.source_tensors[i]].name]
            target = staged[schedule.targets[way.target_tensors[i]].name]
            box = strided(source, form.sizes, form.source_strides, int(way.source_starts[i]))
            strided(target, form.sizes, form.target_strides, int(way.target_starts[i]))[...] = box
    return staged


def assert_equal(staged, expected):
    assert staged.keys() == expected.keys()
    for name, (_, words) in expected.items():
        assert np.array_equal(staged[name], words), name


@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral", "qwen3_moe", "deepseek_v3", "gemma2", "llama-tied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_receive_what_convert_writes(model, tp, tmp_path):
    said, arrays = by_rows(stored(HF / model), 3)
    plan = reshard.transfers(said, config=json.loads((HF / model / "config.json").read_text()), to="vllm", tp=tp)
    reshard.convert(reshard.plan(HF / model, to="vllm", tp=tp), tmp_path / "out")
    for rank in range(tp):
        assert_equal(received(plan, arrays, rank), of_rank(tmp_path / "out", rank))
    assert plan.nbytes == sum(plan.sends(rank).nbytes for rank in range(3)) == sum(plan.receives(rank).nbytes for rank in range(tp))


def test_two_heads_exchanged_are_noticed(tmp_path):
    said, arrays = by_rows(stored(HF / "llama"), 3)
    config = json.loads((HF / "llama" / "config.json").read_text())
    rows = arrays[0]["model.layers.0.self_attn.q_proj.weight"]
    half = len(rows) // 2
    rows[: 2 * half] = np.concatenate([rows[half : 2 * half], rows[:half]])
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    with pytest.raises(AssertionError, match="qkv_proj"):
        assert_equal(received(reshard.transfers(said, config=config, to="vllm", tp=2), arrays, 0), of_rank(tmp_path / "out", 0))


@pytest.mark.parametrize("mesh", sampled(["fsdp2xtp2", "fsdp4", "hsdp2x2", "replicas3"], 4))
def test_real_torch_ranks_are_described(mesh, tmp_path):
    pytest.importorskip("torch", reason="torch describes its memory")
    made = subprocess.run([sys.executable, SCRIPT, HF / "llama", tmp_path, mesh], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    pairs = [pickle.loads(path.read_bytes()) for path in sorted(tmp_path.glob("rank_*.pickle"))]
    arrays = [{name: _words(tensor) for name, tensor in held.items()} for _, held in pairs]
    plan = reshard.transfers([said for said, _ in pairs], config=json.loads((HF / "llama" / "config.json").read_text()), to="vllm", tp=2)
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    for rank in range(2):
        assert_equal(received(plan, arrays, rank), of_rank(tmp_path / "out", rank))
    if mesh in ("hsdp2x2", "replicas3"):
        # Every byte has copies, so all ranks send the same, up to a box.
        assert max(plan.report.bytes_out) - min(plan.report.bytes_out) <= 1 << 16


def _words(tensor):
    import torch

    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.view(words).numpy()


def test_no_holder_sends_more_than_its_share():
    random = np.random.default_rng(0)
    holders = [random.permuted(np.tile(np.arange(8), (200, 1)), axis=1)[:, :count] for count in (1, 2, 4, 8)]
    nbytes = [random.integers(1, 1000, 200) for _ in holders]
    chosen = chosen_holders(holders, nbytes, 8, 3)
    load = np.zeros(8, np.int64)
    for ranks, sizes, copies in zip(holders, nbytes, chosen, strict=True):
        for replica in copies:
            np.add.at(load, ranks[np.arange(len(ranks)), replica], sizes)
    assert load.max() - load.min() < 0.05 * load.mean()
    assert all(map(np.array_equal, chosen, chosen_holders(holders, nbytes, 8, 3)))


def test_replicas_of_the_engine_share_the_copies():
    said, _ = by_rows(stored(HF / "llama"), 2)
    config = json.loads((HF / "llama" / "config.json").read_text())
    one, two = (reshard.transfers(said, config=config, to="vllm", tp=2, replicas=count) for count in (1, 2))
    assert two.nbytes == 2 * one.nbytes
    assert [two.receives(rank).nbytes for rank in range(4)] == 2 * [one.receives(rank).nbytes for rank in range(2)]


def test_a_run_is_computed_as_its_ranks_say():
    said, _ = by_rows(stored(HF / "llama"), 3)
    config = json.loads((HF / "llama" / "config.json").read_text())
    computed = reshard.transfers(config, of="fsdp", degrees={"dp": 3}, to="vllm", tp=2)
    described = reshard.transfers(said, config=config, to="vllm", tp=2)
    assert computed.report.traffic.tolist() == described.report.traffic.tolist()


MEGATRON_RUNS = {
    "dense": ("llama", {"tp": 2, "pp": 2}),
    "experts, each with its own tensors": ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2, "stage_layers": [1, 2]}),
    "experts of a rank in two tensors": ("qwen3_moe", {"tp": 2, "ep": 4, "experts": "grouped"}),
    "experts whole, uneven stages": ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "stage_layers": [1, 2]}),
    "one tensor for all experts": ("gpt_oss", {"tp": 2, "ep": 2, "etp": 1}),
    "virtual stages": ("qwen3_moe", {"pp": 2, "vp": 2, "stage_layers": [1, 1, 1, 0]}),
}


@pytest.mark.parametrize("model, sizes", MEGATRON_RUNS.values(), ids=MEGATRON_RUNS)
def test_a_computed_run_of_megatron_holds_what_its_files_hold(model, sizes, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="Megatron's files are of torch.save")
    # The settings in the files name an enumeration of Megatron.
    enums = ModuleType("megatron.core.enums")
    enums.ModelType = lambda *values: values
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, enums)
    source = HF / model
    if not source.exists():
        source, config = tmp_path / "hf", json.loads((HF.parent / "megatron_declared" / f"{model}.json").read_text())["config"]
        named_weights.write(source, config, {name: weight.shape for name, weight in find_model(config).weights.items()})
    config = json.loads((source / "config.json").read_text())
    reshard.convert(reshard.plan(source, to="megatron", **sizes), tmp_path / "run")
    reshard.convert(reshard.plan(source, to="vllm", tp=2), tmp_path / "out")
    # The files of the ranks in the order of their numbers: first tensor, then expert, then pipeline ranks.
    files = sorted((tmp_path / "run").rglob("model_optim_rng.pt"), key=lambda path: _rank_of(path, sizes))
    arrays = []
    for path in files:
        root = torch.load(path, weights_only=False)
        chunks = {"": root["model"]} if "model" in root else {f"model{i}.": root[f"model{i}"] for i in range(sizes["vp"])}
        arrays.append({pre + name: _words(each) for pre, chunk in chunks.items() for name, each in chunk.items() if each is not None})
    # The published folder has no layer for multi-token prediction.
    plan = reshard.transfers({**config, "num_nextn_predict_layers": 0}, of="megatron", degrees=sizes, to="vllm", tp=2)
    assert [{each.name for each in memory.tensors} for memory in plan.sources] == [held.keys() for held in arrays]
    for rank in range(2):
        assert_equal(received(plan, arrays, rank), of_rank(tmp_path / "out", rank))


def _rank_of(path, sizes):
    tp, *others = (int(number) for number in path.parent.name.removeprefix("mp_rank_").split("_"))
    pp = others.pop(0) if sizes.get("pp", 1) > 1 else 0
    return pp, others[0] if others else 0, tp


def test_a_format_that_does_not_tell_what_ranks_hold_is_refused():
    config = json.loads((HF / "llama" / "config.json").read_text())
    with pytest.raises(RequestError, match=r"`of=hf`: the format does not tell") as caught:
        reshard.transfers(config, of="hf", degrees={}, to="vllm", tp=2)
    assert "megatron" in caught.value.do and "deepspeed" not in caught.value.do


def hellos(config, tp):
    """What the ranks of an engine say of themselves, as far as a plan needs it."""
    about = {
        "engine": "vllm 0.32.0",
        "config": config,
        "model": "a model",
        "tensors": (),
        "others": frozenset(),
        "is_open": False,
    }
    return [Hello(rank=rank, degrees={"tp": tp, "tp_rank": rank}, **about) for rank in range(tp)]


def test_wide_weights_are_cast_to_the_type_of_the_engine():
    config = {**json.loads((HF / "llama" / "config.json").read_text()), "dtype": "torch.bfloat16"}
    narrow = stored(HF / "llama")
    wide = {name: (from_safetensors("F32", where=name), words.astype(np.uint32) << 16) for name, (_, words) in narrow.items()}
    plans = [agreed_plan(by_rows(tensors, 2)[0], hellos(config, 2)) for tensors in (narrow, wide)]
    assert plans[0].nbytes == plans[1].nbytes
    assert {form.wire.name for form in plans[1].forms} == {"BF16"}
    assert {form.source.name for form in plans[1].forms} == {"F32"}


def test_base_weights_under_the_names_of_peft_are_those_of_the_model():
    config, peft = json.loads((HF / "llama" / "config.json").read_text()), {}
    for name, held in stored(HF / "llama").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        peft[f"{module}.base_layer.weight" if name.endswith("q_proj.weight") else f"{module}.weight"] = held
    plain, named = (agreed_plan(by_rows(tensors, 2)[0], hellos(config, 2)) for tensors in (stored(HF / "llama"), peft))
    assert plain.nbytes == named.nbytes


def test_what_both_sides_say_must_be_one_model():
    config = json.loads((HF / "llama" / "config.json").read_text())
    said, _ = by_rows(stored(HF / "llama"), 2)
    trained = [
        RankDescription(each.rank, each.boxes, config={**config, "num_attention_heads": 4, "num_key_value_heads": 1}) for each in said
    ]
    with pytest.raises(RequestError, match=r"the trainer's model is not the engine's: .*num_attention_heads 8 -> 4"):
        agreed_plan(trained, hellos(config, 2))
    with pytest.raises(RequestError, match=r"engines differ: vllm 0\.32\.0 on one rank, and vllm 0\.32\.0 on TP 2"):
        agreed_plan(said, [*hellos(config, 1), *hellos(config, 2)])
    with pytest.raises(RequestError, match="1 of the trainer: no box"):
        agreed_plan([said[0], "no box describes it"], hellos(config, 2))
    assert agreed_plan(said, [*hellos(config, 2), *hellos(config, 2)]).replicas == 2


def test_runs_are_the_boxes_in_bytes():
    said, arrays = by_rows(stored(HF / "llama"), 3)
    plan = reshard.transfers(said, config=json.loads((HF / "llama" / "config.json").read_text()), to="vllm", tp=2)
    schedule = plan.sends(1)
    expected = received(plan, arrays, 0)
    (way,) = [way for way in schedule.ways if way.target_rank == 0]
    for run in schedule.runs(way):
        source, target = (array.reshape(-1).view(np.uint8) for array in (arrays[1][run.source_tensor], expected[run.target_tensor]))
        for at in np.ndindex(*run.counts):
            a = run.source_offset + sum(i * stride for i, stride in zip(at, run.source_strides, strict=True))
            b = run.target_offset + sum(i * stride for i, stride in zip(at, run.target_strides, strict=True))
            assert np.array_equal(source[a : a + run.length], target[b : b + run.length])


def test_descriptors_are_addresses_that_a_copy_of_memory_takes(tmp_path):
    said, arrays = by_rows(stored(HF / "llama"), 2)
    plan = reshard.transfers(said, config=json.loads((HF / "llama" / "config.json").read_text()), to="vllm", tp=1)
    staged = {each.name: np.zeros(each.shape, each.dtype.word) for each in plan.targets(0)}
    targets = {name: array.ctypes.data for name, array in staged.items()}
    for rank, held in enumerate(arrays):
        schedule, sources = plan.sends(rank), {name: array.ctypes.data for name, array in held.items()}
        for source, target, nbytes in descriptors(schedule, schedule.ways[0], sources, targets):
            ctypes.memmove(target, source, nbytes)
    expected = received(plan, arrays, 0)
    assert all(np.array_equal(staged[name], expected[name]) for name in staged if name not in plan.fills(0))


def test_what_cannot_be_planned_is_refused_before_anything_moves():
    said, _ = by_rows(stored(HF / "llama"), 2)
    config = json.loads((HF / "llama" / "config.json").read_text())
    for changed in ({"vocab_size": 260}, {"num_hidden_layers": 3}, {"num_attention_heads": 4, "num_key_value_heads": 4}):
        with pytest.raises(ReshardError):
            reshard.transfers(said, config={**config, **changed}, to="vllm", tp=2)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        lacking = RankDescription(1, tuple(box for box in said[1].boxes if box.key != "model.norm.weight"))
        reshard.transfers([said[0], lacking], config=config, to="vllm", tp=2)
    with pytest.raises(RequestError, match="one description of each rank"):
        reshard.transfers([said[1]], config=config, to="vllm", tp=2)


def test_a_plan_prints_and_draws_itself():
    said, _ = by_rows(stored(HF / "llama"), 3)
    plan = reshard.transfers(said, config=json.loads((HF / "llama" / "config.json").read_text()), to="vllm", tp=2)
    lines = str(plan).splitlines()
    assert lines[0] == "3 ranks of torch -> vllm on TP 2"
    assert lines[1] == f"  bytes     148 kB ({plan.nbytes:,}) in {len(plan.form)} boxes"
    assert sum(line.startswith("  way ") for line in lines) == len(plan.to_json()["ways"]) == 6
    assert all(plan.picture().count(f">source {rank}</span>") == 1 for rank in range(3))
    assert "<svg" in plan._repr_html_()


def test_a_plan_is_saved_as_json(tmp_path):
    said, _ = by_rows(stored(HF / "llama"), 2)
    plan = reshard.transfers(said, config=json.loads((HF / "llama" / "config.json").read_text()), to="vllm", tp=1)
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["bytes"] == plan.nbytes == sum(way["bytes"] for sends in document["sends"] for way in sends)
