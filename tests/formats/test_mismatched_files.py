"""Files of several ranks, steps or runs under one name: each mixture is named, and no good checkpoint is accused of being one.

Each scenario changes a copy of a checkpoint that a real framework wrote. "Another step" is the same file with other values: the last bit of
each element is flipped, as small as the difference of two steps can be.
"""

import json
import re
import shutil
import struct
import zipfile
from importlib import import_module

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF, open_case
from helpers.sampled import sampled

import reshard
from reshard.canonical.content import Selection
from reshard.errors import CheckpointError
from reshard.storage.files import LocalFiles

DEEPSPEED = ("deepspeed", "deepspeed_parallel", "deepspeed_versions")


def copied(case, tmp_path):
    return shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "copy")


def model_of(case):
    folder = FIXTURES / case / "model"
    return folder if folder.exists() else None


def refused(folder, *texts, model=None):
    with pytest.raises(CheckpointError) as error:
        reshard.open(folder, model=model)
    for text in texts:
        assert re.search(text, str(error.value)), str(error.value)


def exchange(first, second):
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def change_elements(folder, path, change, *, kinds, model=None):
    """Apply `change` to the elements of every piece in one file, as an array of words. Each memory is changed once."""
    opened, raw = reshard.open(folder, model=model), bytearray((folder / path).read_bytes())
    changed = set()
    for tensor in opened.index.tensors:
        for piece in tensor.pieces() if tensor.kind in kinds else ():
            extent, nbytes = piece.extent, piece.box.volume * tensor.dtype.itemsize
            if extent.path == path and extent.byte_offset not in changed:
                changed.add(extent.byte_offset)
                words = np.frombuffer(raw, tensor.dtype.word, nbytes // tensor.dtype.itemsize, extent.byte_offset)
                change(words)
    assert changed, f"{path} holds nothing of the kinds {kinds}"
    (folder / path).write_bytes(raw)


def flip_last_bit(words):
    words ^= np.array(1, words.dtype)


def one_step_more(words):
    values = words.view(np.float32)
    values += 1


def next_masters(words):
    """fp32 masters as far away as their weights in bf16 or fp16 are after a step."""
    values = words.view(np.float32)
    values *= np.float32(1.02)


def zero_cases():
    folders = (path for family in DEEPSPEED for path in sorted((FIXTURES / family).iterdir()))
    return [
        str(path.relative_to(FIXTURES))
        for path in folders
        if len(list(path.glob("checkpoint/*/*zero_pp_rank_1_mp_rank_00_optim_states.pt"))) == 1
        and not list(path.glob("checkpoint/*/zero_pp_rank_0_*model_states.pt"))
    ]


ZERO_1_AND_2 = zero_cases()
assert len(ZERO_1_AND_2) >= 20, "without fixtures these tests would pass by testing nothing"


def optimizer_files(folder):
    return sorted(folder.glob("*/*zero_pp_rank_[01]_mp_rank_00_optim_states.pt"))


# ---- DeepSpeed: masters beside weights ----


@pytest.mark.parametrize("case", ZERO_1_AND_2)
def test_optimizer_files_that_changed_places_are_named(case, tmp_path):
    folder = copied(case, tmp_path)
    exchange(*optimizer_files(folder))
    refused(folder, "pp_rank_[01]_mp_rank_00_optim_states|another save", model=model_of(case))


@pytest.mark.parametrize("case", ZERO_1_AND_2)
def test_an_optimizer_file_that_was_copied_over_another_is_named(case, tmp_path):
    folder = copied(case, tmp_path)
    first, second = optimizer_files(folder)
    shutil.copy(first, second)
    refused(folder, "pp_rank_[01]_mp_rank_00_optim_states", model=model_of(case))


@pytest.mark.parametrize("case", ZERO_1_AND_2)
def test_masters_of_another_step_with_the_same_counters_are_named(case, tmp_path):
    folder = copied(case, tmp_path)
    second = optimizer_files(folder)[1]
    change_elements(folder, str(second.relative_to(folder)), next_masters, kinds={"master"}, model=model_of(case))
    refused(folder, re.escape(second.name), "does not round to the weight", model=model_of(case))


def model_files():
    """Every file with weights beside masters: of a model, a layer, an expert."""
    for family in DEEPSPEED:
        for path in sorted((FIXTURES / family).iterdir()):
            for file in sorted(path.glob("checkpoint/*/*model_states.pt")):
                if re.match("layer_|expert_|mp_rank_", file.name) and not re.search("fp32|elastic", path.name):
                    yield str(path.relative_to(FIXTURES)), str(file.relative_to(path / "checkpoint"))


@pytest.mark.parametrize(
    "case, path",
    sampled([pair for pair in model_files() if not re.search("moe-ep2-dp4-z2|autoep", pair[0]) or "xpert_3" in pair[1]], 3),
)
def test_weights_of_another_step_are_named(case, path, tmp_path):
    trained = {tensor.name for tensor in open_case(FIXTURES / case).index.by_kind("master").values()}
    weights = [tensor for name, tensor in open_case(FIXTURES / case).index.by_kind("weight").items() if name in trained]
    if not any(path in primary_paths(tensor) for tensor in weights):
        pytest.skip("none, as in the file of a pipeline stage, or replicas only, which a conversion compares")
    folder = copied(case, tmp_path)
    change_elements(folder, path, flip_last_bit, kinds={"weight"}, model=model_of(case))
    refused(folder, "does not round to the weight|disagree", model=model_of(case))


def test_universal_masters_of_another_step_are_named(tmp_path):
    folder = copied("universal/z1-groups", tmp_path)
    path = sorted(folder.glob("*/zero/*up_proj.weight/fp32.pt"))[0]
    change_elements(folder, str(path.relative_to(folder)), next_masters, kinds={"master"})
    refused(folder, "up_proj", "does not round to the weight")


@pytest.mark.parametrize("change", [exchange, shutil.copy])
@pytest.mark.parametrize("first, second", [("up_proj", "gate_proj"), ("q_proj", "o_proj"), ("q_proj", "k_proj")])
def test_masters_of_other_universal_parameters_are_named(first, second, change, tmp_path):
    folder = copied("universal/z1-groups", tmp_path)
    change(*(next(folder.glob(f"*/zero/*layers.0*{name}.weight/fp32.pt")) for name in (first, second)))
    refused(folder, f"{first}|{second}", "does not round to the weight|has it as|elements")


@pytest.mark.parametrize("other", ["*down_proj.weight/exp_avg.pt", "*up_proj.weight/step.pt"])
def test_moments_of_other_universal_parameters_are_named(other, tmp_path):
    folder = copied("universal/z1-groups", tmp_path)
    shutil.copy(*(next(folder.glob(f"*/zero/*layers.0{name}")) for name in (other, "*up_proj.weight/exp_avg.pt")))
    refused(folder, "up_proj.weight", r"exp_avg.pt has it as \[.*\], .* as \[|elements")


@pytest.mark.parametrize("case", ["moe-ep2-z0", "moe-ep1-z1", "moe-ep2-dp4-z2"])
def test_an_expert_that_was_copied_over_another_is_named(case, tmp_path):
    folder = copied(f"deepspeed_parallel/{case}", tmp_path)
    shutil.copy(next(folder.glob("*/layer_0_expert_0_*")), next(folder.glob("*/layer_0_expert_1_*")))
    refused(folder, "expert_0_mp_rank_00.*expert_1_mp_rank_00", "the same expert")


def test_masters_that_are_nan_as_their_weights_are_are_no_mixture(tmp_path):
    """A run that diverged: the bits of a NaN differ between processors."""
    folder = copied("deepspeed/z2-bf16-3", tmp_path)
    index = reshard.open(folder).index

    def fill(kind, word):
        for tensor in index.by_kind(kind).values():
            for piece in tensor.pieces():
                raw = bytearray((folder / piece.extent.path).read_bytes())
                np.frombuffer(raw, tensor.dtype.word, piece.box.volume, piece.extent.byte_offset)[:] = word
                (folder / piece.extent.path).write_bytes(raw)

    fill("weight", 0xFFC1)
    fill("master", 0x7FC12345)
    assert reshard.open(folder).index.tensors
    fill("weight", 0x3F80)
    refused(folder, "does not round to the weight")


# ---- copies ----


@pytest.mark.parametrize(
    "case, first, second",
    [
        ("deepspeed/z3-bf16", "*pp_rank_0_*optim_states.pt", "*pp_rank_1_*optim_states.pt"),
        ("deepspeed/z3-4", "*pp_rank_1_*optim_states.pt", "*pp_rank_3_*optim_states.pt"),
        ("deepspeed/z3-subgroups", "*pp_rank_0_*optim_states.pt", "*pp_rank_1_*optim_states.pt"),
        ("deepspeed/z3-old-container", "*pp_rank_0_*optim_states.pt", "*pp_rank_1_*optim_states.pt"),
        ("deepspeed_parallel/autotp2-z0", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        ("dcp/fsdp2-3", "__0_0.distcp", "__1_0.distcp"),
        ("dcp/hsdp", "__2_0.distcp", "__3_0.distcp"),
    ],
)
def test_a_file_that_was_copied_over_another_ranks_is_named(case, first, second, tmp_path):
    folder = copied(case, tmp_path)
    target = next(folder.rglob(second))
    shutil.copy(next(folder.rglob(first)), target)
    refused(folder, re.escape(target.name), "the same bytes", model=model_of(case))


def test_a_copied_tensor_parallel_rank_is_named(tmp_path):
    """Its weights and its optimizer: the masters round to the weights."""
    folder = copied("deepspeed_parallel/autotp2-z1", tmp_path)
    for path in folder.glob("*/*mp_rank_00_*.pt"):
        shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    refused(folder, "mp_rank_01_", "the same bytes", "different parts of", model=model_of("deepspeed_parallel/autotp2-z1"))


def test_equal_files_of_constant_tensors_are_no_copies(tmp_path):
    """As a model that was filled with ones, or has not been filled yet, is saved."""
    folder = copied("deepspeed/z3-bf16", tmp_path)
    first, second = sorted(folder.glob("*/*optim_states.pt"))
    shutil.copy(first, second)
    refused(folder, "the same bytes")
    index = index_without_checks(folder)
    for path in (first, second):
        raw = bytearray(path.read_bytes())
        for piece in (piece for tensor in index.tensors if tensor.kind != "step" for piece in tensor.pieces()):
            if piece.extent.path == str(path.relative_to(folder)):
                np.frombuffer(raw, np.uint32, piece.box.volume, piece.extent.byte_offset)[:] = 0x3F800000
        path.write_bytes(raw)
    assert reshard.open(folder).index.tensors


def test_files_that_differ_somewhere_are_no_copies(tmp_path):
    """Although their ends, where a zip has its directory, are equal."""
    folder = copied("deepspeed/z3-bf16", tmp_path)
    first, second = sorted(folder.glob("*/*optim_states.pt"))
    shutil.copy(first, second)
    master = next(iter(index_without_checks(folder).by_kind("master").values()))
    raw = bytearray(second.read_bytes())
    raw[master.shards.extent(0).byte_offset] ^= 1
    second.write_bytes(raw)
    assert reshard.open(folder).index.tensors


def index_without_checks(folder):
    from reshard.adapter import registry
    from reshard.adapter.format import Hints

    files = LocalFiles(str(folder))
    return registry.detect(files)[0].read(files, Hints())


def test_replicas_with_the_same_bytes_are_no_copies(tmp_path):
    """The files of two replicas of a shard may be equal, byte by byte."""
    folder, model = copied("torch_checkpointing/hsdp", tmp_path), model_of("torch_checkpointing/hsdp")
    shutil.copy(folder / "rank_0" / "model.safetensors", folder / "rank_2" / "model.safetensors")
    assert reshard.open(folder, model=model).index.tensors
    shutil.copy(folder / "rank_0" / "model.safetensors", folder / "rank_1" / "model.safetensors")
    refused(folder, "rank_1/model.safetensors", "the same bytes", model=model)


# ---- DCP: step counts ----


def stepped(case, tmp_path, *, only=None):
    """A copy in which one file's step counts are one higher; with `only`, that many of its parameters."""
    folder = copied(case, tmp_path)
    opened, model = reshard.open(folder, model=model_of(case)), model_of(case)
    steps = [tensor for tensor in opened.index.tensors if tensor.kind == "step"]
    path = steps[0].shards.path(0)
    raw = bytearray((folder / path).read_bytes())
    for tensor in [tensor for tensor in steps if tensor.shards.path(0) == path][:only]:
        values = np.frombuffer(raw, np.float32, 1, tensor.shards.extent(0).byte_offset)
        values += 1
    (folder / path).write_bytes(raw)
    return folder, model


@pytest.mark.parametrize("case", ["dcp/fsdp2", "dcp/fsdp2-tp"])
def test_files_whose_step_counts_disagree_are_named(case, tmp_path):
    folder, model = stepped(case, tmp_path)
    refused(folder, "distcp", "different steps", model=model)


def test_parameters_without_gradients_may_have_counted_fewer_steps(tmp_path):
    folder, model = stepped("dcp/fsdp2", tmp_path, only=5)
    assert reshard.open(folder, model=model).index.tensors


# ---- Megatron ----


@pytest.mark.parametrize(
    "case, first, second",
    [
        ("mixtral-tp2-ep2", "mp_rank_00_000", "mp_rank_00_001"),
        ("mixtral-grouped", "mp_rank_01_000", "mp_rank_01_001"),
        ("qwen3moe-ep2-pp2", "mp_rank_00_000_000", "mp_rank_00_000_001"),
        ("qwen3moe-ep2-pp2", "mp_rank_00_001_000", "mp_rank_00_001_001"),
        ("llama-uneven", "mp_rank_00_001", "mp_rank_00_002"),
    ],
)
def test_megatron_ranks_that_changed_places_are_named(case, first, second, tmp_path):
    folder = copied(f"megatron/{case}", tmp_path)
    exchange(*(next(folder.glob(f"*/{name}")) for name in (first, second)))
    refused(folder, second, "changed places", model=model_of(f"megatron/{case}"))


@pytest.mark.parametrize(
    "key, replaced, by",
    [
        ("params_dtype", b"ctorch\nbfloat16\n", b"ctorch\nfloat32\n"),
        ("num_attention_heads", b"num_attention_heads", None),
        ("kv_channels", b"kv_channels", None),
    ],
)
def test_stages_of_two_runs_are_named(key, replaced, by, tmp_path):
    folder = copied("megatron/llama-tied-pp2", tmp_path)
    path = next(folder.glob("*/mp_rank_00_001/model_optim_rng.pt"))
    members = {info.filename: zipfile.ZipFile(path).read(info) for info in zipfile.ZipFile(path).infolist()}
    (pickle,) = (name for name in members if name.endswith("data.pkl"))
    data = members[pickle]
    if by is None:  # the number follows the name, after the opcode that remembers it
        at = re.search(re.escape(replaced) + rb"(q.|r....|\x94)K", data, re.DOTALL).end()
        members[pickle] = data[:at] + bytes([data[at] * 2]) + data[at + 1 :]
    else:
        members[pickle] = data.replace(replaced, by)
    assert members[pickle] != data
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    refused(folder, "mp_rank_00_001", f"{key}=", "several runs", model=model_of("megatron/llama-tied-pp2"))


# ---- leftovers ----


def test_a_layer_of_a_longer_run_is_named_by_its_buffers(tmp_path):
    folder = copied("deepspeed_parallel/pp2-dp2-z1", tmp_path)
    layer = next(folder.glob("*/layer_04-model_states.pt"))
    shutil.copy(layer, layer.with_name("layer_07-model_states.pt"))
    refused(folder, "layer_07-model_states", r"no layer 7", "left over")


def test_last_layers_without_trained_parameters_are_noted(tmp_path):
    """They may be frozen: without buffers nothing tells the two apart."""
    torch = pytest.importorskip("torch")
    folder = copied("deepspeed_parallel/pp2-dp2-z1", tmp_path)
    tag = next(folder.glob("global_step*"))
    torch.save({"head.weight": torch.randn(50, 16).bfloat16(), "head.bias": torch.randn(50).bfloat16()}, tag / "layer_07-model_states.pt")
    notes = reshard.open(folder).index.facts.notes
    assert any("layer_07-model_states.pt" in note and "left over" in note for note in notes), notes
    for case in ("pp2-dp2-z1", "pp2-dp2-bf16-optimizer"):
        assert not any("left over" in note for note in open_case(FIXTURES / "deepspeed_parallel" / case).index.facts.notes)


def test_a_layer_that_may_be_a_tied_module_is_not_accused():
    """Its parameters are trained under the tied key, and its buffers have names below it."""
    layers = import_module("reshard.formats.deepspeed.read.pipeline_layers")
    stored = {0: {"weight", "seen"}, 1: {"up.weight", "seen"}, 2: {"down.weight"}}
    assert layers.untrained_layers(stored, {"tied_modules.embed.weight", "1.up.weight"}) == {2}
    assert layers.untrained_layers(stored, {"1.up.weight"}) == {0, 2}


def test_a_parameter_that_no_model_file_lists_is_left_over(tmp_path):
    folder = copied("universal/z1-groups", tmp_path)
    parameter = sorted(folder.glob("*/zero/*layers.0*up_proj.weight"))[0]
    shutil.copytree(parameter, parameter.with_name(parameter.name.replace("layers.0", "layers.7")))
    refused(folder, r"layers\.7\..*up_proj", "param_shapes", "left over")


# ---- Hugging Face: a tensor in two shards ----


def with_copy_in_another_shard(tmp_path, change=lambda data: data):
    """llama-sharded, with one tensor of the first shard also in the last one. Returns the folder and the tensor's name."""
    folder = shutil.copytree(HF / "llama-sharded", tmp_path / "copy")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, *_, last = sorted(set(index.values()))
    name = next(name for name, shard in index.items() if shard == first)
    (header, data), (other_header, other_data) = (split(folder / shard) for shard in (first, last))
    start, stop = header[name]["data_offsets"]
    other_header[name] = {**header[name], "data_offsets": [len(other_data), len(other_data) + stop - start]}
    text = json.dumps(other_header).encode()
    (folder / last).write_bytes(struct.pack("<Q", len(text)) + text + other_data + change(data[start:stop]))
    return folder, name


def split(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_a_tensor_in_two_shards_is_noted_and_compared(tmp_path):
    folder, name = with_copy_in_another_shard(tmp_path)
    opened = reshard.open(folder)
    assert any(name in note and "two files" in note for note in opened.index.facts.notes)
    assert len(opened.index.by_kind("weight")[name].shards) == 2
    assert reshard.verify(folder, HF / "llama-sharded").equal


def test_two_shards_with_different_copies_are_named(tmp_path):
    folder, name = with_copy_in_another_shard(tmp_path, lambda data: bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CheckpointError, match=re.escape(name)) as error:
        reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "out")
    assert "disagree" in str(error.value) and "-00003-of-" in str(error.value)


# ---- what is said of a good checkpoint ----


def test_masters_are_sampled_in_every_file(tmp_path):
    """A check that reads little must still look into each file."""
    from reshard.engine.checks import masters

    case = open_case(FIXTURES / "deepspeed_parallel" / "moe-ep2-dp4-z2")
    weights, found = case.index.by_kind("weight"), case.index.by_kind("master")
    pairs = {name: (weights[name], found[name]) for name in found if name in weights and weights[name].shape == found[name].shape}
    sampled = {path for paths in masters.sampled_files(pairs, 2).values() for path in paths}
    expected = {path for pair in pairs.values() for tensor in pair for path in primary_paths(tensor)}
    assert sampled == expected and len(expected) > 8


def primary_paths(tensor):
    from reshard.index.shards import primary_rows

    return {tensor.shards.path(int(row)) for row in np.flatnonzero(primary_rows(tensor.shards)) if tensor.shards.sizes[row].all()}


def test_a_conversion_of_weights_alone_may_leave_the_optimizer_away(tmp_path):
    """The remedy that the error offers."""
    folder = copied("deepspeed/z2-bf16-3", tmp_path)
    exchange(*optimizer_files(folder))
    refused(folder, "move the optimizer's files away")
    for path in folder.glob("*/*optim_states.pt"):
        path.unlink()
    assert reshard.open(folder).content(Selection()).weights
