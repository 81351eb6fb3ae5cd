"""Every fixture of every framework, format and version against the truth that was gathered inside its training processes."""

import json

import pytest
from helpers.fixture_places import FIXTURES, TRUTHS, described, open_case, truth

import reshard
from reshard.errors import CheckpointError


def label(folder):
    return str(folder.relative_to(FIXTURES))


@pytest.mark.parametrize("case", TRUTHS, ids=label)
def test_every_tensor_of_every_role_reads_back_bit_exactly(case):
    opened, expected = open_case(case), truth(case)
    # State of the run, and one count of steps that the files keep for all parameters, are no parameter's own.
    aside = {"state"} if any(role == "step" for _, role in expected) else {"state", "step"}
    of_the_run = {(t.name, t.kind) for t in opened.index.tensors if t.kind in aside} - expected.keys()
    found = {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors if (t.name, t.kind) not in of_the_run}
    assert found.keys() == expected.keys()
    assert found == expected


@pytest.mark.parametrize("case", [case for case in TRUTHS if {"fsdp", "torch_versions"} & set(case.parts)], ids=label)
def test_the_mesh_is_the_one_that_was_trained_on(case):
    about, found = json.loads((case / "truth.json").read_text()), open_case(case).index.facts
    if found.mesh:
        assert sorted(found.mesh.sizes) == sorted(about["mesh"].values()) and found.mesh.ranks == about["world"]


def test_an_extension_that_is_not_known_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"stream\.rot13/1"):
        reshard.open(FIXTURES / "dcp" / "rot" / "checkpoint")


def test_two_extensions_are_undone_from_the_last_to_the_first(monkeypatch):
    """torch lists [B, A] for A(B(data)) and undoes B first, which fails (2.13); taught what B was, we read it."""
    from reshard.storage import decoded_ranges

    class Rot13:
        def decompress(self, data):
            return bytes((byte - 13) % 256 for byte in data)

    for known in (decoded_ranges._EXTENSIONS, decoded_ranges._CODECS):
        monkeypatch.setitem(known, "stream.rot13/1", Rot13)
    case = FIXTURES / "dcp" / "rot"
    opened = open_case(case)
    assert {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors} == truth(case)
