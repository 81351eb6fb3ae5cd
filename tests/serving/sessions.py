"""Ends a session's processes: vLLM's workers, and who watches over their shared memory."""

import contextlib
import os
import signal
import time

# How long those have that end on their own.
GRACE_SECONDS = 2


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
