"""Code in a child process that may use 10 s of processor time, 60 s of time and 1 GB of memory."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable

SECONDS = 10
MEMORY = 1_000_000_000


def limited(work: Callable[[], str], *, seconds: int = SECONDS, memory: int = MEMORY, patience: int = 6) -> str:
    """What `work` returns in a forked child; or how the child ended: "HANG", "MEMORY", "CRASH", or "TRACEBACK" with the traceback.

    seconds: of processor time. memory: bytes of address space beyond that of this process. patience: how many times that time may pass.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        answer = "CRASH"
        faulthandler.disable()  # pytest's would print the stack of a child that ends as it should
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            signal.alarm(patience * seconds)  # what waits forever uses no processor time
            answer = work()
        except MemoryError:
            answer = "MEMORY"
        except BaseException:
            answer = "TRACEBACK " + traceback.format_exc()
        finally:
            text = answer.encode("utf-8", "replace")
            os.write(writing, text if len(text) <= 60_000 else text[:1000] + text[-59_000:])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        return "HANG" if ended in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else f"CRASH by {signal.Signals(ended).name}"
    return answer


ON_LINUX = sys.platform == "linux"
