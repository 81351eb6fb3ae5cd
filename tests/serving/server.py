"""Real vLLM, asked line by line (helpers/asked_process.py); each request is answered by a process forked for it.

A request has
    ask          "decode" or "ranks": the file here whose function `answer` is asked
    options      what that function takes
    environment  variables that are set for it
    path         folders that are importable for it, before all others
    messages     the file that gets what it and its helpers print
The answer is null where the function raised (the traceback is among the messages) or took longer than SECONDS.
"""

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[len(sys.path) :] = [str(TESTS), str(TESTS.parent / "fixtures")]

import makers  # noqa: E402
import sessions  # noqa: E402
from helpers import asked_process as questions  # noqa: E402

vllm_make = makers.load("vllm")

SECONDS = 600


def answered(request: dict) -> object:
    """The answer to a request. Nothing of what was started for it is left running, and nothing in folders for temporary files."""
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            try:
                work(request, answer, folder)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        sessions.end(child)
        # Ranks on a CPU leave shared memory, named as the file by which they met.
        for meeting in Path(folder).glob("vllm_dist_*"):
            vllm_make.remove_shared_memory(meeting.name)
        answer.seek(0)
        text, _, imports = answer.read().partition("\n")
        vllm_make.import_all(imports.split())
        return json.loads(text or "null")


def work(request: dict, answer, folder: str) -> None:
    os.setsid()
    signal.alarm(SECONDS)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    messages = os.open(request["messages"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(messages, 1)
    os.dup2(messages, 2)
    os.environ.update(request["environment"])
    # Helpers that are spawned import the same.
    os.environ["PYTHONPATH"] = os.pathsep.join([*request["path"], os.environ["PYTHONPATH"]])
    sys.path[:0] = request["path"]
    ours = vllm_make.imported()
    try:
        answer.write(json.dumps(importlib.import_module(request["ask"]).answer(**request["options"])))
        answer.write("\n" + " ".join(sorted(vllm_make.imported() - ours)))
        answer.flush()
    except BaseException:
        traceback.print_exc()


def arrange() -> None:
    """Workers of vLLM's executor are forked, as requests are: they need not import it again."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama  # noqa: F401
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    vllm_make.take_any_shared_memory()
    # vLLM collects garbage at each start: what is here is not looked at again.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    arrange()
    questions.answer(answered)
