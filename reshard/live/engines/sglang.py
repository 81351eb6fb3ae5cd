"""SGLang: a server at an address, in whose processes plugins/weight_transfer/sglang.py takes part. Run with SGLang 0.5.23.

Its own routes carry the steps of an update to the scheduler of each rank. `group_name` of a request names the step and its values, as a
JSON object with the key "reshard"; other requests of these routes are SGLang's own.

    join       /init_weights_update_group                TargetRank.join
    receive    /update_weights_from_distributed          TargetRank.receive
    finish     /update_weights_from_distributed          TargetRank.finish
    leave      /destroy_weights_update_group             TargetRank.close
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reshard.errors import RequestError, SystemRefusal, UnsupportedError
from reshard.live.engines.control import AskedServer
from reshard.live.wire.channel import channel_of

MARK = "reshard"
"""The key of a step, the backend of a group, and what a server of SGLang says of itself where reshard is installed."""
INFO = "/model_info"
"""A route that SGLang has, and vLLM does not."""
# SGLang cannot wait for requests that run; the plugin can, if the request to pause has this number.
_PAUSES = {"wait": {"mode": "in_place", "rid": MARK}, "abort": {"mode": "abort"}, "keep": {"mode": "retract"}}


def step_text(step: str, values: Mapping[str, Any] | None = None) -> str:
    """The `group_name` of a step."""
    return json.dumps({MARK: step, **(values or {})})


def step_of(group_name: str) -> tuple[str, dict[str, Any]] | None:
    """The step and its values that a `group_name` tells; None if it is a name of SGLang's own."""
    try:
        told = json.loads(group_name)
        return (told.pop(MARK), told) if isinstance(told, dict) and MARK in told else None
    except ValueError:
        return None


class SglangServer(AskedServer):
    """A server of SGLang at an address."""

    routes = ("SGLang has the routes for updates since version 0.5.23", "Start SGLang 0.5.23 or newer")

    def ranks(self) -> int:
        """The number of schedulers. Raises UnsupportedError for pipeline stages and data-parallel replicas."""
        about = self._asked("/server_info")
        try:
            states, sizes = about["internal_states"], {axis: about[f"{axis}_size"] for axis in ("tp", "pp", "dp")}
            is_known = all(MARK in state for state in states)
        except (KeyError, TypeError):
            states, sizes, is_known = [], {"tp": 0}, True
        count = self._counted(sizes["tp"])
        if not is_known:
            raise RequestError(
                "the server does not know reshard",
                where=self.name,
                do="Install reshard in the environment of SGLang, and start it again. SGLANG_PLUGINS, if it is set, must name reshard",
            )
        for axis, what in (("pp", "pipeline stages"), ("dp", "data-parallel ranks")):
            if sizes[axis] != 1:
                raise UnsupportedError(
                    f"the server has {sizes[axis]} {what}",
                    where=self.name,
                    why="SGLang passes the routes for updates to the tensor-parallel ranks of one replica",
                    do="Start one server for each replica, without pipeline stages, and give a list of them",
                )
        return count

    def init(self, info: dict[str, Any]) -> None:
        """Let the schedulers join a channel."""
        self._channel = channel_of(info)
        own = {"master_address": info["host"], "master_port": info["port"], "rank_offset": info["offset"], "world_size": info["targets"]}
        self._post("/init_weights_update_group", {**own, "backend": MARK, "group_name": step_text("join", info)})

    def pause(self, mode: str) -> None:
        """Pause generation. Requests that are kept are computed again from their tokens, with the new weights."""
        self._post("/pause_generation", _PAUSES[mode])

    def start(self) -> None:
        """Nothing: an update begins with its bytes."""

    def update(self) -> None:
        """Let the schedulers receive."""
        self._step("receive", self._channel)

    def finish(self) -> None:
        """Install what was received, or drop it."""
        self._step("finish")

    def version(self) -> str:
        """The version of the weights."""
        return str(self._asked(INFO)["weight_version"])

    def set_version(self, version: str) -> None:
        """Set the version of the weights."""
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def clear_cache(self) -> None:
        """Clear the prefix cache. Raises SystemRefusal if requests run."""
        self._post("/flush_cache")

    def resume(self) -> None:
        """Resume generation."""
        self._post("/continue_generation")

    def leave(self) -> None:
        """Release the connection."""
        self._post("/destroy_weights_update_group", {"group_name": step_text("leave")})

    def is_paused(self) -> None:
        """SGLang 0.5.23 has no route that tells it."""

    def _step(self, step: str, values: Mapping[str, Any] | None = None) -> None:
        question = {"group_name": step_text(step, values), "names": [], "dtypes": [], "shapes": []}
        if not self._post("/update_weights_from_distributed", question).get("success"):
            raise SystemRefusal(f"the server did not carry out the step {step!r} of an update", where=self.name)
