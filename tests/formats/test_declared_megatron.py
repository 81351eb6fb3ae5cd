"""Declared models against what real megatron-core held (fixtures/megatron_declared): every rank, bit by bit, and back.

The weights follow from their names and shapes (fixtures/named_weights.py), so that a reference is a config and a digest for each rank. What
the models compute is compared by tests/megatron/check.py.
"""

import hashlib
import json
import sys
import types

import pytest
from places import FIXTURES

import reshard
from reshard.models.lookup import find_model

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

sys.path.insert(0, str(FIXTURES))
import named_weights  # noqa: E402

REFERENCES = {path.stem: path for path in sorted((FIXTURES / "megatron_declared").glob("*.json"))}
OPTIONS = {"transformer_impl": "local", "vocab_multiple": 8}


def digest(lines):
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def line(name, value):
    return f"{name} {list(value.shape)} {hashlib.sha256(value.float().contiguous().numpy().tobytes()).hexdigest()}\n"


def ranks_of(save):
    """The digest of what each rank's file holds, as tests/megatron/settled.py computes it of a live rank."""
    found = {}
    for path in save.glob("mp_rank_*/model_optim_rng.pt"):
        model = torch.load(path, weights_only=False)["model"]
        found[path.parent.name] = digest(line(f"0.{name}", value) for name, value in model.items() if isinstance(value, torch.Tensor))
    return found


def keys_of(save):
    stored = FileSystemReader(save).read_metadata().state_dict_metadata
    return digest(f"{key} {list(stored[key].size)}\n" for key in sorted(stored) if isinstance(stored[key], TensorStorageMetadata))


@pytest.fixture
def hub(request, tmp_path, monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.enums"):  # args name an enum of a package that is not installed here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = lambda number: number
    reference = json.loads(REFERENCES[request.param].read_text())
    shapes = {weight.name: weight.shape for weight in find_model(reference["config"]).weights.values() if not weight.optional}
    named_weights.write(tmp_path / "hub", reference["config"], shapes)
    return tmp_path / "hub", reference


@pytest.mark.parametrize("hub", REFERENCES, indirect=True)
def test_every_rank_of_a_declared_model_holds_what_real_megatron_holds(hub, tmp_path):
    model, reference = hub
    for to in ("megatron", "megatron-dist"):
        sizes = reference[to]["sizes"]
        reshard.convert(reshard.plan(model, to="megatron", **OPTIONS, **sizes), tmp_path / f"legacy-{to}")
        assert ranks_of(tmp_path / f"legacy-{to}" / "release") == reference[to]["ranks"], to
        reshard.convert(reshard.plan(model, to="megatron-dist", **OPTIONS, **sizes), tmp_path / f"dist-{to}")
        assert keys_of(tmp_path / f"dist-{to}" / "release") == reference[to]["keys"], to
        for written in ("legacy", "dist"):
            reshard.verify(model, tmp_path / f"{written}-{to}").raise_if_different()
