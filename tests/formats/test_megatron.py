"""Megatron: any layout from any other, what lies in the files is what Megatron-Core wrote, and what does not belong together is named."""

import itertools
import json
import pickle
import re
import shutil
import zipfile
from collections import Counter
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, described, open_case, truth
from helpers.reshard_command import reshard as run
from helpers.sampled import sampled
from helpers.zip_checksums import with_right_checksums
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import reshard
from reshard.adapter.dcp_reader import DcpFolder
from reshard.adapter.format import Hints
from reshard.containers import torch_frame, torch_zip
from reshard.engine.views import LazyTensor
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.sections import whole
from reshard.storage.files import LocalFiles

LEGACY, DIST, DERIVED = FIXTURES / "megatron", FIXTURES / "megatron_dist", FIXTURES / "megatron_derived"
VERSIONS = FIXTURES / "megatron_versions"
LEGACY_CASES = sorted(path.parent for path in LEGACY.glob("*/truth.json"))
DIST_CASES = sorted(path.parent for path in DIST.glob("*/truth.json"))
DERIVED_CASES = sorted(path.parent for path in DERIVED.glob("*/truth.json"))
VERSION_CASES = sorted(path.parent for path in VERSIONS.glob("*/truth.json"))
CASES = LEGACY_CASES + DIST_CASES + DERIVED_CASES + VERSION_CASES
# What writes other keys than torch_dist does: NeMo puts module. before them, torch_dcp and bucket space keep the optimizer otherwise.
OTHER_KEYS = {"nemo2", "torch-dcp", "llama-dp-reshardable", "mixtral-dp-reshardable"}
assert len(LEGACY_CASES) >= 22 and len(DIST_CASES) >= 9 and len(DERIVED_CASES) >= 9 and len(VERSION_CASES) >= 4, (
    "without fixtures these tests would pass by testing nothing"
)


def label(case):
    return f"{case.parent.name}/{case.name}"


def refused(folder, *texts, model=None, error=CheckpointError):
    with pytest.raises(error) as raised:
        reshard.open(folder, model=model)
    for text in texts:
        assert re.search(text, str(raised.value)), str(raised.value)


def root(path):
    return torch_zip.read(LocalFiles(path.parent), path.name, locate=False)


def model_entries(folder):
    """(rank's folder, chunk) -> name, shape and element type of every entry, in order."""
    found = {}
    for path in sorted(folder.rglob("model_optim_rng.pt")):
        content = root(path)
        for key in content:
            if key.startswith("model"):
                entries = [(name, value if value is None else (value.shape, value.dtype.name)) for name, value in content[key].items()]
                found[path.parent.name, key] = entries
    return found


def sizes_of(opened, folder):
    """The options that ask for the layout that a checkpoint has."""
    facts = opened.index.facts.parallel
    sizes = {name: facts[name] for name in ("tp", "pp", "ep", "vp", "etp") if name in facts}
    layers = {}
    for (rank, chunk), entries in model_entries(folder).items():
        stage = int(rank.split("_")[3]) if sizes["pp"] > 1 else 0
        names = [name.split(".")[2] for name, _ in entries if name.startswith("decoder.layers.")]
        layers[int(chunk.removeprefix("model") or 0), stage] = len(set(names))
    counts = tuple(layers[place] for place in sorted(layers))
    return sizes if len(set(counts)) == 1 else {**sizes, "stage_layers": counts}


def contents(opened, roles=None):
    """What a checkpoint holds of these roles; None: of all."""
    return {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors if roles is None or t.kind in roles}


def has_optimizer(case):
    return any(role == "moment1" for _, role in truth(case))


def expected(case, plan):
    """The truth, but for counts of steps where the target has one number for them."""
    told = {"step"} if plan.layout.inlined_scalars else set()
    return {key: value for key, value in truth(case).items() if key[1] not in told}


def converted(case, target, to, **options):
    opened = open_case(case)
    plan = reshard.plan(opened, to=to, **options)
    assert not reshard.roundtrip(plan).losses
    reshard.convert(plan, target)
    return plan, reshard.open(target)


# ---- any layout from any other ----


@pytest.mark.parametrize("case", LEGACY_CASES, ids=label)
def test_at_the_same_sizes_every_rank_holds_what_megatron_wrote(case, tmp_path):
    sizes = sizes_of(open_case(case), case / "checkpoint")
    plan, found = converted(case, tmp_path / "out", "megatron", optimizer=has_optimizer(case), **sizes)
    assert model_entries(tmp_path / "out") == model_entries(case / "checkpoint")
    assert contents(found) == expected(case, plan)


@pytest.mark.parametrize("case", sampled(CASES, 3), ids=label)
@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_at_other_sizes_nothing_is_lost(case, to, tmp_path):
    sizes = {"tp": 1 if open_case(case).index.facts.parallel.get("tp", 1) > 1 else 2}
    plan, found = converted(case, tmp_path / "out", to, optimizer=has_optimizer(case), **sizes)
    wanted = expected(case, plan)
    # Some keep one count of steps, some one for each parameter.
    assert contents(found, {role for _, role in wanted}) == wanted


@pytest.mark.parametrize("case", [case for case in DIST_CASES if case.name not in OTHER_KEYS], ids=label)
def test_a_distributed_checkpoint_has_the_keys_and_shapes_that_megatron_wrote(case, tmp_path):
    facts = open_case(case).index.facts.parallel
    converted(case, tmp_path / "out", "megatron-dist", optimizer=has_optimizer(case), tp=facts.get("tp", 1), ep=facts.get("ep", 1))
    assert keys(tmp_path / "out") == keys(case / "checkpoint")


def test_what_ranks_have_in_common_may_be_an_entry(tmp_path):
    """As Megatron-Core writes it since 2026: no common.pt, but common_state/shard_0_1, a list with the same dict. Made of a real save."""
    case = DIST / "llama-tp2-pp2"
    folder = shutil.copytree(case / "checkpoint", tmp_path / "copy")
    (common,) = folder.rglob("common.pt")
    with zipfile.ZipFile(common) as archive:
        body = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    assert body.startswith(b"\x80\x02") and body.endswith(b".")
    entry = torch_frame.frame("archive", b"\x80\x02]" + body[2:-1] + b"a.", ())
    path = common.with_name("__9_0.distcp")
    path.write_bytes(b"".join(data for _, data in entry.literals))
    metadata = common.with_name(".metadata")
    said = pickle.loads(metadata.read_bytes())
    said.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    said.storage_data[MetadataIndex("common_state/shard_0_1")] = _StorageInfo(path.name, 0, entry.nbytes)
    metadata.write_bytes(pickle.dumps(said))
    common.unlink()
    (common.parent / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    found = reshard.open(folder, model=case / "model")
    assert contents(found, {role for _, role in truth(case)}) == truth(case) and found.index.facts.step == 2
    (common.parent / path.name).unlink()
    refused(folder, "__9_0.distcp|common", model=case / "model")


def keys(folder):
    (metadata,) = folder.rglob(".metadata")
    found = DcpFolder(LocalFiles(metadata.parent), "").metadata
    objects = {key: None for key in found.objects if not key.startswith("rng_state")}
    return {key: (item.dtype.name, item.shape) for key, item in found.tensors.items()} | objects


def test_round_and_round_comes_back_bit_by_bit(tmp_path):
    """TP2 PP2 -> TP4 PP1 -> TP1 PP4 VPP2 -> TP2 PP2, weights, masters and moments: every byte of every file."""
    case = LEGACY / "llama-layout"
    ways = [
        ("first", {"tp": 2, "pp": 2}),
        ("tp4", {"tp": 4}),
        ("pp4", {"tp": 1, "pp": 4, "vp": 2, "stage_layers": (1, 0, 1, 0, 0, 1, 0, 1)}),
        ("last", {"tp": 2, "pp": 2}),
    ]
    source = open_case(case)
    for name, sizes in ways:
        reshard.convert(reshard.plan(source, to="megatron", optimizer=True, **sizes), tmp_path / name)
        source = reshard.open(tmp_path / name)
    assert contents(source) == truth(case)
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.pt"))
    assert len(files) == 8 and all((tmp_path / "first" / path).read_bytes() == (tmp_path / "last" / path).read_bytes() for path in files)


def test_experts_are_written_as_the_run_has_them(tmp_path):
    case = LEGACY / "mixtral-tp2-ep2"
    names = {}
    for experts in ("sequential", "grouped", "te-grouped"):
        plan, found = converted(case, tmp_path / experts, "megatron", tp=2, ep=2, experts=experts, optimizer=True)
        assert contents(found) == expected(case, plan)
        names[experts] = {
            name for entries in model_entries(tmp_path / experts).values() for name, _ in entries if ".0.mlp.experts." in name
        }
    assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight" in names["sequential"]
    assert names["grouped"] == {f"decoder.layers.0.mlp.experts.weight{number}" for number in (1, 2)}
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight0" in names["te-grouped"]


def test_norms_are_called_as_the_runs_layers_call_them(tmp_path):
    plan, found = converted(LEGACY / "qwen3-tp4", tmp_path / "te", "megatron", tp=4, transformer_impl="transformer_engine", optimizer=True)
    names = {name for entries in model_entries(tmp_path / "te").values() for name, _ in entries}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in names)
    assert contents(found) == expected(LEGACY / "qwen3-tp4", plan)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_experts_are_cut_otherwise_than_what_is_dense(to, tmp_path):
    """Ranks (0, 0) and (1, 1) only: each has its half of what is dense, and two experts whole."""
    case = LEGACY / "mixtral-tp2-ep2"
    plan, found = converted(case, tmp_path / "out", to, tp=2, ep=2, etp=1, optimizer=True)
    assert contents(found) == expected(case, plan) and found.model.dimensions["experts"] == 4
    if to == "megatron":
        assert sorted(path.name for path in (tmp_path / "out" / "iter_0000002").iterdir()) == ["mp_rank_00_000", "mp_rank_01_001"]


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_projections_into_latent_spaces_are_whole_with_transformer_engine(to, tmp_path):
    case = LEGACY / "deepseek3"
    plan, found = converted(case, tmp_path / "out", to, tp=2, transformer_impl="transformer_engine", optimizer=True)
    assert contents(found) == expected(case, plan)
    for rank, entries in model_entries(tmp_path / "out").items():
        shapes = {name: entry[0] for name, entry in entries if entry}
        assert shapes["decoder.layers.0.self_attention.linear_q_down_proj.weight"] == (10, 8), rank
        assert shapes["decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight"] == (10,)


def test_the_optimizer_can_become_the_other_one(tmp_path):
    for case, distributed in (("llama-tp2", True), ("llama-tp2-pp2-dp2", False)):
        _, found = converted(LEGACY / case, tmp_path / case, "megatron", optimizer=True, distributed_optimizer=distributed)
        assert bool(list((tmp_path / case).rglob("distrib_optim.pt"))) is distributed
        without_steps = {key: value for key, value in truth(LEGACY / case).items() if key[1] != "step"}
        assert {key: value for key, value in contents(found).items() if key[1] != "step"} == without_steps
        steps = Counter(group.settings["step"] for group in found.index.param_groups())
        assert list(steps) == [2]


@pytest.mark.parametrize("to", ["dcp", "fsdp"])
def test_one_count_of_steps_becomes_every_parameters(to, tmp_path):
    """The distributed optimizer counts once; torch's wants a count for each parameter, and would not load without."""
    plan, found = converted(LEGACY / "llama-tp2-pp2-dp2", tmp_path / "out", to, dp=2, optimizer=True)
    counts = [LazyTensor(whole(t.name, t.dtype, ()), {t.name: t}, found.files).numpy() for t in found.index.tensors if t.kind == "step"]
    assert counts == [2.0] * len(found.index.by_kind("moment1")) and len(counts) == len(plan.content.weights)


# ---- the model that the settings describe ----


# Before ffn_hidden_size could be said it was four times the model's width, which these small models are not made of.
WIDTHS_UNSAID = {"gpt-v0", "gpt-v1", "gpt-v2"}


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in WIDTHS_UNSAID], ids=label)
def test_the_settings_describe_the_model(case):
    """What is derived from args says what the config of the model says, as far as both say it."""
    theirs = json.loads((case / "model" / "config.json").read_text())
    ours = reshard.open(case / "checkpoint", vocab_size=theirs["vocab_size"]).index.facts.config
    known = {
        "torch_dtype",
        "rope_theta",
        "rope_scaling",
        "rotary_emb_base",
        "rotary_pct",
        "head_dim",
        "num_key_value_heads",
        "num_nextn_predict_layers",
    }
    names = {"n_embd", "n_layer", "n_head", "n_inner", "n_positions"}
    if case.name == "nemo2":
        known.add("max_position_embeddings")  # NeMo says how long its sequences were
    compared = {key for key in ours if key in theirs and key not in known} | names & theirs.keys()
    assert len(compared) >= 8
    assert {key: ours.get(key) for key in compared} == {key: theirs[key] for key in compared}


def test_the_vocabulary_is_asked_for(tmp_path):
    checkpoint = LEGACY / "llama-tp2" / "checkpoint"
    shown = run("inspect", checkpoint)
    assert shown.code == 0 and "--vocab-size" in shown.out
    refusal = run("convert", checkpoint, tmp_path / "out", "--to", "hf")
    assert refusal.code == 2 and "--vocab-size" in refusal.err and "64" in refusal.err and not (tmp_path / "out").exists()
    assert run("convert", checkpoint, tmp_path / "out", "--to", "hf", "--vocab-size", "50").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 50
    # The other side of a comparison knows it.
    assert run("verify", checkpoint, tmp_path / "out").code == 0
    with pytest.raises(CheckpointError, match="64 rows"):
        reshard.open(checkpoint, vocab_size=65)


@pytest.mark.parametrize("case", [LEGACY / "llama-tp2", DIST / "llama-tp2-pp2"], ids=label)
def test_a_model_that_is_not_declared_is_shown_as_it_is_stored(case, tmp_path):
    """And not converted: whose slices they are cannot be known."""
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mamba9", "vocab_size": 50}')
    shown = run("inspect", case / "checkpoint", "--model", other)
    assert shown.code == 0 and "linear_qkv" in shown.out and "mamba9" in shown.out
    refusal = run("convert", case / "checkpoint", tmp_path / "out", "--to", "hf", "--model", other)
    assert refusal.code == 2 and "mamba9" in refusal.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["nemo-tp2", "nemo-tp2-pp2"])
def test_weights_are_not_listed_as_objects(case):
    """NeMo's rank files are the state dict itself, without a root around it."""
    objects = open_case(DERIVED / case).index.objects
    assert objects and all(name.endswith("_extra_state") for name in objects)


# ---- the steps, one by one ----


@pytest.mark.parametrize("case", LEGACY_CASES, ids=label)
def test_each_step_of_reading_returns_a_value_that_prints_as_one_line(case):
    legacy, ranks = (import_module(f"reshard.formats.megatron.read.{name}") for name in ("legacy", "ranks"))
    files = LocalFiles(case / "checkpoint")
    save = ranks.read_ranks(files, import_module("reshard.formats.megatron.layout.save_folders").find_save(files))
    model = legacy.legacy_model(save, Hints(config=json.loads((case / "model" / "config.json").read_text())))
    chunks = legacy.stored_chunks(save, model.megatron)
    values = [save, model]
    for rank in save.ranks:
        tensors = [tensor for tensor, _ in legacy.rank_tensors(rank, model.megatron, save.sizes, chunks)]
        states = legacy.read_optimizers(files, rank, save, model, tensors)
        assert len(tensors) == sum(map(len, rank.chunks))
        values += [rank, *tensors, *states]
    assert all("\n" not in repr(value) and len(repr(value)) < 240 for value in values)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_parameters_lie_in_their_buckets_where_the_buffer_has_them(elements, shared):
    """The layout of a buffer, from the run's settings, and the one from the lengths of its buckets are one thing.

    A bucket ends behind each shared parameter; so the lengths of the buckets follow from the layout.
    """
    chunks, flat_buckets = (import_module(f"reshard.formats.megatron.layout.{name}") for name in ("chunks", "flat_buckets"))
    array = import_module("reshard.geometry.mosaics").Mosaic((1,), ())
    parameters = [chunks.ChunkTensor("", array, (size,), 0, is_shared=i in shared) for i, size in enumerate(elements)]
    offsets, _ = flat_buckets.buffer_of(parameters, None)
    starts, end = [0], 0
    for i in reversed(range(len(elements))):
        end = offsets[i] + elements[i]
        if i in shared and i:
            starts.append(end)
    lengths = [stop - start for start, stop in itertools.pairwise([*starts, end])]
    assert flat_buckets.offsets_in_buckets(parameters, lengths) == offsets
    assert flat_buckets.offsets_in_buckets(parameters, [*lengths[:-1], lengths[-1] + 1]) is None


# ---- one save, all of it ----


def copied(case, tmp_path):
    folder = shutil.copytree(LEGACY / case / "checkpoint", tmp_path / "copy")
    return folder, next(path for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "case, rank, text",
    [
        ("llama-tp2", "mp_rank_01", "tensor-parallel rank 1"),
        ("llama-tp2-pp2-dp2", "mp_rank_01_001", "tensor-parallel rank 1 of stage 1"),
        ("mixtral-tp2-ep2", "mp_rank_00_001", "experts?|is in no file"),
        ("qwen3moe-ep2-pp2", "mp_rank_00_001_001", "is in no file|expert"),
        ("mixtral-etp1", "mp_rank_01_001", "tensor-parallel rank 1"),
    ],
)
def test_a_missing_rank_is_named(case, rank, text, tmp_path):
    folder, save = copied(case, tmp_path)
    shutil.rmtree(save / rank)
    refused(folder, text, model=LEGACY / case / "model")


@pytest.mark.parametrize(
    "case, ranks, text",
    [
        ("llama-tp2", ("mp_rank_00", "mp_rank_01"), "written by rank"),
        ("llama-uneven", ("mp_rank_00_000", "mp_rank_00_002"), "changed places"),
        ("mixtral-tp2-ep2", ("mp_rank_00_000", "mp_rank_01_000"), "written by rank"),
    ],
)
def test_folders_that_have_changed_places_are_told(case, ranks, text, tmp_path):
    folder, save = copied(case, tmp_path)
    first, second = (save / rank for rank in ranks)
    first.rename(save / "aside")
    second.rename(first)
    (save / "aside").rename(second)
    refused(folder, text, model=LEGACY / case / "model")
    shutil.rmtree(second)
    shutil.copytree(first, second)
    refused(folder, text, model=LEGACY / case / "model")


def test_a_rank_of_a_larger_run_is_named(tmp_path):
    folder, save = copied("llama-tp2", tmp_path)
    shutil.copytree(save / "mp_rank_01", save / "mp_rank_02")
    refused(folder, "mp_rank_02", "tensor-parallel size 2")


def test_a_replica_that_drifted_is_found_and_named(tmp_path):
    """A norm that differs between tensor-parallel ranks."""
    folder, save = copied("llama-tp2", tmp_path)
    path = save / "mp_rank_01" / "model_optim_rng.pt"
    stored = torch_zip.read(LocalFiles(path.parent), path.name)["model"]["decoder.layers.0.pre_mlp_layernorm.weight"]
    raw = bytearray(path.read_bytes())
    raw[stored.byte_offset] ^= 1
    path.write_bytes(bytes(raw))
    result = run("convert", folder, tmp_path / "out", "--to", "hf", "--vocab-size", "50")
    assert result.code == 3 and "model.layers.0.post_attention_layernorm.weight" in result.err and "mp_rank_01" in result.err
    assert run("verify", folder, LEGACY / "llama-tp2" / "checkpoint", "--vocab-size", "50").code == 3


def test_ranks_of_two_iterations_are_told_apart(tmp_path):
    folder, save = copied("llama-tp2", tmp_path)
    path = save / "mp_rank_01" / "model_optim_rng.pt"
    raw = path.read_bytes()
    (number,) = re.findall(rb"iterationq(.)", raw, flags=re.DOTALL)  # the word's place in the memo, by which the root's key refers to it
    later = raw.replace(b"h" + number + b"K\x02", b"h" + number + b"K\x03")
    assert later != raw
    path.write_bytes(with_right_checksums(later))
    refused(folder, "iteration 3.*iteration 2", "mp_rank_01")


@pytest.mark.parametrize("case", ["llama-tp2", "llama-tp2-pp2-dp2"])
def test_masters_of_another_save_are_refused(case, tmp_path):
    folder, _ = copied(case, tmp_path)
    opened = open_case(LEGACY / case)
    piece = next(iter(opened.index.by_kind("master")["model.layers.0.self_attn.q_proj.weight"].pieces()))
    path = folder / piece.extent.path
    raw = bytearray(path.read_bytes())
    raw[piece.extent.byte_offset : piece.extent.byte_offset + 4] = b"\x00\x00\x80\x40"
    path.write_bytes(bytes(raw))
    refused(folder, "not what the weight was rounded from", "q_proj")


def test_masters_that_a_distributed_save_has_shifted_are_left_out(tmp_path):
    folder = shutil.copytree(DIST / "llama-tp2-pp2" / "checkpoint", tmp_path / "copy")
    piece = next(iter(open_case(DIST / "llama-tp2-pp2").index.by_kind("master")["model.norm.weight"].pieces()))
    raw = bytearray((folder / piece.extent.path).read_bytes())
    raw[piece.extent.byte_offset : piece.extent.byte_offset + 4] = b"\x00\x00\x80\x40"
    (folder / piece.extent.path).write_bytes(bytes(raw))
    found = reshard.open(folder, vocab_size=50)
    assert {tensor.kind for tensor in found.index.tensors} == {"weight"}
    assert any("left out" in note and "model.norm" in note for note in found.index.facts.notes)
    with pytest.raises(RequestError, match="no optimizer state"):
        reshard.plan(found, to="dcp", optimizer=True)


@pytest.mark.parametrize("name", ["mp_rank_00_000_001/optim.pt", "mp_rank_00/layer_wise_optimizer_1.pt"])
def test_an_optimizer_that_is_not_read_is_told(name, tmp_path):
    folder, save = copied("llama-tp2", tmp_path)
    (save / name).parent.mkdir(exist_ok=True)
    (save / name).write_bytes(b"whatever")
    (note,) = reshard.open(folder, vocab_size=50).index.facts.notes
    assert name in note and "left out" in note


@pytest.mark.parametrize("name, text", [("metadata.json", "no metadata.json.*not finished"), (".metadata", "no .metadata")])
def test_a_distributed_save_that_was_not_finished_is_told(name, text, tmp_path):
    folder = shutil.copytree(DIST / "llama-tp2-pp2" / "checkpoint", tmp_path / "copy")
    next(folder.rglob(name)).unlink()
    refused(folder, text)


@pytest.mark.parametrize("tp, ep, etp", list(itertools.product((1, 2, 4), (1, 2), (1, 2, 4))))
def test_every_shard_is_the_first_one_of_some_rank(tp, ep, etp):
    """A run of megatron-core 0.19.2 with tp 1, ep 2, etp 2 showed it: its bucket arrays of half the experts were left out."""
    sizes = import_module("reshard.formats.megatron.layout.stages").ParallelSizes(tp=tp, ep=ep, etp=etp)
    ranks = list(sizes.ranks())
    dense = [rank.tp_rank for rank in ranks if rank.is_first_dense]
    experts = [(rank.ep_rank, rank.etp_rank) for rank in ranks if rank.is_first_experts]
    assert sorted(dense) == list(range(tp)) and sorted(experts) == list(itertools.product(range(ep), range(etp)))


def test_a_tracker_that_names_nothing_is_told(tmp_path):
    folder, save = copied("llama-tp2", tmp_path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    refused(folder, "iter_0000007 is not there")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert reshard.open(folder, vocab_size=50).index.facts.step == 2
    assert reshard.open(save, vocab_size=50).index.facts.step == 2
    shutil.copytree(save, save.with_name("iter_0000003"))
    refused(folder, "2 checkpoints of 2 steps", error=RequestError)


def test_a_distributed_save_of_verl_is_read_with_the_config_beside_it(tmp_path):
    """dist_ckpt/ and huggingface/ in actor/ (megatron_checkpoint_manager.py); the trainer's tracker, which is called as Megatron's, names
    global_step_100."""
    case, actor = DIST / "llama-tp2-pp2", tmp_path / "global_step_100" / "actor"
    shutil.copytree(case / "checkpoint" / "iter_0000002", actor / "dist_ckpt")
    shutil.copytree(case / "model", actor / "huggingface")
    assert reshard.open(actor).index.format == "megatron-dist"
    for source, out, options in ((actor, "found", {}), (actor / "dist_ckpt", "named", {"model": actor / "huggingface"})):
        reshard.convert(reshard.plan(source, to="hf", **options), tmp_path / out)
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == (tmp_path / "named" / "model.safetensors").read_bytes()
    for out in ("found", "named"):
        shutil.rmtree(tmp_path / out)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    shown = run("inspect", tmp_path).out
    assert "1 checkpoint of 1 step" in shown and "global_step_100/actor" in shown and "latest_checkpointed_iteration.txt names 100" in shown
    assert reshard.open(tmp_path).index.format == "megatron-dist", "the only checkpoint of the run is meant"


def test_a_config_of_another_model_is_refused(tmp_path):
    refused(LEGACY / "llama-tp2" / "checkpoint", "the config says", model=LEGACY / "llama-uneven" / "model")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"tp": 3}, "attention heads"),
        ({"pp": 3}, "do not divide"),
        ({"pp": 2, "stage_layers": (1, 2)}, "stage_layers"),
        ({"ep": 2}, "no experts"),
        ({"vp": 2}, "`pp="),
        ({"dp": 2}, "`dp="),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, text):
    with pytest.raises(RequestError, match=text):
        reshard.plan(open_case(LEGACY / "llama-tp2"), to="megatron", **options)


def test_options_of_megatron_are_refused_elsewhere(tmp_path):
    result = run("convert", LEGACY / "llama-tp2" / "checkpoint", tmp_path / "out", "--to", "hf", "--vocab-size", "50", "--vp", "2")
    assert result.code == 2 and "--vp does not apply to hf" in result.err


def test_layers_that_are_alike_keep_their_own_names():
    # Layers 1 and 2 have experts and are alike. Their keys have numbers, because layer 0 has none.
    plan = reshard.plan(FIXTURES / "hf" / "deepseek_v3", to="megatron-dist")
    assert reshard.roundtrip(plan).losses == ()


@pytest.mark.parametrize("head", ["output_layer.weight", "lm_head.weight", "word_embeddings_for_head.weight"])
def test_a_head_with_a_learning_rate_of_its_own_has_a_group_to_itself(head):
    """Also under the names that it had before Megatron-Core."""
    chunks, optimizer = (import_module(f"reshard.formats.megatron.{name}") for name in ("layout.chunks", "read.optimizer"))
    array = import_module("reshard.geometry.mosaics").Mosaic((8, 4), ())
    names = (head, "decoder.layers.0.mlp.linear_fc1.weight")
    table, weight = (chunks.ChunkTensor(name, array, (8, 4), 0) for name in names)
    groups = [{"is_decoupled_lr": False}, {"is_decoupled_lr": True}]
    (link,) = optimizer.chain_links({"param_groups": groups})
    assert link.members([table, weight]) == [[weight], [table]]
