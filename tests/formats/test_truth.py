"""Every fixture of every framework, format and version against the truth that was gathered inside its training processes."""

import json

import pytest
from helpers.fixture_places import FIXTURES, TRUTHS, described, open_case, truth

import reshard
from reshard.errors import CheckpointError
from reshard.testing import FormatCase, TruthLaws


def label(folder):
    return str(folder.relative_to(FIXTURES))


class TestTruth(TruthLaws):
    @pytest.fixture(params=TRUTHS, ids=label)
    def case(self, request):
        opened = open_case(request.param)
        model = request.param / "model"
        return FormatCase(opened.format, request.param / "checkpoint", truth(request.param), model if model.exists() else None)


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
