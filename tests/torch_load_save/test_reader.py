"""Reader: `dcp.load` in one process fills what a trainer's state dict asks for, from every format, and refuses what does not fit."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import reshard
from reshard.canonical.content import Selection
from reshard.storage.files import LocalFiles

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

from reshard.torch import Reader  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LLAMA = FIXTURES / "hf" / "llama"
ROLES = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "step": "step"}
CASES = [
    "dcp/fsdp2", "dcp/groups", "dcp/flat-optim", "dcp/accelerate", "fsdp/hsdp", "fsdp/fsdp1-sharded", "deepspeed/z3-bf16",
    "deepspeed/z1-groups", "universal/autotp2-z1", "megatron/llama-tp2-pp2-dp2", "megatron/mixtral-tp2-ep2", "megatron_dist/llama-tp2-pp2",
]  # fmt: skip


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def zeros(roles, role):
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
    return torch.zeros(roles[role]["shape"], dtype=dtypes[roles[role]["dtype"]])


def load(state, path, **options):
    dcp.load(state, storage_reader=Reader(path, **options))


def refusal(state, path, **options):
    """The text of the error, which torch puts into a CheckpointException."""
    with pytest.raises(CheckpointException) as raised:
        load(state, path, **options)
    return str(raised.value)


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_holds_the_truth(case):
    folder = FIXTURES / case
    options = {"model": folder / "model"} if (folder / "model").is_dir() else {}
    truth = json.loads((folder / "truth.json").read_text())["tensors"]
    content = reshard.open(folder / "checkpoint", **options).content(Selection(optimizer=True, masters=True))
    weights = {name: zeros(truth[name], "master" if "master" in truth[name] else "weight") for name in content.weights}
    states = {
        name: {kind: zeros(truth[name], role) if role in truth[name] else torch.tensor(0.0) for kind, role in ROLES.items()}
        for name in content.weights
        if "moment1" in truth[name]
    }
    groups = [
        {"params": [*group.names], "lr": 0.5, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "fused": None}
        for group in content.param_groups()
    ]
    load({"model": weights, "optim": {"state": states, "param_groups": groups}}, folder / "checkpoint", optimizer=True, **options)
    for name, tensor in weights.items():
        assert digest(tensor) == truth[name]["master" if "master" in truth[name] else "weight"]["sha256"], name
    for name, state in states.items():
        assert {kind: digest(state[kind]) for kind, role in ROLES.items() if role in truth[name]} == {
            kind: truth[name][role]["sha256"] for kind, role in ROLES.items() if role in truth[name]
        }, name
        assert state["step"] > 0
    for group, stored in zip(groups, content.param_groups(), strict=True):
        assert group["fused"] is None and group["params"] == [*stored.names]
        for key in ("lr", "betas", "eps", "weight_decay"):
            value = stored.settings[key]
            assert group[key] == (tuple(value) if isinstance(value, list) else value) and type(group[key]) is not list


def test_a_flattened_optimizer_is_filled():
    folder = FIXTURES / "dcp" / "fsdp2"
    content = reshard.open(folder / "checkpoint").content(Selection(optimizer=True))
    name, (group,) = next(iter(content.weights)), content.param_groups()
    weights = {key: torch.zeros(tensor.shape, dtype=torch.bfloat16) for key, tensor in content.weights.items()}
    flat = {f"state.{name}.exp_avg": torch.zeros(content.weights[name].shape, dtype=torch.bfloat16)}
    flat |= {f"state.{name}.step": torch.tensor(0.0), f"param_groups.{name}.lr": 0.5, f"param_groups.{name}.betas": (0.0, 0.0)}
    load({"model": weights, "optimizer": flat}, folder / "checkpoint", optimizer=True)
    truth = json.loads((folder / "truth.json").read_text())["tensors"][name]
    assert (
        digest(flat[f"state.{name}.exp_avg"]) == truth["moment1"]["sha256"]
        and digest(flat[f"state.{name}.step"]) == truth["step"]["sha256"]
    )
    assert flat[f"param_groups.{name}.lr"] == group.settings["lr"] and flat[f"param_groups.{name}.betas"] == (0.9, 0.999)


def llama(change=lambda name: name):
    return {change(name): torch.zeros_like(tensor) for name, tensor in load_file(LLAMA / "model.safetensors").items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name,
        lambda name: f"model.{name}",
        lambda name: f"state_dict.model._orig_mod.{name}",
        lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    ],
)
def test_roots_and_wrappers_before_the_names_are_seen_through(change):
    state, truth = llama(change), load_file(LLAMA / "model.safetensors")
    load(state, LLAMA)
    assert all(torch.equal(state[change(name)], tensor) for name, tensor in truth.items())


def test_a_prefix_of_the_trainer_is_taken_off_if_it_is_named():
    state = llama(lambda name: f"policy.actor.{name}")
    assert "the trainer asks for policy.actor." in refusal(state, LLAMA)
    load(state, LLAMA, prefix="policy.actor.")
    assert torch.equal(state["policy.actor.model.norm.weight"], load_file(LLAMA / "model.safetensors")["model.norm.weight"])


def test_a_tied_head_has_the_embedding_under_both_names():
    tied = FIXTURES / "hf" / "llama-tied"
    truth = load_file(tied / "model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    state["lm_head.weight"] = torch.zeros_like(truth["model.embed_tokens.weight"])
    load(state, tied)
    assert torch.equal(state["lm_head.weight"], truth["model.embed_tokens.weight"])
    del state["model.embed_tokens.weight"]  # as a trainer that names its parameters by the head
    state["lm_head.weight"].zero_()
    load(state, tied)
    assert torch.equal(state["lm_head.weight"], truth["model.embed_tokens.weight"])


def test_names_that_one_side_lacks_are_refused_side_by_side():
    state = llama()
    state["model.extra.weight"] = state.pop("model.norm.weight")
    text = refusal(state, LLAMA)
    assert "the trainer asks for model.extra.weight, which the checkpoint does not have" in text
    assert "the checkpoint has model.norm.weight, which the trainer does not ask for" in text
    assert all(not tensor.any() for tensor in state.values())  # nothing was read
    del state["model.extra.weight"]
    assert "the trainer asks" not in refusal(state, LLAMA)


def test_a_planner_may_allow_what_is_missing():
    state = llama()
    state["model.extra.weight"] = state.pop("model.norm.weight")
    dcp.load(state, storage_reader=Reader(LLAMA), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert not state["model.extra.weight"].any() and state["lm_head.weight"].any()


def test_a_model_that_is_asked_for_twice_is_refused():
    text = refusal({"model": llama(), "ema": llama()}, LLAMA)
    assert "both stand for" in text and "prefix=" in text


def test_optimizer_state_needs_to_be_asked_for():
    state = {"model": llama(), "optim": {"state": {"lm_head.weight": {"exp_avg": torch.zeros(1)}}}}
    assert "Add `optimizer=True`" in refusal(state, LLAMA)
    assert "no optimizer state" in refusal(state, LLAMA, optimizer=True)


def test_groups_that_are_not_those_of_the_run_are_refused():
    folder = FIXTURES / "dcp" / "groups"
    content = reshard.open(folder / "checkpoint").content(Selection(optimizer=True))
    names = [name for group in content.param_groups() for name in group.names]
    state = {name: torch.zeros(tensor.shape) for name, tensor in content.weights.items()}
    one = {"param_groups": [{"params": names, "weight_decay": 0.5}]}
    assert "have different values of weight_decay in the checkpoint: 0.1, 0.0" in refusal(
        {"model": state, "optim": one}, folder / "checkpoint", optimizer=True
    )


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    assert str(tmp_path / "none") in refusal(llama(), tmp_path / "none")


def test_a_base_and_its_delta_are_read_as_one():
    folder = FIXTURES / "delta"
    steps = [folder / name for name in ("step-100", "step-200")]
    truth = {name: lazy.torch() for name, lazy in reshard.open(steps[1]).tensors().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    load(state, steps[1])
    assert all(torch.equal(state[name], tensor) for name, tensor in truth.items())


@pytest.mark.parametrize("case", ["mixtral-fused", "qwen3_moe-fused", "deepseek_v3-fused"])
def test_experts_in_one_tensor_are_filled_from_what_is_stored_apart(case, tmp_path):
    """transformers 5 holds the experts of a layer in one tensor, published files hold each by itself, and mixtral's under other names."""
    fused = FIXTURES / "hf" / case
    truth = {name: tensor for file in fused.glob("*.safetensors") for name, tensor in load_file(file).items()}
    reshard.convert(reshard.plan(fused, to="hf"), tmp_path / "apart")
    assert not any(name.endswith("experts.gate_up_proj") for name in reshard.open(tmp_path / "apart").tensors())
    for path in (tmp_path / "apart", fused):
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in truth.items()}}
        load(state, path)
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in truth.items())


def test_the_optimizer_of_experts_in_one_tensor_is_filled():
    """Real Megatron's moments of mixtral, into the tensors that transformers 5 trains."""
    folder = FIXTURES / "megatron" / "mixtral-tp2-ep2"
    content = reshard.open(folder / "checkpoint", model=folder / "model").content(Selection(optimizer=True, masters=True))
    read = {
        key: lazy.torch()
        for key, lazy in reshard.open(folder / "checkpoint", model=folder / "model")
        .tensors(Selection(optimizer=True, masters=True))
        .items()
    }
    layer = "model.layers.0.block_sparse_moe"
    experts = sum(name.startswith(f"{layer}.experts.") and name.endswith("w1.weight") for name in content.weights)

    def stacked(prefix, suffix):
        gates, ups = ([read[f"{prefix}{layer}.experts.{i}.{part}.weight{suffix}"] for i in range(experts)] for part in ("w1", "w3"))
        return torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])

    own, master = "model.layers.0.mlp.experts.gate_up_proj", stacked("optim.state.", ".master_param")
    weights = {name: torch.zeros(tensor.shape) for name, tensor in content.weights.items() if ".experts." not in name or layer not in name}
    weights |= {own: torch.zeros(master.shape), own.replace("gate_up", "down"): torch.zeros(experts, master.shape[2], master.shape[1] // 2)}
    state = {own: {"exp_avg": torch.zeros(master.shape), "step": torch.tensor(0.0)}}
    groups = [{"params": [own], "lr": 0.5}]
    load(
        {"model": weights, "optim": {"state": state, "param_groups": groups}}, folder / "checkpoint", optimizer=True, model=folder / "model"
    )
    assert torch.equal(weights[own], master) and torch.equal(state[own]["exp_avg"], stacked("optim.state.", ".exp_avg"))
    assert state[own]["step"] > 0 and groups[0]["lr"] not in (0.0, 0.5)


def test_quantized_weights_are_read_as_values():
    folder = FIXTURES / "hf_fp8" / "llama-fp8-block"
    weights = reshard.open(folder).tensors()
    state = {name: torch.zeros(lazy.shape, dtype=torch.bfloat16) for name, lazy in weights.items() if not name.endswith("_scale_inv")}
    load(state, folder, dequantize=True)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[: state[name].shape[0], : state[name].shape[1]]
    assert torch.equal(state[name], (stored[name].float() * scale).to(torch.bfloat16))


def test_a_storage_that_is_read_whole_has_its_checksum(tmp_path):
    shutil.copytree(FIXTURES / "dcp" / "fsdp2", tmp_path / "fsdp2")
    checkpoint = reshard.open(tmp_path / "fsdp2" / "checkpoint")
    tensor = next(tensor for tensor in checkpoint.index.tensors if tensor.name == "lm_head.weight" and tensor.kind == "weight")
    extent = tensor.shards.extent(0)
    file = tmp_path / "fsdp2" / "checkpoint" / extent.path
    content = bytearray(file.read_bytes())
    content[extent.byte_offset] ^= 1
    file.write_bytes(content)
    state = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in checkpoint.content().weights.items()}
    assert "lm_head.weight" in refusal(state, tmp_path / "fsdp2" / "checkpoint")
    load(state, tmp_path / "fsdp2" / "checkpoint", checksums=False)


@pytest.fixture
def rank(request):
    """One rank of four, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A folder with a matrix whose rows are long: parts of rows that lie close together are read with the bytes between them."""
    folder = tmp_path_factory.mktemp("wide")
    save_file(
        {"up.weight": torch.arange(10 * 16384, dtype=torch.float32).view(10, 16384), "b": torch.arange(10.0)}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("rank", [0, 1, 2, 3], indirect=True)
@pytest.mark.parametrize(("case", "sizes"), [("hf/llama", (4,)), ("fsdp/hsdp", (4,)), ("dcp/fsdp2", (4,)), ("wide", (2, 2))])
def test_a_rank_reads_its_boxes_and_nothing_else(case, sizes, rank, wide, monkeypatch):
    """Uneven rows, and boxes of two dimensions: 250 rows of four ranks are 63, 63, 63, 61. What is read to fill tensors is counted."""
    path = wide if case == "wide" else FIXTURES / case if case.startswith("hf") else FIXTURES / case / "checkpoint"
    options = {"model": FIXTURES / case / "model"} if (FIXTURES / case / "model").is_dir() else {}
    truth = {name: lazy.torch() for name, lazy in reshard.open(path, **options).tensors().items()}
    mesh = init_device_mesh("cpu", sizes)

    def spread(tensor):
        placements = [Shard(0), Shard(1) if tensor.dim() == 2 else Replicate()]
        return distribute_tensor(tensor, mesh, placements[: mesh.ndim], src_data_rank=None)

    state = {name: spread(torch.zeros_like(tensor)) for name, tensor in truth.items()}
    reader = Reader(path, workers=1, checksums=False, **options)
    metadata = reader.read_metadata()
    for tensor in reader._source.content.weights.values():
        tensor.shards.located()  # small headers of entries
    monkeypatch.setattr(reader, "read_metadata", lambda: metadata)
    counted = []
    for name, real in (("read_into", LocalFiles.read_into), ("read_runs", LocalFiles.read_runs)):
        monkeypatch.setattr(LocalFiles, name, lambda *given, real=real: counted.append(len(given[-1])) or real(*given))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state[name].to_local(), spread(tensor).to_local()) for name, tensor in truth.items())
    assert sum(counted) == sum(tensor.to_local().nbytes for tensor in state.values())


def test_nothing_else_imports_torch(tmp_path):
    import subprocess
    import sys

    code = "import sys, reshard, reshard.cli.main; assert not {'torch', 'reshard.torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fused_and_unknown_files_beside_a_model_do_not_matter(tmp_path):
    """A model without config: its own names are canonical."""
    save_file({"a.weight": torch.ones(3, 2), "b": torch.full((2,), 2.0)}, tmp_path / "model.safetensors")
    state = {"a.weight": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.float64)}
    load({"model": state}, tmp_path)
    assert state["a.weight"].eq(1).all() and state["b"].eq(2).all()
