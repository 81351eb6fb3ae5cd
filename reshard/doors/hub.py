"""Hub: virtual folders over HTTP, in three protocols on one port: the Hugging Face Hub's, S3's, and plain files with a page.

with reshard.hub("step-1000", to="hf") as hub:
    print(hub.url)          # http://127.0.0.1:8787

request -> is it for this host, may the client ask -> hub front, S3 front or page -> answer
"""

from __future__ import annotations

import logging
import os
import re
import secrets as random_bytes
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.doors.catalogue import MAIN, Catalogue, Repository
from reshard.doors.folder import Folder, folder
from reshard.doors.fronts import hub as hub_front
from reshard.doors.fronts import people, s3
from reshard.doors.fronts.access import Access, is_loopback
from reshard.doors.fronts.messages import Malformed, Request, Response, json_answer
from reshard.doors.server import HubServer
from reshard.engine.events import event
from reshard.errors import RequestError, ReshardError
from reshard.opening.chains import source_of
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import ManyPlanOptions, OpenOptions, PathLike, checked_keywords, take
from reshard.opening.open import open
from reshard.opening.run_folders import RunFolder, run_at
from reshard.secrets import remember
from reshard.storage.system_calls import system_refusal

TOKEN = "RESHARD_HUB_TOKEN"
"""The environment variable with the token that clients have to know."""
PORT = 8787
"""The port, unless another one is asked for."""
_LOOPBACK = "127.0.0.1"
# Files that are remembered as logged.
_MOST_LOGGED = 10_000
_SHORTEST_TOKEN = 16
# The level of what the command line shows without being asked (cli/logs.py).
_NOTICE = 25


class HubOptions(OpenOptions, ManyPlanOptions, total=False):
    """Keywords of `hub`: those of `open` and of `plan`."""


@checked_keywords
def hub(
    source: Checkpoint | PathLike | Sequence[Checkpoint | PathLike],
    *,
    to: str | Sequence[str] = "hf",
    name: str | Sequence[str] = (),
    port: int = PORT,
    bind: str = _LOOPBACK,
    **options: Unpack[HubOptions],
) -> Hub:
    """Serve checkpoints, or all steps of a run, as a Hugging Face repository, an S3 bucket and a page. Takes the keywords of `plan`.

    to: the format, or several. name: ORG/NAME for each source (default: local/ and the name of its folder). port: 0 for a free one.
    bind: the address to listen at. Another one than the loopback needs a token: that of RESHARD_HUB_TOKEN, else one is made.

    Use the result as a context, or call `serve`. Nothing is converted before a client asks for it.

    Raises: what `folder` raises; SystemRefusal if the port is taken.
    """
    sources = [source] if isinstance(source, str | os.PathLike | Checkpoint) else [*source]
    formats, names = [to] if isinstance(to, str) else [*to], [name] if isinstance(name, str) else [*name]
    if names and len(names) != len(sources):
        raise RequestError(f"{len(names)} names for {len(sources)} checkpoints", do="Give `name=` once for each checkpoint")
    token = os.environ.get(TOKEN, "")
    if token and len(token) < _SHORTEST_TOKEN:
        raise RequestError(f"the token in {TOKEN} has {len(token)} characters", do=f"Use at least {_SHORTEST_TOKEN}")
    is_made = not token and not is_loopback(bind)
    token = token or (random_bytes.token_urlsafe(32) if is_made else "")
    remember(*filter(None, [token]))
    repositories = [
        _repository(
            source, format, names[i] if names else "", options if len(formats) == 1 else _of_format(format, options), len(formats) > 1
        )
        for i, source in enumerate(sources)
        for format in formats
    ]
    return Hub(Catalogue(iter(repositories)), (bind, port), Access(token), is_made=is_made)


def _of_format(format: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one of several formats: sizes of ranks are left out where the format writes a model's folder without ranks."""
    has_ranks = format in registry.serving_formats() or not registry.target(format).needs_model_files
    return {key: given for key, given in options.items() if has_ranks or key not in ("tp", "pp", "ep")}


def _repository(source: Checkpoint | PathLike, format: str, name: str, options: Mapping[str, Any], is_one_of_several: bool) -> Repository:
    path = source.path if isinstance(source, Checkpoint) else os.fspath(source)
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rstrip("/").rpartition("/")[2]).strip("-._") or "checkpoint"
    name = name or f"local/{re.sub('-{2,}', '-', last)[:80]}"
    name = f"{name}-{format}" if is_one_of_several else name
    is_step = isinstance(source, Checkpoint) or options.get("step") is not None
    run = None if is_step else run_at(path)
    if run is None:
        opened = _folder(source, format, options)
        return Repository(name, lambda: {MAIN: lambda: opened})
    return Repository(name, partial(_steps, path, format, options))


def _folder(source: Checkpoint | PathLike, format: str, options: Mapping[str, Any]) -> Folder:
    given = dict(options)
    about_source = take(given, OpenOptions)
    opened = source if isinstance(source, Checkpoint) else open(source, **about_source)
    return folder(opened, to=format, **given)


def _steps(path: str, format: str, options: Mapping[str, Any]) -> dict[str, Callable[[], Folder]]:
    """What opens the complete steps of a run, the oldest first."""
    given = {key: value for key, value in options.items() if key != "part"}
    every = RunFolder(path).steps()
    wanted = [step for step in every if step.complete and step.number is not None and options.get("part") in (None, step.part)]
    numbers = [step.number for step in wanted]
    names = [step.name if numbers.count(step.number) == 1 else f"{step.name}-{step.part.replace('/', '-')}" for step in wanted]
    return {
        label: partial(_folder, source_of(step, every), format, given)
        for label, step in sorted(zip(names, wanted, strict=True), key=lambda named: (named[1].order, named[0]))
    }


class Hub:
    """A server of virtual folders, which listens from the start. catalogue: what it serves. address: host and port.

    access: who may ask. is_made: whether the token was made for it, and nobody knows it yet.
    """

    def __init__(self, catalogue: Catalogue, address: tuple[str, int], access: Access, *, is_made: bool = False) -> None:
        self.catalogue, self.access, self.is_made = catalogue, access, is_made
        if not is_loopback(address[0]) and not access.token:
            raise RequestError("an address that others reach needs a token", where=address[0], do=f"Set {TOKEN}")
        try:
            self._server = HubServer(address, self._respond, self._failed)
        except OSError as error:
            raise system_refusal(error, "opened for clients", f"{address[0]}:{address[1]}") from error
        self._logged: set[tuple[str, str]] = set()
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port."""
        return self._server.server_port

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = str(self._server.server_address[0])
        host = {"0.0.0.0": os.uname().nodename, "::": os.uname().nodename}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{host}:{self.port}"

    @property
    def sent(self) -> int:
        """The bytes that clients got."""
        return self._server.sent

    @property
    def requests(self) -> int:
        """The requests that were answered."""
        return self._server.requests

    def serve(self) -> None:
        """Response until `close` is called from another thread, or an exception such as KeyboardInterrupt comes."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop listening, and end the connections' threads with the process."""
        if self._thread:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self.serve, name="reshard-hub", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def lines(self) -> list[tuple[str, str]]:
        """Commands to copy, each with the name of the program, for the first repository."""
        repository = next(iter(self.catalogue.by_name.values()))
        folder_of, token = repository.revision(MAIN), self.access.token
        weights = folder_of.folder.plan.layout.files[0].path if folder_of and folder_of.folder.plan.layout.files else ""
        place = f"{repository.bucket}/{folder_of.name}" if folder_of and repository.is_run else repository.bucket
        hub_ = f"HF_ENDPOINT={self.url}" + (f" HF_TOKEN=${TOKEN}" if token else "")
        keys = f"AWS_ACCESS_KEY_ID=reshard AWS_SECRET_ACCESS_KEY={f'${TOKEN}' if token else 'none'} AWS_REGION=us-east-1"
        s3_ = f"AWS_ENDPOINT_URL={self.url} {keys}"
        bearer = f' -H "Authorization: Bearer ${TOKEN}"' if token else ""
        streamer = f"{s3_} RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING=0"
        name = shlex.quote(repository.name)
        return [
            (
                "transformers",
                f'{hub_} python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({repository.name!r})"',
            ),
            ("vLLM", f"{hub_} vllm serve {name}"),
            ("SGLang", f"{hub_} python -m sglang.launch_server --model-path {name}"),
            ("Run:ai", f"{streamer} vllm serve s3://{place} --load-format runai_streamer"),
            ("hf", f"{hub_} hf download {name}"),
            ("aws", f"{keys} aws s3 ls --endpoint-url {self.url} s3://{place}/"),
            ("curl", f"curl -r 0-7{bearer} {self.url}/{shlex.quote(f'{place}/{weights}')} | xxd"),
        ]

    def _respond(self, request: Request, client: str) -> Response:
        try:
            if not self.access.names_this_host(request):
                return json_answer({"error": "the Host header does not name this server"}, 421)
            if not self.access.allows(request):
                return self._forbidden(request)
            answer = (
                hub_front.answer(request, self.catalogue) or people.answer(request, self.catalogue) or s3.answer(request, self.catalogue)
            )
        except Malformed:
            raise
        except Exception as error:
            return self._failed(error)
        key = client, request.path
        if answer.file is not None and request.method == "GET" and key not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(key)
            event("hub-read", f"{client} reads {request.path}", level=_NOTICE, client=client, path=request.path, bytes=answer.file.size)
        return answer

    def _forbidden(self, request: Request) -> Response:
        if request.asks_s3:
            return s3.error_answer(403, "SignatureDoesNotMatch", "the secret access key is not the token of this server")
        return json_answer({"error": "the token is missing or wrong"}, 401, WWW_Authenticate='Basic realm="reshard", charset="UTF-8"')

    def _failed(self, error: Exception) -> Response:
        """Log why bytes could not be read, and tell the client."""
        told = str(error) if isinstance(error, ReshardError) else f"a defect of reshard: {type(error).__name__}"
        event("hub-failed", told, level=logging.ERROR, error=told)
        plain = "".join(letter for letter in told.encode("ascii", "backslashreplace").decode() if letter.isprintable())[:1000]
        return json_answer({"error": told}, 500, X_Error_Message=plain)

    def __repr__(self) -> str:
        return f"Hub({self.url!r}, {len(self.catalogue.by_name)} repositories)"
