"""`reshard hub`: what clients of three protocols get, and what strangers do not."""

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from output_bytes import FIXTURES

import reshard
from reshard.doors import server as serving
from reshard.doors.hub import TOKEN, Hub

HF = FIXTURES / "hf"
SECRET = "a token of more than sixteen letters"


@contextmanager
def served(*sources, **options) -> Hub:
    with reshard.hub(sources, port=0, **options) as hub:
        yield hub


@pytest.fixture(scope="module")
def llama():
    with served(HF / "llama", name="org/m") as hub:
        yield hub


@pytest.fixture
def secured(monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(HF / "llama", name="org/m", bind="0.0.0.0") as hub:
        yield hub


def ask(hub, path, method="GET", body=None, **headers):
    """(status, headers with lower-case names, content)"""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=20)
    connection.request(method, path, body=body, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()


def raw(hub, request, seconds=20):
    """Everything that the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", hub.port), timeout=seconds) as connection:
        connection.sendall(request)
        content = b""
        while part := connection.recv(1 << 16):
            content += part
        return content


def test_the_hub_tells_its_files_and_sends_them(llama):
    folder = reshard.folder(HF / "llama", to="hf")
    status, _, content = ask(llama, "/api/models/org/m")
    told = json.loads(content)
    assert status == 200 and told["id"] == "org/m" and [each["rfilename"] for each in told["siblings"]] == list(folder)
    for revision in ("main", told["sha"]):
        tree = json.loads(ask(llama, f"/api/models/org/m/tree/{revision}?recursive=true&expand=false")[2])
        assert {each["path"]: each["size"] for each in tree} == {path: file.size for path, file in folder.items()}
        status, headers, content = ask(llama, f"/org/m/resolve/{revision}/model.safetensors")
        assert (status, content) == (200, folder["model.safetensors"].read())
        assert headers["etag"] == f'"{folder["model.safetensors"].etag}"' and headers["x-repo-commit"] == told["sha"]
    body = json.dumps({"paths": ["config.json", "nothing"], "expand": False})
    status, _, content = ask(llama, "/api/models/org/m/paths-info/main", "POST", body, Content_Type="application/json")
    assert status == 200 and [each["path"] for each in json.loads(content)] == ["config.json"]
    assert [each["name"] for each in json.loads(ask(llama, "/api/models/org/m/refs")[2])["branches"]] == ["main"]


def test_pages_of_a_listing_follow_each_other(llama):
    paths, path = [], "/api/models/org/m/tree/main?recursive=true&limit=3"
    while path:
        _, headers, content = ask(llama, path)
        paths += [each["path"] for each in json.loads(content)]
        path = headers.get("link", "").partition(f"127.0.0.1:{llama.port}")[2].partition(">")[0]
    assert paths == list(reshard.folder(HF / "llama", to="hf"))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/org/other", "RepoNotFound"),
        ("/other/m/resolve/main/config.json", "RepoNotFound"),
        ("/api/models/org/m/revision/v2", "RevisionNotFound"),
        ("/org/m/resolve/v2/config.json", "RevisionNotFound"),
        ("/org/m/resolve/main/tokenizer.model", "EntryNotFound"),
        ("/org/m/resolve/main/../../../etc/passwd", "EntryNotFound"),
        ("/org/m/resolve/main/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "EntryNotFound"),
        ("/org/m/resolve/main//etc/passwd", "EntryNotFound"),
        ("/api/agent-harnesses", "RepoNotFound"),
    ],
)
def test_what_is_not_announced_does_not_exist(llama, path, code):
    for method in ("GET", "HEAD"):
        status, headers, _ = ask(llama, path, method)
        assert (status, headers["x-error-code"]) == (404, code)


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=0-7", (0, 8)), ("bytes=100-", (100, None)), ("bytes=-5", (-5, None)), ("bytes=7-99999999999", (7, None)),
        ("bytes=0-0", (0, 1)), ("bytes=5-4", (0, None)), ("bytes=0-1,3-4", (0, None)), ("items=0-1", (0, None)), ("bytes=-", (0, None)),
    ],
)  # fmt: skip
def test_ranges_are_slices(llama, asked, span):
    content = reshard.folder(HF / "llama", to="hf")["model.safetensors"].read()
    wanted = content[span[0] : span[1]]
    for path in ("/org/m/resolve/main/model.safetensors", "/m/model.safetensors"):
        status, headers, part = ask(llama, path, Range=asked)
        assert part == wanted and int(headers["content-length"]) == len(wanted)
        assert status == (200 if wanted == content else 206)
        assert ask(llama, path, "HEAD", Range=asked)[1]["content-length"] == headers["content-length"]
    if status == 206:
        start = len(content) + span[0] if span[0] < 0 else span[0]
        assert headers["content-range"] == f"bytes {start}-{start + len(wanted) - 1}/{len(content)}"


def test_conditions_on_the_etag(llama):
    path = "/m/model.safetensors"
    etag = ask(llama, path, "HEAD")[1]["etag"]
    assert ask(llama, path, If_Match=etag)[0] == 200
    assert ask(llama, path, If_Match='"other"', Range="bytes=0-3")[0] == 412
    assert ask(llama, path, If_None_Match=etag)[::2] == (304, b"")
    assert ask(llama, path, If_Range='"other"', Range="bytes=0-3")[0] == 200
    assert ask(llama, path, If_Range=etag, Range="bytes=0-3")[0] == 206
    status, headers, _ = ask(llama, path, Range="bytes=999999999-")
    assert status == 416 and headers["content-range"].startswith("bytes */")


def keys(content):
    space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}
    tree = ElementTree.fromstring(content)
    found = [each.findtext("s3:Key", namespaces=space) for each in tree.findall("s3:Contents", space)]
    token = tree.findtext("s3:NextContinuationToken", namespaces=space)
    return found, [each.findtext("s3:Prefix", namespaces=space) for each in tree.findall("s3:CommonPrefixes", space)], token


def test_a_bucket_lists_its_keys_page_by_page(llama):
    every, token = [], None
    for _ in range(20):
        query = f"&continuation-token={token}" if token else ""
        found, _, token = keys(ask(llama, f"/m?list-type=2&max-keys=2{query}")[2])
        every += found
        if not token:
            break
    assert every == sorted(reshard.folder(HF / "llama", to="hf"))
    assert keys(ask(llama, "/m?list-type=2&prefix=con")[2])[0] == ["config.json"]
    assert ask(llama, "/m", "HEAD")[0] == 200 and ask(llama, "/n", "HEAD")[0] == 404
    assert b"NoSuchKey" in ask(llama, "/m/nothing", x_amz_date="x")[2] and b"NoSuchBucket" in ask(llama, "/n?list-type=2")[2]
    assert b"InvalidArgument" in ask(llama, "/m?list-type=2&max-keys=x")[2]


def test_the_steps_of_a_run_are_revisions(tmp_path):
    for step in (100, 200):
        shutil.copytree(HF / "llama", tmp_path / "run" / f"step-{step}")
        (tmp_path / "run" / f"step-{step}" / "reshard.json").write_text("{}")
    with served(tmp_path / "run", name="org/run") as hub:
        commits = {each["name"]: each["targetCommit"] for each in json.loads(ask(hub, "/api/models/org/run/refs")[2])["branches"]}
        assert commits.keys() == {"main", "step-100", "step-200"} and commits["main"] == commits["step-200"] != commits["step-100"]
        assert ask(hub, "/org/run/resolve/step-100/config.json")[1]["x-repo-commit"] == commits["step-100"]
        assert keys(ask(hub, "/run?list-type=2&delimiter=/")[2])[1] == ["step-100/", "step-200/"]
        assert "step-100/config.json" in keys(ask(hub, "/run?list-type=2&prefix=step-100/")[2])[0]
        assert ask(hub, "/run/step-200/config.json")[0] == 200 and ask(hub, "/run/config.json")[0] == 404
        shutil.copytree(tmp_path / "run" / "step-200", tmp_path / "run" / "step-300")
        repository = hub.catalogue.by_name["org/run"]
        repository._looked -= 100  # as if it were later
        assert ask(hub, "/org/run/resolve/step-300/config.json")[0] == 200


def test_a_changed_source_ends_an_answer(tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "m")
    with served(tmp_path / "m", name="org/m") as hub:
        assert ask(hub, "/m/model.safetensors", Range="bytes=5000-5007")[0] == 206
        content = (tmp_path / "m" / "model.safetensors").read_bytes()
        (tmp_path / "m" / "model.safetensors").write_bytes(content[::-1])
        status, _, content = ask(hub, "/m/model.safetensors")
        assert status == 500 and b"after the checkpoint was opened" in content


def test_requests_on_one_connection_are_answered_in_order(llama):
    line = b"GET /m/config.json HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%d-%d\r\n%s\r\n"
    content = reshard.folder(HF / "llama", to="hf")["config.json"].read()
    answers = raw(llama, b"".join(line % (at, at, b"" if at < 9 else b"Connection: close\r\n") for at in range(10)))
    parts = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 206 ")[1:]]
    assert b"".join(parts) == content[:10]


def test_an_absolute_target_is_understood(llama):
    request = b"GET http://127.0.0.1:%d/m/config.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % llama.port
    assert raw(llama, request).startswith(b"HTTP/1.1 200")
    assert raw(llama, request.replace(b"http://127.0.0.1", b"http://evil.example")).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "169.254.169.254", "localhost:1:2"])
def test_another_host_is_refused_without_a_token(llama, host):
    status, _, content = ask(llama, "/m/config.json", Host=host)
    assert status == 421 and b"Host" in content


def test_hosts_of_the_loopback_are_taken(llama):
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:9", "[::1]:80", "127.1.2.3"):
        assert ask(llama, "/m/config.json", Host=host)[0] == 200
    assert raw(llama, b"GET /m/config.json HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    "request_",
    [
        b"PUT /m/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
        b"DELETE /m/config.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /m/config.json HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /m/config.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /m HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /m\x00/config.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET m HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[::1/m HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\r\n\r\n\r\n",
    ],
)
def test_what_no_client_sends_is_refused_and_the_server_lives(llama, request_, capfd):
    answer = raw(llama, request_)
    assert answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"404", b"405", b"414", b"431", b"505")
    assert ask(llama, "/m/config.json")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_slow_head_and_too_many_connections_end(monkeypatch):
    monkeypatch.setattr(serving, "_HEAD", 0.5)
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 8)
    with served(HF / "llama", name="org/m") as hub:
        idle = [socket.create_connection(("127.0.0.1", hub.port), timeout=10) for _ in range(8)]
        for connection in idle:
            connection.sendall(b"GET /m")
        time.sleep(0.2)
        assert raw(hub, b"GET /m/config.json HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 503")
        for connection in idle:
            assert connection.recv(100) == b""
            connection.close()
        assert ask(hub, "/m/config.json")[0] == 200


def test_a_small_read_on_a_kept_connection_does_not_wait(llama):
    connection = http.client.HTTPConnection("127.0.0.1", llama.port)
    took = []
    for at in range(20):
        began = time.perf_counter()
        connection.request("GET", "/m/model.safetensors", headers={"Range": f"bytes={at}-{at + 7}"})
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
    assert sorted(took)[5] < 0.03


def test_another_address_needs_the_token(secured):
    for path in ("/", "/m/config.json", "/api/models/org/m", "/org/m/resolve/main/config.json", "/../../etc/passwd", "/%ff"):
        status, headers, content = ask(secured, path)
        assert status in (400, 401) and b"config" not in content.replace(b"the token is missing", b"")
        assert status == 400 or headers["www-authenticate"].startswith("Basic")
    for wrong in (
        "Bearer wrong",
        f"Bearer {SECRET}x",
        "Bearer ",
        "Basic ???",
        "Basic " + base64.b64encode(b"a:b").decode(),
        SECRET,
        "AWS4-HMAC-SHA256 x",
    ):
        assert ask(secured, "/m/config.json", Authorization=wrong)[0] in (401, 403)
    assert ask(secured, "/m/config.json", Authorization=f"Bearer {SECRET}")[0] == 200
    basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert ask(secured, "/m/config.json", Authorization=f"Basic {basic}", Host="node-7:8787")[0] == 200


def signed(hub, path, secret, **headers):
    """The headers that botocore signs."""
    request = AWSRequest("GET", f"http://127.0.0.1:{hub.port}{path}", headers=headers)
    S3SigV4Auth(Credentials("any", secret), "s3", "us-east-1").add_auth(request)
    return dict(request.headers.items())


@pytest.mark.parametrize("path", ["/m/config.json", "/m?list-type=2&prefix=a%20b%2Fc&delimiter=%2F", "/m/a%20b%2B~c.json"])
def test_signatures_of_s3_are_compared(secured, path):
    connection = http.client.HTTPConnection("127.0.0.1", secured.port)

    def status(headers, asked=path):
        connection.request("GET", asked, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    good = signed(secured, path, SECRET)
    assert status(good) in (200, 404)
    assert status(signed(secured, path, "another secret")) == 403
    assert status(good, "/m/model.safetensors") == 403
    assert status({**good, "X-Amz-Date": "20200101T000000Z"}) == 403
    assert status({**good, "Authorization": good["Authorization"].replace("SignedHeaders=host;", "SignedHeaders=")}) == 403


def test_another_address_without_a_token_gets_one(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with served(HF / "llama", name="org/m", bind="0.0.0.0") as hub:
        assert hub.is_made and len(hub.access.token) >= 32
        assert ask(hub, "/m/config.json")[0] == 401
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(reshard.RequestError, match="characters"):
        reshard.hub(HF / "llama", port=0)


def test_names_and_formats_of_several_checkpoints():
    with served(HF / "llama", HF / "gpt2", name=["a/one", "a/two"], to=["hf", "vllm"], tp=2) as hub:
        assert [*hub.catalogue.by_name] == ["a/one-hf", "a/one-vllm", "a/two-hf", "a/two-vllm"]
        assert ask(hub, "/one-vllm/model-rank-1-part-0.safetensors", "HEAD")[0] == 200
    for name in ("noslash", "a/../b", "a/b/c", "a/b--c"):
        with pytest.raises(reshard.RequestError, match="name"):
            reshard.hub(HF / "llama", name=name, port=0)


def test_pages_for_people_are_inert(tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "<script>alert(1)<")
    with served(tmp_path / "<script>alert(1)<", name="org/m") as hub:
        for path in ("/", "/-/org/m/main", "/-/org/m/main?plan", "/-/org/m/main?tensor=3"):
            status, headers, content = ask(hub, path, Accept="text/html")
            assert status == 200 and headers["content-type"].startswith("text/html") and b"<script" not in content
            assert "default-src 'none'" in headers["content-security-policy"]
        assert b"Histogram" in content and b"model.layers" in content
        assert ask(hub, "/-/org/x/main", Accept="text/html")[0] == 404
        assert b"ListAllMyBucketsResult" in ask(hub, "/")[2]


def test_many_clients_at_once_get_their_bytes(llama):
    content, wrong = reshard.folder(HF / "llama", to="hf")["model.safetensors"].read(), []

    def read(seed):
        for at in range(seed, 5000, 500):
            if ask(llama, "/m/model.safetensors", Range=f"bytes={at}-{at + 9999}")[2] != content[at : at + 10_000]:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("token", ["", SECRET])
def test_the_command_prints_lines_to_copy(token):
    """One line for each program, with every variable as a shell takes it; the token is named, and never printed. Ctrl-C ends it."""
    command = [Path(sys.executable).with_name("reshard"), "hub", HF / "llama", "--name", "org/m", "--port", "0"]
    process = subprocess.Popen(command, env={**os.environ, TOKEN: token}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = [process.stdout.readline() for _ in range(9)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert first[0].startswith("http://127.0.0.1:") and first[0].endswith(" serves org/m\n") and not rest
    programs = [line.split()[0] for line in first[2:]]
    assert programs == ["transformers", "vLLM", "SGLang", "Run:ai", "hf", "aws", "curl"]
    assert "***" not in "".join(first) and "\\n" not in "".join(first) and SECRET not in "".join(first)
    secret = f"${TOKEN}" if token else "none"
    assert f"AWS_ACCESS_KEY_ID=reshard AWS_SECRET_ACCESS_KEY={secret} " in first[7]
