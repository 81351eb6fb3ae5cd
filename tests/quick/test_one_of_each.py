"""One conversion of each format: what `make quick` runs beside the laws and the house."""

import pytest
from helpers.fixture_places import FIXTURES
from helpers.one_of_each import READ, WRITTEN, read_case, written_case
from helpers.reshard_command import reshard as command

from reshard.testing import TruthLaws, WritingLaws


class TestReading(TruthLaws):
    @pytest.fixture(params=READ)
    def case(self, request):
        return read_case(request.param)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversion_loses_nothing(name, tmp_path):
    WritingLaws().test_what_is_written_is_read_back(written_case(name), tmp_path)


def test_the_command_line_converts_verifies_and_tells(tmp_path):
    source, out = FIXTURES / "dcp" / "fsdp2", tmp_path / "out"
    planned = command(
        "convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model", "--dry-run", "--json"
    )
    assert planned.code == 0 and planned.document["target"]["format"] == "vllm" and not out.exists()
    done = command("convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model", "--json")
    assert done.code == 0 and {file["path"] for file in done.document["files"]} == {path.name for path in out.glob("*.safetensors")}
    assert command("verify", source / "checkpoint", out, "--model", source / "model").code == 0
    assert command("fingerprint", out, "-v").out.split()[0] == done.document["fingerprint"]
    again = command("convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model")
    assert again.code == 4 and "--overwrite" in again.err and again.out == ""
