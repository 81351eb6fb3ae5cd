"""URLs of stores, and the options with which they are opened."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from reshard.errors import RequestError, UnsupportedError
from reshard.secrets import masked_option, remember
from reshard.storage.stores.store import Store, StoreTraffic

# The page of a model, or of a file or folder of it, on the Hugging Face Hub; the addresses of its files contain /resolve/.
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface|hf)\.co/(?!api/|datasets/|spaces/)([\w.-]+/[\w.-]+)(?:/(?:tree|blob)/([\w.-]+)(?:/.*)?)?/?"
)
OBJECT_STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""The schemes that obstore serves."""
opened: deque[tuple[str, StoreTraffic]] = deque(maxlen=1000)
"""The stores that this process has opened last: URL, and what was asked of each."""
_options: ContextVar[Mapping[str, str]] = ContextVar("storage_options", default={})  # noqa: B039  (never changed in place)


def current_options() -> Mapping[str, str]:
    """The options with which stores are opened now."""
    return _options.get()


@contextmanager
def storage_options(given: Mapping[str, str]) -> Iterator[None]:
    """Inside this context, stores are opened with these options, such as {"endpoint": "http://minio:9000"}."""
    for key, text in given.items():
        masked_option(key, text)
    token = _options.set({**_options.get(), **given})
    try:
        yield
    finally:
        _options.reset(token)


def parsed_options(given: Sequence[str]) -> dict[str, str]:
    """The options of texts KEY=VALUE. Raises RequestError for a text without `=`."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RequestError("a `storage_option=` is not KEY=VALUE", do="Give for example `storage_option=` endpoint=http://minio:9000")
        pairs[key] = value
    return pairs


def open_store(url: str) -> Store:
    """The store at a URL. Nothing is asked of it yet. `opened` lists it.

    Raises: UnsupportedError with the command that installs what is missing; RequestError for an option that the store does not know.
    """
    scheme = url.partition("://")[0].lower()
    remember(url)
    if page := _HUB_PAGE.fullmatch(url):
        revision = f"@{page[2]}" if page[2] not in (None, "main") else ""
        raise UnsupportedError(
            "this is a page of the Hugging Face Hub, and not the files of the model",
            where=url,
            do=f"Give hf://{page[1]}{revision}, or the folder that `hf download {page[1]} --local-dir {page[1].partition('/')[2]}` makes",
        )
    if scheme in ("http", "https"):
        from reshard.storage.stores.web_backend import WebStore

        store = Store(url, WebStore(url, _options.get()))
    elif scheme in OBJECT_STORES:
        from reshard.storage.stores.obstore_backend import ObjectStore

        store = Store(url, ObjectStore(url, _options.get()))
    else:
        from reshard.storage.stores.fsspec_backend import FsspecStore

        store = Store(url, FsspecStore(url, _options.get()))
    opened.append((store.url, store.traffic))
    return store
