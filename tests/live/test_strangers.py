"""Nobody joins who should not: strangers at the port of an update, files that are not ours, ranks and servers that lie.

What a stranger sends is made here by hand, with hmac and struct; a right conversation is recorded by a relay, and said again.
"""

import hashlib
import hmac
import json
import os
import socket
import stat
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import blake3
import pytest
import torch
import torch.distributed as dist
from helpers.fixture_places import HF
from helpers.push_server import serving
from helpers.reshard_command import command, reshard
from live.memory_transport import MemoryTransport
from live.source_rank import free_port, source_ranks
from live.test_update import LLAMA, TP, digests, held

import reshard as library
from reshard.errors import RequestError, SystemRefusal
from reshard.geometry.dtypes import BF16
from reshard.live.hello import Hello
from reshard.live.plan.schedule import HeldTensor
from reshard.live.target_rank import TargetRank
from reshard.live.wire import meeting as meetings
from reshard.live.wire import own_memory
from reshard.live.wire.channel import VERSION, Joining
from reshard.live.wire.meeting import Guest, Meeting, torch_store
from reshard.live.wire.secret import Secret
from reshard.live.wire.shared_memory import SLOT, SLOTS, SharedMemory
from reshard.live.wire.staging import Staged
from reshard.live.wire.stream import StreamWriter, receive_stream
from reshard.live.wire.transport import TorchDistributed

KEY = bytes(range(32))
MEMORY = Path("/dev/shm")


@contextmanager
def met():
    """A meeting, and its port."""
    meeting = Meeting("127.0.0.1").open(KEY)
    try:
        yield meeting, meeting.port
    finally:
        meeting.close()


def connected(port):
    return socket.create_connection(("127.0.0.1", port), 5)


def is_ended(connection, seconds=5.0):
    """Whether the other end closes the connection in time; what it sends before is read."""
    connection.settimeout(seconds)
    with suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


def framed(key, way, number, body):
    """A message as meeting.py describes it."""
    seal = hmac.new(key, f"{way}, {number}:".encode() + body, hashlib.sha256).digest()
    return len(body).to_bytes(4, "big") + seal + body


def test_two_guests_tell_each_other_values():
    with met() as (meeting, port):
        one, two = Guest("127.0.0.1", port, KEY, 10), Guest("127.0.0.1", port, KEY, 10)
        assert two.ask("a") is None
        threading.Timer(0.3, one.ask, ("a", "\u00ff\n1")).start()
        assert two.wait("a") == "\u00ff\n1" and meeting.strangers == 0
        store = torch_store(two)
        store.set("address", bytes(range(256)))
        assert torch_store(one).get("address") == bytes(range(256)) and store.check(["address"]) and not store.check(["other"])
        with pytest.raises(SystemRefusal, match="nobody has told 'b' within"):
            Guest("127.0.0.1", port, KEY, 1).wait("b")
        one.ask("cannot", "rank 1: no memory")
        with pytest.raises(SystemRefusal, match="rank 1: no memory"):
            two.wait("b")


STRANGERS = {
    "garbage": os.urandom(4096),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a huge length": bytes(16) + b"\xff" * 4,
    "a length beyond the first": bytes(16) + (1 << 20).to_bytes(4, "big"),
    "a right form without the key": bytes(16) + framed(bytes(32), "question", 0, b'["go", "", 0, null]'),
    "nothing": b"",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_what_a_stranger_says_ends_its_connection_and_changes_nothing(said, monkeypatch):
    monkeypatch.setattr(meetings, "SECONDS_UNKNOWN", 1.0)
    with met() as (meeting, port):
        stranger = connected(port)
        stranger.sendall(said)
        guest = Guest("127.0.0.1", port, KEY, 10)
        guest.ask("a", "1")
        assert is_ended(stranger) and guest.wait("a") == "1" and guest.ask("go") is None
        assert meeting.strangers == 1


def test_nothing_is_parsed_before_its_seal(monkeypatch):
    monkeypatch.setattr(meetings.json, "loads", lambda text: pytest.fail("parsed"))
    with met() as (_, port):
        stranger = connected(port)
        stranger.sendall(STRANGERS["a right form without the key"])
        assert is_ended(stranger)


def test_torchs_store_does_not_join():
    with met() as (_, port), pytest.raises((RuntimeError, dist.DistError)):
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)).set("go", "")


def test_a_conversation_that_was_recorded_cannot_be_said_again():
    with met() as (meeting, port), relayed(port) as (between, recorded):
        guest = Guest("127.0.0.1", between, KEY, 10)
        guest.ask("a", "old")
        Guest("127.0.0.1", port, KEY, 10).ask("a", "new")
        # In this conversation it counts once, too.
        assert len(recorded) > 16
        stranger = connected(port)
        stranger.sendall(bytes(recorded))
        assert is_ended(stranger) and guest.ask("a") == "new" and meeting.strangers == 1


@pytest.mark.parametrize("place", [17, 25, 70, 100])
def test_a_conversation_that_is_changed_on_its_way_ends(place):
    with met() as (_, port), relayed(port, place) as (between, _):
        with pytest.raises(SystemRefusal, match=r"does not know the secret|the connection to the sender ended"):
            Guest("127.0.0.1", between, KEY, 10).ask("a", "1")
        assert Guest("127.0.0.1", port, KEY, 10).ask("a") is None


@contextmanager
def relayed(port, flip=None):
    """A relay before a port, and what it has recorded of those who connect. flip: the byte that it changes."""
    recorded = bytearray()

    def one_way(source, target, is_question):
        with suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                if is_question:
                    start = len(recorded)
                    recorded.extend(part)
                    if flip is not None and start <= flip < len(recorded):
                        part[flip - start] ^= 1
                target.sendall(part)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve():
        with suppress(OSError):
            while True:
                near = listening.accept()[0]
                far = connected(port)
                recorded.clear()
                for ways in ((near, far, True), (far, near, False)):
                    threading.Thread(target=one_way, args=ways, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1], recorded


def test_who_pretends_to_be_the_meeting_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend():
            near = listening.accept()[0]
            near.sendall(bytes(16))
            near.recv(1 << 16)
            near.sendall(framed(bytes(32), "answer", 0, b'""'))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(SystemRefusal, match="not sealed with the secret"):
            Guest("127.0.0.1", listening.getsockname()[1], KEY, 10)


def test_many_silent_connections_hold_nobody_up(monkeypatch):
    """More of them than are kept, before and while others come."""
    monkeypatch.setattr(meetings, "MOST_UNKNOWN", 16)
    with met() as (_, port):
        silent = [connected(port) for _ in range(60)]
        began = time.monotonic()
        guests = [Guest("127.0.0.1", port, KEY, 10) for _ in range(4)]
        for i, guest in enumerate(guests):
            guest.ask(str(i), "here")
        assert [guests[0].wait(str(i)) for i in range(4)] == ["here"] * 4 and time.monotonic() - began < 5
        assert sum(is_ended(each, 0.05) for each in silent) >= 60 - 16


def test_a_guest_that_has_come_is_not_ended_by_strangers(monkeypatch):
    monkeypatch.setattr(meetings, "MOST_UNKNOWN", 4)
    with met() as (_, port):
        guest = Guest("127.0.0.1", port, KEY, 10)
        strangers = [connected(port) for _ in range(20)]
        assert guest.ask("a", "1") == "1" and len(strangers) == 20


# ---- the secret, and files ----


def test_a_secret_on_one_host_is_a_file_of_this_user_alone_until_it_is_forgotten(monkeypatch):
    monkeypatch.delenv("RESHARD_LIVE_TOKEN", raising=False)
    secret = Secret.of(True, False)
    path = MEMORY / f"reshard-{secret.told.removeprefix('file ')}"
    about = path.stat()
    assert stat.S_IMODE(about.st_mode) == 0o600 and about.st_size == 32 and path.read_bytes() == secret.content
    assert Secret.heard(secret.told) == secret.content and secret.content.hex() not in secret.told + repr(secret)
    secret.forget()
    assert not path.exists()
    with pytest.raises(RequestError, match="No such file"):
        Secret.heard(secret.told)


def test_a_secret_goes_to_another_host_only_where_the_network_is_trusted_or_by_the_environment(monkeypatch):
    monkeypatch.delenv("RESHARD_LIVE_TOKEN", raising=False)
    with pytest.raises(RequestError, match=r"loopback.*RESHARD_LIVE_TOKEN.*trust_network=True"):
        Secret.of(False, False)
    trusted = Secret.of(False, True)
    assert Secret.heard(trusted.told) == trusted.content
    monkeypatch.setenv("RESHARD_LIVE_TOKEN", "marked")
    secret = Secret.of(False, True)
    assert secret.told == "environment" and "marked" not in repr(secret) and secret.content == b"marked"
    # An engine that has a token takes no other secret.
    assert Secret.heard(trusted.told) == Secret.heard("environment") == b"marked"
    monkeypatch.delenv("RESHARD_LIVE_TOKEN")
    for told in ("environment", "request", "request 00", "request zz", "file", "", None, 3, ["file"], "file ../../etc/passwd"):
        with pytest.raises(RequestError):
            Secret.heard(told)


def test_the_key_of_a_channel_depends_on_all_that_its_ranks_are_told():
    joining = Joining("127.0.0.1", 4000, 2, 2)
    keys = [joining.key(b"secret"), joining.key(b"other")]
    for change in (
        {"host": "10.0.0.1"},
        {"port": 4001},
        {"sources": 3},
        {"targets": 3},
        {"channel": "a"},
        {"backend": "shared"},
        {"version": 4},
    ):
        keys.append(Joining(**{**asdict(joining), **change}).key(b"secret"))
    assert len({*keys}) == len(keys) and Joining(**{**asdict(joining), "offset": 2}).key(b"secret") == keys[0]


@pytest.mark.parametrize(
    "what", ["a path", "a link", "a hard link", "a FIFO", "a folder", "another size", "others may read it", "not there"]
)
def test_memory_that_is_not_ours_is_refused_and_stays_as_it_is(what, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    number = os.urandom(8).hex()
    path = MEMORY / f"reshard-{number}"
    make = {
        "a link": lambda: path.symlink_to(victim),
        "a FIFO": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "another size": lambda: (path.write_bytes(bytes(7)), path.chmod(0o600)),
        "others may read it": lambda: (path.write_bytes(bytes(8)), path.chmod(0o644)),
        "a hard link": lambda: (path.write_bytes(bytes(8)), path.chmod(0o600), os.link(path, f"{path}-2")),
    }
    make.get(what, lambda: None)()
    try:
        began = time.monotonic()
        for told in (f"../..{victim}", str(victim), f"{number}/../x", "") if what == "a path" else (number,):
            with pytest.raises(RequestError, match="should share is not there"):
                own_memory.opened(told, 8)
        assert time.monotonic() - began < 2 and victim.read_bytes() == b"precious"
        assert what != "another size" or path.read_bytes() == bytes(7)
    finally:
        for each in (path, Path(f"{path}-2")):
            with suppress(OSError):
                each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()


def test_a_rank_that_names_another_file_for_shared_memory_is_refused(tmp_path):
    """The rank that is honest opens nothing that lies elsewhere, and waits for nobody."""
    victim = tmp_path / "victim"
    victim.touch()
    os.truncate(victim, SLOTS * SLOT + 5)
    store, refused = dist.HashStore(), []

    def honest():
        try:
            SharedMemory.meet(store, 0, 2, seconds=20, address="127.0.0.1")
        except RequestError as error:
            refused.append(str(error))

    thread = threading.Thread(target=honest, daemon=True)
    thread.start()
    evil = TorchDistributed.join(store, 1, 2, seconds=20, address="127.0.0.1")
    store.set("file 1", f"{os.uname().nodename} {victim}")
    store.set("opened 1", "")
    thread.join(15)
    assert len(refused) == 1 and "is not there" in refused[0] and victim.stat().st_size == SLOTS * SLOT + 5
    evil.close()


# ---- messages ----


def pair(key=KEY):
    """Two ranks on gloo in this process, with a key."""
    store, ranks = dist.HashStore(), {}

    def join(rank):
        ranks[rank] = TorchDistributed.join(store, rank, 2, seconds=20, address="127.0.0.1")

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    [each.start() for each in threads], [each.join() for each in threads]
    return ranks[0], ranks[1]


def sent(rank, text, seal=bytes(32), lengths=None):
    """What a rank sends as a message, without its own seal."""

    def send():
        with suppress(RuntimeError):
            rank.group.send([torch.tensor(lengths or [len(text), 0])], 0, 0).wait()
            if lengths is None:
                rank.group.send([torch.frombuffer(bytearray(text + seal), dtype=torch.uint8)], 0, 0).wait()

    threading.Thread(target=send, daemon=True).start()


def sealed(text, number=0, way="1 to 0"):
    """The seal of a message of rank 1 in a channel without a secret."""
    return hmac.new(bytes(32), f"{way}, {number}:".encode() + len(text).to_bytes(8, "big") + text, hashlib.sha256).digest()


def test_a_message_arrives_sealed():
    here, there = pair()
    threading.Thread(target=lambda: (there.tell(0, {"a": [1, "\u00e9"]}, b"content"), there.tell(0, {"b": 2}))).start()
    first, second = here.hear(1), here.hear(1)
    assert (first.document, first.content, second.document) == ({"a": [1, "\u00e9"]}, b"content", {"b": 2})
    sent(there, b'{"c": 3}', sealed(b'{"c": 3}', 2))
    assert here.hear(1).document == {"c": 3}


LIES = {
    "no seal": (b"{}", bytes(32), "not sealed"),
    "the seal of another way": (b"{}", sealed(b"{}", way="0 to 1"), "not sealed"),
    "a seal that was used": (b"{}", sealed(b"{}", 1), "not sealed"),
    "more values than any message has": (b"[" + b"[]," * (1 << 20) + b"[]]", None, "more than 1,048,576 values"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, None, "not JSON"),
    "a long number": (b'{"a": ' + b"9" * 10_000 + b"}", None, "not JSON"),
    "no text": (b"\xff\xfe", None, "not JSON"),
    "a list": (b"[1]", None, "not a JSON object"),
}


@pytest.mark.parametrize("text, seal, what", LIES.values(), ids=LIES)
def test_a_message_that_lies_is_refused_in_one_sentence(text, seal, what):
    here, there = pair()
    sent(there, text, sealed(text) if seal is None else seal)
    with pytest.raises(SystemRefusal, match=what) as refusal:
        here.hear(1)
    assert "rank 1 of the channel" in str(refusal.value).lower() and len(str(refusal.value)) < 500


@pytest.mark.parametrize("lengths", [[1 << 30, 0], [1, 1 << 30], [-1, 5], [0, 0], [60_000_000, 0], [-(1 << 62), 1 << 62]])
def test_a_message_that_claims_too_much_is_refused_at_once(lengths):
    here, there = pair()
    sent(there, b"", lengths=lengths)
    began = time.monotonic()
    with pytest.raises(SystemRefusal, match="a message claims"):
        here.hear(1)
    assert time.monotonic() - began < 5


def test_who_changes_bytes_cannot_change_the_digest_with_them():
    """The digest without the key, which was the digest before, is refused."""
    staged = Staged((HeldTensor("a", BF16, (3,), (1,)),), {})
    source, target = MemoryTransport.joined(2)
    writer = StreamWriter(source, 1, verify=True)
    writer.write([(0, 6, 1, 0)], bytes(6))
    writer.end()
    mail = source._mail[0, 1]
    mail[2][:] = 1
    mail[4] = torch.frombuffer(bytearray(blake3.blake3(bytes([1] * 6)).digest()), dtype=torch.uint8)
    with pytest.raises(RequestError, match="digest"):
        receive_stream(target, 0, staged.buffer, expected=6, verify=True)


# ---- whole updates ----


@pytest.fixture
def trainer():
    with source_ranks(2) as ranks:
        ranks.ask("load", files=str(LLAMA))
        ranks.ask("stand_in", tp=TP, port=free_port())
        yield ranks


def test_an_update_goes_on_among_strangers(trainer):
    """They connect before anybody else does, again and again, stay silent or send garbage."""
    port, is_over, reached = free_port(), threading.Event(), []

    def strange(said):
        while not is_over.is_set():
            with suppress(OSError):
                reached.append(connected(port))
                reached[-1].sendall(said)
            time.sleep(0.01)

    threads = [threading.Thread(target=strange, args=(said,), daemon=True) for said in (b"", os.urandom(200), bytes(16) + b"\xff" * 4)]
    [each.start() for each in threads]
    try:
        opened = trainer.ask("open", engine="stand-in", tp=TP, verify=True, reach={"port": port})
        reports = trainer.ask("update")
    finally:
        is_over.set()
    assert "nbytes" in opened[0] and held(trainer) == digests(LLAMA) and reports[0]["nbytes"] == opened[0]["nbytes"], (opened, reports)
    assert len(reached) > 3


@pytest.mark.parametrize("lie", [{}, {"config": 3}])
def test_no_file_of_a_secret_is_left(lie, ranks_of_llama, monkeypatch):
    numbers, made = [], own_memory.made
    monkeypatch.setattr(own_memory, "made", lambda nbytes: numbers.append(made(nbytes)) or numbers[-1])
    with serving(ranks_of_llama, CONFIG, tp=2) as (server, address), suppress(RequestError):
        honest = server.ranks[0].described
        server.ranks[0].described = lambda: {**honest(), **lie}
        library.push(HF / "llama", address)
    assert len(numbers) == 1 and not (MEMORY / f"reshard-{numbers[0][0]}").exists()


def test_an_engine_with_another_token_does_not_join_and_nobody_tells_a_token(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RESHARD_LIVE_TOKEN", "marked-of-the-engine")
    folder = tmp_path / "files"
    library.convert(library.plan(HF / "llama", to="vllm", tp=2), folder)
    config = json.loads((HF / "llama" / "config.json").read_text())
    told = []
    with serving(folder, config, tp=2) as (server, address):
        join = server.on_init_weight_transfer_engine
        monkeypatch.setattr(server, "on_init_weight_transfer_engine", lambda question: (told.append(json.dumps(question)), join(question)))
        refused = pushed(address, "marked-of-the-trainer")
        assert refused.returncode == 5 and "did not join" in refused.stderr and "RESHARD_LIVE_TOKEN" in refused.stderr, refused.stderr
        assert not server.held(0) and "/pause" not in server.asked
        done = pushed(address, "marked-of-the-engine", "-v", "--json")
        assert done.returncode == 0 and server.held(0), done.stderr
    said = "".join((refused.stdout, refused.stderr, done.stdout, done.stderr, *told, *capfd.readouterr()))
    assert "marked" not in said and '"secret": "environment"' in told[-1]


def pushed(address, token, *options):
    """What `reshard push` of a process with a token says."""
    environment = {**os.environ, "RESHARD_LIVE_TOKEN": token}
    return subprocess.run(command("push", HF / "llama", address, *options), env=environment, capture_output=True, text=True, timeout=300)


def test_another_version_of_the_protocol_is_refused_by_a_sentence(caplog):
    import logging

    rank = TargetRank(None, logging.getLogger("stand-in"))
    rank.join({**asdict(Joining("127.0.0.1", 4000, 1, 1)), "version": 4})
    assert f"sender speaks version 4 of the protocol of updates, the engine {VERSION}" in caplog.text
    assert "Install the same version of reshard" in caplog.text


# ---- ranks and servers that lie ----


CONFIG = json.loads((HF / "llama" / "config.json").read_text())
HELLOS = {
    **{f"config is {value!r}": {"config": value} for value in (None, [], [1], 3, "llama", True)},
    **{
        f"degrees are {value!r}"[:60]: {"degrees": value}
        for value in (None, [], 3, {"tp": 10**30}, {"tp": "2"}, {"tp": -2}, {"tp": 0}, {"tp": 2.5})
    },
    "a rank beyond its stage": {"degrees": {"tp": 2, "tp_rank": 7, "pp": 1, "pp_rank": 0, "ep": 1}},
    "the other rank": {"degrees": {"tp": 2, "tp_rank": 1, "pp": 1, "pp_rank": 0, "ep": 1}, "rank": 1},
    "another number": {"rank": 10**40},
    "a negative shape": {"tensors": [[["a"], "BF16", [-1, 4]]]},
    "a huge shape": {"tensors": [[["a"], "BF16", [1 << 62, 1 << 62]]]},
    "a shape that is text": {"tensors": [[["a"], "BF16", "12"]]},
    "names that are text": {"tensors": [["ab", "BF16", [2]]]},
    "no tensors": {"tensors": None},
    "a tensor without a name": {"tensors": [[[], "BF16", [2]]]},
    "an engine that is a list": {"engine": ["vllm", "0.32.0"]},
    "names that are numbers": {"others": [1, 2]},
}


@pytest.mark.parametrize("lie", HELLOS.values(), ids=HELLOS)
def test_a_rank_that_lies_about_itself_is_refused_before_the_server_is_paused(lie, ranks_of_llama):
    with serving(ranks_of_llama, CONFIG, tp=2) as (server, address):
        honest = server.ranks[0].described
        server.ranks[0].described = lambda: {**honest(), **lie}
        with pytest.raises(RequestError) as refusal:
            library.push(HF / "llama", address)
    assert refusal.value.exit_code != 70 and "\n" not in str(refusal.value) and "/pause" not in server.asked


def test_a_version_that_is_negative_is_refused(ranks_of_llama):
    with serving(ranks_of_llama, CONFIG, tp=2) as (server, _):
        told = {**server.ranks[0].described(), "is_open": False, "holds": "", "number": 0, "before": ""}
    Hello.of(told)
    with pytest.raises(RequestError, match="a version is negative"):
        Hello.of({**told, "number": -1})


@pytest.fixture(scope="module")
def ranks_of_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "files"
    library.convert(library.plan(HF / "llama", to="vllm", tp=2), folder)
    return folder


@pytest.mark.parametrize("names", ["all", "one"])
def test_a_rank_cannot_keep_weights_as_its_own(names, ranks_of_llama):
    """It would tell the version of weights that it does not hold. The scales of its cache are its own."""
    with serving(ranks_of_llama, CONFIG, tp=2) as (server, address):
        honest = server.ranks[0].described

        def described():
            told = honest()
            own = {each[0][0] for each in told["tensors"]} if names == "all" else {"model.norm.weight"}
            tensors = [each for each in told["tensors"] if each[0][0] not in own]
            return {**told, "tensors": tensors, "others": [*told["others"], *own]}

        server.ranks[0].described = described
        with pytest.raises(RequestError, match=r"the engine takes no values of .*, and the plan brings them"):
            library.push(HF / "llama", address)
        assert "/pause" not in server.asked and server.version == "default"
        server.ranks[0].described = honest
        library.push(HF / "llama", address)
        assert server.held(0) and not any(name.endswith("_scale") for name in server.held(0))


@pytest.mark.parametrize("size", [10**30, 0, -1, "2", None, 2.0, 1 << 40])
def test_a_server_whose_sizes_are_none_is_refused(size, ranks_of_llama):
    with serving(ranks_of_llama, CONFIG, tp=2) as (server, address):
        server.pp = size
        result = reshard("push", HF / "llama", address)
    assert result.code == 3 and result.err.count("\n") == 1, result.err
