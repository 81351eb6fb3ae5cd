"""State dicts of the optimizers that people use, in the forms that real runs of them saved (pytorch_optimizer 4.1.0, schedulefree 1.4.1,
torch 2.13): every tensor and every setting arrives, and what does not is named."""

import numpy as np
import pytest
from helpers.reshard_command import reshard as run

import reshard
from reshard.canonical.content import Selection

torch = pytest.importorskip("torch", reason="torch writes the files")
dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch writes the files")

SHAPES = {"0.weight": (6, 8), "0.bias": (6,), "1.weight": (4, 6), "1.bias": (4,)}
STEP = {"step": 3}


def factors(shape, row, column, vector, **others):
    """Factors of rows and columns; a vector has none."""
    return {**others, **({row[0]: row[1], column[0]: column[1]} if shape[1:] else {vector: shape})}


def squares(shape):
    return [(size, size) for size in shape]


def matrices(shape):
    """Shampoo keeps its square matrices before the momentum."""
    pairs = ((f"{kind}_{axis}", size) for axis, size in enumerate(squares(shape)) for kind in ("pre_cond", "inv_pre_cond"))
    return {**dict(pairs), "momentum_buffer": shape}


# By optimizer: the shapes of the states of a parameter, values that are no tensors, and the settings of the group.
KINDS = {
    "AMSGrad": (lambda shape: dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), shape) | {"step": ()}, {}, {"amsgrad": True}),
    "Muon": (lambda shape: {"momentum_buffer": shape}, {}, {"ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None}),
    "Adafactor": (
        lambda shape: factors(shape, ("row_var", (*shape[:-1], 1)), ("col_var", (1, shape[-1])), "variance", step=()),
        {},
        {"eps": (None, 0.001)},
    ),
    "AdaFactor of pytorch_optimizer": (
        lambda shape: factors(shape, ("exp_avg_sq_row", shape[:1]), ("exp_avg_sq_col", shape[1:]), "exp_avg_sq", exp_avg=shape),
        {"RMS": 0.25},
        STEP,
    ),
    "AdamWScheduleFree": (lambda shape: {"z": shape, "exp_avg_sq": shape}, {}, {"k": 3, "weight_sum": 3e-6, "train_mode": True}),
    "SOAP": (
        lambda shape: {"exp_avg": shape, "exp_avg_sq": shape, "GG": squares(shape), "Q": squares(shape)},
        {"precondition_frequency": 1, "shampoo_beta": 0.95},
        STEP,
    ),
    "Shampoo": (matrices, {}, STEP),
    "ScalableShampoo": (lambda shape: {"momentum": shape}, {"graft": "sgd"}, STEP),
}  # fmt: skip


def filled(shapes, generator):
    if isinstance(shapes, list):
        return [filled(shape, generator) for shape in shapes]
    return torch.rand(shapes, generator=generator)


def saved(form, kind, folder):
    """A model and its optimizer, saved in a form; and the states by name."""
    of_state, plain, settings = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    weights = {name: filled(shape, generator) for name, shape in SHAPES.items()}
    states = {name: {key: filled(part, generator) for key, part in of_state(shape).items()} for name, shape in SHAPES.items()}
    group = {"lr": 0.000375, "weight_decay": 0.1, **settings}
    if form == "dcp":
        named = {name: {**state, **plain} for name, state in states.items()}
        optim = {"state": named, "param_groups": [{**group, "params": list(SHAPES)}]}
        dcp.save({"model": weights, "optim": optim}, checkpoint_id=folder, no_dist=True)
    else:
        numbered = {number: {**state, **plain} for number, state in enumerate(states.values())}
        folder.mkdir()
        optim = {"state": numbered, "param_groups": [{**group, "params": list(range(len(SHAPES)))}]}
        torch.save({"model": weights, "optimizer": optim}, folder / "model.pt")
    flat = {}
    for name, state in states.items():
        for key, part in state.items():
            parts = {f"{key}.{i}": one for i, one in enumerate(part)} if isinstance(part, list) else {key: part}
            flat |= {f"optim.state.{name}.{path}": one.numpy() for path, one in parts.items()}
    return flat, group, plain


@pytest.mark.parametrize("target", ["dcp", "fsdp"])
@pytest.mark.parametrize("form", ["pt", "dcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_state_arrives(tmp_path, kind, form, target):
    states, group, plain = saved(form, kind, tmp_path / "source")
    result = run("convert", tmp_path / "source", tmp_path / "out", "--to", target, "--optimizer")
    assert result.code == 0, result.err
    opened = reshard.open(tmp_path / "out")
    view = opened.tensors(Selection(optimizer=True))
    for key, expected in states.items():
        assert np.array_equal(view[key].numpy(), expected), key
    (settings,) = (one.settings for one in opened.index.param_groups())
    assert settings.items() >= group.items()
    about = [line for line in result.out.splitlines() if "no tensor" in line]
    assert bool(about) == bool(plain) and all(name in about[0] for name in list(plain)[:1])


@pytest.mark.parametrize("target", ["deepspeed", "universal"])
@pytest.mark.parametrize(("kind", "state", "other"), [("SOAP", "GG.0", "GG.0"), ("Adafactor", "variance", "row_var")])
def test_state_of_another_shape_is_the_reason_where_deepspeed_has_no_place_for_it(tmp_path, monkeypatch, kind, state, other, target):
    """One matrix is square: factors of SOAP have its shape, and not that of the other. Before, a file was said to be lost."""
    monkeypatch.setitem(SHAPES, "1.weight", (6, 6))
    monkeypatch.setitem(SHAPES, "1.bias", (6,))
    saved("pt", kind, tmp_path / "source")
    result = run("convert", tmp_path / "source", tmp_path / "out", "--to", target, "--optimizer")
    assert result.code and not (tmp_path / "out").exists()
    assert f"0.weight: the optimizer's state has no {state} of this parameter's shape" in result.err
    assert f"such as {other}:" in result.err and "lost" not in result.err and "--to dcp" in result.err


@pytest.mark.parametrize("target", ["deepspeed", "universal"])
def test_a_step_count_of_a_group_without_moments_stays_in_the_group(tmp_path, target):
    """Lion of bitsandbytes, Muon of pytorch_optimizer: no state of a parameter takes the count. Before, it was lost."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: filled(shape, generator) for name, shape in SHAPES.items()}
    state = {number: {"momentum_buffer": filled(shape, generator)} for number, shape in enumerate(SHAPES.values())}
    groups = [{"lr": 0.01, "step": 3, "params": [0, 1]}, {"lr": 0.02, "step": 5, "params": [2, 3]}]
    (tmp_path / "source").mkdir()
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "source" / "model.pt")
    assert run("convert", tmp_path / "source", tmp_path / "out", "--to", target, "--optimizer").code == 0
    index = reshard.open(tmp_path / "out").index
    assert [(group.settings["lr"], group.settings["step"]) for group in index.param_groups()] == [(0.01, 3), (0.02, 5)]
    assert not any(tensor.kind == "step" for tensor in index.tensors)
