"""`reshard push` into real vLLM: tokens and log-probabilities are those of a server that was started from the converted folder.

    python tests/live/push.py [--reshard PATH] [--python PATH]

The FSDP2 checkpoint of the fixtures, Megatron files of other weights of the same sizes, and ZeRO-3 files of the FSDP2 checkpoint go one
after the other into one running server at TP 2, which was started from weights that are none of these. Fixtures by real DeepSpeed and
Megatron have heads that vLLM's CPU kernels do not take: tests/live/test_push.py compares what their ranks get. Two prompts are longer than
a block of the cache. Then only what differs is pushed: from one step to the next, after a wrong base, a failed update and a kill. A mixture
of experts is pushed likewise, and with --long one with latent attention.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# This folder is a package here: tests/serving has a file of its name.
sys.path[:] = [str(HERE.parent), str(ROOT / "fixtures"), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]

import named_weights  # noqa: E402
from helpers.framework_environments import LONG, Environment, installed, run_checks  # noqa: E402
from live.served import ServedModel, served  # noqa: E402

VLLM = Environment("vLLM", ROOT / "tests" / "serving" / "requirements.txt", options=("--no-deps",))
BACKEND = ("--weight-transfer-config", '{"backend": "reshard"}')
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"
TP = 2
POSITIONS = 512
LONG_PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(200)]
"""A prompt of more than a block of a CPU's cache, which has 128 tokens."""
PROMPTS = ([3, 17, 91, 200, 45], [7, 7, 12, 133, 240, 5, 66], LONG_PROMPT, [*LONG_PROMPT[:150], 9, 9, 8])
TOKENS = 8
Case = tuple[str, list[Path | str], Path, list[Path | str]]
"""A name, the source with its options, the same weights as Hugging Face files, and options of the push."""
Checks = Callable[[ServedModel, object], Iterator[tuple[str, bool, str]]]
"""Checks of a server, from its address and its answers before."""


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    # The server would find reshard in the current folder first, and there without its plugins.
    os.environ["PYTHONSAFEPATH"] = "1"
    plugin = installed(python, work)
    hf = converted(reshard, FSDP2 / "checkpoint", work / "hf", "--to", "hf", "--model", FSDP2 / "model")
    start, own, other = (rolled(hf, work / name, turns) for name, turns in (("start", 3), ("own", 0), ("other", 2)))
    near = flipped(own, work / "near")
    # DeepSpeed's files have optimizer state, which these weights alone have.
    zero3 = converted(reshard, FSDP2 / "checkpoint", work / "zero3", "--to", "deepspeed", "--dp", "3", "--model", FSDP2 / "model")
    megatron = converted(reshard, other, work / "megatron", "--to", "megatron", "--tp", "2", "--pp", "2")
    cases: list[Case] = [
        ("FSDP2", [FSDP2 / "checkpoint", "--model", FSDP2 / "model"], own, []),
        ("Megatron", [megatron], other, []),
        ("ZeRO-3", [zero3], own, ["--changes"]),
        ("what changed", [near], near, ["--since", own]),
    ]
    yield from pushed(reshard, python, plugin, work, start, cases, refused(reshard, work, own), disturbed(reshard, work, own, near, other))
    for model in ("qwen3_moe", "deepseek_v3") if LONG else ("qwen3_moe",):
        recorded = json.loads((ROOT / "fixtures" / "vllm_served" / f"{model}.json").read_text())
        named_weights.write(work / model / "hf", recorded["config"], recorded["shapes"])
        start, own, other = (
            rolled(work / model / "hf", work / model / name, turns) for name, turns in (("start", 3), ("own", 0), ("other", 2))
        )
        megatron = converted(reshard, own, work / model / "megatron", "--to", "megatron", "--tp", "2", "--ep", "2")
        near = flipped(other, work / model / "near")
        cases = [
            (f"{model}, Megatron", [megatron], own, []),
            (f"{model}, Hugging Face", [other], other, ["--changes"]),
            (f"{model}, what changed", [near], near, ["--since", other]),
        ]
        yield from pushed(reshard, python, plugin, work, start, cases)


def pushed(
    reshard: Path,
    python: Path,
    plugin: Path,
    work: Path,
    start: Path,
    cases: list[Case],
    first: Checks | None = None,
    last: Checks | None = None,
) -> Iterator[tuple[str, bool, str]]:
    """Push each source into one server that was started from other weights, and start servers from what each is. first, last: checks before
    and after."""
    found: dict[str, Any] = {}
    with served(python, start, TP, plugin, work / "server.log", *BACKEND) as server:
        address, before = server.address, answers(server)
        if first is not None:
            yield from first(server, before)
        for name, source, folder, options in cases:
            code, document, messages = run(reshard, "push", *source, address, *options)
            found[name] = answers(server)
            yield f"{name}: pushed", code == 0 and document.get("bytes", 0) > 0, f"{document} {messages}"
            if "--since" in options:
                is_few = document["since"] == str(options[-1]) and 0 < document["bytes"] < document["full_bytes"] // 20
                yield f"{name}: few bytes travel", is_few, f"{document['bytes']} of {document['full_bytes']} {document['notes']}"
            told = server.asked("/weight_info")["weight_version"]
            # As the ranks hold them: vLLM has a correction bias in float32.
            files = work / f"files of {name}"
            fingerprint = run(reshard, "convert", folder, files, "--to", "vllm", "--tp", str(TP))[1]["fingerprint"]
            yield f"{name}: the version is the fingerprint", told == fingerprint == document.get("version"), f"{told} {fingerprint}"
            code, document, messages = run(reshard, "verify", *source, address, "--allow-not-comparable")
            about = document.get("server") or {}
            same = code == 0 and about.get("same_version") is True and not document["differences"] and not about["unknown"]
            yield f"{name}: verify agrees", same, f"{document} {messages}"
            others = next(source for _, source, each, _ in cases if each != folder)
            code, document, _ = run(reshard, "verify", *others, address, "--allow-not-comparable")
            yield f"{name}: verify tells other weights from it", code == 1 and document["server"]["same_version"] is False, str(document)
        if last is not None:
            yield from last(server, found[cases[-1][0]])
    expected = {}
    for folder in dict.fromkeys(folder for _, _, folder, _ in cases):
        with served(python, folder, TP, plugin, work / "server.log") as server:
            expected[folder] = answers(server)
    for name, _, folder, _ in cases:
        same = found[name] == expected[folder]
        yield f"{name}: tokens and log-probabilities are those of a server started from it", same, f"{found[name]} {expected[folder]}"
        yield f"{name}: they are not those of before", found[name] != before, str(before)


def refused(reshard: Path, work: Path, own: Path) -> Checks:
    """What does not fit is refused by name, and the server goes on with what it has."""
    config, shapes = json.loads((own / "config.json").read_text()), shapes_in(own / "model.safetensors")
    wide = {name: (300, *shape[1:]) if shape[0] == config["vocab_size"] else shape for name, shape in shapes.items()}
    named_weights.write(work / "wide", {**config, "vocab_size": 300}, wide)

    def first(server: ServedModel, before: object) -> Iterator[tuple[str, bool, str]]:
        code, _, messages = run(reshard, "push", work / "wide", server.address)
        yield "another vocabulary is refused by name", code == 2 and "vocab_size 250 -> 300" in messages, messages
        yield "the server goes on with what it has", answers(server) == before, str(before)
        code, document, messages = run(reshard, "push", own, server.address, "--dry-run")
        yield "a dry run tells the server's sizes", code == 0 and document["target"]["tp"] == TP, f"{document} {messages}"

    return first


SAVED_AGAIN = """
import os, shutil, sys, reshard
near, own, moved, address = sys.argv[1:]
shutil.copytree(near, moved)
last = reshard.push(moved, address, changes=True)
shutil.rmtree(moved)
shutil.copytree(own, moved)
reshard.push(own, address, since=last)
"""
KILLED = """
import os, sys, reshard
near, own, address = sys.argv[1:]
reshard.push(near, address, since=own, progress=lambda nbytes: os._exit(9))
"""


def disturbed(reshard: Path, work: Path, own: Path, near: Path, other: Path) -> Checks:
    """What goes wrong with changes leaves the old weights, and all weights travel afterwards. The server holds `near`."""
    library = reshard.parent / "python"

    def last(server: ServedModel, held: object) -> Iterator[tuple[str, bool, str]]:
        # Of a base that was saved again after it was pushed, the fingerprint is that of the server and the values are not.
        script = [library, "-c", SAVED_AGAIN, near, own, work / "moved", server.address]
        found = subprocess.run(script, capture_output=True, text=True)
        yield (
            "a base that was saved again fails by the digests",
            found.returncode == 1 and "digest of the bytes" in found.stderr,
            found.stderr,
        )
        yield "the server goes on with what it has", answers(server) == held, str(held)
        code, document, messages = run(reshard, "push", own, server.address, "--since", near)
        yield "after an update that failed all travels", code == 0 and in_full(document, "no copy"), f"{document} {messages}"
        found = subprocess.run([library, "-c", KILLED, near, own, server.address], capture_output=True, text=True)
        yield "a push of changes is killed", found.returncode == 9, found.stderr
        code, document, messages = run(reshard, "push", near, server.address, "--since", own)
        yield "the next one sends all", code == 0 and in_full(document, "no copy"), f"{document} {messages}"
        yield "the server answers with it", answers(server) == held, str(held)
        code, document, messages = run(reshard, "push", near, server.address, "--since", other)
        yield "a wrong base sends all", code == 0 and in_full(document, "the servers hold"), f"{document} {messages}"
        yield "the server still answers with it", answers(server) == held, str(held)

    return last


def in_full(document: dict[str, Any], sentence: str) -> bool:
    """Whether all weights were sent, and one note says why."""
    return document["since"] is None and document["bytes"] >= document["full_bytes"] and any(sentence in note for note in document["notes"])


def run(reshard: Path, *arguments: Path | str) -> tuple[int, dict[str, Any], str]:
    """The exit code of a command, its document, and its messages."""
    found = subprocess.run([reshard, *arguments, "--json"], capture_output=True, text=True)
    return found.returncode, json.loads(found.stdout or "{}"), found.stderr


def converted(reshard: Path, source: Path, target: Path, *options: Path | str) -> Path:
    subprocess.run([reshard, "convert", source, target, *options], check=True, stdout=subprocess.DEVNULL)
    return target


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def rolled(model: Path, target: Path, turns: int) -> Path:
    """A copy of Hugging Face files with a tokenizer and longer positions, in which the rows of each weight are rolled."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("reshard.*"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    document |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": words}
    (target / "tokenizer.json").write_text(json.dumps(document))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (target / "tokenizer_config.json").write_text(json.dumps(about))
    path = target / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            step = turns * (stop - start) // entry["shape"][0]
            raw[start:stop] = raw[start + step : stop] + raw[start : start + step]
    path.write_bytes(raw)
    return target


def flipped(model: Path, target: Path) -> Path:
    """A copy of Hugging Face files in which one in 101 bytes of the weights has another bit."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    raw = bytearray(path.read_bytes())
    for place in range(8 + struct.unpack("<Q", raw[:8])[0], len(raw), 101):
        raw[place] ^= 4
    path.write_bytes(raw)
    return target


def answers(server: ServedModel) -> list[Any]:
    """Of each prompt the tokens that follow, with their log-probabilities. One after the other: the cache of prefixes is used."""
    about = server.asked("/v1/models")["data"][0]
    vocabulary = json.loads(Path(about["root"], "config.json").read_text())["vocab_size"]
    how = {"model": about["id"], "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    found = []
    for prompt in PROMPTS:
        question = {**how, "prompt": [token % vocabulary for token in prompt], "return_tokens_as_token_ids": True}
        told = server.asked("/v1/completions", question)["choices"][0]["logprobs"]
        found.append((told["tokens"], told["token_logprobs"]))
    return found


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
