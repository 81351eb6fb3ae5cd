"""Delta then apply is the identity: on every pair of fixtures of one model, whatever wrote them, and in every format that is written.

Every ordered pair is read back as BASE+DELTA. Every base is applied to every target, each with another new checkpoint of its model.
Formats that always have optimizer state are left out: a delta says nothing about it, and they refuse its result by name.
"""

from collections import defaultdict
from functools import cache

import pytest
from helpers.fixture_places import FIXTURES
from hostile.checkpoints import fixtures, pristine_of

import reshard
from reshard.adapter import registry
from reshard.errors import ReshardError, UnsupportedError

# A fixture that holds a layout alone, or an adapter, has no pair.
NAMES = [name for name in fixtures() if not name.startswith("written/")]
SIZES = {"hf": {}, "dcp": {"dp": 2}, "fsdp": {"dp": 2}, "vllm": {"tp": 2}, "sglang": {"tp": 2}, "trtllm": {"tp": 2}, "megatron": {"tp": 2},
         "megatron-dist": {}, "fsdp-dtensor": {"dp": 2}, "consolidated": {}, "nanotron": {}}  # fmt: skip
WITH_OPTIMIZER = {"deepspeed", "universal"}


def opened(name):
    model = FIXTURES / name / "model"
    return reshard.open(pristine_of(name), **({"model": model} if model.is_dir() else {}))


@cache
def models():
    """The names of the fixtures of each model: those whose weights have the same names and shapes."""
    found = defaultdict(list)
    for name in NAMES:
        try:
            content = opened(name).content()
        except ReshardError:
            continue  # one that is not to be read, or a layout without weights
        if content.weights and not content.adapter:
            found[tuple(sorted((key, tensor.shape) for key, tensor in content.weights.items()))].append(name)
    return [names for names in found.values() if len(names) > 1]


@pytest.mark.slow
def test_there_are_many_pairs():
    assert sum(len(names) * (len(names) - 1) for names in models()) > 2500


def test_every_written_format_has_sizes_here():
    assert SIZES.keys() | WITH_OPTIMIZER == {name for name, format in registry.formats().items() if format.can_write} - {"peft"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_delta_then_apply_is_the_identity(name, tmp_path):
    others = [other for names in models() if name in names for other in names if other != name]
    if not others:
        pytest.skip("no other fixture holds its model")
    base = opened(name)
    for i, other in enumerate(others):
        new, delta = opened(other), tmp_path / str(i)
        try:
            result = reshard.delta(base, new, delta, cast=True, encoding=("xor", "overwrite")[i % 2])
        except UnsupportedError as refusal:
            assert "needs scales" in str(refusal) or "holds" in str(refusal), refusal
            continue
        patched = reshard.open(base.path, deltas=[delta], **base.options)
        # What differs in its type was cast to that of the base.
        reshard.verify(new, patched, cast=True).raise_if_different()
        for to in [to for number, to in enumerate(SIZES) if number % len(others) == i]:
            try:
                left_out = reshard.plan(base, to=to, **SIZES[to]).layout.left_out
            except ReshardError:
                continue  # the base itself is not written in this format
            out = tmp_path / f"{i}-{to}"
            reshard.apply(base.path, delta, out, to=to, **SIZES[to], **base.options)
            # Some formats hold a router's weight in float32; engines read layers for multi-token prediction from other files.
            left = tuple(base.content().tensors.keys() & left_out)
            chosen = reshard.Selection(exclude=left) if left else None
            reshard.verify(reshard.open(out, **base.options), patched, cast=True, selection=chosen).raise_if_different()
        assert reshard.fingerprint(patched).root == result.result.root
