"""Real vLLM, asked line by line (questions.py); each request is answered by a process forked for it.

A request has
    ask          "decode" or "ranks": the file here whose function `answer` is asked
    options      what that function takes
    environment  variables that are set for it
    path         folders that are importable for it, before all others
    messages     the file that gets what it and its helpers print
The answer is null where the function raised (the traceback is among the messages) or took longer than SECONDS.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import questions
import sessions

SECONDS = 600


def answered(request: dict) -> object:
    """The answer to a request. Nothing of what was started for it is left running."""
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if not child:
            try:
                work(request, answer)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        sessions.end(child)
        answer.seek(0)
        return json.loads(answer.read() or "null")


def work(request: dict, answer) -> None:
    os.setsid()
    signal.alarm(SECONDS)
    messages = os.open(request["messages"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(messages, 1)
    os.dup2(messages, 2)
    os.environ.update(request["environment"])
    # Helpers that are spawned import the same.
    os.environ["PYTHONPATH"] = os.pathsep.join([*request["path"], os.environ["PYTHONPATH"]])
    sys.path[:0] = request["path"]
    try:
        answer.write(json.dumps(importlib.import_module(request["ask"]).answer(**request["options"])))
        answer.flush()
    except BaseException:
        traceback.print_exc()


if __name__ == "__main__":
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama  # noqa: F401

    questions.answer(answered)
