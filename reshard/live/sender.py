"""Sender: a trainer's ranks update running engines.

    sender = Sender(model, engine="http://127.0.0.1:8000")
    report = sender.update()

Both lines run on every rank of the trainer, at the same time. The plan is computed once; an update sends what the tensors hold then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from reshard.errors import RequestError, check_word
from reshard.live.adapter_updates import AdapterUpdates
from reshard.live.agreement import agreed_plan
from reshard.live.arrangement import Arrangement, Link, Planned
from reshard.live.engines.choice import controls
from reshard.live.hello import Hello
from reshard.live.leading import UpdateReport
from reshard.live.memory.describe import arrays_of, describe
from reshard.live.memory.description import RankDescription
from reshard.live.plan.schedule import Schedule
from reshard.live.session import opened
from reshard.live.trainers import Trainers
from reshard.live.wire.exchange import Exchange
from reshard.live.wire.transport import reason
from reshard.opening.keywords import LinkOptions, PathLike

if TYPE_CHECKING:
    import torch


class SenderOptions(LinkOptions, total=False):
    """Further keywords of `Sender`."""

    adapter: bool
    name: str
    shared_dir: PathLike
    keep: int


_OF_ADAPTER = ("name", "shared_dir", "keep")


class Sender:
    """The rank of a trainer that this process is, joined with engines; with `adapter=True` it joins none."""

    def __init__(
        self,
        model: Any,
        engine: Any,
        plan: Planned | Callable[[Sequence[Hello]], Planned] | None = None,
        group: Any = None,
        transport: str | Link = "gloo",
        verify: bool = False,
        fallback: str | None = None,
        changes: bool = False,
        **reach: Unpack[SenderOptions],
    ) -> None:
        """Join the engines, plan, and check both sides; nothing is sent yet.

        model: a torch module, or a mapping of names to tensors.
        engine: the address of a server of vLLM or SGLang, vLLM's `LLM` of this process, or a list of them: replicas, which all get the same
        weights.
        plan: what goes where; a function makes it from what the engines' ranks say. Only source rank 0 needs it.
        group: the trainer's process group; None: torch.distributed's default group, or this process alone.
        transport: gloo or nccl, or a Link with more to say.
        verify: compare the digests of all bytes that arrive before they are installed.
        fallback: "whole": send tensors that cannot be planned whole to the engine's own loader; None: refuse them by name.
        changes: send what changed since the last update, where that is less. This rank then keeps a copy of the tensors that it has sent.
        reach: `take_over`: take the engine over from a Sender or push of another process that has joined it; by default this one is refused
        by the name of that process. `bind` and `port`: where source rank 0 listens. `trust_network`: whether the secret of the update may
        go over HTTP to an engine that is not asked at a loopback address. `adapter`: send the model's LoRA adapter alone, as one that
        requests ask for by name, with `name`, `shared_dir` and `keep` of `push_adapter`; the other keywords are then left out.

        Raises: RequestError or SystemRefusal on every rank; trainer and engines stay as they were.
        """
        given: dict[str, Any] = dict(reach)
        trainers = Trainers.of(group)
        self.plan: Planned | None = None
        """The plan, on source rank 0."""
        of_adapter = {name: given.pop(name) for name in _OF_ADAPTER if name in given}
        self._adapter: AdapterUpdates | None = None
        if given.pop("adapter", False):
            if plan or verify or fallback or changes or given or transport != "gloo":
                raise RequestError("`adapter=True` sends no weights", do=f"Give only `group` and {', '.join(_OF_ADAPTER)} with it")
            self._adapter = AdapterUpdates(model, engine, trainers, of_adapter)
            return
        if of_adapter:
            raise RequestError(f"`{next(iter(of_adapter))}=` has a meaning only with `adapter=True`")
        if fallback is not None:
            check_word("fallback", fallback, ["whole"])
            if plan is not None:
                raise RequestError("`fallback=` is about a plan that Sender makes, and `plan=` gives one", do="Leave out one of them")
        link: Link = replace(transport if isinstance(transport, Link) else Link(transport), **given)
        descriptions = trainers.gather(_described(model, trainers.rank)) if plan is None else []

        def arrange(hellos: Sequence[Hello]) -> Arrangement:
            if plan is None:
                made: Planned = agreed_plan(descriptions, hellos, fallback=fallback is not None)
            else:
                made = plan(hellos) if callable(plan) else plan
            self.plan = made
            return Arrangement.of(made, verify=verify, changes=changes)

        self._model = model
        self._session = opened(partial(controls, engine, link.seconds), trainers, arrange, link)
        assert self._session.sends is not None
        self._sends = self._session.sends
        self._exchange = Exchange(self._session.transport, self._session.members, self._sends, verify=verify, changes=changes)

    @property
    def transport(self) -> Any:
        """What carries the bytes; it counts them."""
        return self._session.transport

    def update(self, version: str | None = None) -> UpdateReport:
        """Send what the model's tensors hold now, and let the engines answer with it.

        version: what the engines call these weights; None: a number, one more than that of the first engine. The version of an adapter is
        its name with its fingerprint.

        Raises: SystemRefusal on every rank if the update failed. The message says what the engines hold.
        """
        if self._adapter is not None:
            if version is not None:
                raise RequestError("`version=`: the version of an adapter is its name with its fingerprint", do="Leave it out")
            return self._adapter.update()
        tensors: dict[str, torch.Tensor] = {}

        def ready() -> None:
            tensors.update(arrays_of(self._model))
            check_live(self._sends, tensors)

        try:
            report = self._session.update(lambda: self._exchange.send(tensors), ready, version)
        except BaseException:
            self._exchange.forget()
            raise
        self._exchange.keep(tensors)
        return report

    def close(self) -> None:
        """Leave the engines. They go on with the weights that they have."""
        if self._adapter is None:
            self._session.close()


def _described(model: Any, rank: int) -> RankDescription | str:
    """What this rank holds; or why that cannot be said: the other ranks wait for an answer."""
    try:
        return describe(model, rank=rank)
    except Exception as error:
        return reason(error)


def check_live(sends: Schedule, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises RequestError, naming the first tensor, unless the live tensors are those of the plan."""
    for held in sends.sources:
        tensor = tensors.get(held.name)
        if tensor is None:
            raise RequestError("the plan sends it, and the model does not have it", where=held.name, do="Make a new Sender for this model")
        live = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())
        planned = held.dtype.torch, list(held.shape), list(held.strides)
        if live != planned:
            raise RequestError(
                f"it is {live[0]} {live[1]} with strides {live[2]}, in the plan {planned[0]} {planned[1]} with {planned[2]}",
                where=held.name,
                why="Other bytes than those of the plan would be sent",
                do="Make a new Sender for this model",
            )
