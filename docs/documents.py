"""What every JSON document holds. docs/generate.py writes the schemas in reference/schemas/ from this table.

A shape is a type; a class of values, whose keys and their types follow from its fields (reshard/geometry/documents.py); `[shape]`, a list;
`{"key": shape}`, an object with these keys and no other, where "key?" may be absent; `{str: shape}`, an object with any keys; a tuple of
shapes, one of which it has; `extended(cls, {...})`, an object of the class with more keys. `object` is anything.
"""

from __future__ import annotations

from typing import Any

from reshard.canonical.content import Drop
from reshard.canonical.dequantization import QuantizedFamily
from reshard.canonical.tensor_classes import StoredModel
from reshard.engine.checks.recorded_digests import FileDigests
from reshard.engine.destinations.forecast import StoreForecast
from reshard.health.findings import Finding, FindingKind, Report
from reshard.index.balance import ByteShare
from reshard.index.index import StoredFile
from reshard.index.provenance import AppliedDelta
from reshard.live.from_files.pushing import PushResult
from reshard.measures.changes import Change
from reshard.opening.pipelines import Pipeline
from reshard.opening.run_folders import Step
from reshard.plans.layout import LeftFile
from reshard.plans.plan import Totals
from reshard.plans.summary import DropSummary, ExpertSummary, KindSummary
from reshard.requests.outlook import Outlook
from reshard.serving.capacity import DegreeReport, DegreeRow
from reshard.storage.claims import SourceChecks
from reshard.training.memory import Strategy
from reshard.verbs.delta import DeltaResult
from reshard.verbs.look.diff import Diff
from reshard.verbs.look.explain import Explanation
from reshard.verbs.look.log import LoggedStep
from reshard.verbs.look.stats import TensorStatistics
from reshard.verbs.serve.cache import CacheEntry
from reshard.verbs.serve.sign import Signed
from reshard.verbs.verify import Comparison
from reshard.verbs.watch import WatchEvent

ANY_OBJECT = {str: object}
TEXT, NUMBER = (str, None), (int, None)


class Extended:
    """The keys of a class, and more."""

    def __init__(self, cls: type, more: dict[str, Any]) -> None:
        self.cls, self.more = cls, more


_SIZES = {"tp": int, "pp": int, "ep": int}
_DEGREE = Extended(DegreeRow, {"gpus": int, "legal": bool, "kv_bytes_per_token": NUMBER})
_PIPELINE = {
    "schedule": str, "stages": int, "microbatches": int, "chunks_per_stage": int, "bubble": float, "microbatches_in_flight": [float],
}  # fmt: skip
_BATCH = {
    "seq_len": int, "micro_batch": int, "recompute": str, "sequence_parallel": bool, "flash_attention": bool, "layer_activations": int,
}  # fmt: skip
_SERVER = {
    "equal": (bool, None), "parameters": int, "matching": int, "renamed": {str: str}, "different": [str], "missing": [str],
    "not_comparable": [str], "unknown": [str], "bytes": int, "compared_bytes": int,
    "version": TEXT, "fingerprint": TEXT, "same_version": (bool, None),
}  # fmt: skip
_SIGNATURE = {"path": str, "key": str, "name": str, "fingerprint": TEXT, "step": NUMBER, "files": int}
_RESULT = {
    "path": str, "files": [StoredFile], "dropped": [DropSummary], "left": {str: int}, "notes": [str], "findings": [Finding],
    "fingerprint": str, "seconds": float, "unchanged": bool, "source_checks": SourceChecks, "source_digests": FileDigests,
    "overflow": {str: int},
}  # fmt: skip
_LEARNED_SIZE = {"tp": [int], "pp": int, "ep": bool, "withheld": NUMBER}
_STORED = {
    "name": str, "dtype": str, "shape": [int], "byte_offset": int, "filled_elements": int,
    "holds": [{"tensor": str, "offsets": [int], "sizes": [int]}],
}  # fmt: skip
_ROUTE = {
    "name": str, "shape": [int], "from": str, "to": str, "scaled_by": TEXT, "updated_by": [str], "source_boxes": int, "target_boxes": int,
}  # fmt: skip
_RANK_OF_TARGET = {
    "ranks": {str: int}, "files": [str], "tensors": int, "nbytes": int, "layers": ([int], None), "query_heads": ([int], None),
    "kv_heads": ([int], None), "vocabulary": ([int], None), "padding_rows": int,
}  # fmt: skip
_PLAN = {
    "source": {"format": str, "path": str},
    "adapter": (ANY_OBJECT, None),
    "combined": (ANY_OBJECT, None),
    "deltas": [AppliedDelta],
    "target": {"format": str, **_SIZES, "dp": int, "dtype": TEXT, "engine_version": TEXT, "options": ANY_OBJECT},
    "totals": Totals,
    "files": [{"path": str, "bytes": int, "ranks": {str: int}, "tensors?": [_STORED]}],
    "sidecars": [str],
    "copied_files?": [{"path": str, "bytes": int}],
    "left": {str: int},
    "notes": [str],
    "findings": [Finding],
    "dropped": [DropSummary],
    "ranks": [_RANK_OF_TARGET],
    "tensors?": [_ROUTE],
    "tasks?": [{"files": [str], "tensors": [str]}],
    "left_files?": [LeftFile],
    "dropped_tensors?": [{"name": str, "kind": str, "nbytes": int, "reason": str}],
    "stores?": [StoreForecast],
}
_LEFT = {"bytes": int, "run": str, "command": TEXT, "removed": bool}
_PLACEMENT = {"dimension": str, "ranks": int, "placement": str, "meaning": str}
_PIECE = {"file": str, "offsets": [int], "sizes": [int], "replica": bool, "rank": NUMBER}
_TENSOR = {
    "name": str, "kind": str, "dtype": str, "shape": [int], "bytes": int, "sharding": str, "pieces": [_PIECE],
    "placements": ([_PLACEMENT], None),
}  # fmt: skip
_BRANCH = {
    "level": int, "name": str, "alike": int, "tensors": int, "elements": int, "bytes": int, "kind": TEXT, "dtype": TEXT,
    "shape": ([int], None), "sharding": TEXT, "state": TEXT,
}  # fmt: skip
_QUANTIZED = Extended(QuantizedFamily, {"stored": [{"name": str, "dtype": str, "shape": [int]}]})
_INSPECT = {
    "path": str,
    "format": str,
    "detected_by": str,
    "producer": TEXT,
    "version": TEXT,
    "step": NUMBER,
    "parallel": {str: int},
    "model_type": TEXT,
    "architecture_known": bool,
    "parameters": int,
    "parameters_as_stored": bool,
    "experts": (Extended(ExpertSummary, {"active_parameters": NUMBER}), None),
    "bytes": int,
    "files": [StoredFile],
    "kinds": [KindSummary],
    "models": [StoredModel],
    "quantized": [_QUANTIZED],
    "adapter": (ANY_OBJECT, None),
    "tensor_count": int,
    "withheld_count": int,
    "object_count": int,
    "notes": [str],
    "mesh": ([{"dimension": str, "ranks": int}], None),
    "outlook": Extended(Outlook, {"next": TEXT}),
    "tree": [_BRANCH],
    "shares": [ByteShare],
    "tensors?": [_TENSOR],
    "withheld?": [Drop],
    "objects?": [str],
}
_ENV = {
    "reshard": str,
    "python": str,
    "machine": {
        "platform": str, "architecture": str, "processors": NUMBER, "usable_processors": NUMBER, "memory_bytes": NUMBER,
        "open_files": NUMBER,
    },
    "current_folder": {"file_system": TEXT, "free_bytes": int},
    "packages": {str: TEXT},
    "formats": {str: str},
    "plugins": {str: str},
    "environment": {str: str},
}  # fmt: skip
_ESTIMATE = {
    "parameters": int,
    "gpus": int,
    "parallel": {"dp": int, **_SIZES},
    "pipeline": _PIPELINE,
    "batch": (_BATCH, None),
    "strategies": [Extended(Strategy, {"strategy": str})],
    "assumptions": [str],
    "by_gpus": [{"gpus": int, "pp": int, "fewest_microbatches": NUMBER, "totals": {str: int}}],
    "fits": [{"strategy": str, "gpus": NUMBER, "parameters": NUMBER}],
    "bubbles": [{"stages": int, "microbatches": int, "bubble": float}],
    "fewest_microbatches": NUMBER,
}
# A number, a list or an object: what a size is computed from.
_EXPRESSION = (int, [object], ANY_OBJECT)
_TEMPLATE = {
    "dtype": str,
    "shape": [_EXPRESSION],
    "parts?": [{"from": str, "start": [_EXPRESSION], "at": [_EXPRESSION], "axes": [[_EXPRESSION]], "run?": [_EXPRESSION]}],
    "fill?": float,
    "problem?": str,
    "kernel?": str,
}
_LAYOUT = {
    "engine": str,
    "engine_version": str,
    "platform": str,
    "model_class": str,
    "dtype": str,
    "config": {str: str},
    "counts": {str: int},
    "sizes": [_LEARNED_SIZE],
    "softened": [str],
    "sources": [[object]],
    "templates": [_TEMPLATE],
    "stages": [{"pp": int, "pp_rank": int, "ep": bool, "tensors": [[object]]}],
    "unread": [object],
    "twice": [object],
    "digest": str,
}

# File in reference/schemas -> (title, shape). Every document but the lines of `watch` starts with `schema_version`.
DOCUMENTS: dict[str, tuple[str, Any]] = {
    "architectures": ("reshard architectures --json", {"architectures?": [str], "declaration?": str}),
    "cat": ("reshard cat --json", {"name": str, "dtype": str, "shape": [int], "slice": str, "values": object}),
    "clean": (
        "reshard clean --json",
        {
            "directory": str,
            "removed": int,
            "folders": [{"path": str, "target": str, "state": str, "age_seconds": int, **_LEFT}],
            "leftovers?": [{"kind": str, "url": str, "age_seconds": NUMBER, **_LEFT}],
        },
    ),
    "convert": ("reshard convert --json", {**_RESULT, "plan?": ANY_OBJECT}),
    "convert-part": (
        "reshard convert --part --json",
        {
            "path": str, "part": str, "tasks": int, "bytes": int, "resumed_bytes": int, "seconds": float, "complete": bool,
            "source_checks": SourceChecks,
            "result": (_RESULT, None),
        },
    ),
    "delta": ("reshard delta --json", DeltaResult),
    "degrees": (
        "reshard degrees --json",
        Extended(DegreeReport, {"degrees": [_DEGREE]}),
    ),
    "diff": ("reshard diff --json", Extended(Diff, {"beyond_threshold": ([str], None), "changes?": [Change]})),
    "digests": (
        "reshard digests --json",
        {
            "action?": "compare",
            "baseline?": {str: str},
            "ranks?": [{"checksums": {str: str}, "parallelism_info": ANY_OBJECT}],
            "comparison": (_SERVER, None),
        },
    ),
    "cache-get": ("reshard cache get --json", Extended(CacheEntry, {"source_checks": SourceChecks})),
    "cache-list": ("reshard cache list --json", {"root": str, "entries": [CacheEntry]}),
    "cache-clean": ("reshard cache clean --json", {"root": str, "removed": bool, "entries": [CacheEntry]}),
    "doctor": ("reshard doctor --json", Report),
    "doctor-list": ("reshard doctor --list --json", {"findings": [FindingKind]}),
    "env": ("reshard env --json", _ENV),
    "fingerprint-several": (
        "reshard fingerprint A B --json",
        {"checkpoints": [{"path": str, "fingerprint": str, "notes": [str], "source_checks": SourceChecks, "tensors?": {str: str}}]},
    ),
    "inspect-several": ("reshard inspect A B --json", {"checkpoints": [ANY_OBJECT]}),
    "errors": (
        "an error with --json",
        {"error": {"id": str, "exit_code": int, "what": str, "where": TEXT, "why": TEXT, "do": TEXT}},
    ),
    "estimate": ("reshard estimate --json", _ESTIMATE),
    "explain": ("reshard explain --json", Explanation),
    "export": (
        "reshard export --json",
        {"path": str, "bytes": int, "tensors": [{"name": str, "dtype": str, "shape": [int], "bytes": int}], "note": TEXT},
    ),
    "fingerprint": (
        "reshard fingerprint --json",
        {"fingerprint": str, "notes": [str], "source_checks": SourceChecks, "tensors?": {str: str}},
    ),
    "versions": (
        "reshard versions --json",
        {"versions": [{"software": str, "version": str, "formats": [str], "done": [str], "date": str}]},
    ),
    "formats": ("reshard formats --json", {"formats": [{"name": str, "reads": bool, "writes": bool, "summary": str}]}),
    "inspect": ("reshard inspect --json", _INSPECT),
    "inspect-RUN": (
        "reshard inspect RUN --json",
        {"path": str, "steps": [Extended(Step, {"age_seconds": (float, None)})], "pipeline?": Pipeline},
    ),
    "log": (
        "reshard log --json",
        {"path": str, "steps": [Extended(LoggedStep, {"age_seconds": (float, None)})]},
    ),
    "layout": ("a layout file of reshard learn", _LAYOUT),
    "learn": (
        "reshard learn --json",
        {
            "layout": str, "engine": str, "engine_version": str, "platform": str, "model_class": str, "sizes": [_LEARNED_SIZE],
            "templates": int, "problems": {str: str}, "depend_on_platform": {str: str}, "seconds": float,
        },
    ),
    "plan": ("reshard plan --json", _PLAN),
    "roundtrip": (
        "reshard roundtrip --json",
        {"lossless": bool, "materialized": bool, "tensors": int, "boxes": int, "bytes": int, "losses": [str], "left": [str]},
    ),
    "serve-check": ("reshard serve-check --json", Report),
    "stats": ("reshard stats --json", {"path": str, "bytes": int, "tensors": [TensorStatistics], "source_checks": SourceChecks}),
    "verify": ("reshard verify --json", Extended(Comparison, {"server": (_SERVER, None), "signature": (_SIGNATURE, None)})),
    "sign": ("reshard sign --json", Signed),
    "push": ("reshard push --json", Extended(PushResult, {"parallel": _SIZES, "plan?": ANY_OBJECT})),
    "watch": ("reshard watch --json, one line", WatchEvent),
}  # fmt: skip
