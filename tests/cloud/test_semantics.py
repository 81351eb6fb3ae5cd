"""What S3 promises, as moto implements it: exclusive creation, parts, aborted and listed uploads, credentials."""

import json
import os
import signal
import subprocess
import time

import boto3
import pytest
from cloud.models import content, converted, write_hf
from helpers.reshard_command import command
from helpers.reshard_command import reshard as run
from moto.s3 import responses
from moto.server import ThreadedMotoServer

import reshard
from reshard.errors import SystemRefusal
from reshard.storage.stores.urls import open_store
from reshard.testing import StoreLaws


@pytest.fixture(scope="module")
def server():
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, request):
    """A bucket of moto, and a client of boto3."""
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = f"b-{abs(hash(request.node.name)) % 10**8}"
    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"])
    client.create_bucket(Bucket=name)
    client.bucket = name
    return client


def put_folder(client, prefix, folder):
    for path in folder.iterdir():
        client.upload_file(str(path), client.bucket, f"{prefix}/{path.name}")


def stored(client, prefix):
    keys = [each["Key"] for each in client.list_objects_v2(Bucket=client.bucket, Prefix=f"{prefix}/").get("Contents", ())]
    keys = [key for key in keys if not key.endswith("/reshard.json")]
    return {key.removeprefix(f"{prefix}/"): client.get_object(Bucket=client.bucket, Key=key)["Body"].read() for key in keys}


def test_a_checkpoint_goes_from_a_bucket_to_a_bucket(tmp_path, bucket):
    source = write_hf(tmp_path / "hf", layers=1, hidden=512, feed_forward=2048, vocabulary=4096)
    put_folder(bucket, "hf", source)
    url = f"s3://{bucket.bucket}"
    converted(f"{url}/hf", f"{url}/out", to="vllm", tp=2)
    assert stored(bucket, "out") == content(converted(source, tmp_path / "out", to="vllm", tp=2))
    assert not bucket.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads")
    assert reshard.verify(f"{url}/out").equal and reshard.verify(f"{url}/hf", f"{url}/out").equal


class TestMoto(StoreLaws):
    @pytest.fixture
    def store(self, bucket):
        return open_store(f"s3://{bucket.bucket}/x")


@pytest.fixture
def uploads_with_times(monkeypatch):
    """moto 5.2 says of every upload that it was begun in 2010, before the conversion that wrote it. S3 says when it was."""
    answer, began = responses.ActionResult, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() + 60))

    def with_times(result):
        return answer(
            {**result, "Uploads": [{**each, "Initiated": began} for each in result["Uploads"]]} if "Uploads" in result else result
        )

    monkeypatch.setattr(responses, "ActionResult", with_times)


@pytest.mark.usefixtures("uploads_with_times")
def test_clean_aborts_what_a_killed_run_left(tmp_path, bucket):
    source = write_hf(tmp_path / "hf", layers=8, hidden=512, feed_forward=2048, vocabulary=8192)
    process = subprocess.Popen(
        command("convert", source, f"s3://{bucket.bucket}/out", "--to", "vllm"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not bucket.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads") and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    listed = json.loads(run("clean", f"s3://{bucket.bucket}", "--json").out)
    assert {each["kind"] for each in listed["leftovers"]} == {"upload", "target"}
    assert run("clean", f"s3://{bucket.bucket}", "--yes").code == 0
    assert not bucket.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads") and stored(bucket, "out") == {}


def test_a_profile_of_aws_is_used(tmp_path, bucket, monkeypatch):
    put_folder(bucket, "hf", write_hf(tmp_path / "hf", layers=1))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    folder = tmp_path / "home" / ".aws"
    folder.mkdir(parents=True)
    (folder / "credentials").write_text("[team]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    (folder / "config").write_text("[profile team]\nregion = us-east-1\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert len(reshard.open(f"s3://{bucket.bucket}/hf").index.tensors) == 12


def test_a_bucket_that_is_not_there_is_named_at_once(bucket, monkeypatch):
    monkeypatch.setattr("reshard.storage.stores.store.random.uniform", None)  # no pause before it is asked again
    with pytest.raises((SystemRefusal, reshard.RequestError), match="no-such-bucket"):
        reshard.open("s3://no-such-bucket/x")
    assert os.environ["AWS_ENDPOINT_URL"]
