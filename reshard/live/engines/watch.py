"""Watch: requests to an engine, and whether it still answers while somebody waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

from reshard.engine.events import event
from reshard.errors import SystemRefusal
from reshard.live.engines.control import EngineControl

EVERY = 1.0
"""Seconds between two looks at an engine."""
_TOLD_EVERY = 10.0
Answer = TypeVar("Answer")


def requested(request: Callable[..., Answer], *arguments: Any, **more: Any) -> Future[Answer]:
    """A request that runs, on a thread of its own: no process waits for it when it ends."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(request(*arguments, **more))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class Watch:
    """An engine during an update."""

    def __init__(self, engine: EngineControl, seconds: float) -> None:
        """seconds: the longest time in which it answers nothing."""
        self.engine, self._seconds = engine, seconds
        self._heard = self._told = time.monotonic()
        self._looking: Future[bool] | None = None

    def ask(self, request: Callable[..., Answer], *arguments: Any) -> Answer:
        """What a request to the engine returns. Raises what it raises, and what `look` raises."""
        return self.answer(requested(request, *arguments))

    def answer(self, request: Future[Answer]) -> Answer:
        """What a request that runs returns. Raises as `ask`."""
        while not wait([request], EVERY).done:
            self.look()
        return request.result()

    def look(self) -> None:
        """Notice whether the engine answers, without waiting for it. Raises SystemRefusal if it has ended, or is silent for too long."""
        now = time.monotonic()
        if self._looking is None:
            self._looking = requested(self.engine.look)
        elif self._looking.done():
            looking, self._looking = self._looking, None
            if looking.result():
                self._heard = self._told = now
        silence = now - self._heard
        if silence > self._seconds:
            raise SystemRefusal(f"the server has not answered for {silence:.0f} s", where=self.engine.name)
        if now - self._told >= _TOLD_EVERY:
            self._told = now
            event(
                "silent",
                f"{self.engine.name} has not answered for {silence:.0f} s; the update waits for it up to {self._seconds:.0f} s",
                level=logging.WARNING,
                engine=self.engine.name,
                seconds=round(silence),
            )
