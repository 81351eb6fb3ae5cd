"""RunningServer: what a server says about the model that it serves.

A server tells its parallel sizes and its element type, in a way that belongs to the format of its engine's files (weight_checker.py).
The model's config it does not tell; the ranks of its engine do when they join a channel (hello.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from reshard.adapter import registry
from reshard.adapter.model_files import CONFIG
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.live.engines.choice import server_control
from reshard.live.wire.transport import SECONDS
from reshard.storage.server import Server


@value
class RunningServer:
    """What a server says about the model that it serves."""

    address: str
    """The server's address."""
    format: str
    """The format of the files that its engine loads."""
    parallel: Parallel
    """The parallel sizes on which the layout of the weights depends."""
    replicas: int
    """How many ranks hold the same, because of data parallelism."""
    dtype: str | None
    """The element type to which it casts weights, such as bfloat16; None if it does not say."""
    model: str | None
    """The directory or the name by which the server opened the model; None if it does not say."""

    @property
    def folder(self) -> str | None:
        """The model, if it is a folder of this machine that has a config."""
        return self.model if self.model and os.path.isabs(self.model) and Path(self.model, CONFIG).is_file() else None


def running_servers(addresses: Sequence[str]) -> tuple[RunningServer, ...]:
    """The servers at these addresses. Raises RequestError if there is none, one cannot take updates, or they need different plans."""
    if not addresses:
        raise RequestError("there is no server to push to", do="Give an address, such as http://localhost:8000")
    servers = tuple(map(running_server, addresses))
    first = servers[0]
    for other in servers[1:]:
        if (other.format, other.parallel, other.dtype) != (first.format, first.parallel, first.dtype):
            raise RequestError(
                f"it runs {other.format} on {other.parallel} in {other.dtype}, and {first.address} {first.format} on {first.parallel} in "
                f"{first.dtype}",
                where=other.address,
                why="One push has one plan",
                do="Push to them one after the other",
            )
    for server in servers:
        server_control(server.address, SECONDS).ranks()
    return servers


def running_server(address: str) -> RunningServer:
    """What the server at an address says. Raises CheckpointError if it says nothing, UnsupportedError for a split that is not known."""
    server = Server.at(address)
    for name, format in registry.serving_formats().items():
        if (checker := format.weight_checker) is None:
            continue
        try:
            facts = checker.about(server.ask(checker.info_path) or {})
        except (ArithmeticError, AttributeError, CheckpointError, KeyError, TypeError, ValueError):
            continue
        if (sizes := facts.sizes) is None:
            continue
        if sizes.pcp > 1 or (facts.expert_parallel and sizes.dp > 1):
            what = f"prefill contexts over {sizes.pcp} ranks" if sizes.pcp > 1 else f"experts over {sizes.dp} data-parallel ranks"
            why = "reshard lays out weights for the ranks of one replica"
            raise UnsupportedError(f"the server splits {what}", where=server.address, why=why)
        parallel = Parallel(tp=sizes.tp, pp=sizes.pp, ep=sizes.tp if facts.expert_parallel else 1)
        return RunningServer(server.address, name, parallel, sizes.dp, facts.dtype, facts.model)
    raise CheckpointError(
        "the server does not say how it splits its model",
        where=server.address,
        why="It is no server of vLLM or SGLang, or was started without the routes for updates",
        do="Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment",
    )
