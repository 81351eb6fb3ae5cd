"""How long several machines take for DeepSeek-V3: the requests of the real plan, simulated with given bandwidths, latencies and failures.

    python benchmarks/many_machines.py [--work DIR] [--tp 16]

The plan, its tasks and their owners are those that `reshard convert --part I/N` uses (plans/tasks.py). Of each task the contiguous ranges
of the source are read in requests of at most 16 MiB, and what they make is written in parts of 16 MiB. A node has one link each way. A
request waits for its latency, then for its turn on the link, and never runs faster than one connection. Each node runs four parts; each has
64 requests in flight and 1 GiB of memory for what is read and not yet written.

Nothing is moved, so this shows what the division of the work allows, and not what the code reaches.
"""

from __future__ import annotations

import argparse
import heapq
import random
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sparse import write_deepseek

import reshard
from reshard.plans.plan import Plan
from reshard.plans.tasks import imbalance, owners

REQUEST, BUDGET, PARTS_PER_NODE = 16 << 20, 1 << 30, 4


@dataclass(frozen=True)
class Network:
    """What a node gets."""

    link: float = 11e9
    """Bytes per second each way: 100 Gb/s, of which 11 GB/s are usable."""
    connection: float = 200e6
    """Bytes per second of one request."""
    latency: float = 0.05
    """Mean seconds until the first byte, exponentially distributed."""
    in_flight: int = 64
    """Requests at a time of each part, each way."""
    parts: int = PARTS_PER_NODE
    """Parts on each node."""


@dataclass(frozen=True)
class Work:
    """One task."""

    reads: tuple[int, ...]
    """The bytes of each request."""
    written: int
    """The bytes that are made of them."""


def work_of(plan: Plan) -> list[Work]:
    """The requests of each task. Pieces that touch in a file are read together."""
    found = []
    for task in plan.tasks():
        ranges: list[tuple[int, int, int]] = []
        written = 0
        for i in task.routes:
            route = plan.routes[i]
            located = route.source.shards.located()
            nbytes = route.source.shards.sizes.prod(axis=1) * route.source.dtype.itemsize
            ranges += zip(located.files.tolist(), located.byte_offsets.tolist(), nbytes.tolist(), strict=True)
            written += route.target.shards.elements * route.target.dtype.itemsize
        merged: list[list[int]] = []
        for file, start, nbytes in sorted(ranges):
            if merged and merged[-1][0] == file and merged[-1][1] + merged[-1][2] == start:
                merged[-1][2] += nbytes
            else:
                merged.append([file, start, nbytes])
        reads = [min(REQUEST, nbytes - at) for _, _, nbytes in merged for at in range(0, nbytes, REQUEST)]
        found.append(Work(tuple(reads), written))
    return found


class Node:
    """One node that converts tasks one after the other, reads ahead, and writes what it has read."""

    def __init__(self, network: Network, randomness: random.Random, start: float = 0.0) -> None:
        self._network, self._random = network, randomness
        self._free = {"read": start, "write": start}
        self._slots = {name: [start] * network.in_flight * network.parts for name in self._free}
        self._waiting: deque[tuple[float, int]] = deque()  # when it will have been written, and its bytes
        self._unwritten = 0
        self.ends: list[float] = []
        """When each task was finished."""

    def convert(self, work: Work) -> float:
        """Convert a task; returns when it is finished."""
        ratio, rest, end = work.written / max(sum(work.reads), 1), 0.0, 0.0
        for nbytes in work.reads:
            there = self._request("read", nbytes, self._room())
            rest += nbytes * ratio
            while rest >= REQUEST:
                end = max(end, self._write(there, REQUEST))
                rest -= REQUEST
        end = max(end, self._write(there, int(rest)) if work.reads else 0.0)
        self.ends.append(end)
        return end

    def _room(self) -> float:
        """When there is room in the budget for another request."""
        end = 0.0
        while self._unwritten > (BUDGET - REQUEST) * self._network.parts:
            end, nbytes = self._waiting.popleft()
            self._unwritten -= nbytes
        return end

    def _write(self, there: float, nbytes: int) -> float:
        end = self._request("write", nbytes, there)
        self._waiting.append((end, nbytes))
        self._unwritten += nbytes
        return end

    def _request(self, way: str, nbytes: int, earliest: float) -> float:
        network = self._network
        start = max(heapq.heappop(self._slots[way]), earliest)
        first = start + self._random.expovariate(1 / network.latency)
        # The link is shared: a request takes its turn, and the link never waits for the latency of one of many requests.
        self._free[way] = max(self._free[way], start) + nbytes / network.link
        end = max(self._free[way], first + nbytes / network.connection)
        heapq.heappush(self._slots[way], end)
        return end


def simulated(work: list[Work], weights: list[int], nodes: int, network: Network, *, lost_at: float | None = None, restart: float = 10.0):
    """Seconds until all is done, how unequal the nodes' seconds are, and the seconds of work that were lost.

    lost_at: when the first node dies. What it had finished counts; its part starts again after `restart` seconds.
    """
    parts = owners(weights, nodes * network.parts)
    owner, seconds, lost = [part % nodes for part in parts], [], 0.0
    for number in range(nodes):
        own = [each for each, who in zip(work, owner, strict=True) if who == number]
        node = Node(network, random.Random(number))
        for each in own:
            node.convert(each)
        if lost_at is not None and number == 0:
            done = sum(end <= lost_at for end in node.ends)
            lost = lost_at - max([end for end in node.ends if end <= lost_at], default=0.0)
            node = Node(network, random.Random(nodes), lost_at + restart)
            for each in own[done:]:
                node.convert(each)
        seconds.append(max(node.ends, default=0.0))
    return max(seconds), max(seconds) / float(np.mean(seconds)) - 1, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--tp", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-machines-", dir=options.work) as folder:
        source = Path(folder, "deepseek")
        write_deepseek(source, layers=61, experts=256)
        plan = reshard.plan(source, to="vllm", tp=options.tp)
        work, weights = work_of(plan), [task.weight for task in plan.tasks()]
        read, written = sum(sum(each.reads) for each in work), sum(each.written for each in work)
        requests = sum(len(each.reads) for each in work)
        print(
            f"{read / 1e12:.3f} TB read in {requests:,} requests, {written / 1e12:.3f} TB written, {len(work):,} tasks, "
            f"largest {max(weights) / 1e9:.2f} GB of {sum(weights) / 1e9:.0f}"
        )
    columns = ("nodes", "floor", "seconds", "times the floor", "imbalance of bytes", "of seconds", "a node lost at half time", "work lost")
    print(f"\n| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    network = Network()
    for nodes in (1, 4, 16):
        floor = max(read, written) / nodes / network.link
        seconds, uneven, _ = simulated(work, weights, nodes, network)
        after, _, lost = simulated(work, weights, nodes, network, lost_at=seconds / 2)
        bytes_uneven = imbalance(weights, nodes * network.parts)
        print(
            f"| {nodes} | {floor:.0f} s | {seconds:.0f} s | {seconds / floor:.2f} | {bytes_uneven:.2%} | {uneven:.2%} | {after:.0f} s "
            f"| {lost:.1f} s |",
            flush=True,
        )
    print("\n| 4 nodes; parts on each, and each request | seconds | times the floor |\n|---|---|---|")
    for parts, connection, latency in ((1, 200e6, 0.05), (4, 200e6, 0.05), (4, 90e6, 0.05), (4, 90e6, 0.2), (8, 90e6, 0.2)):
        seconds, _, _ = simulated(work, weights, 4, Network(connection=connection, latency=latency, parts=parts))
        floor = max(read, written) / 4 / network.link
        each = f"{parts} parts, {connection / 1e6:.0f} MB/s, {latency * 1000:.0f} ms"
        print(f"| {each} | {seconds:.0f} s | {seconds / floor:.2f} |", flush=True)


if __name__ == "__main__":
    main()
