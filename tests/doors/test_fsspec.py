"""`reshard://` of fsspec: virtual folders as a file system, found by its entry point."""

import fsspec
import pytest
from output_bytes import FIXTURES

import reshard

LLAMA = FIXTURES / "hf" / "llama"


def test_a_url_names_checkpoint_format_and_file():
    folder = reshard.folder(LLAMA, to="vllm", tp=2, dtype="fp16")
    url = f"reshard://{LLAMA}!vllm,tp=2,dtype=fp16"
    files = fsspec.filesystem("reshard")
    assert [name.rpartition("!")[2].partition("/")[2] for name in files.ls(url, detail=False)] == list(folder)
    for path in folder:
        assert files.info(f"{url}/{path}")["size"] == folder[path].size
        with fsspec.open(f"{url}/{path}") as file:
            if path != "reshard.json":
                assert file.read() == folder[path].read()
    path = "model-rank-1-part-0.safetensors"
    whole = folder[path].read()
    for start, stop in ((0, 8), (5, None), (-7, None), (100, -100), (9, 9)):
        assert files.cat_file(f"{url}/{path}", start, stop) == whole[start:stop]
    assert files.ukey(f"{url}/{path}") == folder[path].etag


def test_options_may_stand_beside_the_url():
    files = fsspec.filesystem("reshard", checkpoint=LLAMA, to="hf")
    assert files.glob("*.safetensors") == ["model.safetensors"] and files.exists("config.json") and files.isdir("")
    assert files.cat_file("config.json") == reshard.folder(LLAMA, to="hf")["config.json"].read()


def test_what_is_not_there_and_what_is_written_is_refused():
    files = fsspec.filesystem("reshard", checkpoint=LLAMA, to="hf")
    for path in ("nothing", "../config.json", "config.json/x"):
        assert not files.exists(path)
        with pytest.raises(FileNotFoundError):
            files.cat_file(path)
    with pytest.raises(OSError, match="written"):
        files.open("new", "wb")
    with pytest.raises(reshard.RequestError, match="no checkpoint"):
        fsspec.filesystem("reshard").ls("reshard://config.json")
