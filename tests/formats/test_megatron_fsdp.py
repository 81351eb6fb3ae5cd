"""Megatron-FSDP (fsdp_dtensor): what real runs saved is read under any wrappers, converts to other formats with its state, and is written
under Megatron's own names. That the fixtures equal their truth bit by bit is test_truth.py's."""

import pickle
import shutil
from importlib import import_module

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, described, truth

import reshard
from reshard.containers import dcp_metadata
from reshard.errors import CheckpointError, RequestError, UnsupportedError

HERE = FIXTURES / "megatron_fsdp"
LLAMA, TP2, MIXTRAL = HERE / "llama-dp2", HERE / "llama-tp2-dp2", HERE / "mixtral-ep2"
STEP = "iter_0000002"
WITH_STATE = (LLAMA, TP2, MIXTRAL)


def opened(case, folder=None):
    return reshard.open(folder or case / "checkpoint", model=case / "model")


def content(checkpoint):
    return {(tensor.name, tensor.kind): described(tensor, checkpoint.files) for tensor in checkpoint.index.tensors if tensor.kind != "step"}


def settings(checkpoint):
    """Of each weight: step count, learning rate and weight decay."""
    groups = checkpoint.index.param_groups()
    return {name: tuple(group.settings[key] for key in ("step", "lr", "weight_decay")) for group in groups for name in group.names}


def keys(folder):
    """(name -> shape of the tensors, the names of the objects) in a folder of torch.distributed.checkpoint."""
    metadata = dcp_metadata.read((folder / ".metadata").read_bytes, where="")
    return {name: item.shape for name, item in metadata.tensors.items()}, set(metadata.objects)


def renamed(case, tmp_path, new_name):
    """A copy of a save with other names; `new_name` returns None for what is left out. Names stand in .metadata alone."""
    torch_metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    copy = tmp_path / "renamed"
    shutil.copytree(case / "checkpoint", copy)
    path = copy / STEP / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = None
    metadata.state_dict_metadata = {new: item for name, item in metadata.state_dict_metadata.items() if (new := new_name(name))}
    metadata.storage_data = {
        torch_metadata.MetadataIndex(new, index.offset, index.index): info
        for index, info in metadata.storage_data.items()
        if (new := new_name(index.fqn))
    }
    path.write_bytes(pickle.dumps(metadata))
    return copy


@pytest.mark.parametrize("case", WITH_STATE, ids=lambda case: case.name)
def test_steps_and_rates_are_those_of_the_run(case):
    """The learning rate of the schedule of fixtures/megatron_fsdp/ranks.py after two steps, and two steps."""
    checkpoint = opened(case)
    weights = {name for name, kind in truth(case) if kind == "weight"}
    found = settings(checkpoint)
    assert found.keys() == weights
    assert {step for step, _, _ in found.values()} == {2} and len({rate for _, rate, _ in found.values()}) == 1
    assert {decay for name, (_, _, decay) in found.items() if "norm" in name} == {0.0}
    assert {decay for name, (_, _, decay) in found.items() if "norm" not in name} == {0.1}


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_number_of_wrappers_is_read(tmp_path, depth):
    def new_name(name):
        root, _, rest = name.partition("model.module.")
        if not root and rest:
            return f"model.{'module.' * depth}{rest}"
        return name.replace("module.module.module.", "module." * depth)

    checkpoint = opened(LLAMA, renamed(LLAMA, tmp_path, new_name))
    assert content(checkpoint) == truth(LLAMA) and settings(checkpoint) == settings(opened(LLAMA))


def test_state_of_unknown_parameters_never_hinders_weights(tmp_path):
    renamed_save = renamed(LLAMA, tmp_path, lambda name: name.replace("final_layernorm.weight.exp_avg", "strange_module.weight.exp_avg"))
    checkpoint = opened(LLAMA, renamed_save)
    assert any("strange_module.weight.exp_avg" in note for note in checkpoint.index.facts.notes)
    reshard.convert(reshard.plan(checkpoint, to="hf"), tmp_path / "hf")
    assert reshard.verify(LLAMA / "checkpoint", tmp_path / "hf").equal
    with pytest.raises(RequestError, match=r"strange_module.*is not known"):
        reshard.plan(checkpoint, to="dcp", optimizer=True)


def test_factors_of_a_parameter_keep_their_numbers(tmp_path):
    """SOAP and Shampoo keep lists of matrices: here moment2 of one parameter stands for the first of them."""
    old, new = "linear_proj.weight.exp_avg_sq", "linear_proj.weight.GG.0"
    checkpoint = opened(LLAMA, renamed(LLAMA, tmp_path, lambda name: name.replace(old, new)))
    (tensor,) = (tensor for tensor in checkpoint.index.tensors if tensor.kind == "state")
    assert tensor.name == "model.layers.0.self_attn.o_proj.weight.GG.0"
    reshard.convert(reshard.plan(checkpoint, to="dcp", optimizer=True), tmp_path / "dcp")
    assert "optim.state.model.layers.0.self_attn.o_proj.weight.GG.0" in keys(tmp_path / "dcp")[0]


@pytest.mark.parametrize(
    ("case", "lost", "named"),
    [(MIXTRAL, "local_experts.1.", "experts.1."), (LLAMA, "decoder.layers.0.", "layers.0.")],
    ids=["expert", "stage"],
)
def test_a_lost_expert_or_stage_is_refused(tmp_path, case, lost, named):
    """Ranks write disjoint names, so nothing in the files says that some are missing: the settings of the run do."""
    folder = renamed(case, tmp_path, lambda name: None if lost in name else name)
    with pytest.raises(CheckpointError, match="is in no file") as refused:
        opened(case, folder)
    assert named in str(refused.value)


def test_gate_and_up_that_are_not_separated_follow_the_ranks(tmp_path):
    """Without the handler of SwiGLU, two tensor-parallel ranks hold gate 0, up 0, gate 1, up 1: made here by numpy from a real save."""
    torch = pytest.importorskip("torch")
    checkpoint, stem = opened(TP2), "model.layers.0.mlp."
    view = {name: checkpoint.view(to="hf")[stem + name].numpy() for name in ("gate_proj.weight", "up_proj.weight")}
    gate, up = (np.split(view[name], 2) for name in ("gate_proj.weight", "up_proj.weight"))
    fused = np.concatenate([gate[0], up[0], gate[1], up[1]])
    folder = renamed(TP2, tmp_path, lambda name: None if "linear_fc1.weight_" in name or name.startswith("optimizer.") else name)
    torch.distributed.checkpoint.save(
        {"model": {"module.decoder.layers.0.mlp.linear_fc1.weight": torch.from_numpy(fused)}},
        checkpoint_id=tmp_path / "fused",
        no_dist=True,
    )
    joined_metadata(folder / STEP, tmp_path / "fused")
    again = opened(TP2, folder)
    for name, values in view.items():
        assert np.array_equal(again.view(to="hf")[stem + name].numpy(), values), name


def test_fused_down_projections_are_read_where_their_order_is_known(tmp_path, monkeypatch):
    """mla_down_proj_fusion: the rows of q, then those of kv. Two tensor-parallel ranks may share them or not: that is refused."""
    torch, case = pytest.importorskip("torch"), HERE / "deepseek3"
    view, stem = opened(case).view(to="hf"), "model.layers.0.self_attn."
    parts = [view[f"{stem}{name}.weight"].numpy() for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    state = {"model": {"module.decoder.layers.0.self_attention.linear_qkv_down_proj.weight": torch.from_numpy(np.concatenate(parts))}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "fused", no_dist=True)
    folder = renamed(case, tmp_path, lambda name: None if "layers.0.self_attention.linear_" in name and "_down_proj" in name else name)
    joined_metadata(folder / STEP, tmp_path / "fused")
    assert content(opened(case, folder)) == truth(case)
    sizes = import_module("reshard.formats.megatron.layout.stages").ParallelSizes
    monkeypatch.setattr(sizes, "from_args", lambda args: sizes(tp=2))
    with pytest.raises(UnsupportedError, match="both down projections of 2 tensor-parallel ranks"):
        opened(case, folder)


def joined_metadata(folder, other):
    """The entries of another save become entries of this one."""
    (file,) = other.glob("*.distcp")
    shutil.copy(file, folder / "other.distcp")
    metadata, more = (pickle.loads((place / ".metadata").read_bytes()) for place in (folder, other))
    metadata.state_dict_metadata |= more.state_dict_metadata
    for index, info in more.storage_data.items():
        info.relative_path = "other.distcp"
        metadata.storage_data[index] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("case", sorted(path for path in HERE.iterdir() if (path / "truth.json").exists()), ids=lambda case: case.name)
def test_written_names_and_shapes_are_megatrons(tmp_path, case, dp):
    optimizer = case in WITH_STATE
    tp = 2 if case == TP2 else 1
    plan = reshard.plan(opened(case), to="fsdp_dtensor", dp=dp, tp=tp, vocab_multiple=8, optimizer=optimizer)
    reshard.convert(plan, tmp_path / "out")
    real_tensors, real_objects = keys(case / "checkpoint" / STEP)
    tensors, objects = keys(tmp_path / "out" / (STEP if optimizer else "release"))
    assert tensors == real_tensors and real_objects <= objects
    again = opened(case, tmp_path / "out")
    assert again.index.format == "fsdp-dtensor" and content(again) == truth(case) and settings(again) == settings(opened(case))


@pytest.mark.parametrize("between", ["megatron-dist", "megatron", "dcp", "deepspeed", "fsdp"])
@pytest.mark.parametrize("case", WITH_STATE, ids=lambda case: case.name)
def test_round_trips_keep_the_state(tmp_path, case, between):
    reshard.convert(reshard.plan(opened(case), to=between, optimizer=True), tmp_path / "there")
    reshard.convert(reshard.plan(opened(case, tmp_path / "there"), to="fsdp_dtensor", optimizer=True), tmp_path / "back")
    again = opened(case, tmp_path / "back")
    assert content(again) == truth(case) and settings(again) == settings(opened(case))


def test_masters_are_written_for_weights(tmp_path):
    """A bf16 run of another optimizer has both: Megatron-FSDP keeps the master alone."""
    case = FIXTURES / "megatron" / "llama-tp2"
    plan = reshard.plan(opened(case), to="fsdp_dtensor", optimizer=True)
    reshard.convert(plan, tmp_path / "out")
    told, again = truth(case), content(opened(case, tmp_path / "out"))
    for (name, kind), value in told.items():
        if kind in ("master", "moment1", "moment2"):
            assert again[name, "weight" if kind == "master" else kind] == value, name
    assert any("masters" in note for note in plan.layout.notes)


def test_state_of_a_layer_wise_optimizer_is_named(tmp_path):
    """Muon's layer-wise optimizer saves into the root, beside the steps, and each save replaces the files of the one before."""
    case = FIXTURES / "megatron" / "llama-uneven"
    folder = shutil.copytree(case / "checkpoint", tmp_path / "run")
    (folder / "layer_wise_optimizer_0.pt").write_bytes(b"")
    assert any("layer_wise_optimizer_0.pt is left out" in note for note in opened(case, folder).index.facts.notes)
