"""The slow check of docs/recipes/preshard.md: files of ranks that vLLM dumps itself, and those that reshard writes.

    python tests/serving/dumps.py [--reshard PATH] [--python PATH]

Of each model real vLLM is started at TP 2 three times: on the Hugging Face folder, on what its ranks dump (`save_sharded_state`), and on
what reshard writes. The tensors of rank 0 in both kinds of files are compared bit by bit, the answers by tokens and log-probabilities.
Checks: reshard's files answer as the folder does, and the page has the row that was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "fixtures" / "hf_packed")]

from check import HF, VLLM, asked, compared, converted, decode, served  # noqa: E402
from helpers.asked_process import Ask  # noqa: E402
from helpers.fixture_places import stored  # noqa: E402
from helpers.framework_environments import run_checks  # noqa: E402
from packed import write_decodable  # noqa: E402

PAGE = ROOT / "docs" / "recipes" / "preshard.md"
RANK_0 = "model-rank-0-part-0.safetensors"
# Models that vLLM's build for CPUs computes: what the page calls them, and the folder or the fixture whose form they have.
MODELS: dict[str, Path | str] = {
    "llama, bfloat16": HF / "llama",
    "mixtral, bfloat16": HF / "mixtral",
    "llama, INT4 (compressed-tensors)": "llama-ct-int4",
    "llama, INT4 (AWQ)": "llama-awq",
    "llama, INT4 (GPTQ)": "llama-gptq",
    "llama, FP8 by channel (ModelOpt)": "llama-modelopt-fp8-channel",
}
# What vLLM says when it does not write a dump, or does not start on one, and the words of the page.
REASONS = {
    "Missing keys": "tensors are missing",
    "size of tensor": "a shape does not fit",
    "KeyError": "a name is unknown",
    "view size is not compatible": "a weight lies transposed in memory",
}


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    with served(python, work / "hub") as ask:
        for number, (name, model) in enumerate(MODELS.items()):
            yield from of_a_model(reshard, name, model, work / str(number), ask)


def of_a_model(reshard: Path, name: str, model: Path | str, work: Path, ask: Ask) -> Iterator[tuple[str, bool, str]]:
    """The two ways to files of ranks, and the row that tells how the dump ends."""
    work.mkdir()
    source = model if isinstance(model, Path) else work / "source"
    if isinstance(model, str):
        write_decodable(model, source)
    expected = decode(ask, source, 2, "auto")
    written = converted(reshard, source, work / "written", "--to", "vllm", "--tp", "2")
    found = decode(ask, written, 2, "sharded_state")
    yield compared(f"{name}: vLLM answers from reshard's files as from the Hugging Face folder", found, expected)
    how = {"model": str(source), "tensor_parallel_size": 2, "target": str(work / "dump")}
    dumped, messages = asked(ask, "dump", how, None, VLLM_CPU_OMP_THREADS_BIND="0|1")
    if dumped:
        answers = decode(ask, work / "dump", 2, "sharded_state")
        row = f"| {name} | {held(work / 'dump', written)} | {ending(answers, expected)} |"
        print(row, *differences(work / "dump", written), sep="\n      ")
    else:
        row = f"| {name} | no dump | vLLM does not write it: {reason(messages)} |"
        print(row)
    yield f"{name}: the page says how it ends", PAGE.exists() and row in PAGE.read_text(), row


def held(dump: Path, written: Path) -> str:
    """How many tensors the loader asks for, and how many of them the dump of rank 0 has with the same element type, shape and bits."""
    theirs, ours = stored(dump / RANK_0), stored(written / RANK_0)
    return f"{sum(theirs.get(name) == tensor for name, tensor in ours.items())} of {len(ours)}"


def differences(dump: Path, written: Path) -> Iterator[str]:
    """The tensors of rank 0 that differ, as text."""
    theirs, ours = stored(dump / RANK_0), stored(written / RANK_0)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            dumped, loaded = (f"{each[name][0]} {each[name][1]}" if name in each else "nothing" for each in (theirs, ours))
            yield f"{name}: {dumped} in the dump, {loaded} when it is loaded" + (", other bits" if dumped == loaded else "")


def ending(answers: object, expected: object) -> str:
    """How a start on the dump ends, in words of the page."""
    if isinstance(answers, str):
        return f"vLLM does not start: {reason(answers)}"
    return "the same answers" if answers == expected else "other answers, without a message"


def reason(messages: str) -> str:
    return next((words for sign, words in REASONS.items() if sign in messages), messages[-1500:])


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
