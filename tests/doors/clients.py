"""Reads org/m, or the bucket m, with every client, and compares with the folder that was converted: a line for each (tests/doors/check.py).

Run by the interpreter of the clients; HF_ENDPOINT, AWS_ENDPOINT_URL and what else a client needs are in its environment.
"""

import hashlib
import os
import random
import sys
import traceback
from pathlib import Path

CONVERTED = Path(sys.argv[1])
WEIGHTS = {path.name: path.read_bytes() for path in CONVERTED.iterdir() if path.name not in ("reshard.json", "reshard.digests")}
RANGES = [
    (path, at, min(at + 5000, len(content))) for path, content in WEIGHTS.items() for at in random.Random(0).sample(range(len(content)), 5)
]


def snapshot():
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download("org/m"))
    for path, content in WEIGHTS.items():
        assert hashlib.sha256((folder / path).read_bytes()).digest() == hashlib.sha256(content).digest(), path


def metadata():
    from huggingface_hub import get_safetensors_metadata
    from safetensors import safe_open

    found = get_safetensors_metadata("org/m")
    with safe_open(CONVERTED / "model.safetensors", "pt") as file:
        assert set(found.weight_map) == set(file.keys())


def file_system():
    from huggingface_hub import HfFileSystem

    files = HfFileSystem(endpoint=os.environ["HF_ENDPOINT"])
    assert {name.rpartition("/")[2] for name in files.ls("org/m", detail=False)} >= set(WEIGHTS)
    assert files.info("org/m/config.json")["size"] == len(WEIGHTS["config.json"])
    for path, start, stop in RANGES:
        assert files.cat_file(f"org/m/{path}", start=start, end=stop) == WEIGHTS[path][start:stop]


def what_is_not_there():
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, RepositoryNotFoundError

    for name, path, error in (("org/m", "nothing.json", EntryNotFoundError), ("org/draft", "config.json", RepositoryNotFoundError)):
        try:
            hf_hub_download(name, path)
        except error:
            continue
        raise AssertionError(f"{name}/{path} is there")


def transformers():
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12)[None]
    logits = [AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in ("org/m", str(CONVERTED))]
    assert torch.equal(*logits)


def boto3():
    import boto3 as client

    s3 = client.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    assert {item["Key"]: item["Size"] for item in s3.list_objects_v2(Bucket="m")["Contents"]}.items() >= {
        (path, len(content)) for path, content in WEIGHTS.items()
    }
    paged = s3.get_paginator("list_objects_v2").paginate(Bucket="m", PaginationConfig={"PageSize": 2})
    assert {item["Key"] for page in paged for item in page["Contents"]} >= set(WEIGHTS)
    for path, start, stop in RANGES:
        part = s3.get_object(Bucket="m", Key=path, Range=f"bytes={start}-{stop - 1}")["Body"].read()
        assert part == WEIGHTS[path][start:stop]
    config = client.s3.transfer.TransferConfig(multipart_threshold=1 << 16, multipart_chunksize=1 << 16)
    s3.download_file("m", "model.safetensors", os.environ["HF_HOME"] + ".s3", Config=config)
    assert Path(os.environ["HF_HOME"] + ".s3").read_bytes() == WEIGHTS["model.safetensors"]


def obstore():
    import obstore as client
    from obstore.store import S3Store

    store = S3Store("m", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
    assert {item["path"] for page in client.list(store) for item in page} >= set(WEIGHTS)
    for path, start, stop in RANGES:
        assert bytes(client.get_range(store, path, start=start, end=stop)) == WEIGHTS[path][start:stop]


def runai():
    import torch
    from runai_model_streamer import SafetensorsStreamer
    from safetensors.torch import load

    expected = load(WEIGHTS["model.safetensors"])
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(["s3://m/model.safetensors"])
        found = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items())


def refused():
    """Without the secret, where there is one."""
    import urllib.error
    import urllib.request

    if "SECRET" not in os.environ:
        return
    for path in ("/m/config.json", "/org/m/resolve/main/config.json", "/"):
        try:
            urllib.request.urlopen(os.environ["HF_ENDPOINT"] + path)
        except urllib.error.HTTPError as error:
            assert error.code == 401
            continue
        raise AssertionError(f"{path} is answered")


if __name__ == "__main__":
    for client in (snapshot, metadata, file_system, what_is_not_there, transformers, boto3, obstore, runai, refused):
        try:
            client()
            result = "ok"
        except Exception:
            result = traceback.format_exc().replace("\n", " | ")[-1500:]
        print(f"client\t{client.__name__}\t{result}", flush=True)
