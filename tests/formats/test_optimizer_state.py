"""Optimizer state through every format that carries it: moments, masters, and the count of steps, without which Adam does not resume."""

import hashlib
import io
import pickle
import shutil
import types

import pytest
import torch
import torch.distributed.checkpoint
from helpers.fixture_places import FIXTURES, TRUTHS, described, open_case, truth
from helpers.reshard_command import reshard as run

import reshard
from reshard.engine.views import LazyTensor
from reshard.geometry.sections import whole

SOURCES = [
    "megatron/llama-tp2-pp2-dp2", "megatron/llama-tp2", "megatron_dist/mixtral-dp-reshardable", "dcp/fsdp2", "fsdp/verl",
    "deepspeed/z1-groups", "deepspeed/z2-bf16-3", "deepspeed/z3-bf16", "universal/z1-groups", "universal/z3-frozen",
    "universal/autotp2-dp2-z3",
]  # fmt: skip
TARGETS = {
    "dcp": (),
    "fsdp": ("--dp", "2"),
    "deepspeed": ("--dp", "2"),
    "universal": (),
    "megatron": ("--tp", "2", "--plain-optimizer"),
    "megatron-distributed": ("--pp", "1", "--distributed-optimizer"),
    "megatron-dist": ("--tp", "2"),
}
MOMENTS = {"moment1", "moment2"}
TRAINED = FIXTURES / "megatron_dist" / "llama-tp2-pp2"
OF_TRAINED = ("--model", TRAINED / "model")


def steps_of(checkpoint):
    """Parameter -> its step count, whether the files have it as a tensor or as a setting of its param group."""
    counts = {name: group.settings["step"] for group in checkpoint.index.param_groups() if "step" in group.settings for name in group.names}
    for name, tensor in checkpoint.index.by_kind("step").items():
        counts[name] = LazyTensor(whole(name, tensor.dtype, tensor.shape), {name: tensor}, checkpoint.files).numpy().item()
    return counts


def converted(source, target, to, *options):
    arguments = [to.removesuffix("ributed") if to == "megatron-dist" else to.partition("-distributed")[0], *TARGETS[to], *options]
    optimizer = [] if to in ("deepspeed", "universal") else ["--optimizer"]
    result = run("convert", source, target, "--to", *arguments, *optimizer)
    assert result.code == 0, result.err
    return target


def moments(expected):
    return {key: value for key, value in expected.items() if key[1] in MOMENTS}


@pytest.mark.parametrize("case", [case for case in TRUTHS if any(role == "moment2" for _, role in truth(case))], ids=str)
def test_every_moment_of_every_fixture_has_a_count_of_steps(case):
    """A trainer that counts once for all parameters (Megatron's distributed optimizer) has no count per parameter in its truth."""
    opened, expected = open_case(case), truth(case)
    counts = steps_of(opened)
    assert counts.keys() >= {name for name, role in expected if role == "moment2"}
    assert len(set(counts.values())) == 1 and next(iter(counts.values())) >= 1
    assert not any("no count of the steps" in note for note in opened.index.facts.notes)


@pytest.fixture(scope="module")
def first_hop(tmp_path_factory):
    """What a source becomes in one conversion, made once."""
    made = {}

    def make(source, to):
        if (source, to) not in made:
            case, folder = FIXTURES / source, tmp_path_factory.mktemp("hop") / "made"
            model = ("--model", case / "model") if (case / "model").exists() else ()
            made[source, to] = converted(case / "checkpoint", folder, to, *model)
        return made[source, to]

    return make


@pytest.mark.parametrize("last", TARGETS)
@pytest.mark.parametrize("first", TARGETS)
def test_state_survives_every_pair_of_formats(first, last, first_hop, tmp_path):
    case = FIXTURES / "megatron/llama-tp2-pp2-dp2"
    through = first_hop("megatron/llama-tp2-pp2-dp2", first)
    opened = reshard.open(converted(through, tmp_path / "made", last))
    expected = truth(case)
    found = {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors if t.kind in MOMENTS}
    assert found == moments(expected)
    assert steps_of(opened) == {name: 2 for name, role in expected if role == "moment2"}


# ---- read by torch alone, where the trainer's loader looks ----


class _Stand(pickle.Unpickler):
    """Reads without DeepSpeed and Megatron: their classes become empty ones."""

    def find_class(self, module, name):
        if module.partition(".")[0] in ("deepspeed", "megatron"):
            return type(name, (), {"__new__": lambda cls, *_: object.__new__(cls), "__init__": lambda self, *_: None})
        return super().find_class(module, name)


def loaded(path):
    stand = types.SimpleNamespace(
        Unpickler=_Stand, load=lambda file, **_: _Stand(file).load(), loads=lambda data, **_: _Stand(io.BytesIO(data)).load()
    )
    stand.__name__ = "pickle"
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=stand)


def counts_in_universal(folder):
    """ZeRO-1 and 2 load step.pt of each parameter, ZeRO-3 the state of group 0 (deepspeed/runtime/base_optimizer.py, zero/stage3.py)."""
    zero = folder / (folder / "latest_universal").read_text() / "zero"
    yield loaded(zero / "optimizer_state.pt")["optimizer_state_dict"]["state"][0]["step"]
    parameters = [path.parent for path in zero.glob("*/exp_avg_sq.pt")]
    assert parameters
    yield from (loaded(path / "step.pt") for path in parameters)


def counts_in_deepspeed(folder):
    files = sorted(folder.glob("*/*optim_states.pt"))
    assert files
    for path in files:
        yield from (group["step"] for group in loaded(path)["optimizer_state_dict"]["optimizer_state_dict"]["state"].values())


def counts_in_dcp(folder):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    yield from (state["step"] for state in loaded(folder.parent / "whole.pt")["optim"]["state"].values())


def counts_in_fsdp(folder):
    for path in folder.glob("optim_*.pt"):
        yield from (state["step"] for state in loaded(path)["state"].values())


READERS = {"universal": counts_in_universal, "deepspeed": counts_in_deepspeed, "dcp": counts_in_dcp, "fsdp": counts_in_fsdp}


@pytest.mark.parametrize("to", READERS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_count_lies_where_the_trainer_loads_it(source, to, first_hop):
    expected = set(steps_of(open_case(FIXTURES / source)).values())
    found = [*READERS[to](first_hop(source, to))]
    assert {float(count) for count in found} == expected and len(expected) == 1
    if to != "deepspeed":  # which torch's load_state_dict turns into a tensor
        assert all(isinstance(count, torch.Tensor) for count in found)


# ---- moments without a count, and counts that are numbers ----


def with_counts(folder, count):
    """A copy of a universal checkpoint of ZeRO-1 whose counts are what `count` says of each number of a parameter; None: no file."""
    shutil.copytree(FIXTURES / "universal/z1-groups/checkpoint", folder)
    for number, path in enumerate(sorted(folder.glob("*/zero/*/step.pt"))):
        path.unlink()
        if count(number) is not None:
            torch.save(count(number), path)
    return folder


@pytest.mark.parametrize("count", [lambda number: None, lambda number: 2 + number % 2], ids=["none", "different numbers in a group"])
@pytest.mark.parametrize("to", TARGETS)
def test_moments_without_a_count_are_named_and_never_written(to, count, tmp_path):
    folder = with_counts(tmp_path / "source", count)
    assert any("no count of the steps" in note for note in reshard.open(folder).index.facts.notes)
    optimizer = [] if to in ("deepspeed", "universal") else ["--optimizer"]
    result = run("convert", folder, tmp_path / "made", "--to", to.replace("-distributed", ""), *optimizer)
    assert result.code != 0 and "no count of the steps" in result.err and "bias correction" in result.err
    assert not (tmp_path / "made").exists()
    assert run("convert", folder, tmp_path / "weights", "--to", "dcp").code == 0


def test_counts_that_are_numbers_are_read(tmp_path):
    """As DeepSpeedCPUAdam keeps them."""
    folder = with_counts(tmp_path / "source", lambda number: 7)
    assert set(steps_of(reshard.open(folder)).values()) == {7}
    converted(folder, tmp_path / "made", "universal")
    assert {float(count) for count in counts_in_universal(tmp_path / "made")} == {7.0}


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_counts_of_a_torch_optimizer_that_are_numbers_are_read(kind, tmp_path):
    weights = {"a.weight": torch.ones(4, 3), "b.weight": torch.ones(2)}
    moments = {name: {"step": 5, "exp_avg": value / 2, "exp_avg_sq": value / 4} for name, value in weights.items()}
    whole_state = {"model": weights, "optim": {"state": moments, "param_groups": [{"lr": 0.1, "params": [*weights]}]}}
    if kind == "pt":
        (tmp_path / "source").mkdir()
        torch.save(whole_state, tmp_path / "source" / "model.pt")
    else:
        torch.distributed.checkpoint.save(whole_state, checkpoint_id=tmp_path / "source", no_dist=True)
    assert steps_of(reshard.open(tmp_path / "source")) == {"a.weight": 5, "b.weight": 5}
    converted(tmp_path / "source", tmp_path / "made", "fsdp")
    assert {float(count) for count in counts_in_fsdp(tmp_path / "made")} == {5.0}


def test_an_optimizer_without_second_moments_needs_no_count(tmp_path):
    """Lion keeps a moment and nothing else."""
    weights = {"a.weight": torch.ones(4, 3)}
    state = {"state": {"a.weight": {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1, "params": ["a.weight"]}]}
    torch.save({"model": weights, "optim": state}, tmp_path / "model.pt")
    converted(tmp_path / "model.pt", tmp_path / "made", "dcp")


# ---- the step of the run ----


@pytest.mark.parametrize("through", ["dcp", "fsdp", "hf", "consolidated"])
def test_the_step_of_the_run_survives_a_format_that_has_no_place_for_it(through, tmp_path):
    case = FIXTURES / "megatron/llama-tp2-pp2-dp2"
    optimizer = ("--optimizer",) if through in ("dcp", "fsdp") else ()
    assert run("convert", case / "checkpoint", tmp_path / "middle", "--to", through, "--model", case / "model", *optimizer).code == 0
    assert reshard.open(tmp_path / "middle").index.facts.step == 2
    result = run("convert", tmp_path / "middle", tmp_path / "made", "--to", "megatron-dist", *optimizer)
    assert result.code == 0, result.err
    tracker = (tmp_path / "made" / "latest_checkpointed_iteration.txt").read_text()
    assert tracker == ("2" if optimizer else "release")
    assert ("weights alone are a `release`" in result.err + result.out) is not bool(optimizer)
    if optimizer:
        assert loaded(tmp_path / "made" / "iter_0000002" / "common.pt")["iteration"] == 2


def test_a_step_that_nothing_tells_is_said_to_be_0(tmp_path):
    case = FIXTURES / "fsdp/verl"
    for to, sentence in (("megatron-dist", "so the save is of iteration 0"), ("universal", "so the run goes on at step 0")):
        optimizer = ("--optimizer",) if to == "megatron-dist" else ()
        result = run("convert", case / "checkpoint", tmp_path / to, "--to", to, "--model", case / "model", *optimizer)
        assert result.code == 0 and sentence in " ".join((result.out + result.err).split()), result.out + result.err


@pytest.mark.parametrize("case", [case for case in TRUTHS if case.parent.name.startswith("megatron")], ids=lambda case: case.name)
def test_the_param_groups_of_megatron_follow_the_order_of_the_model(case):
    """ZeRO-3's shards and torch's optimizers load by position. The declared order is that of transformers' modules (tests/training)."""
    opened = open_case(case)
    for group in opened.index.param_groups():
        assert list(group.names) == [name for name in opened.model.weights if name in set(group.names)]


# ---- masters ----


def held(folder):
    """(name, kind) -> what the files hold, for weights and masters."""
    opened = reshard.open(folder)
    return {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors if t.kind in ("weight", "master")}


@pytest.mark.parametrize("source", ["megatron/llama-tp2-pp2-dp2", "megatron_dist/llama-tp2-pp2", "deepspeed/z2-bf16-3"])
@pytest.mark.parametrize("to", ["dcp", "fsdp"])
def test_without_a_place_for_masters_the_masters_are_the_weights(source, to, tmp_path):
    case = FIXTURES / source
    expected = truth(case)
    arguments = (case / "checkpoint", tmp_path / "made", "--to", to, "--model", case / "model", "--optimizer")
    result = run("convert", *arguments)
    assert result.code == 0 and "the weights are the optimizer's full-precision masters" in result.out + result.err
    masters = {name: value for (name, kind), value in expected.items() if kind == "master"}
    found = held(tmp_path / "made")
    assert masters and {name: found[name, "weight"] for name in masters} == masters
    equal = run("verify", case / "checkpoint", tmp_path / "made", "--optimizer", "--model", case / "model")
    assert equal.code == 0 and "compared with the master of the other side" in equal.out, equal.out
    # An explicit choice is obeyed, and then a run would resume from other values.
    rounded = run("convert", case / "checkpoint", tmp_path / "rounded", *arguments[2:], "--weights", "model")
    assert rounded.code == 0 and "full-precision masters" not in rounded.out + rounded.err
    weights = {name: value for (name, kind), value in expected.items() if kind == "weight" and name in masters}
    assert {name: held(tmp_path / "rounded")[name, "weight"] for name in weights} == weights
    assert run("verify", case / "checkpoint", tmp_path / "rounded", "--optimizer", "--weights", "model").code == 0
    different = run("verify", case / "checkpoint", tmp_path / "rounded", "--optimizer", "--json")
    assert different.code == 1 and {each["kind"] for each in different.document["differences"]} == {"values"}


def test_a_run_in_bf16_loads_from_the_masters_what_the_model_computed_with(tmp_path):
    """torch casts what it loads into the run's parameters: the default loses nothing whatever the type that a run trains in."""
    case = FIXTURES / "megatron/llama-tp2-pp2-dp2"
    made = converted(case / "checkpoint", tmp_path / "made", "dcp", "--model", case / "model")
    for dtype, kind in ((torch.bfloat16, "weight"), (torch.float32, "master")):
        expected = {name: value for (name, of), value in truth(case).items() if of == kind}
        model = {name: torch.zeros(value["shape"], dtype=dtype) for name, value in expected.items()}
        torch.distributed.checkpoint.load({"model": model}, checkpoint_id=made, no_dist=True)
        digests = {name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for name, tensor in model.items()}
        assert digests == {name: value["sha256"] for name, value in expected.items()}


@pytest.mark.parametrize("last", TARGETS)
def test_masters_survive_every_format(last, first_hop):
    source = "megatron/llama-tp2-pp2-dp2"
    expected = {name: value for (name, kind), value in truth(FIXTURES / source).items() if kind == "master"}
    found = held(first_hop(source, last))
    assert {name: found.get((name, "master"), found.get((name, "weight"))) for name in expected} == expected


@pytest.mark.parametrize("last", TARGETS)
@pytest.mark.parametrize("first", TARGETS)
def test_verify_finds_what_a_run_resumes_from_equal_in_every_pair_of_formats(first, last, first_hop):
    source = "megatron/llama-tp2-pp2-dp2"
    result = run("verify", first_hop(source, first), first_hop(source, last), "--optimizer", "--json")
    assert result.code == 0, result.document["differences"][:3]
    assert result.document["tensors"] >= 3 * 21


def test_verify_compares_masters_and_counts(tmp_path):
    """One bit of a master, and one step: differences, though weights and moments are equal."""
    case = FIXTURES / "megatron/llama-tp2-pp2-dp2"
    model = ("--model", case / "model")
    universal = converted(case / "checkpoint", tmp_path / "universal", "universal", *model)
    (universal / "reshard.json").unlink()
    folder = universal / (universal / "latest_universal").read_text() / "zero" / "model.norm.weight"
    for name, change in (("fp32", lambda stored: stored["param"].view(torch.int32).add_(1)), ("step", lambda stored: stored.add_(1))):
        path = folder / f"{name}.pt"
        before, stored = path.read_bytes(), loaded(path)
        change(stored)
        torch.save(stored, path)
        result = run("verify", case / "checkpoint", universal, "--optimizer", "--json", *model)
        kind = {"fp32": "master_param", "step": "step"}[name]
        assert result.code == 1
        differences = [(each["name"], each["kind"]) for each in result.document["differences"]]
        assert differences == [(f"optim.state.model.norm.weight.{kind}", "values")]
        path.write_bytes(before)


def test_the_step_goes_through_formats_that_have_no_place_for_it(tmp_path):
    assert run("convert", TRAINED / "checkpoint", tmp_path / "fsdp", "--to", "fsdp", "--optimizer", "--dp", 2, *OF_TRAINED).code == 0
    assert run("inspect", tmp_path / "fsdp", "--json").document["step"] == 2
    back = run("convert", tmp_path / "fsdp", tmp_path / "back", "--to", "megatron-dist", "--optimizer", "--tp", 2)
    assert back.code == 0 and (tmp_path / "back" / "iter_0000002").is_dir()
    alone = run("convert", TRAINED / "checkpoint", tmp_path / "alone", "--to", "megatron", *OF_TRAINED)
    assert "weights alone are a `release`: Megatron starts a new run from them, at iteration 0" in alone.out


@pytest.mark.parametrize("target", [("dcp",), ("fsdp", "--dp", 2)])
def test_a_resumed_run_gets_the_masters(tmp_path, target):
    shown = run("convert", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED, "--to", *target)
    assert "the weights are the optimizer's full-precision masters" in shown.out
    kinds = {row["kind"]: row for row in run("inspect", tmp_path / "out", "--json").document["kinds"]}
    assert kinds["weight"]["dtype"] == "F32" and "master" not in kinds
    assert run("verify", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED).code == 0
