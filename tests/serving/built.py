"""Real vLLM, imported once, asked line by line (asked_process.py) about the ranks of a folder. The answer to what fails is a text.

A request has `ask`, and
    "built"   `model`, `tp`, `ep` and `rank`. The answer is the names of each tensor with which the rank is built, several if modules share
              it. Nothing is loaded, and no kernel runs, so it is built also for forms for which a CPU has no kernel.
    "traced"  `model` and `cases`. The answer is that of the program that traces the loader (plugins/loader_tracer/__main__.py), as lines.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

from helpers import asked_process as questions  # noqa: E402

TRACER = TESTS.parent / "plugins" / "loader_tracer"
# Its neighbours would hide vLLM if their folder were importable.
spec = importlib.util.spec_from_file_location("loader_tracer", TRACER / "__init__.py", submodule_search_locations=[str(TRACER)])
sys.modules["loader_tracer"] = importlib.util.module_from_spec(spec)

from loader_tracer import ranks, trace, vllm_ranks  # noqa: E402


def answered(request: dict) -> list | str:
    """The answer to a request, by a process of its own, with which everything ends that vLLM keeps for a rank."""
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if not child:
            try:
                found = {"built": names, "traced": traced}[request.pop("ask")](**request)
            except BaseException:
                found = traceback.format_exc()[-600:]
            answer.write(json.dumps(found))
            answer.flush()
            os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        return json.loads(answer.read() or '"the process ended"')


def names(model: str, tp: int, ep: int, rank: int) -> list[list[str]]:
    case = ranks.Case(tp=tp, ep=ep)
    config = vllm_ranks.engine_config(model, case, trust_remote_code=False)
    with vllm_ranks.loaded_rank(config, case, rank, contextlib.nullcontext(), {}) as loaded:
        found: dict[int, list[str]] = {}
        for name, tensor in loaded.model.state_dict(keep_vars=True).items():
            found.setdefault(id(tensor), []).append(name)
        return [*found.values()]


def traced(model: str, cases: list[dict[str, int]]) -> list[dict]:
    vllm_ranks.prepare = lambda: None  # it is
    with tempfile.TemporaryDirectory() as work:
        asked, answer = Path(work, "requests.json"), Path(work, "answer.jsonl")
        asked.write_text(json.dumps([{"model": model, "cases": cases, "ranks": None, "trust_remote_code": False}]))
        trace.main("vllm", asked, answer)
        return [json.loads(line) for line in answer.read_text().splitlines()]


if __name__ == "__main__":
    vllm_ranks.prepare()
    questions.answer(answered)
