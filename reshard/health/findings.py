"""Findings: what `reshard doctor` reports, with a stable id for each kind of finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import (
    CheckpointError,
    IncompleteTensor,
    MissingFile,
    MixedSaves,
    ReplicasDiffer,
    ReshardError,
    TruncatedFile,
    check_word,
)
from reshard.geometry.documents import document
from reshard.geometry.quantities import plural
from reshard.geometry.value import Tabular, value

if TYPE_CHECKING:
    from reshard.geometry.table import Table

Severity = Literal["error", "warning", "info"]
Needs = Literal["", "deep", "since", "serve-check"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@value
class FindingKind:
    """One kind of finding."""

    JSON = "id severity meaning=text do"

    id: str
    """The stable id, such as "nan"."""
    severity: Severity
    """error: do not use the checkpoint. warning: look at it. info: what was seen or not checked, often on purpose."""
    needs: Needs
    """The keyword of `doctor` without which it is not looked for, or the verb that looks for it; empty if `doctor` always does."""
    meaning: str
    """What the finding means."""
    do: str
    """What the user can do about it; may be empty."""

    @property
    def text(self) -> str:
        """The meaning, with the option that it needs."""
        if not self.needs:
            return self.meaning
        return f"`{'' if self.needs == 'serve-check' else '--'}{self.needs}`: {self.meaning[0].lower()}{self.meaning[1:]}"


_COPY = "Copy the file again from where the checkpoint was written"
_PLAIN = "Save plain tensors, for example by `.dequantize()` or `.to_dense()`"
_SAVE = "Keep the files of one save only, or save again"
_LOADED = "Check how it is initialized and loaded"
_BEFORE = "Go back to an earlier save, and look at the loss and the gradient norm of the run"

_ROWS: tuple[tuple[str, Severity, Needs, str, str], ...] = (
    # Files.
    ("missing-file", "error", "", "A file of the checkpoint is not there.", _COPY),
    ("truncated-file", "error", "", "A file ends before its content does.", _COPY),
    ("damaged-file", "error", "", "A file cannot be read as what its name or its first bytes claim.", _COPY),
    ("wrong-checksum", "error", "deep", "The bytes of a zip member do not have the CRC-32 that was stored with them.", _COPY),
    ("wrong-digest", "error", "deep", "A file does not have the digest that integrity.json or a download recorded.", _COPY),
    ("unlisted-file", "warning", "", "A file lies in a folder whose integrity.json does not list it.",
     "Remove it if it is from another save"),
    ("integrity-not-checked", "info", "", "The digests in integrity.json were not compared with the files.",
     "`deep=True` compares those of SHA-256; a program that knows another algorithm, the others"),
    ("changed", "error", "deep", "A tensor or a file is not what reshard wrote and recorded in reshard.json.",
     "Copy it again from where it was written; if it was changed on purpose, remove reshard.json"),
    ("no-checksums", "info", "deep", "Zip files were saved without CRC-32, so damage in them cannot be seen.", ""),
    ("unused-file", "warning", "", "A file has the name of a weight file, but no tensor of the checkpoint lies in it.",
     "Remove it if it is from another save"),
    ("missing-tokenizer", "warning", "", "There is no tokenizer beside the weights, and the engines that load this format need one.",
     "Name a folder with the model's config and tokenizer: `model=DIR`"),
    ("missing-config", "warning", "", "There is no config.json beside the weights, and the engines that load this format need one.",
     "Name a folder with the model's config and tokenizer: `model=DIR`"),
    ("unlike-pipeline", "warning", "", "model_index.json and a folder of the pipeline disagree: on its class, or on whether it is a part.",
     "Correct model_index.json, or remove the folder"),
    # Consistency.
    ("inconsistent", "error", "", "The files contradict each other or their format, so the checkpoint cannot be opened.", _SAVE),
    ("stale-rank", "error", "", "Files are from different saves, steps or runs.", _SAVE),
    ("uneven-steps", "warning", "", "The optimizer has counted different numbers of steps for different parameters.",
     "Harmless if some parameters were added or unfrozen later, or got no gradient; otherwise files of two saves are mixed"),
    ("unread-weight", "error", "", "A weight is an object of a class that reshard does not read.", _PLAIN),
    ("unread-state", "warning", "", "Optimizer state is an object of a class that reshard does not read.", _PLAIN),
    ("incomplete-tensor", "error", "", "A part of a tensor is in no file, or several unequal boxes hold it.", _COPY),
    ("missing-layer", "warning", "", "A layer number between the first and the last layer has no tensors.",
     "Check that the files of all pipeline stages are there"),
    ("missing-weight", "error", "", "A weight that the config needs is not there.", "Check that all files of the save are there"),
    ("wrong-shape", "error", "", "A weight has another shape than the config says.",
     "Give the config that this model was trained with (`model=DIR`)"),
    ("unknown-weight", "info", "", "The architecture has no such weight.",
     "Formats that keep names carry it; for serving engines and Megatron, leave it out with `exclude=` or `drop_unknown=True`"),
    ("config-not-checked", "info", "", "The shapes were not compared with a config.", "Give the model's config with `model=DIR`"),
    ("mixed-dtypes", "info", "", "The same weight has different element types in different layers.", ""),
    ("tied-mismatch", "error", "", "The config ties head and embedding, and the two differ in shape, type or (`--deep`) values.",
     "Correct tie_word_embeddings in the config, or find out which of the two is right"),
    ("replicas-differ", "error", "deep", "Ranks that should hold the same values hold different ones.",
     "Find out which rank has diverged or which file is wrong"),
    ("wrong-padding", "error", "deep", "Padding, or a constant that the format prescribes, has other bytes.", _COPY),
    # The optimizer.
    ("missing-moment", "error", "", "A trained parameter lacks a part of its optimizer state that the other parameters have.",
     "Check that all optimizer files are there. A run that goes on from here starts with wrong state"),
    ("moment-shape", "error", "", "Optimizer state has another shape than its weight.", "It belongs to another model or another save"),
    ("lone-moment", "warning", "", "Optimizer state belongs to a parameter that the model does not have.", ""),
    ("no-moments", "info", "", "Weights without optimizer state: frozen weights, buffers, or parameters without gradients.", ""),
    ("negative-moment", "error", "deep", "A second moment, an average of squares, is negative.", _BEFORE),
    # Values.
    ("nan", "error", "deep", "Elements are NaN.", _BEFORE),
    ("inf", "error", "deep", "Elements are infinite.", _BEFORE),
    ("huge-value", "warning", "deep", "Elements are larger than 65504, the largest fp16 number. A flipped exponent bit does this.",
     _BEFORE),
    ("zero-tensor", "warning", "deep", "All elements of a matrix are zero.", _LOADED),
    ("constant-tensor", "warning", "deep", "All elements of a matrix have one value.", _LOADED),
    ("zero-rows", "warning", "deep", "Rows of a matrix are zero: dead or pruned units, or a part that was never written.", ""),
    ("constant-rows", "warning", "deep", "Rows of a matrix have one value other than zero.", ""),
    ("unused-rows", "info", "deep", "Rows of an embedding or head are zero or constant: tokens that are not used.", ""),
    ("constant-vectors", "info", "deep", "Biases or norms have one value, as before training.", ""),
    ("norm-outlier", "warning", "deep", "The root mean square of a matrix is far from that of the same matrix in the other layers.",
     "Compare the layer with an earlier save"),
    ("fresh-tensor", "warning", "deep", "A matrix has the distribution of a fresh initialization, and most others do not.",
     "Check that it was loaded when the run began; a head or an added layer is often left out"),
    ("fresh-model", "info", "deep", "Most matrices have the distribution of a fresh initialization.", ""),
    ("dead-expert", "warning", "deep", "An expert is zero, or only its moments are. `--since`: an expert never moved.",
     "Check the load balance of the router"),
    # Quantization.
    ("missing-scale", "error", "", "A weight is quantized, and a scale or zero point of it is not stored.", _COPY),
    ("unequal-scales", "warning", "", "Weights that engines join, such as gate and up, have different global scales.",
     "An engine applies one scale to all of them, so it serves other values. Quantize the original weights with one global scale for "
     "each set, as `quantize=nvfp4` does. The files are right by themselves: `dequantize=True` gives values that engines serve"),
    ("zero-groups", "warning", "deep", "All elements that share a scale are zero.", "Check the weights that were quantized"),
    ("bad-scale", "error", "deep", "A scale is NaN, infinite, zero or negative.", "Quantize the model again"),
    # Two saves.
    ("never-moved", "warning", "since", "A matrix has the same bits in both checkpoints.", "Check that it gets gradients"),
    ("frozen", "info", "since", "Vectors, or weights without optimizer state, have the same bits in both checkpoints.", ""),
    ("nothing-moved", "warning", "since", "All weights have the same bits in both checkpoints.", "Check that the paths are of two saves"),
    ("other-weights", "warning", "since", "A weight is in one of the checkpoints only, or has another shape or element type.", ""),
    # Before serving.
    ("no-class", "error", "serve-check", "config.json names no class of the engine.", "Take config.json of the model that was trained"),
    ("no-type", "error", "serve-check", "The engine knows no config of this model_type, or config.json has none.",
     "`to=hf` writes the type of a declared model. For another one, take config.json of the model that was trained"),
    ("unlike-value", "error", "serve-check", "config.json gives a value of another kind than the engine's config class takes.",
     "Correct the value in config.json"),
    ("refused-setting", "error", "serve-check", "config.json has a setting that the engine rejects.", ""),
    ("unknown-name", "error", "serve-check", "A weight has a name that the engine's class does not take.",
     "`to=hf` writes the published names"),
    ("not-known", "info", "serve-check", "Whether the engine takes it is not known.", ""),
    ("other-engine", "error", "serve-check", "The files are laid out for another engine.", "Convert for this engine with `to=`"),
    ("other-sizes", "error", "serve-check", "The files are laid out for other parallel sizes.",
     "Start the engine with the sizes of the files, or convert for those that you want"),
    ("not-served", "error", "serve-check", "The engine does not take this model at these sizes.", ""),
    ("never-applied", "error", "serve-check", "The engine takes the adapter, and never applies a part of it.", ""),
    ("adapter-served", "info", "serve-check", "The engine takes the adapter and applies all of it.", ""),
    ("adapter-not-checked", "info", "serve-check", "What this engine does with the adapter is not known.", ""),
    ("not-told", "warning", "serve-check", "The engine must be told something at its start, or it refuses the files.", ""),
    ("missing-on-rank", "error", "serve-check", "A rank's files lack a tensor that the engine asks for.",
     "Convert again, with `engine_version=` of the engine that will serve"),
    ("unknown-on-rank", "error", "serve-check", "A rank's files hold a tensor that the engine has no place for.",
     "Convert again, with `engine_version=` of the engine that will serve"),
    ("unlike-on-rank", "error", "serve-check", "A tensor of a rank has another shape or element type than the engine asks for.",
     "Convert again, with `engine_version=` of the engine that will serve"),
)  # fmt: skip

KINDS: Mapping[str, FindingKind] = {row[0]: FindingKind(*row) for row in _ROWS}
"""Every kind of finding by id."""

# The most specific class first.
_OF_ERRORS: tuple[tuple[type[CheckpointError], str], ...] = (
    (MissingFile, "missing-file"),
    (TruncatedFile, "truncated-file"),
    (IncompleteTensor, "incomplete-tensor"),
    (MixedSaves, "stale-rank"),
    (ReplicasDiffer, "replicas-differ"),
)


@value
class Finding:
    """One thing that `doctor` found."""

    JSON = "id severity tensor file rank detail do"

    id: str
    """The kind of finding: a stable word, such as "nan" or "missing-file"."""
    severity: Severity
    """How bad it is: "error", "warning" or "info"."""
    detail: str
    """A sentence: what was found."""
    tensor: str | None = None
    """The tensor, if it is about one."""
    file: str | None = None
    """The file, relative to the checkpoint, if it is about one."""
    rank: int | None = None
    """The rank that held the tensor's part during training, if the files tell."""
    do: str = ""
    """What to do; may be empty."""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain values with stable keys."""
        return document(self)


def found(id: str, detail: str, *, tensor: str | None = None, file: str | None = None, rank: int | None = None, do: str = "") -> Finding:
    """A finding of the kind `id`. do: what to do, if it is more than what the kind says."""
    kind = KINDS[id]
    return Finding(id, kind.severity, detail, tensor, file, rank, do or kind.do)


def of_error(error: ReshardError, id: str | None = None) -> Finding:
    """The finding that an error is. id: its kind, if the class of the error does not say it."""
    kind = next((name for type_, name in _OF_ERRORS if isinstance(error, type_)), id or "inconsistent")
    detail = f"{error.what}. {error.why}" if error.why else error.what
    if kind in ("incomplete-tensor", "replicas-differ"):
        return found(kind, detail, tensor=error.where, do=error.do or "")
    return found(kind, detail, file=error.where, do=error.do or "")


@value
class Report(Tabular):
    """What `doctor` found in a checkpoint."""

    JSON = "path format deep healthy tensors files bytes=nbytes findings"

    path: str
    """The checkpoint, as it was given."""
    format: str | None
    """Its format; None if it could not be opened."""
    deep: bool
    """Whether the weights were read."""
    tensors: int
    """The number of tensors that were checked."""
    files: int
    """The number of files that were checked."""
    nbytes: int
    """The bytes of tensors that were read."""
    findings: tuple[Finding, ...]
    """The findings, the worst first."""

    @property
    def healthy(self) -> bool:
        """Whether no finding is an error."""
        return not self.fails()

    def fails(self, fail_on: Iterable[str] = ()) -> bool:
        """Whether a finding is an error, or has one of these ids or severities."""
        bad = {"error", *fail_on}
        return any(finding.severity in bad or finding.id in bad for finding in self.findings)

    def table(self) -> Table:
        """A row for each finding, the worst first."""
        from reshard.geometry.table import Table

        columns = ("severity", "id", "tensor", "file", "rank", "detail", "do")
        return Table(columns, tuple(tuple(getattr(finding, name) for name in columns) for finding in self.findings))

    def count(self, severity: Severity) -> int:
        """The number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def raise_if_unhealthy(self) -> None:
        """Raises CheckpointError, with the first error and the number of all."""
        if not self.healthy:
            first, more = self.findings[0], self.count("error") - 1
            raise CheckpointError(
                first.detail + (f" (and {plural(more, 'other error')})" if more else ""), where=first.tensor or first.file, do=first.do
            )

    def __repr__(self) -> str:
        return f"Report({self.path!r}, {self.counts_text()})"

    def counts_text(self) -> str:
        """Such as "1 error, 2 warnings, 1 remark"; "no findings" if there are none."""
        words = {"error": "error", "warning": "warning", "info": "remark"}
        counts = [plural(self.count(severity), words[severity]) for severity in SEVERITIES if self.count(severity)]
        return ", ".join(counts) or "no findings"


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without repetitions, errors first, in the order in which they were found."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))


def check_fail_on(words: Iterable[str]) -> None:
    """Raises RequestError for a word that is neither the id of a finding nor a severity."""
    for word in words:
        check_word("`fail_on=`", word, [*KINDS, *SEVERITIES])
