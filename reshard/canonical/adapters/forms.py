"""The forms in which the adapter of a layer's experts is stored: rows of a table, and the way from the value to the tensors of a form.

    split     experts.0.gate_proj.lora_A.weight [r, in], .lora_B.weight [out, r]       one pair for each expert and projection
    fused     experts.base_layer.lora_A.weight [E*r, in], .lora_B.weight [2 I, r*E]    PEFT's target_parameters: gate and up have one A
    stacked   experts.w1.lora_A.weight [E, r, in], .lora_B.weight [E, out, r]          Tinker; "shared": a factor of all experts once

Split is the canonical form. The others are descriptions of where its tensors lie in theirs, so a change of form copies elements. Only
where gate and up have different A, the fused form needs a rank as high as both together: A is [gate; up], and B has zeros elsewhere.
reading.py has the way back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.canonical.adapters.base import AdaptedBase, Place
from reshard.canonical.adapters.reading import WITHOUT_MARK, read_adapter
from reshard.canonical.adapters.updates import Update
from reshard.canonical.content import Content, Drop
from reshard.canonical.lora import LoraSettings
from reshard.canonical.renaming import PREFIX, adapter_name
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import grouped, plural
from reshard.geometry.sections import Section, Sections, StoredTensor, whole
from reshard.geometry.value import value
from reshard.index.origin import Tensor, Term, Weighted

_FACTOR = re.compile(rf"{re.escape(PREFIX)}(.+\.experts)\.(\d+)\.(\w+)\.lora_(A|B)\.weight")
# The names of the projections of experts, in the order of the rows of their fused tensor.
_FUSED_OF = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj", "w1": "gate_up_proj", "w3": "gate_up_proj",
    "w2": "down_proj",
}  # fmt: skip
_STACKED_OF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w2": "w2", "w3": "w3"}
FORMS: Mapping[str, str] = {
    "fused": "PEFT's target_parameters, all experts in one matrix",
    "split": "a module for each expert",
    "stacked": "an array [experts, ...] for each projection, as Tinker's",
}
"""The forms that adapters of experts are stored in, and what they are."""


@value(eq=False)
class Formed:
    """An adapter in the canonical form, ready to be laid out in another one."""

    content: Content
    """Its tensors in the split form, without those that the other form does not need."""
    all_tensors: tuple[Tensor, ...]
    """The same with those."""
    config: dict[str, Any]
    """Its settings in the other form."""
    notes: tuple[str, ...]
    """What a reader should know about the change."""


def form_of(names: Iterable[str]) -> str | None:
    """The form of the adapter of experts with these names of tensors; None if it adapts no routed experts."""
    for name in names:
        parsed = adapter_name(name)
        if parsed is None or ".experts" not in f".{parsed.module}":
            continue
        if _FACTOR.fullmatch(parsed.in_file):
            return "split"
        if re.search(r"\.experts(\.base_layer)*$", parsed.module):
            return "fused"
        if re.search(r"\.experts\.w[123]$", parsed.module):
            return "stacked"
    return None


def formed(
    content: Content, settings: LoraSettings, path: str, form: str, read: Callable[[Tensor], bytes], *, for_engine: bool = False
) -> Formed:
    """An adapter in the canonical form, without what the form needs once. read: the bytes of a small tensor. for_engine: with the modules
    of linear attention that engines adapt as one.

    Raises: RequestError if the model is not known; UnsupportedError if the form cannot hold this adapter; as `read_adapter`.
    """
    if content.model is None:
        raise RequestError(
            f"`experts={form}`: the base model is not known",
            where=path,
            why="Where gate, up and each expert lie in the factors follows from the config of the base",
            do="Name its directory with `model=DIR`",
        )
    base = AdaptedBase(content.model, None, path, settings.config.get("base_model_name_or_path"))
    adapter = read_adapter(base, settings, content.tensors)
    updates = [update for update in adapter.updates if isinstance(update, Update)]
    if other := next((update.module for update in updates if update.expert is None and re.search(r"\.experts\.\w+$", update.module)), None):
        raise UnsupportedError(
            f"`experts={form}`: the adapter changes {other}",
            where=path,
            why="The other forms hold updates of the matrices of experts alone",
            do="Merge it: give the base as the source, and this directory with `merge_adapter=`",
        )
    split = [part for update in updates if update.expert is not None for part in _split(update, base)]
    alone = [update for update in updates if update.expert is None]
    rest = alone if form == "tinker" else list(_joined(alone, base, attention=for_engine))
    renamed = next(((name, new) for name in content.tensors if (new := _renamed(name, base, form)) != name), None)
    if not split and renamed is None and len(rest) == len(alone):
        raise RequestError(f"`experts={form}`: the adapter changes no routed experts", where=path, do="Leave it out")
    used = {factor.name for update in updates if update.expert is not None or update not in rest for factor in (update.a, update.b)}
    used |= {drop.name for drop in adapter.drops}
    others = {_renamed(name, base, form): tensor for name, tensor in content.tensors.items() if name not in used}
    factors = {
        f"{PREFIX}{part.module}.lora_{which}.weight": tensor
        for part in (*split, *(one for one in rest if one not in alone))
        for which, tensor in (("A", part.a), ("B", part.b))
    }
    tensors = {name: replace(tensor, name=name) for name, tensor in {**others, **factors}.items()}
    kept = _Kept(tensors, read)
    if form == "fused":
        kept.drop_equal_a()
    elif form == "shared":
        kept.drop_shared(path)
    drops = tuple(Drop.of(tensors[name], reason, "adapter") for name, reason in kept.left_out.items())
    left = {name: tensor for name, tensor in tensors.items() if name not in kept.left_out}
    modules = {update.module: update for update in (*rest, *_as_parameters(split, form, kept, base))}
    config = _config(settings, form, modules)
    notes = [f"the adapter of the experts is written in the form {form}"] if split else []
    if renamed is not None and not split:
        notes.append(f"the modules have the names of the form {form}: {renamed[0]} is {renamed[1]}")
    if len(rest) < len(alone):
        notes.append(
            f"{plural(len(alone), 'module')} became {len(rest)}: those that the model has as one are joined, with the ranks of all"
        )
    made = replace(content, tensors=left, drops=(*content.drops, *adapter.drops, *drops))
    return Formed(made, tuple(leaf for tensor in tensors.values() for leaf in tensor.leaves), config, (*notes, *kept.notes))


def stored_as(content: Content, form: str, dtype_of: Callable[[Tensor], DType]) -> list[StoredTensor]:
    """The tensors of an adapter, which `formed` has made, in a form. Their sections are those of the split form."""
    layout = _Layout(content, dtype_of)
    experts = {name: match for name in content.tensors if (match := _FACTOR.fullmatch(name))} if form != "split" else {}
    others = [whole(name, dtype_of(tensor), tensor.shape) for name, tensor in content.tensors.items() if name not in experts]
    by_target = grouped(experts, lambda name: (experts[name][1], (_FUSED_OF if form == "fused" else _STACKED_OF)[experts[name][3]]))
    made: list[StoredTensor] = []
    for (module, target), names in by_target.items():
        pieces = [(int(experts[name][2]), experts[name][3], experts[name][4], name) for name in names]
        if form == "fused":
            made += layout.fused(module, target, pieces)
        else:
            made += layout.stacked(module if form == "shared" else _in_tinker(layout.memory(module)), target, pieces)
    return sorted([*others, *made], key=lambda tensor: tensor.name)


def _split(update: Update, base: AdaptedBase) -> Iterator[Update]:
    """The update of an expert, for each of its projections, under the names of the split form."""
    before, parameter = update.module.rsplit(".", 1)
    number = update.expert
    if not re.fullmatch(r"\d+", before.rpartition(".")[2]):  # of all experts
        if parameter == "gate_up_proj":
            rows = update.b.shape[0] // 2
            alternates = base.alternates(update.array)
            parts = [("gate_proj", 0, rows), ("up_proj", 1 if alternates else rows, rows)]
            step = 2 if alternates else 1
        else:
            parts, step = [(parameter, 0, update.b.shape[0])], 1
        for projection, first, count in parts:
            own = update.rows(first, count, step, f"{before}.{number}.{projection}")
            yield replace(own, module=_published(own.module, base))
        return
    yield replace(update, module=_published(update.module, base))


def _joined(updates: Sequence[Update], base: AdaptedBase, *, attention: bool) -> Iterator[Update]:
    """The updates of modules, those of the rows of one fused module as one: A has the ranks of all, B has zeros outside of their rows."""
    for module, parts in grouped(updates, lambda update: base.joined(update.module, attention=attention)).items():
        place = base.find(f"{module}.weight")
        if parts[0].module == module or place is None or len({part.scale for part in parts}) > 1:
            yield from parts
            continue
        of_a, of_b, rank = list[Term](), list[Term](), 0
        for part in sorted(parts, key=lambda part: part.array.tiles[0].box.offsets[0]):
            of_a.append(Term(Box((rank, 0), part.a.shape), part.a, ()))
            of_b.append(Term(Box((part.array.tiles[0].box.offsets[0], rank), part.b.shape), part.b, ()))
            rank += part.rank
        a = replace(parts[0].a, shape=(rank, place.array.shape[1]), origin=Weighted(tuple(of_a)))
        b = replace(parts[0].b, shape=(place.array.shape[0], rank), origin=Weighted(tuple(of_b)))
        yield replace(parts[0], module=module, array=place.array, a=a, b=b, alpha=parts[0].alpha * _growth(parts[0], rank))


def _published(module: str, base: AdaptedBase) -> str:
    """A module of one expert as the model is published with it: mixtral's mlp.experts.0.gate_proj is block_sparse_moe.experts.0.w1."""
    place = base.find(f"{module}.weight")
    names = place.array.names if place else ()
    match = re.fullmatch(r"(.+\.experts)\.\d+\.\w+\.weight", names[0]) if len(names) == 1 else None
    if match is None or not names:
        return module
    start = re.search(r"layers\.\d+\.", module)
    inner = re.search(r"layers\.\d+\.(.+)\.weight", names[0])
    return module if start is None or inner is None else module[: start.end()] + inner[1]


def _renamed(name: str, base: AdaptedBase, form: str) -> str:
    """The name in the form of a tensor that belongs to no routed expert: Tinker has other names for some modules of the model."""
    parsed = adapter_name(name)
    if parsed is None:
        return name
    module = base.renamed(parsed.module)
    if form == "tinker":
        module = "model.unembed_tokens" if module.removeprefix("language_model.") == "lm_head" else _in_tinker(module)
        if base.model is not None and base.model.architecture.model_type == "gpt_oss":
            module = module.replace(".self_attn.", ".attn.")
    return f"{PREFIX}{module}.{parsed.parameter}"


def _in_tinker(module: str) -> str:
    """The name in Tinker's form of a module of the language part of a model."""
    return re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", module)


class _Kept:
    """Which tensors of the split form another form needs."""

    def __init__(self, tensors: Mapping[str, Tensor], read: Callable[[Tensor], bytes]) -> None:
        self._tensors, self._read = tensors, read
        self.left_out: dict[str, str] = {}
        """The tensors that are left out, and why."""
        self.notes: list[str] = []
        """What a reader should know."""

    def drop_equal_a(self) -> None:
        """Leave out the A of up where it is that of gate, for all experts of a module."""
        factors = {name: match for name in self._tensors if (match := _FACTOR.fullmatch(name))}
        grown = 0
        for of_module in grouped(factors, lambda name: (factors[name][1], _FUSED_OF[factors[name][3]])).values():
            a = [name for name in of_module if factors[name][4] == "A"]
            by_expert = [names for names in grouped(a, lambda name: factors[name][2]).values() if len(names) > 1]
            if all(self.are_equal(names) for names in by_expert):
                self.left_out |= {name: "equal to the lora_A of gate, which both use" for names in by_expert for name in names[1:]}
            else:
                grown += 1
        if grown:
            self.notes.append(f"gate and up have different lora_A in {plural(grown, 'module')}, so the rank there is that of both together")

    def drop_shared(self, path: str) -> None:
        """Leave out the factors of all experts but the first where they are shared: A of gate and up, B of down.

        Raises: UnsupportedError if they are not shared.
        """
        factors = {name: match for name in self._tensors if (match := _FACTOR.fullmatch(name))}
        for (module, projection, which), names in grouped(factors, lambda name: factors[name].group(1, 3, 4)).items():
            if (which == "A") == (_STACKED_OF[projection] == "w2"):
                continue
            if not self.are_equal(names):
                raise UnsupportedError(
                    f"`experts=shared`: the experts of {module} have different lora_{which} of {projection}",
                    where=path,
                    why="In the shared form all experts have one lora_A of gate and up, and one lora_B of down",
                    do="Write `experts=tinker` or `experts=split`",
                )
            self.left_out |= dict.fromkeys(names[1:], f"equal to the lora_{which} of the first expert, which all use")

    def are_equal(self, names: Sequence[str]) -> bool:
        """Whether tensors hold the same bytes: they are the same pieces of files, or are read, two at a time."""
        first, *others = (self._tensors[name] for name in names)
        where, content = _where(first), b""
        for other in others:
            if other.shape != first.shape or other.dtype != first.dtype:
                return False
            if _where(other) != where:
                content = content or self._read(first)
                if self._read(other) != content:
                    return False
        return True


def _where(tensor: Tensor) -> list[tuple[object, ...]]:
    """Where the bytes of a tensor lie in files."""
    pieces = (tensor.shards.piece(i) for i in range(len(tensor.shards)))
    return [(piece.box.offsets, piece.box.sizes, piece.extent.path, piece.extent.byte_offset, piece.extent.strides) for piece in pieces]


def _as_parameters(split: Sequence[Update], form: str, kept: _Kept, base: AdaptedBase) -> Iterator[Update]:
    """One update for each entry of the settings in a form: split modules, or the parameters of all experts, with their rank.

    Raises: UnsupportedError if the experts of one parameter have different scales.
    """
    if form == "split":
        yield from split
        return
    targets = _FUSED_OF if form == "fused" else _STACKED_OF
    for (module, target), parts in grouped(split, lambda part: (_module(part), targets[_projection(part)])).items():
        if form == "fused" and base.find(f"{_memory_module(module, base)}.{target}") is None:
            raise UnsupportedError(f"`experts=fused`: {module} has no {target}", do="Write `experts=split`")
        if len({part.scale for part in parts}) > 1:
            raise UnsupportedError(
                f"`experts={form}`: the updates of {module} have different scales",
                why="All experts of a parameter have one alpha and one rank in this form",
                do="Write `experts=split`",
            )
        of_experts = grouped(parts, lambda part: part.expert).values()
        ranks = [sum(_ranks(own, kept)) if form == "fused" else own[0].rank for own in of_experts]
        if form != "fused" and len(set(ranks)) > 1:
            raise UnsupportedError(f"`experts={form}`: the experts of {module} have different ranks", do="Write `experts=split`")
        alpha = parts[0].alpha * _growth(parts[0], max(ranks))
        a = replace(parts[0].a, shape=(max(ranks), parts[0].a.shape[1]))
        yield replace(parts[0], module=f"{_memory_module(module, base)}.{target}" if form == "fused" else parts[0].module, a=a, alpha=alpha)


def _growth(part: Update, rank: int) -> float:
    """The factor by which alpha grows so that the scale stays with another rank."""
    return part.scale / part.alpha * (rank if part.scale == part.alpha / part.rank else rank**0.5) if rank != part.rank else 1


def _ranks(parts: Sequence[Update], kept: _Kept) -> list[int]:
    """The ranks of the A's of one expert in a parameter that are kept."""
    return [part.rank for part in parts if f"{PREFIX}{part.module}.lora_A.weight" not in kept.left_out]


def _module(part: Update) -> str:
    return part.module.rsplit(".", 2)[0]


def _projection(part: Update) -> str:
    return part.module.rpartition(".")[2]


def _memory_module(module: str, base: AdaptedBase) -> str:
    """The module of all experts as transformers 5 has it in memory: mixtral's block_sparse_moe.experts is mlp.experts."""
    other = module.replace(".block_sparse_moe.", ".mlp.")
    return other if base.find(f"{other}.down_proj") else module


def _config(settings: LoraSettings, form: str, modules: Mapping[str, Update]) -> dict[str, Any]:
    """The settings of the adapter in a form. modules: an update for each module, or parameter, with its rank and alpha.

    Raises: UnsupportedError if the form has one rank and alpha for all modules, and the adapter has several.
    """
    config = dict(settings.config)
    experts = {name: update for name, update in modules.items() if update.expert is not None}
    others = {name.rpartition(".")[2] for name, update in modules.items() if update.expert is None}
    rest = [target for target in settings.target_parameters if ".experts" not in f".{target}" and target.rpartition(".")[2] in others]
    named = config.get("target_modules")
    plain = [name for name in named if name in others] if isinstance(named, list) else sorted(others)
    last = dict.fromkeys(name.rpartition(".")[2] for name in experts)
    if form == "fused":
        config["target_parameters"] = [*rest, *dict.fromkeys(".".join(name.split(".")[-3:]) for name in experts)]
        config["target_modules"] = plain
    else:
        config["target_parameters"] = rest or None
        config["target_modules"] = [*plain, *(name for name in last if name not in plain)]
    config["peft_version"] = "0.21.2" if form == "fused" else config.get("peft_version")
    rank, alpha = settings.config.get("r"), settings.config.get("lora_alpha")
    uniform = {(update.rank, update.alpha) for update in modules.values()}
    if len(uniform) == 1:
        ((rank, alpha),) = uniform
    config |= {"r": rank, "lora_alpha": int(alpha) if alpha is not None and alpha == int(alpha) else alpha}
    ranks = {name: update.rank for name, update in modules.items() if update.rank != rank}
    alphas = {name: update.alpha for name, update in modules.items() if update.alpha != alpha}
    if form == "tinker" and (ranks or alphas or config.get("use_rslora")):
        raise UnsupportedError(
            "`experts=tinker`: the adapter has several ranks or values of alpha, or rsLoRA",
            why="In Tinker's form the scale of all modules is lora_alpha / r",
            do="Write `experts=split`",
        )
    config |= {"rank_pattern": _pattern(ranks, modules), "alpha_pattern": _pattern(alphas, modules)}
    if config.get("exclude_modules"):
        config["exclude_modules"] = None
    return config


def _pattern(values: Mapping[str, float], modules: Mapping[str, Update]) -> dict[str, float]:
    """A pattern of settings: by the ending of the names where all modules with that ending have one value, otherwise by whole names."""

    def ending(name: str) -> str:
        *_, one, two, three = ("", "", *name.split("."))
        return rf"experts\.\d+\.{three}" if re.fullmatch(r"\d+", two) and one == "experts" else f"{two}.{three}"

    pattern: dict[str, float] = {}
    for key, names in grouped(modules, ending).items():
        own = {values.get(name) for name in names}
        one = next(iter(own)) if len(own) == 1 else None
        if one is not None:
            pattern[key] = one
        pattern |= {name: values[name] for name in names if len(own) > 1 and name in values}
    return {key: int(number) if number == int(number) else number for key, number in pattern.items()}


class _Layout:
    """Where the factors of the split form lie in another one."""

    def __init__(self, content: Content, dtype_of: Callable[[Tensor], DType]) -> None:
        self._tensors, self._dtype_of = content.tensors, dtype_of
        assert content.model is not None, "`formed` has asked for it"
        self._base = AdaptedBase(content.model, None, "", None)
        self._is_exchanged = content.model.architecture.model_type in WITHOUT_MARK

    def memory(self, module: str) -> str:
        """The module of all experts as transformers 5 has it in memory."""
        return _memory_module(module, self._base)

    def stacked(self, module: str, target: str, pieces: Sequence[tuple[int, str, str, str]]) -> Iterator[StoredTensor]:
        """Both factors with a first axis of experts."""
        for which in ("A", "B"):
            own = [(number, name) for number, _, factor, name in pieces if factor == which]
            shape = self._tensors[own[0][1]].shape
            step = shape[0] * shape[1]
            sections = [Section(name, Box.whole(shape), place * step, (shape[1], 1)) for place, (_, name) in enumerate(sorted(own))]
            yield self._stored(f"{PREFIX}{module}.{target}.lora_{which}.weight", (len(own), *shape), [name for _, name in own], sections)

    def fused(self, module: str, target: str, pieces: Sequence[tuple[int, str, str, str]]) -> Iterator[StoredTensor]:
        """The factors of a parameter of all experts: A [E*r, in], with the expert slowest, and B [out, r*E], with the expert fastest."""
        shapes = {(number, projection, which): self._tensors[name].shape for number, projection, which, name in pieces}
        memory = self.memory(module)
        parameter = self._base.find(f"{memory}.{target}")
        assert parameter is not None, "the base has the experts"
        experts = parameter.array.shape[0]
        firsts, out = self._rows(module, target, shapes)
        own = {number: [key for key in shapes if key[0] == number and key[2] == "A"] for number, *_ in pieces}
        rank = max(sum(shapes[key][0] for key in keys) for keys in own.values())
        into = next(shape[1] for key, shape in shapes.items() if key[2] == "A")
        a_sections: list[Section] = []
        b_sections: list[Section] = []
        for number, projection, which, name in pieces:
            column = 0
            for key in own[number]:
                if key[1] == projection:
                    break
                column += shapes[key][0] if len(own[number]) > 1 else 0
            column = column if (number, projection, "A") in shapes else 0
            first, step = firsts[projection]
            box = Box.whole(shapes[number, projection, which])
            if which == "A":
                strides = (experts, rank * experts) if self._is_exchanged else (into, 1)
                start = column * experts + number if self._is_exchanged else (number * rank + column) * into
                (b_sections if self._is_exchanged else a_sections).append(Section(name, box, start, strides))
            elif self._is_exchanged:
                a_sections.append(Section(name, box, (number * rank + column) * out + first, (step, out)))
            else:
                start = first * rank * experts + column * experts + number
                b_sections.append(Section(name, box, start, (step * rank * experts, experts)))
        rows, columns = (into, out) if self._is_exchanged else (out, into)
        inner = ".base_layer" if target == "gate_up_proj" and self._has_both(module) else ""
        names = [name for *_, name in pieces]
        yield self._stored(f"{PREFIX}{memory}{inner}.lora_A.weight", (experts * rank, columns), names, a_sections)
        yield self._stored(f"{PREFIX}{memory}{inner}.lora_B.weight", (rows, rank * experts), names, b_sections)

    def _rows(
        self, module: str, target: str, shapes: Mapping[tuple[int, str, str], tuple[int, ...]]
    ) -> tuple[dict[str, tuple[int, int]], int]:
        """The first row of each projection in the fused weight and the step to the next one, and the number of rows of that weight."""
        rows = {projection: shape[0] for (_, projection, which), shape in shapes.items() if which == "B"}
        if target != "gate_up_proj":
            return dict.fromkeys(rows, (0, 1)), next(iter(rows.values()))
        places = {name: self._place(module, name) for name in rows}
        half = next(iter(rows.values()))
        is_up = {name: _STACKED_OF[name] == "w3" for name in rows}
        firsts = {name: (place.first_row, 2) if place.row_step > 1 else (half if is_up[name] else 0, 1) for name, place in places.items()}
        return firsts, 2 * half

    def _place(self, module: str, projection: str) -> Place:
        place = self._base.find(f"{module}.0.{projection}.weight")
        assert place is not None, "the base has the expert"
        return place

    def _has_both(self, module: str) -> bool:
        targets = {_FUSED_OF[match[3]] for name in self._tensors if (match := _FACTOR.fullmatch(name)) and match[1] == module}
        return len(targets) > 1

    def _stored(self, name: str, shape: tuple[int, ...], names: Sequence[str], sections: Iterable[Section]) -> StoredTensor:
        dtypes = {self._dtype_of(self._tensors[part]) for part in names}
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"its factors have several element types: {', '.join(sorted(map(str, dtypes)))}",
                where=name,
                why="They become one tensor",
                do="Name one with `dtype=`",
            )
        return StoredTensor(name, dtypes.pop(), shape, Sections.of(sections))
