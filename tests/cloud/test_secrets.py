"""Credentials of stores, wherever a user can put them: the stores get them, and nothing else holds them afterwards."""

import logging
import re

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.storage.stores import store
from reshard.storage.stores.urls import storage_options

LLAMA = HF / "llama"
# One secret for each place, so that a failure says which.
OF_OPTION, OF_KEY, OF_USER, OF_QUERY = "optionM4RKED/+==", "AKIAM4RKEDKEYID", "pa%40M4RKEDsw'ord", "sigM4RKED%2Bquery"
OF_ENVIRONMENT = {
    "AWS_SESSION_TOKEN": "envM4RKEDsession",
    "HF_TOKEN": "hf_envM4RKED",
    "AZURE_STORAGE_ACCOUNT_KEY": "envM4RKEDazure==",
    "RESHARD_LIVE_TOKEN": "envM4RKEDlive",
    "HTTPS_PROXY": "http://user:proxyM4RKED@127.0.0.1:9",
}
MARK = re.compile(r".{0,60}M4RKED.{0,40}")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name, value in OF_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "_ATTEMPTS", 2)
    monkeypatch.setattr(store, "_SILENCE", 0.0)  # a repeated request is told at once


@pytest.fixture
def told():
    """What listeners in Python are told: every record of the library's logger, as a plain handler formats it."""
    lines = []

    class Listener(logging.Handler):
        def emit(self, record):
            lines.append(f"{record.getMessage()} {record.__dict__.get('fields')}")

    listener, logger = Listener(), logging.getLogger("reshard")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(listener)
    logger.setLevel(level)


def leaks(folder, *texts, s3=None):
    """Every place that holds a secret, with what stands around it."""
    held = {f"text {i}": text for i, text in enumerate(texts)}
    held |= {
        str(path): path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file() and "s3-server" not in path.parts
    }
    held |= {f"{path.name}": path.name for path in folder.rglob("*")}
    if s3:
        held |= {f"{bucket}/{key}": s3.content(bucket, key).decode("latin-1") for bucket, key in list(s3.objects)}
    return {place: found[0] for place, text in held.items() if (found := MARK.search(text))}


def options(s3, *more):
    pairs = [f"endpoint={s3.endpoint}", "region=us-east-1", f"access_key_id={OF_KEY}", f"secret_access_key={OF_OPTION}", *more]
    return [word for pair in pairs for word in ("--storage-option", pair)]


# Each writes something of its own: a record, an index, a plan file, a page, a log, metrics, a link, a journal.
COMMANDS = {
    "convert": ["convert", "{m}", "out", "--to", "hf", "--metrics-file", "metrics.prom", "--checksums"],
    "convert into the store": ["convert", "{m}", "{b}/out", "--to", "vllm", "--tp", 2],
    "part": ["convert", "{m}", "{b}/parts", "--to", "vllm", "--tp", 2, "--part", "0/2"],
    "if changed": ["convert", "{m}", "out", "--to", "hf", "--if-changed", "--json"],
    "plan": ["plan", "{m}", "--to", "hf", "--plan-out", "plan.file", "--json", "--full"],
    "run a plan": ["convert", "{m}", "planned", "--plan", "plan.file"],
    "page": ["inspect", "{m}", "--html", "page.html", "--interactive"],
    "diff": ["diff", "{m}", "{m}", "--html", "diff.html"],
    "cache": ["cache", "get", "{m}", "--to", "vllm", "--tp", 2, "--cache", "cache", "--json"],
    "cache list": ["cache", "list", "--cache", "cache", "--json"],
    "delta": ["delta", "{m}", "{m}", "delta", "--json"],
    "kept": ["delta", "--of", "{b}/run", "kept"],
    "apply": ["apply", "{m}", "delta", "applied", "--to", "hf"],
    "average": ["convert", "{m}", "{m}", "mean", "--to", "hf", "--average"],
    "watch": ["watch", "{b}/run", "--to", "hf", "--into", "watched/{step}", "--all", "--json", "--then", "echo $RESHARD_TARGET"],
    "verify": ["verify", "{m}", "out", "--json"],
    "doctor": ["doctor", "{m}", "--deep", "--json", "--metrics-file", "doctor.prom"],
    "stats": ["stats", "{m}", "--json"],
    "log": ["log", "{b}/run", "--stats", "--json"],
    "fingerprint": ["fingerprint", "{m}", "--json"],
    "clean": ["clean", "{b}", "--json"],
    "usage": ["convert", "{m}", "out2", "--to", "nothing"],
    "missing": ["inspect", "{b}/nothing-there"],
}


def test_no_command_tells_or_records_what_opens_a_store(tmp_path, s3, told, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    s3.put_tree("bucket", "m", LLAMA)
    s3.put_tree("bucket", "run/step-1", LLAMA)
    for name, words in COMMANDS.items():
        # --all takes a step that has just been written.
        line = [str(word).replace("{m}", "s3://bucket/m").replace("{b}", "s3://bucket") for word in words]
        for more in ("-v", "--debug"):
            front, back = ([more], []) if more == "--debug" else ([], [more, "--log-file", "log.txt", "--log-format", "json"])
            done = reshard(*front, *line, *options(s3), *back)
            assert done.code in (0, 1, 2, 4), (name, done.err)
            assert not leaks(tmp_path, done.out, done.err, *told, s3=s3), name
    assert "secret_access_key=***" in (tmp_path / "out" / "reshard.json").read_text()
    assert f"endpoint={s3.endpoint}" in (tmp_path / "out" / "reshard.json").read_text(), "harmless options can be read"
    assert "secret_access_key=***" in (tmp_path / "log.txt").read_text()


def web(s3, name="model.safetensors", *, password=OF_USER, signature=""):
    query = f"?X-Amz-Signature={signature}" if signature else ""
    return f"{s3.endpoint.replace('://', f'://user:{password}@')}/bucket/m/{name}{query}"


def test_the_password_of_a_url_is_told_to_the_server_alone(tmp_path, s3, told):
    s3.put_tree("bucket", "m", LLAMA)
    asked = []
    s3.lie = lambda request: asked.append(request.headers.get("Authorization")) or False
    for name, words in COMMANDS.items():
        if not any("{b}" in str(word) for word in words):
            line = [str(word).replace("{m}", web(s3)) for word in words]
            done = reshard(*line, "-v", "--log-file", "log.txt")
            assert not leaks(tmp_path, done.out, done.err, *told, s3=s3), name
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "delta").exists() and (tmp_path / "page.html").exists()
    assert any(each and each.startswith("Basic ") for each in asked)
    assert "http://***@127.0.0.1" in (tmp_path / "out" / "reshard.json").read_text()


def test_a_new_password_does_not_make_another_entry_of_the_cache(tmp_path, s3):
    s3.put_tree("bucket", "m", LLAMA)
    words = ["--to", "vllm", "--tp", 2, "--cache", "cache", "--json"]
    first = reshard("cache", "get", web(s3), *words).document
    second = reshard("cache", "get", web(s3, password="another-password"), *words).document
    assert (first["used"], second["used"]) == (False, True) and first["path"] == second["path"]


def test_a_run_that_began_with_another_password_is_resumed_and_found_unchanged(tmp_path, s3):
    s3.put_tree("bucket", "m", LLAMA)
    words = ["--to", "vllm", "--tp", 2]
    assert reshard("convert", web(s3), "out", *words, "--part", "0/2").code == 0
    done = reshard("convert", web(s3, password="another-password"), "out", *words, "--resume")
    assert done.code == 0, done.err
    again = reshard("convert", web(s3, password="a-third-password"), "out", *words, "--if-changed", "--json")
    assert again.document["unchanged"] is True


@pytest.mark.parametrize(
    "scheme", ["http", "https", "s3", "s3a", "gs", "az", "abfss", "hf", "hdfs", "ssh", "sftp", "ftp", "msc", "memory", "webdav", "oci"]
)
def test_no_scheme_of_a_url_lets_its_secrets_out(tmp_path, scheme, told, monkeypatch):
    """What happens depends on what is installed; nothing answers at port 9 of this machine."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://user:{OF_USER}@127.0.0.1:9")
    url = f"{scheme}://user:{OF_USER}@127.0.0.1:9/m?token={OF_QUERY}&sig={OF_QUERY}#{OF_QUERY}"
    more = ["--storage-option", f"endpoint=http://user:{OF_USER}@127.0.0.1:9", "--storage-option", f"password={OF_OPTION}"]
    for words in (["inspect", url], ["convert", LLAMA, url, "--to", "hf"], ["inspect", url, *more], ["clean", url]):
        for json in ([], ["--json"]):
            done = reshard("--debug", *words, *json, "-v", "--log-file", "log.txt")
            assert done.code in (0, 2, 3, 4, 5, 6), done.err
            assert not leaks(tmp_path, done.out, done.err, *told), words[0]


def test_python_is_told_no_secret_either(tmp_path, s3, told):
    s3.put_tree("bucket", "m", LLAMA)
    with storage_options({"endpoint": s3.endpoint, "access_key_id": OF_KEY, "secret_access_key": OF_OPTION}):
        library.convert(library.plan(library.open("s3://bucket/m"), to="hf"), tmp_path / "out")
        with pytest.raises(library.ReshardError) as caught:
            library.open(f"s3://user:{OF_USER}@bucket/nothing")
    error = caught.value
    assert not leaks(tmp_path, str(error), repr(error), str(error.to_json()), *told)
