"""Work on many tensors or files that waits for the storage: side by side in a store, one after the other on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from reshard.storage.files import Files

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(files: Files, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `work` returns for each item, in order. `work` reads from `files`; in a store, where each read takes tens of milliseconds, it
    runs in as many threads as there may be requests."""
    if files.store is None:
        yield from map(work, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    from reshard.storage.stores.store import REQUESTS_AT_ONCE

    threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="reshard-read")
    try:
        yield from threads.map(work, items)
    finally:
        threads.shutdown(cancel_futures=True)
