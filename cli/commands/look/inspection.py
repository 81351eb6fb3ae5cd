"""What `reshard inspect` knows of a checkpoint: for the lines on a terminal, the document of --json and the page of --html."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import RequestError, ReshardError
from reshard.geometry.documents import document, to_json
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.models.lookup import draft_class
from reshard.models.quantization import unknown_quantization

from ...console import height
from ...json_output import Streamed
from ...tables import Shown, count_text, nbytes_text

if TYPE_CHECKING:
    from reshard.canonical.content import Content, Drop
    from reshard.canonical.dequantization import QuantizedFamily
    from reshard.index.balance import ByteShare
    from reshard.index.fold import Fold
    from reshard.index.index import Tensor
    from reshard.opening.checkpoint import Checkpoint
    from reshard.plans.summary import ExpertSummary
    from reshard.requests.outlook import Outlook

# Rows of the tree on a terminal, and in a document that is not --full.
_ROWS_ON_TERMINAL, _MOST_ROWS_OF_JSON = 50, 1000
# The bytes that an engine uses of a GPU of 80 GB. Weights that fit leave the rest for the KV cache.
_ROOM = int(80e9 * 0.9)
# The fewest rows of the tree that are shown on a low terminal; and the lines that its headings, its last line and the prompt need.
_FEWEST_ROWS, _LINES_AROUND = 3, 3


@value
class TreeView:
    """How much of a checkpoint is shown, and in which order."""

    by: str | None = None
    depth: int | None = None
    sort: str = "model"
    limit: int | None = None

    def most(self, below: int = 0) -> int | None:
        """The most rows; None for all. Without --limit, the answer above them stays visible on a terminal.

        below: the lines that come after these rows.
        """
        if self.limit is not None:
            return self.limit or None
        lines = height()
        return None if lines is None else max(min(lines - Shown.lines - _LINES_AROUND - below, _ROWS_ON_TERMINAL), _FEWEST_ROWS)

    def rows(self, tree: Fold, most: int | None) -> tuple[list[tuple[int, Fold]], int]:
        """The rows of a tree that are shown, and how many are not. Without --depth, as many levels as fit."""
        tree = tree.sorted_by_bytes() if self.sort == "bytes" else tree
        every = list(tree.walk(self.depth))
        if most is None or len(every) <= most:
            return every, 0
        if self.depth is None:
            for depth in range(max(level for level, _ in every), 0, -1):
                rows = [(level, branch) for level, branch in every if level < depth]
                if len(rows) <= most:
                    return rows, len(every) - len(rows)
        return every[:most], len(every) - most


class Inspection:
    """An opened checkpoint, and what is derived from it for the lines and for the document."""

    JSON = (
        "path=checkpoint.path format=index.format detected_by=checkpoint.detected producer=facts.producer version=facts.version "
        "step=facts.step parallel=facts.parallel model_type architecture_known parameters parameters_as_stored "
        "experts bytes=nbytes files=index.files kinds models=checkpoint.models quantized adapter tensor_count withheld_count object_count "
        "notes=facts.notes mesh outlook tree shares"
    )

    def __init__(self, checkpoint: Checkpoint, view: TreeView) -> None:
        self.checkpoint, self.view = checkpoint, view
        self.index, self.facts, self.tensors = checkpoint.index, checkpoint.index.facts, checkpoint.index.tensors
        self.config, self.adapter_config = checkpoint.model_files.config, checkpoint.model_files.adapter_config or {}
        self.nbytes = sum(file.nbytes for file in self.index.files)

    @cached_property
    def content(self) -> Content | None:
        """What a conversion would take; None if it would be refused, for example because none of several models is the main one."""
        return None if isinstance(self._content, ReshardError) else self._content

    @cached_property
    def _content(self) -> Content | ReshardError:
        try:
            return self.checkpoint.content()
        except ReshardError as error:
            return error

    @cached_property
    def outlook(self) -> Outlook:
        """What it can become."""
        from reshard.requests.outlook import outlook

        return outlook(self.checkpoint, self._content)

    @property
    def is_adapter(self) -> bool:
        """Whether it holds a LoRA adapter and no base weights."""
        return self.content is not None and self.content.is_adapter

    @property
    def withheld(self) -> tuple[Drop, ...]:
        """What a conversion leaves out."""
        return self.content.withheld if self.content else ()

    @cached_property
    def parameters(self) -> int:
        """The number of elements of the model, or of all models if none is the main one; of an adapter without its base model."""
        from reshard.plans import summary

        if self.content is not None and (count := summary.parameter_count(self.content, self.config)):
            return count
        adapter = summary.adapter(self.index)
        return sum(found.parameters for found in self.checkpoint.models) or (adapter.parameters if adapter else 0)

    @property
    def parameters_as_stored(self) -> bool:
        """Whether the parameters are counted without a model: a copy of the embedding as the head counts, and so does a word of codes."""
        return self.parameters > 0 and (self.content is None or self.checkpoint.sized_model is None)

    @property
    def parameters_name(self) -> str:
        """What is counted: parameters of the model, or as stored."""
        return "parameters as stored" if self.parameters_as_stored else "parameters"

    @cached_property
    def quantized(self) -> tuple[QuantizedFamily, ...]:
        """The quantized weights."""
        from reshard.canonical.dequantization import quantized_families

        return quantized_families(self.content, self.config) if self.content else ()

    @cached_property
    def experts(self) -> ExpertSummary | None:
        """The routed experts, if it holds the weights of a model that has some."""
        from reshard.plans import summary

        try:
            return summary.experts(self.checkpoint.sized_model) if self.checkpoint.sized_model and self.parameters else None
        except RequestError:  # a config that says nonsense about them; what needs it refuses it
            return None

    @property
    def active_parameters(self) -> int | None:
        """The parameters that work on one token; None without experts, or if the config does not tell."""
        idle = self.experts.idle_parameters if self.experts else None
        return None if idle is None else self.parameters - idle

    @property
    def stored_as(self) -> str:
        """The quantized forms of the weights; without any, their element types."""
        dtypes = dict.fromkeys(tensor.dtype.name for tensor in self.tensors if tensor.kind in ("weight", "master"))
        forms = list(dict.fromkeys(family.form for family in self.quantized))
        others = [plural(len(forms) - 2, "other form")] if len(forms) > 2 else []
        return " and ".join([*forms[:2], *others]) or ", ".join(list(dtypes)[:3])

    @property
    def headline(self) -> list[tuple[str, object]]:
        """(name, value): what a page says first."""
        active, step, mesh = self.active_parameters, self.facts.step, self.facts.mesh
        return [
            ("model", name_of_model(self.config or {}) or "unknown model"),
            *([(self.parameters_name, count_text(self.parameters))] if self.parameters else []),
            *([] if active is None else [("active for a token", count_text(active))]),
            ("stored as", self.stored_as),
            ("size", nbytes_text(self.nbytes)),
            ("format", self.index.format),
            ("files", len(self.index.files)),
            *([("ranks", mesh.ranks)] if mesh and mesh.ranks else []),
            *([] if step is None else [("step", step)]),
        ]

    @property
    def shares(self) -> tuple[ByteShare, ...]:
        """The stored bytes of each rank, file, ...; empty without --by."""
        from reshard.index.balance import shares

        found = shares(self.index, self.view.by) if self.view.by else ()
        return tuple(sorted(found, key=lambda share: -share.nbytes)) if self.view.sort == "bytes" else found

    def next(self, model: str | None) -> str | None:
        """A command that goes on from here; None if nothing can be proposed. model: what --model was."""
        from reshard.adapter import registry
        from reshard.canonical.lora import LoraSettings
        from reshard.requests.outlook import SIZES

        path, about_model = shlex.quote(self.checkpoint.path), f" --model {shlex.quote(model)}" if model else ""
        models, engines = self.checkpoint.models, self.outlook.engines
        if self.outlook.problem:
            return f"reshard doctor {path}{about_model}"
        if self.facts.delta is not None:
            return f"reshard apply {shlex.quote(self.facts.delta.base or 'BASE')} {path} out --to hf"
        if self.is_adapter:
            of_peft = f"reshard convert BASE merged --to hf --merge-adapter {path}"
            is_peft = registry.named(self.index.format).holds_adapters
            if is_peft or LoraSettings(self.adapter_config).alpha is not None:
                return of_peft
            return f"reshard convert {path} adapter --to peft{about_model or (' --model DIR' if self.config is None else '')}"
        if len(models) > 1 and not any(each.is_main for each in models):
            return f"reshard convert {path} out --to hf --root {shlex.quote(models[0].root)}"
        if not {tensor.kind for tensor in self.tensors} & {"weight", "master"}:
            return None
        if self.index.format in engines:
            return f"reshard verify {path}"
        about_model = about_model or (" --model DIR" if self.config is None or self.checkpoint.config_problem else "")
        if self.content is not None and self.content.adapter:
            about_model += " --merge-adapter self" + ("" if LoraSettings(self.adapter_config).alpha is not None else " --lora-alpha ALPHA")
        stored = self.checkpoint.model and self.checkpoint.model.quantization
        about_model += " --dequantize" if stored and stored.library else ""
        if engines:
            engine = "vllm" if "vllm" in engines else min(engines)
            tp = self._smallest_tp(engines[engine])
            return f"reshard convert {path} out --to {engine} --tp {tp}{about_model}" if tp else None
        if self.has_undeclared_model:
            if (teacher := self._engine_to_learn_from()) and (tp := self._smallest_tp(SIZES)):
                return f"reshard convert {path} out --to {teacher} --tp {tp} --learn{about_model}"
            if self.index.format == "hf":
                return f"reshard architectures --start {path} > my.yaml"
        return f"reshard convert {path} out --to hf{about_model}"

    @property
    def has_undeclared_model(self) -> bool:
        """Whether the config names a model that nobody has declared, and that a declaration would make known."""
        config = self.config
        return config is not None and self.checkpoint.model is None and not (draft_class(config) or unknown_quantization(config))

    def _engine_to_learn_from(self) -> str | None:
        """An engine in this Python whose loader can tell the layout, if the config names a model."""
        from reshard.adapter import registry
        from reshard.serving.legality import has_engine

        if not (self.config or {}).get("model_type"):
            return None
        traceable = [name for name, found in registry.serving_formats().items() if found.tracer and has_engine(name)]
        return max(traceable, default=None)  # vllm before sglang

    def _smallest_tp(self, sizes: tuple[int, ...]) -> int | None:
        """The smallest of these tensor-parallel sizes at which a GPU of 80 GB has room for its part of the weights; None if none has."""
        stored = self.checkpoint.model and self.checkpoint.model.quantization
        weights = self.content.weights.values() if self.content else ()
        nbytes = 2 * self.parameters if stored and stored.library else sum(tensor.nbytes for tensor in weights)
        return next((tp for tp in sizes if nbytes <= tp * _ROOM), None)

    def document(self, tensors: list[Tensor] | None) -> dict[str, Any]:
        """What is known, with stable keys. tensors: those that are described one by one."""
        from reshard.models.lookup import model_type_of
        from reshard.plans import summary

        mesh, experts = self.facts.mesh, self.experts
        found = document(
            self,
            model_type=model_type_of(self.config or {}),
            architecture_known=self.checkpoint.model is not None,
            experts=experts and document(experts, active_parameters=self.active_parameters),
            kinds=summary.kinds(self.index),
            quantized=[document(family, stored=_stored(family)) for family in self.quantized],
            adapter=self._adapter(),
            tensor_count=len(self.tensors),
            withheld_count=len(self.withheld),
            object_count=len(self.index.objects),
            mesh=[{"dimension": name, "ranks": size} for name, size in zip(mesh.names, mesh.sizes, strict=True)] if mesh else None,
            outlook=document(self.outlook, next=self.next(None)),
            tree=[_branch(level, branch) for level, branch in self.view.rows(self.checkpoint.tree, _MOST_ROWS_OF_JSON)[0]],
        )
        every = {"withheld": to_json(self.withheld), "objects": list(self.index.objects)}
        return found if tensors is None else {**found, "tensors": Streamed(_tensor, tensors), **every}

    def _adapter(self) -> dict[str, Any] | None:
        from reshard.plans import summary

        found = summary.adapter(self.index)
        return (
            None
            if found is None
            else {**document(found), **{key: self.adapter_config.get(name) for key, name in _ADAPTER_SETTINGS.items()}}
        )


# What inspect shows of adapter_config.json, under its own names.
_ADAPTER_SETTINGS = {
    "alpha": "lora_alpha",
    "base_model": "base_model_name_or_path",
    "task_type": "task_type",
    "rslora": "use_rslora",
    "dora": "use_dora",
}


def _stored(family: QuantizedFamily) -> list[dict[str, Any]]:
    return [{"name": kind, "dtype": dtype, "shape": shape} for kind, dtype, shape in family.stored]


def _branch(level: int, branch: Fold) -> dict[str, Any]:
    from reshard.index.coverage import sharding_text

    first = branch.stored[0] if branch.stored else None
    return {
        "level": level,
        "name": branch.name,
        "alike": len(branch.numbers) or 1,
        "tensors": branch.tensors,
        "elements": branch.elements,
        "bytes": branch.nbytes,
        "kind": first and first.kind,
        "dtype": first and first.dtype.name,
        "shape": first and list(first.shape),
        "sharding": first and sharding_text(first),
        "state": branch.state or None,
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    from reshard.index.coverage import sharding_text
    from reshard.index.shards import primary_rows

    shards, primary = tensor.shards, primary_rows(tensor.shards)
    ranks = shards.ranks.tolist() if shards.ranks is not None else [None] * len(shards)
    pieces = [
        {"file": shards.path(i), "offsets": offsets, "sizes": sizes, "replica": not primary[i], "rank": ranks[i]}
        for i, (offsets, sizes) in enumerate(zip(shards.offsets.tolist(), shards.sizes.tolist(), strict=True))
    ]
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "sharding": sharding_text(tensor),
        "pieces": pieces,
        "placements": [dict(zip(PLACEMENT_COLUMNS, row, strict=True)) for row in placements(tensor)] if tensor.distribution else None,
    }


PLACEMENT_COLUMNS = ("dimension", "ranks", "placement", "meaning")


def placements(tensor: Tensor) -> list[tuple[str, int, str, str]]:
    """What each mesh dimension does to the tensor; empty if the files do not say."""
    if tensor.distribution is None:
        return []
    mesh = tensor.distribution.mesh
    dimensions = zip(mesh.names, mesh.sizes, tensor.distribution.placements, strict=True)
    return [(name, size, str(placement), placement.meaning) for name, size, placement in dimensions]


def name_of_model(config: Mapping[str, Any]) -> str | None:
    """What a config calls its model: its type, or the class of a draft model; None if it names neither."""
    from reshard.models.lookup import model_type_of

    draft = draft_class(config)
    return f"draft model {draft}" if draft else model_type_of(config)
