"""The slow check: real vLLM serves what reshard wrote, and its ranks hold what the references say.

    python tests/serving/check.py [--reshard PATH] [--python PATH]

Makes the vLLM environment (.venv-vllm) where there is none. Then, each as a check that is counted:
1. convert --to vllm, and real vLLM decodes the same tokens with the same log-probabilities as from the Hugging Face folder
   at the same degree; also for the bundled FSDP2 checkpoint;
2. two query heads exchanged in one rank's file change the tokens: the first check can fail;
3. the references in fixtures/vllm come from real vLLM: its ranks are asked again, and agree;
4. its ranks hold what is written of models of random sizes (random_models.py), or both refuse them;
5. with a draft model that went through reshard, it decodes the same tokens, from sharded_state and from Hugging Face files;
6. real vLLM loads FSDP2, ZeRO-3 and Megatron checkpoints by --load-format reshard: it decodes as from the converted ones, and its ranks
   hold the same bits; they read their own bytes only; a wrong config and what is not there are noticed;
7. a live server is asked what its ranks hold: equal to the right checkpoint, different from a stale and a wrong one (live.py).
That converted files equal the references is tests/formats' part, which needs no vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

import sessions  # noqa: E402
from helpers.asked_process import Ask, asking  # noqa: E402
from helpers.eagle_draft import make_draft  # noqa: E402
from helpers.fixture_places import exchange_query_heads, ranks, stored  # noqa: E402
from helpers.framework_environments import Environment, installed, run_checks  # noqa: E402
from live import live_checks  # noqa: E402

# Without dependencies: vLLM's own would replace torch.
VLLM = Environment("vLLM", HERE / "requirements.txt", options=("--no-deps",))
HF = ROOT / "fixtures" / "hf"
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"
ZERO3 = ROOT / "fixtures" / "deepspeed" / "z3-bf16"
MEGATRON = ROOT / "fixtures" / "megatron" / "llama-tied-pp2"
RANDOM_CASES = 26  # of random_models.py: two of each of its model types


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    make_references = [python, ROOT / "fixtures" / "vllm" / "make.py", "--check"]
    make_random = [python, HERE / "random_models.py", "--reshard", reshard]
    with ThreadPoolExecutor(1) as beside, served(python, work / "hub") as ask:
        references = beside.submit(alone, make_references, seconds=3600)
        random = beside.submit(alone, make_random, seconds=3600)
        yield from decoded(reshard, python, work, ask)
        yield from drafted(reshard, work, ask)
        plugin = installed(python, work)
        yield from decoded_directly(reshard, work, ask, plugin)
        yield from held_directly(reshard, work, ask, plugin)
        yield from noticed(work, ask, plugin)
        yield from live_checks(reshard, python, work)
        yield from references_hold(*references.result())
        yield from random_hold(*random.result())


def decoded(reshard: Path, python: Path, work: Path, ask: Ask) -> Iterator[tuple[str, bool, str]]:
    """What was converted, and what it was converted from."""
    made = work / "deepseek_v3"
    subprocess.run([python, ROOT / "fixtures" / "models.py", made.name, made], check=True, stderr=subprocess.DEVNULL)
    for folder, tp in ((folder, tp) for folder in (HF / "llama", HF / "qwen3", HF / "mixtral", made) for tp in (1, 2)):
        model = folder.name
        sharded = converted(reshard, folder, work / f"{model}-tp{tp}", "--to", "vllm", "--tp", str(tp))
        # Of several sequences at once, attention over latents on a CPU answers one thing today and another tomorrow, in vLLM itself.
        options: dict[str, object] = {"max_num_seqs": 1} if folder == made else {}
        whole = decode(ask, folder, tp, "auto", **options)
        found = decode(ask, sharded, tp, "sharded_state", **options)
        yield compared(f"{model} at TP {tp}: sharded_state decodes as the Hugging Face folder", found, whole)
        if (model, tp) == ("llama", 2):
            rank1 = sharded / "model-rank-1-part-0.safetensors"
            exchange_query_heads(rank1, "model.layers.1.self_attn.qkv_proj.weight", head_dim=32)
            wrong = decode(ask, sharded, tp, "sharded_state")
            changed = isinstance(wrong, list) and tokens(wrong) != tokens(whole)
            yield "exchanging two query heads of rank 1 changes the tokens", changed, str(wrong)
    named = ("--model", str(FSDP2 / "model"))
    sharded = converted(reshard, FSDP2 / "checkpoint", work / "fsdp2-tp2", "--to", "vllm", "--tp", "2", *named)
    whole = decode(ask, converted(reshard, FSDP2 / "checkpoint", work / "fsdp2-hf", "--to", "hf", *named), 2, "auto")
    found = decode(ask, sharded, 2, "sharded_state")
    yield compared("FSDP2 checkpoint at TP 2: sharded_state decodes as its Hugging Face form", found, whole)


def drafted(reshard: Path, work: Path, ask: Ask) -> Iterator[tuple[str, bool, str]]:
    """A draft model beside the model that it drafts for. That its bits are kept is shown in tests/formats."""
    made = make_draft(work / "draft")
    trained = converted(reshard, made, work / "draft-dcp", "--to", "dcp")
    carried = converted(reshard, trained, work / "draft-hf", "--to", "hf", "--model", str(made))
    sharded = converted(reshard, HF / "llama", work / "drafted", "--to", "vllm", "--tp", "1")
    # Engines read drafts from Hugging Face folders, so the format of the model's own files must not count for the draft.
    draft = {"method": "eagle3", "num_speculative_tokens": 2, "draft_load_config": {"load_format": "auto"}}
    found = decode(ask, sharded, 1, "sharded_state", speculative_config={**draft, "model": str(carried)})
    whole = decode(ask, HF / "llama", 1, "auto", speculative_config={**draft, "model": str(made)})
    yield compared("with an EAGLE-3 draft: sharded_state decodes as the Hugging Face folder", found, whole)


def references_hold(output: str, messages: str) -> Iterator[tuple[str, bool, str]]:
    """What the maker of the references says when it asks real ranks again: of each a line, and after it the lines that are different."""
    answers = re.findall(r"^(\S+\.json): (the same|DIFFERENT)\n((?:[-+@].*\n)*)", output, re.MULTILINE)
    for name, answer, lines in answers:
        yield f"real ranks hold what the reference says: {name}", answer == "the same", lines[:2000]
    yield "all references were asked for", len(answers) == len(list((ROOT / "fixtures" / "vllm").rglob("*.json"))), messages[-2000:]


def random_hold(output: str, messages: str) -> Iterator[tuple[str, bool, str]]:
    """What random_models.py says: most cases are served."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    for each in found:
        yield f"{each['case']}: {each['outcome'][:60]}", not each["outcome"].startswith("DIFFERENT"), each["outcome"]
    same = sum(each["outcome"] == "the same" for each in found)
    yield "all random models were tried, and half are the same", len(found) == RANDOM_CASES and 2 * same > len(found), messages[-2000:]


def decoded_directly(reshard: Path, work: Path, ask: Ask, plugin: Path) -> Iterator[tuple[str, bool, str]]:
    """Checkpoints whose heads vLLM's CPU kernels take: one by real FSDP2, and ones made of it with their config beside them."""
    named = ("--model", str(FSDP2 / "model"))
    zero3 = converted(reshard, FSDP2 / "checkpoint", work / "zero3", "--to", "deepspeed", "--dp", "3", *named)
    megatron = converted(reshard, FSDP2 / "checkpoint", work / "megatron", "--to", "megatron", "--tp", "2", "--pp", "2", *named)
    outside = {"model_loader_extra_config": {"checkpoint": str(FSDP2 / "checkpoint")}}
    for tp in (1, 2):
        sharded = converted(reshard, FSDP2 / "checkpoint", work / f"direct-tp{tp}", "--to", "vllm", "--tp", str(tp), *named)
        expected = decode(ask, sharded, tp, "sharded_state")
        for what, model, options in (
            ("FSDP2, the model's directory elsewhere", FSDP2 / "model", outside),
            ("ZeRO-3", zero3, {"dtype": "bfloat16"}),
            ("Megatron", megatron, {}),
        ):
            found = decode(ask, model, tp, "reshard", plugin, **options)
            yield compared(f"{what}, at TP {tp}: --load-format reshard decodes as sharded_state", found, expected)


def held_directly(reshard: Path, work: Path, ask: Ask, plugin: Path) -> Iterator[tuple[str, bool, str]]:
    """Checkpoints by real frameworks, and what vLLM's ranks hold of them."""
    # Of experts vLLM's CPU kernels take no rows of 8, which the fixtures by real Megatron have.
    experts = converted(reshard, HF / "mixtral", work / "experts", "--to", "megatron", "--tp", "2", "--ep", "2")
    cases = (
        (FSDP2 / "checkpoint", FSDP2 / "model", 2, 1, 1),
        (ZERO3 / "checkpoint", ZERO3 / "model", 2, 1, 1),
        (MEGATRON / "checkpoint", MEGATRON / "model", 2, 2, 1),
        (experts, experts, 2, 1, 2),
    )
    for source, model, tp, pp, ep in cases:
        name = f"{source.parent.name if source != experts else 'Mixtral by Megatron'} at TP {tp} PP {pp} EP {ep}"
        sizes = ("--tp", str(tp), "--pp", str(pp), "--ep", str(ep), "--dtype", "bfloat16", "--model", str(model))
        written = converted(reshard, source, work / f"held-{source.parent.name}", "--to", "vllm", *sizes)
        for whole in (False, True):
            extra = {"checkpoint": str(source), "whole_tensors": whole}
            degrees = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "enable_expert_parallel": ep > 1}
            found, messages = held(ask, model, plugin, extra, dtype="bfloat16", **degrees)
            way = "whole" if whole else "by rank"
            yield f"{name}, read {way}: ranks hold the converted bits", found == ranks(written), f"{found} {messages[-2000:]}"
            lines = re.findall(rf"rank (\d).*: read {way} .* ([\d,]+) bytes", messages)
            told = {int(rank): int(count.replace(",", "")) for rank, count in lines}
            yield f"{name}, read {way}: the log says so", set(told) == set(range(tp)), messages[-2000:]
            if source.parent == FSDP2:
                # Padding is not read; of short runs what lies between is, too; whole tensors are twice as much.
                share = {rank: own_bytes(written / f"model-rank-{rank}-part-0.safetensors") for rank in told}
                fair = {rank: 0.9 * share[rank] < count < 1.5 * share[rank] for rank, count in told.items()}
                expected = dict.fromkeys(told, not whole)
                yield f"{name}, read {way}: {'more than' if whole else 'about'} their own bytes", fair == expected, f"{told} {share}"


def noticed(work: Path, ask: Ask, plugin: Path) -> Iterator[tuple[str, bool, str]]:
    """What must not be served; and a model that reshard does not know."""
    at = {"checkpoint": str(FSDP2 / "checkpoint")}
    found, messages = held(ask, HF / "qwen3", plugin, at)
    yield "another model's config is refused", found is None and "the config says" in messages, messages[-2000:]
    found, messages = held(ask, FSDP2 / "model", plugin, {**at, "folder": "there"})
    yield "an unknown key is refused with the known ones", found is None and "are checkpoint, format," in messages, messages[-2000:]
    cached_as_by_the_hub(FSDP2 / "model", work / "hub")
    found, messages = held(ask, "org/name", plugin, at)
    expected, _ = held(ask, FSDP2 / "model", plugin, at)
    yield "a model named as on the hub is loaded from the checkpoint", found is not None and found == expected, messages[-2000:]
    unknown = undeclared(HF / "llama", work / "undeclared")
    found, messages = held(ask, unknown, plugin, {}, tensor_parallel_size=2)
    expected, _ = held(ask, unknown, None, {}, tensor_parallel_size=2)
    same = found is not None and found == expected and "is not declared" in messages
    yield "of a model that is not declared vLLM cuts whole tensors, and the log says why", same, messages[-2000:]
    rename(unknown / "model.safetensors", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.rotary_emb.inv_freq")
    found, messages = held(ask, unknown, plugin, {}, tensor_parallel_size=2)
    lost = found is None and "model.layers.1.self_attn.qkv_proj.weight: it was not loaded" in messages
    yield "of such a model a missing weight is noticed", lost, messages[-2000:]


def cached_as_by_the_hub(folder: Path, cache: Path) -> None:
    """Fill the cache of the hub's client as if it had loaded org/name, which consists of the files in a folder."""
    model = cache / "models--org--name"
    shutil.copytree(folder, model / "snapshots" / "0123")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123")


def undeclared(folder: Path, target: Path) -> Path:
    """A llama under a name that transformers, through which vLLM runs it, knows as one, and reshard does not."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    names = {"model_type": "helium", "architectures": ["HeliumForCausalLM"]}
    (target / "config.json").write_text(json.dumps({**config, **names}))
    return target


def own_bytes(path: Path) -> int:
    """The weights in a rank's file, padding included."""
    return sum(len(data) for name, (_, _, data) in stored(path).items() if not name.endswith("_scale"))


def converted(reshard: Path, source: Path, target: Path, *options: str) -> Path:
    subprocess.run([reshard, "convert", source, target, *options], check=True, stdout=subprocess.DEVNULL)
    return target


def decode(
    ask: Ask, model: Path, tp: int, load_format: str, plugin: Path | None = None, **options: object
) -> list[dict[str, list[object]]] | str:
    """What real vLLM answers; if it does not, the errors in its messages, a worker's before what follows from them. options: of its LLM."""
    named = {"model": str(model), "tensor_parallel_size": tp, "load_format": load_format, **options}
    answers, messages = asked(ask, "decode", named, plugin, VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(tp))))
    errors = dict.fromkeys(re.findall(r"\w*(?:Error|Exception): .*", messages))
    return answers or "\n".join(["vLLM failed:", *errors, messages[-1000:]])


def held(ask: Ask, model: Path | str, plugin: Path | None, extra: dict[str, object], **options: object) -> tuple[object, str]:
    """What real vLLM's ranks hold after --load-format reshard (without the plugin: auto), in the form of the references, or None; and
    vLLM's messages."""
    how = {"load_format": "reshard", "model_loader_extra_config": extra} if plugin else {}
    return asked(ask, "ranks", {"model": str(model), **how, **options}, plugin)


@contextlib.contextmanager
def served(python: Path, hub: Path) -> Iterator[Ask]:
    """server.py, as long as it is needed. hub: where the hub's client keeps what it has loaded."""
    own = {"PYTHONPATH": str(HERE / "startup"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    # The engine in the process that asks: one process less to start. Its workers are processes all the same.
    vllms = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    # It would compile a function of the sampler at each start, which takes a third of it.
    vllms["TORCH_COMPILE_DISABLE"] = "1"
    with asking([python, HERE / "server.py"], {**os.environ, **own, **vllms}) as ask:
        yield ask


def asked(ask: Ask, what: str, options: dict[str, object], plugin: Path | None, **environment: str) -> tuple[Any, str]:
    """What server.py answers, or None, and the messages on the way."""
    with tempfile.NamedTemporaryFile("r") as messages:
        path = [str(plugin)] if plugin else []
        answer = ask({"ask": what, "options": options, "environment": environment, "path": path, "messages": messages.name})
        return answer, messages.read()


def alone(command: list[Path | str], seconds: int) -> tuple[str, str]:
    """stdout and stderr of a command in a session of its own, of which nothing is left running.

    Through files, not pipes: helpers that outlive their parent would keep a pipe open for ever.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, stdout=output, stderr=messages, start_new_session=True)
        try:
            process.wait(timeout=seconds)
        finally:
            sessions.end(process.pid)
        output.seek(0), messages.seek(0)
        return output.read(), messages.read()


def compared(what: str, found: list[dict[str, list[object]]] | str, expected: list[dict[str, list[object]]] | str) -> tuple[str, bool, str]:
    """Equal tokens and log-probabilities, and answers that are worth comparing: not one token over and over."""
    telling = isinstance(expected, list) and len({str(answer["tokens"]) for answer in expected}) == len(expected)
    return what, telling and found == expected, f"{found} against {expected}"


def tokens(answers: list[dict[str, list[object]]] | str) -> object:
    return [answer["tokens"] for answer in answers] if isinstance(answers, list) else None


def rename(path: Path, old: str, new: str) -> None:
    """Give a tensor of a safetensors file another name."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
