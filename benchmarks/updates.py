"""Sending an update, beside a plain exchange of as many bytes by gloo between the same ranks. Needs torch.

    python benchmarks/updates.py [--sources 2] [--rounds 5] [--layers 16] [--transport gloo] [--changed 0.02]

Source ranks hold rows of each weight of a llama, as FSDP2 cuts them; target ranks are vLLM's at TP 2, without vLLM: what an engine does
after the bytes have arrived is not measured. Plain: one tensor for each pair of ranks, in the same order. The best of the rounds counts.
Also printed: the peak memory that a source rank takes beyond its weights. With --changed that share of the elements, at random places, is
another one in each round, and changes are sent; the source's memory has a copy of its weights then, and targets hold the round before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path[len(sys.path) :] = [str(Path(__file__).resolve().parent.parent / "tests")]

TP = 2


def shapes_of(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The weights of a llama."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    found["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{x}_proj.weight": (rows, hidden) for x, rows in (("q", q), ("k", kv), ("v", kv))}
        found |= {f"{at}self_attn.o_proj.weight": (hidden, q), f"{at}mlp.down_proj.weight": (hidden, inner)}
        found |= {f"{at}mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        found |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return found


def rank_of(rank: int, port: int, sources: int, rounds: int, changed: float, config: dict[str, int], backend: str, pipe) -> None:
    import torch
    from live.hand_plan import HandPlan
    from torch import distributed

    from reshard.live.wire.exchange import Exchange, Members
    from reshard.live.wire.shared_memory import SharedMemory
    from reshard.live.wire.staging import Staged
    from reshard.live.wire.transport import TorchDistributed

    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60))
    plain = TorchDistributed.join(distributed.PrefixStore("plain", store), rank, sources + TP)
    transport = SharedMemory.meet(distributed.PrefixStore("updates", store), rank, sources + TP) if backend == "shared" else plain
    members, plan = Members(sources, TP), HandPlan(config, shapes_of(config), sources, TP)
    is_source = rank < sources
    schedule = plan.sends(rank) if is_source else plan.receives(rank - sources)
    if is_source:
        tensors = {held.name: torch.ones(held.shape, dtype=torch.bfloat16) for held in plan.held(rank)}
    else:
        tensors = Staged(plan.targets(rank - sources), {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange = Exchange(transport, members, schedule, changes=changed > 0)
    run = exchange.send if is_source else exchange.receive
    seconds: dict[str, list[float]] = {"update": [], "plain": []}
    memory = nbytes = 0
    if changed:
        run(tensors)
        if is_source:
            exchange.keep(tensors)
    for _ in range(rounds):
        for tensor in tensors.values() if changed and is_source else ():
            tensor.view(-1)[torch.randint(tensor.numel(), (int(changed * tensor.numel()),))] += 1
        _together(transport)
        began = time.perf_counter()
        outcome = run(tensors)
        _together(transport)
        seconds["update"].append(time.perf_counter() - began)
        if changed and is_source:
            exchange.keep(tensors)
        nbytes = outcome.nbytes
        assert not outcome.failures and (nbytes == schedule.nbytes or changed)
        memory = memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    whole = {way: torch.ones(schedule.nbytes_of(way), dtype=torch.uint8) for way in sorted(schedule.ways, key=members.turn)}
    for _ in range(rounds):
        _together(transport)
        began = time.perf_counter()
        for way, tensor in whole.items():
            if is_source:
                plain.send(members.target(way.target_rank), tensor).wait()
            else:
                plain.receive(way.source_rank, tensor).wait()
        _together(transport)
        seconds["plain"].append(time.perf_counter() - began)
    pipe.send({"seconds": seconds, "nbytes": nbytes, "memory": memory << 10})
    pipe.recv()


def _together(transport) -> None:
    """Wait for all ranks."""
    if transport.rank == 0:
        for peer in range(1, transport.size):
            transport.hear(peer)
        for peer in range(1, transport.size):
            transport.tell(peer, {})
    else:
        transport.tell(0, {})
        transport.hear(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sources", 2), ("rounds", 5), ("layers", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--changed", type=float, default=0.0, help="the share of elements that change in each round")
    parser.add_argument("--transport", choices=["gloo", "shared"], default="gloo")
    options = parser.parse_args()
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128}
    config = {**sizes, "vocab_size": 32000, "num_hidden_layers": options.layers}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(options.sources + TP):
        ours, theirs = context.Pipe()
        given = options.sources, options.rounds, options.changed, config, options.transport
        context.Process(target=rank_of, args=(rank, port, *given, theirs), daemon=True).start()
        pipes.append(ours)
    told = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    sources = told[: options.sources]
    best = {what: min(told[0]["seconds"][what]) for what in ("update", "plain")}
    print(json.dumps(told[0]["seconds"]))
    print(f"{sum(each['nbytes'] for each in sources) / 1e9:.3f} GB from {options.sources} to {TP} ranks")
    print(f"update {best['update']:.2f} s, plain {best['plain']:.2f} s, {best['update'] / best['plain']:.2f} times")
    print(f"a source rank takes {max(each['memory'] for each in sources) / 1e6:.0f} MB beyond its weights")


if __name__ == "__main__":
    main()
