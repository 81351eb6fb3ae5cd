"""Stores and web servers that lie: told in one paragraph, never believed, and no other place is asked for it."""

import shutil

import pytest
from cloud.lies import LIES, redirecting
from cloud.models import write_hf
from cloud.s3_server import S3Server
from helpers.reshard_command import reshard as run

from reshard.errors import SystemRefusal
from reshard.storage.stores import store as stores
from reshard.storage.stores.obstore_backend import _answering
from reshard.storage.stores.urls import open_store

STATUSES = (301, 302, 307, 308)


@pytest.fixture
def quick(monkeypatch):
    """The pauses between attempts are those of a hundredth of the time."""
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE", "_SILENCE"):
        monkeypatch.setattr(stores, name, getattr(stores, name) / 100)


@pytest.fixture
def other(tmp_path):
    """Another server, which has everything that it is asked for."""
    server = S3Server(tmp_path / "other")
    yield server
    server.close()


@pytest.fixture
def model(tmp_path, s3, other):
    """A model at both servers."""
    folder = write_hf(tmp_path / "hf", layers=1)
    shutil.copyfile(folder / "model-00001-of-00003.safetensors", folder / "table.safetensors")
    for server in (s3, other):
        server.put_tree("bucket", "hf", folder)
    return folder


def is_told(result, *texts):
    return result.code in (3, 5, 6) and "Traceback" not in result.err and all(text in result.err for text in texts)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("GET",)], ids="-".join)
@pytest.mark.parametrize("where", ["port", "host", "scheme"])
def test_a_web_server_does_not_lead_elsewhere(status, methods, where, s3, other, model):
    place = {
        "port": other.endpoint,
        "host": other.endpoint.replace("127.0.0.1", "localhost"),
        "scheme": s3.endpoint.replace("http:", "https:"),
    }
    s3.lie = redirecting(status, place[where], methods)
    result = run("inspect", f"{s3.endpoint}/bucket/hf/table.safetensors")
    assert is_told(result, "redirects to", "connects only to what you name"), result.err
    assert not other.requests


def test_a_model_at_a_url_does_not_lead_elsewhere(s3, other, model):
    s3.lie = redirecting(302, other.endpoint)
    result = run("inspect", model, "--model", f"{s3.endpoint}/bucket/hf/config.json")
    assert result.code != 0 and "redirects to" in result.err and not other.requests, result.err


def test_a_redirect_on_the_same_server_is_followed_and_one_in_a_circle_is_not(s3, model, quick):
    def moved(request):
        if request.path != "/latest/table.safetensors":
            return False
        request.head(307, 0, {"Location": "/bucket/hf/table.safetensors"})
        return True

    s3.lie = moved
    assert run("inspect", f"{s3.endpoint}/latest/table.safetensors").code == 0
    s3.lie = redirecting(307, "")
    assert is_told(run("inspect", f"{s3.endpoint}/bucket/hf/table.safetensors"), "more than 5 redirects")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("PUT", "POST", "DELETE")], ids="-".join)
def test_an_s3_endpoint_does_not_lead_to_another_host(status, methods, s3, other, model, monkeypatch, quick):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint.replace("127.0.0.1", "localhost"))
    assert run("inspect", "s3://bucket/hf").code == 0, "the endpoint itself is reached"
    s3.lie = redirecting(status, other.endpoint, methods)
    if "GET" in methods:
        assert is_told(run("inspect", "s3://bucket/hf"), "redirects to another host")
        assert is_told(run("inspect", "s3://bucket/hf", "--storage-option", f"endpoint={s3.endpoint.replace('127.0.0.1', 'localhost')}"))
    else:
        assert is_told(run("convert", model, "s3://bucket/out", "--to", "vllm"))
    assert not other.requests


@pytest.mark.parametrize("name", LIES)
def test_what_a_store_that_lies_says_is_told_in_one_paragraph(name, s3, model, tmp_path, quick):
    s3.lie = LIES[name]
    for url in ("s3://bucket/hf", f"{s3.endpoint}/bucket/hf/table.safetensors"):
        result = run("convert", url, tmp_path / "out", "--to", "vllm", "--model", model)
        lines = [line for line in result.err.splitlines() if "warning: no answer" not in line]
        assert result.code in (2, 3, 5) and len(lines) == 1 and "Traceback" not in result.err, result.err
        assert sum(s3.requests.values()) < 500


def test_a_store_whose_etags_never_settle_is_left_after_some_looks(s3, model, quick):
    """The record of a conversion that has begun changes with every look."""
    assert run("convert", model, "s3://bucket/out", "--to", "vllm").code == 0
    del s3.objects["bucket", "out/reshard.json"]
    open_store("s3://bucket/out").put(".reshard/begun.json", b"{}")
    s3.reset_counts()
    s3.lie = LIES["a new ETag with every answer"]
    result = run("convert", model, "s3://bucket/out", "--to", "vllm", "--resume")
    assert is_told(result, "ETag") and result.err.count("\n") == 1, result.err
    assert s3.by_key["out/.reshard/begun.json"] < 50


def test_a_store_that_does_not_answer_is_spoken_of_before_it_is_given_up(s3, model, quick):
    s3.lie = LIES["busy for ever"]
    result = run("inspect", "s3://bucket/hf")
    *warnings, error = result.err.splitlines()
    assert result.code == 5 and "cannot be listed" in error, result.err
    assert warnings and all(
        line.startswith("reshard: warning: no answer from s3://bucket/hf, trying again (") and "of 10)" in line for line in warnings
    ), result.err
    assert sum(s3.requests.values()) == 10
    web = run("inspect", f"{s3.endpoint}/bucket/hf/table.safetensors")
    assert f"no answer from {s3.endpoint}/bucket/hf" in web.err and ", trying again (" in web.err


def test_an_endpoint_that_nobody_serves_is_named_without_the_librarys_requests(s3, quick):
    s3.close()
    error = run("inspect", "s3://bucket/hf").err.splitlines()[-1]
    assert f"s3://bucket/hf: cannot be listed: no answer from {s3.endpoint.removeprefix('http://')}. Check the URL" in error, error


def test_a_bucket_that_is_not_there_is_called_so(s3, quick):
    def no_bucket(request):
        request.error(404, "NoSuchBucket")
        return True

    s3.lie = no_bucket
    assert is_told(run("inspect", "s3://typo/hf"), "the bucket does not exist")


@pytest.fixture
def nobody(s3, monkeypatch, tmp_path):
    """Neither the environment nor a cloud gives credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("config", [None, "[default]\nregion = eu-west-1\n"])
def test_without_credentials_the_message_says_what_to_set(nobody, tmp_path, config):
    if config:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "config").write_text(config)
    shown = run("inspect", "s3://bucket/hf")
    assert shown.code == 5 and shown.err == (
        "reshard: s3://bucket/hf: no credentials are set, and this machine gets none from a cloud. Set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (which needs boto3); a public bucket needs --storage-option skip_signature=true. [system]\n"
    )


def test_a_profile_that_is_not_there_is_named(nobody, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "tema")
    shown = run("inspect", "s3://bucket/hf")
    assert shown.code == 2 and "AWS_PROFILE=tema: The config profile (tema) could not be found. Name a profile of ~/.aws." in shown.err


@pytest.mark.parametrize(
    ("store", "path", "variable"),
    [
        ("GCS", "/computeMetadata/v1/instance/service-accounts/default/token", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("MicrosoftAzure", "/metadata/identity/oauth2/token", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_other_clouds_have_other_variables(store, path, variable):
    """The requests of obstore 0.12.1 on a machine in no cloud. A cloud that has too much to do is asked again."""
    import obstore

    asked = f"Generic {store} error: Error performing token request: Error performing GET http://169.254.169.254{path} in 1.2ms - "
    for cause, expected in (("HTTP error: error sending request", SystemRefusal), ("status code: 429 Too Many Requests", OSError)):
        with pytest.raises(expected) as refused, _answering(obstore, "gs://bucket/hf"):
            raise obstore.exceptions.GenericError(asked + cause)
        assert (variable in str(refused.value)) == (expected is SystemRefusal), str(refused.value)
