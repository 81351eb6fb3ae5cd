"""A plan made by hand, for llama alone: source ranks hold rows of each weight as FSDP2 cuts them, target ranks hold vLLM's tensors.

What a target rank holds is written down here from vLLM's classes, not computed by reshard: q, k and v one below the other, each its rows of
the rank; gate and up likewise; columns of o and down; rows of embedding and head, padded to a multiple of 64; whole norms.
"""

from __future__ import annotations

import numpy as np

from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.live.plan.beside import Beside
from reshard.live.plan.schedule import BoxForm, HeldTensor, Schedule, Way


def shard_rows(rows: int, sources: int, rank: int) -> tuple[int, int]:
    """The rows that torch.chunk gives a rank."""
    step = -(-rows // sources)
    return min(rank * step, rows), min((rank + 1) * step, rows)


def target_tensors(config: dict, tp: int, rank: int) -> dict[str, tuple[tuple[int, ...], list[tuple[str, int, tuple[int, int], int]]]]:
    """Tensor of the load form -> its shape, and its parts: weight, axis along which it is cut (1: columns), start and stop, first row."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inner, vocab = config["intermediate_size"], config["vocab_size"]

    def stacked(*parts):
        found, first = [], 0
        for name, rows in parts:
            own = rows // tp
            found.append((name, 0, (rank * own, (rank + 1) * own), first))
            first += own
        return (first, hidden), found

    padded = -(-vocab // 64) * 64 // tp
    rows = (rank * padded, min((rank + 1) * padded, vocab))
    tensors = {"model.embed_tokens.weight": ((padded, hidden), [("model.embed_tokens.weight", 0, rows, 0)])}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        tensors[f"{attention}qkv_proj.weight"] = stacked(*((f"{attention}{x}_proj.weight", n) for x, n in (("q", q), ("k", kv), ("v", kv))))
        name, own = f"{attention}o_proj.weight", q // tp
        tensors[name] = (hidden, own), [(name, 1, (rank * own, (rank + 1) * own), 0)]
        tensors[f"{mlp}gate_up_proj.weight"] = stacked(*((f"{mlp}{x}_proj.weight", inner) for x in ("gate", "up")))
        name, own = f"{mlp}down_proj.weight", inner // tp
        tensors[name] = (hidden, own), [(name, 1, (rank * own, (rank + 1) * own), 0)]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = (hidden,), [(f"{at}{norm}.weight", 0, (0, hidden), 0)]
    tensors["model.norm.weight"] = (hidden,), [("model.norm.weight", 0, (0, hidden), 0)]
    tensors["lm_head.weight"] = (padded, hidden), [("lm_head.weight", 0, rows, 0)]
    return tensors


def with_heads_exchanged(parts, head_dim: int):
    """The parts of a qkv_proj with the first two query heads in each other's place."""
    (q, axis, (start, stop), first), *others = parts
    heads = [(q, axis, (at, at + head_dim), first + at - start) for at in range(start, stop, head_dim)]
    (_, _, one, here), (_, _, two, there) = heads[:2]
    return [(q, axis, two, here), (q, axis, one, there), *heads[2:], *others]


class HandPlan:
    """The plan; `sources` ranks, of which each tensor is a shard of rows, to `tp` ranks."""

    def __init__(
        self,
        config: dict,
        shapes: dict[str, tuple[int, ...]],
        sources: int,
        tp: int,
        dtype: DType = BF16,
        *,
        exchange: bool = False,
        replicas: int = 1,
    ) -> None:
        """exchange: whether two query heads of the last rank are exchanged, which is wrong. replicas: engines that get the same."""
        self.config, self.shapes, self.sources, self.tp, self.dtype = config, shapes, sources, tp, dtype
        self.exchange, self.replicas = exchange, replicas

    def targets(self, rank: int) -> tuple[HeldTensor, ...]:
        tensors = target_tensors(self.config, self.tp, rank % self.tp)
        scales = [
            HeldTensor(f"model.layers.{layer}.self_attn.attn.{name}", F32, (), ())
            for layer in range(self.config["num_hidden_layers"])
            for name in ("_k_scale", "_v_scale")
        ]
        return (*(HeldTensor(name, BF16, shape, row_major(shape)) for name, (shape, _) in tensors.items()), *scales)

    def fills(self, rank: int) -> dict[str, float]:
        return {target.name: 1.0 for target in self.targets(rank) if target.name.endswith("_scale")}

    def beside(self, rank: int) -> Beside:
        return Beside()

    def sends(self, rank: int) -> Schedule:
        return self._schedule(rank, [(rank, target) for target in range(self.tp * self.replicas)], rank)

    def receives(self, rank: int, *, named: bool = True) -> Schedule:
        return self._schedule(rank, [(source, rank) for source in range(self.sources)], 0)

    @property
    def nbytes(self) -> int:
        return sum(self.receives(rank).nbytes for rank in range(self.tp * self.replicas))

    def held(self, rank: int) -> tuple[HeldTensor, ...]:
        """What a source rank holds."""
        found = []
        for name, shape in self.shapes.items():
            start, stop = shard_rows(shape[0], self.sources, rank)
            local = (stop - start, *shape[1:])
            found.append(HeldTensor(name, self.dtype, local, row_major(local)))
        return tuple(found)

    def _boxes(self, source: int, target: int):
        """Name of the source's tensor, name of the target's, form, starts."""
        target %= self.tp
        tensors = target_tensors(self.config, self.tp, target)
        for name, (shape, parts) in tensors.items():
            if self.exchange and target == self.tp - 1 and name == "model.layers.1.self_attn.qkv_proj.weight":
                parts = with_heads_exchanged(parts, self.config["head_dim"])
            for weight, axis, (start, stop), first in parts:
                rows, whole = shard_rows(self.shapes[weight][0], self.sources, source), self.shapes[weight]
                if len(whole) == 1:
                    lo, hi = max(rows[0], start), min(rows[1], stop)
                    if lo < hi:
                        yield weight, name, BoxForm((hi - lo,), (1,), (1,), self.dtype, BF16), lo - rows[0], lo
                    continue
                width = shape[1]
                lo, hi = (max(rows[0], start), min(rows[1], stop)) if axis == 0 else rows
                if lo >= hi:
                    continue
                column = start if axis else 0
                form = BoxForm((hi - lo, width), (whole[1], 1), (width, 1), self.dtype, BF16)
                row = first + lo - start if axis == 0 else lo
                yield weight, name, form, (lo - rows[0]) * whole[1] + column, row * width

    def _schedule(self, rank: int, pairs: list[tuple[int, int]], source_rank: int) -> Schedule:
        sources, targets = self.held(source_rank), self.targets(pairs[0][1])
        source_at = {held.name: i for i, held in enumerate(sources)}
        target_at = {held.name: i for i, held in enumerate(targets)}
        forms: dict[BoxForm, int] = {}
        ways = []
        for source, target in pairs:
            rows = [
                (forms.setdefault(form, len(forms)), source_at[weight], from_start, target_at[name], to_start)
                for weight, name, form, from_start, to_start in self._boxes(source, target)
            ]
            if rows:
                ways.append(Way(source, target, *np.array(rows, np.int64).T))
        return Schedule(rank, sources, targets, tuple(forms), tuple(ways))
