"""A server in a session of its own: waits until it answers, and ends the session's processes: vLLM's workers, and who watches over their
shared memory."""

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

# How long those have that end on their own.
GRACE_SECONDS = 2
# How long a server may take to start.
SECONDS = 600


def end(session: int) -> None:
    """Nothing that a session's leader has started runs after this. Python's resource trackers do not end when asked to, but when those have
    whose shared memory they watch over; killed with them, they would leave it, 240 MiB of each rank, until others find no room."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            os.killpg(session, 0)
            time.sleep(0.05)
        os.killpg(session, signal.SIGKILL)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    said = log.read_text()
    errors = "\n".join(dict.fromkeys(re.findall(r"\w*(?:Error|Exception): .*", said)))
    raise SystemExit(f"the server does not answer: {errors}\n{said[-1000:]}")
