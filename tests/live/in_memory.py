"""Updates within one process: the product's exchange carries out a plan, and the target's ranks tell what they hold then."""

from __future__ import annotations

import json

import torch
from live.memory_transport import MemoryTransport

from reshard.engine.origins.on_tensors import torch_type
from reshard.live.plan.beside import Beside
from reshard.live.plan.schedule import Schedule
from reshard.live.wire.computing import compute, merge
from reshard.live.wire.exchange import Exchange, Members
from reshard.live.wire.staging import Staged


def updated(plan, *steps):
    """Of each target rank the words of its tensors, by name, after an update for each step; and the bytes on the wire in the last one.

    steps: of each source rank name -> words. The second one and those after it send what has changed.
    """
    sources, targets = len(steps[0]), len(plan.memories)
    transports, members = MemoryTransport.joined(sources + targets), Members(sources, targets)

    def exchange(rank, schedule):
        return Exchange(transports[rank], members, Schedule.from_bytes(schedule.to_bytes()), changes=len(steps) > 1)

    senders = [exchange(rank, plan.sends(rank)) for rank in range(sources)]
    receivers = [exchange(sources + rank, plan.receives(rank, named=False)) for rank in range(targets)]
    besides = [Beside.of(json.loads(json.dumps(plan.beside(rank).to_json()))) for rank in range(targets)]
    stagings = [(Staged(plan.targets(rank), plan.fills(rank)), Staged(besides[rank].tensors, {})) for rank in range(targets)]
    sent = 0
    for arrays in steps:
        before = sum(transport.nbytes_sent for transport in transports)
        for rank, sender in enumerate(senders):
            types = {each.name: torch_type(each.dtype) for each in plan.sends(rank).sources}
            tensors = {name: torch.from_numpy(arrays[rank][name].copy().view("u1")).view(dtype) for name, dtype in types.items()}
            assert not sender.send(tensors).failures
            sender.keep(tensors)
        for (staged, beside), about, receiver in zip(stagings, besides, receivers, strict=True):
            assert not receiver.receive({**staged, **beside}).failures
            compute(about.computes, beside, staged)
            merge(about.merges, beside, staged)
        sent = sum(transport.nbytes_sent for transport in transports) - before
    found = []
    for rank, (staged, beside) in enumerate(stagings):
        held = (*plan.targets(rank), *besides[rank].whole)
        both = {**staged, **beside}
        words = {each.name: both[each.name].reshape(-1).view(torch.uint8).numpy().view(each.dtype.word) for each in held}
        found.append({name: each.reshape(both[name].shape) for name, each in words.items()})
    return found, sent


def earlier(arrays):
    """The same ranks a step ago: every 50th word of each tensor was another one."""
    found = [{name: words.copy() for name, words in held.items()} for held in arrays]
    for held in found:
        for words in held.values():
            words.reshape(-1)[::50] ^= 1
    return found
