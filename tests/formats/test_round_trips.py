"""Real checkpoints with optimizer state, through another format and back: weights, moments, masters, steps and rates are equal."""

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.canonical.content import Selection

# By the format: a run that its framework saved, and the options with which a conversion writes it.
RUNS = {
    "fsdp_dtensor": FIXTURES / "megatron_fsdp" / "llama-dp2",
    "megatron-dist": FIXTURES / "megatron_0_19" / "llama-tp2-pp2",
    "dcp": FIXTURES / "dcp" / "fsdp2",
    "deepspeed": FIXTURES / "deepspeed" / "z3-bf16",
    "fsdp": FIXTURES / "fsdp" / "verl-groups",
}


def state(path, model):
    """The values by key, and the step and the settings of each parameter that all optimizers know."""
    opened = reshard.open(path, model=model)
    view = opened.tensors(Selection(weights="master" if opened.index.by_kind("master") else None, optimizer=True))
    values = {key: view[key].numpy().astype("float32").tobytes() for key in view if not key.endswith(".step")}
    steps = {key.removesuffix(".step"): float(view[key].numpy()) for key in view if key.endswith(".step")}
    settings = {}
    for group in opened.index.param_groups():
        for name in group.names:
            settings[name] = {key: group.settings.get(key) for key in ("lr", "weight_decay")}
            if "step" in group.settings:
                steps[f"optim.state.{name}"] = float(group.settings["step"])
    return values, steps, settings


@pytest.mark.parametrize("between", RUNS)
@pytest.mark.parametrize("start", RUNS)
def test_state_comes_back(tmp_path, start, between):
    case = RUNS[start]
    source, model, last = case / "checkpoint", case / "model", case / "checkpoint"
    for name, target in (("there", between), ("back", start)):
        reshard.convert(reshard.plan(reshard.open(last, model=model), to=target, optimizer=True), tmp_path / name)
        last = tmp_path / name
    values, steps, settings = expected = state(source, model)
    assert {key.rpartition(".")[2] for key in values if key.startswith("optim.")} == {"exp_avg", "exp_avg_sq"}
    assert steps and set(steps.values()) - {0.0} and any(one["lr"] for one in settings.values())
    assert state(last, model) == expected
