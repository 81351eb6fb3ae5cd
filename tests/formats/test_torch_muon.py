"""torch's Muon, which takes matrices alone, beside AdamW for the rest: state that numbers fewer parameters than the model has."""

import numpy as np
import pytest

import reshard
from reshard.canonical.content import Selection
from reshard.errors import RequestError

torch = pytest.importorskip("torch", reason="torch writes the files")


def trained(tied_shapes=False):
    """A model after a step of both optimizers."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(11, 6),
            "up": torch.nn.Linear(6, 7),
            "left": torch.nn.Linear(7, 5, bias=False),
            "right": torch.nn.Linear(7, 5, bias=False),
            "head": torch.nn.Linear(7, 5, bias=False) if tied_shapes else torch.nn.Linear(5, 11, bias=False),
        }
    )
    muon = torch.optim.Muon([model[name].weight for name in ("up", "left", "right")], lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW([model["embed"].weight, model["up"].bias, model["head"].weight], lr=0.2)
    hidden = model["up"](model["embed"](torch.arange(4)))
    both = model["left"](hidden) + 2 * model["right"](hidden)
    (model["head"](hidden if tied_shapes else both).pow(2).sum() + both.pow(2).sum()).backward()
    muon.step()
    adam.step()
    return model, muon, adam


def truth(model, *optimizers):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optim.state.{names[parameter]}.{kind}": value.numpy()
        for optimizer in optimizers
        for parameter, kinds in optimizer.state.items()
        for kind, value in kinds.items()
    }


def saved(path, model, optimizer):
    torch.save({"model": model.state_dict(), **optimizer}, path)
    return reshard.open(path)


def together(muon, adam, form):
    first, second = muon.state_dict(), adam.state_dict()
    return {
        "Muon alone": {"optimizer": first},
        "AdamW alone": {"optimizer": second},
        "a list": {"optimizers": [first, second]},
        "a dict": {"optimizer": {"muon": first, "adam": second}},
    }[form]


@pytest.mark.parametrize("form", ["Muon alone", "AdamW alone", "a list", "a dict"])
def test_each_state_gets_the_name_of_its_parameter(tmp_path, form):
    model, muon, adam = trained()
    optimizers = [*([muon] if form != "AdamW alone" else []), *([adam] if form != "Muon alone" else [])]
    checkpoint = saved(tmp_path / "run.pt", model, together(muon, adam, form))
    expected = truth(model, *optimizers)
    for place in (checkpoint, _converted(checkpoint, tmp_path / "dcp")):
        view = place.tensors(Selection(optimizer=True))
        state = {key: view[key].numpy() for key in view if key.startswith("optim.")}
        assert state.keys() == expected.keys()
        assert all(np.array_equal(state[key], value) for key, value in expected.items())
        rates = {name: group.settings["lr"] for group in place.index.param_groups() for name in group.names}
        assert rates == {key.split(".state.")[1].rpartition(".")[0]: 0.1 if "momentum" in key else 0.2 for key in expected}


def _converted(checkpoint, out):
    reshard.convert(reshard.plan(checkpoint, to="dcp", optimizer=True), out)
    return reshard.open(out)


def test_what_shapes_and_order_leave_open_is_refused(tmp_path):
    """left, right and head have one shape: two of them are Muon's, and the file does not tell which."""
    model, muon, adam = trained(tied_shapes=True)
    checkpoint = saved(tmp_path / "run.pt", model, together(muon, adam, "Muon alone"))
    with pytest.raises(RequestError, match=r"has 3 parameters, the model 6; number \d could be .*Save the optimizer with names"):
        reshard.plan(checkpoint, to="dcp", optimizer=True)
    assert reshard.plan(checkpoint, to="dcp").layout.files
