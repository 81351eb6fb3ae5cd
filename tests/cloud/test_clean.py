"""`reshard clean s3://... --yes` removes what reshard wrote, whatever the records of a folder say; and forged records are told."""

from __future__ import annotations

import json
import time

import boto3
import pytest
from cloud.models import content_in
from cloud.s3_server import Stored
from helpers.fixture_places import HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.engine.pool import Effort
from reshard.verbs.convert import conversion

BEGUN = "out/.reshard/begun.json"


def put(s3, key, content, *, when=None):
    """An object that somebody else wrote."""
    path = s3.root / f"object-{len(s3.objects)}-{key.replace('/', '_')}"
    path.write_bytes(content)
    s3.objects["bucket", key] = Stored([(str(path), len(content))], f'"{len(s3.objects)}"', when or time.time())


def interrupted(s3, url="s3://bucket/out"):
    """A conversion that was stopped when it had completed a file."""
    running = conversion(reshard.plan(HF / "llama", to="hf", max_shard_size=30_000), url, effort=Effort(workers=1)).run()
    next(running)
    while not [key for key in s3.keys("bucket", "out/") if ".reshard/files/" in key]:
        next(running)
    running.close()


def clean(*more):
    return run("clean", "s3://bucket", "--yes", *more)


def test_what_the_conversion_wrote_is_removed(s3):
    interrupted(s3)
    put(s3, "out/notes.txt", b"mine")
    assert clean().code == 0 and s3.keys("bucket") == ["out/notes.txt"]


def test_what_a_record_names_and_the_conversion_did_not_write_stays(s3):
    """Whoever may write begun.json could otherwise have the objects of others removed."""
    put(s3, "out/model.safetensors", b"theirs, older", when=time.time() - 3600)
    put(s3, "out/thesis.pdf", b"theirs, older, and of the right length", when=time.time() - 3600)
    interrupted(s3, "s3://bucket/out/deep")
    record = json.loads(s3.content("bucket", "out/deep/.reshard/begun.json"))
    s3.objects = {at: stored for at, stored in s3.objects.items() if "deep" not in at[1]}
    named = {"model.safetensors": 13, "thesis.pdf": 38, "later.bin": 7, "unknown.bin": None, "deep/../thesis.pdf": 38}
    for files in (named, list(named)):
        put(s3, BEGUN, json.dumps({**record, "files": files}).encode())
        put(s3, "out/later.bin", b"theirs, later, of another length")
        put(s3, "out/unknown.bin", b"theirs, later")
        before = {key: s3.content("bucket", key) for key in s3.keys("bucket") if ".reshard" not in key}
        assert clean().code == 0
        assert {key: s3.content("bucket", key) for key in s3.keys("bucket")} == before


def test_records_of_files_that_reshard_did_not_write_stay(s3):
    interrupted(s3)
    for name, content in (("mine.json", b"{}"), ("a.json", b"[" * 100_000), ("b", b"x")):
        put(s3, f"out/.reshard/files/{name}", content)
    put(s3, "other/.reshard/state.db", b"another program's")
    clean()
    assert s3.keys("bucket") == ["other/.reshard/state.db", *(f"out/.reshard/files/{name}" for name in ("a.json", "b", "mine.json"))]


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"[]",
            b"[" * 200_000,
            b'{"identity": Infinity}',
            b"\xff\xfe{",
            b"",
            b"7",
            b'{"identity": "x", "files": {}}',
            b"9" * 5000,
            b"null",
        ),
        {"nbytes": float("inf")},
        {"nbytes": "7"},
        {"nbytes": float("nan")},
        {"files": 7},
        {"files": [[]]},
        {"files": {"a": "b"}},
        {"replaces": ["../../x"]},
        {"arguments": {"a": 1, "b": [2]}, "to": 7},
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_forged_record_is_one_clear_paragraph_and_nothing_is_removed(s3, content):
    interrupted(s3)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(s3.content("bucket", BEGUN)), **content}).encode()
    put(s3, BEGUN, content)
    before = content_in(s3, "bucket", "out")
    for words in (
        ("inspect", "s3://bucket/out"),
        ("convert", HF / "llama", "s3://bucket/out", "--to", "hf"),
        ("convert", HF / "llama", "s3://bucket/out", "--to", "hf", "--resume"),
        ("convert", HF / "llama", "s3://bucket/out", "--to", "hf", "--part", "0/2"),
        ("clean", "s3://bucket/out", "--yes"),
    ):
        found = run(*words)
        assert found.code in ((0,) if words[0] == "clean" else (2, 3, 4)), (words, found.err)
        told = [line for line in found.err.splitlines() if "begun.json" in line]
        assert len(told) == 1 and "not written by reshard" in told[0] and "defect" not in found.err, found.err
        assert content_in(s3, "bucket", "out") == before


def test_a_record_that_is_too_long_is_not_read(s3):
    interrupted(s3)
    path = s3.root / "long"
    with path.open("wb") as file:
        file.truncate(8 << 30)
    s3.objects["bucket", BEGUN] = Stored([(str(path), 8 << 30)], '"long"')
    s3.reset_counts()
    for words in (("inspect", "s3://bucket/out"), ("clean", "s3://bucket/out", "--yes")):
        assert "begun.json" in run(*words).err
    assert s3.bytes_out < 10 << 20


def test_uploads_of_others_are_not_aborted(s3):
    interrupted(s3)
    client = boto3.client("s3")
    name = next(key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors"))
    for key in ("elsewhere/video.mp4", "out/video.mp4", name):
        client.create_multipart_upload(Bucket="bucket", Key=key)
    done = run("clean", "s3://bucket", "--json")
    listed = done.document["leftovers"]
    assert [each["url"] for each in listed if each["kind"] == "upload"] == [f"s3://bucket/{name}"]
    assert done.err.count("AbortIncompleteMultipartUpload") == 1
    clean()
    assert sorted(at[1] for at, *_ in s3.uploads.values()) == ["elsewhere/video.mp4", "out/video.mp4"]


def test_an_upload_that_a_part_has_left_below_a_complete_target_is_aborted(s3):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), "s3://bucket/out")
    name = next(key for key in s3.keys("bucket", "out/") if key.endswith(".safetensors"))
    before = content_in(s3, "bucket", "out")
    boto3.client("s3").create_multipart_upload(Bucket="bucket", Key=name)
    clean()
    assert not s3.uploads and content_in(s3, "bucket", "out") == before
