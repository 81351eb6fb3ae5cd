"""Hugging Face: one safetensors file, or several with an index; or the torch pickles that came before.

    config.json                        what the model is (generation_config.json, tokenizer files beside it)
    model.safetensors                  one file, or
    model-00001-of-00003.safetensors   several, with
    model.safetensors.index.json       {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
    pytorch_model.bin                  the same as torch.save of a dict, or pytorch_model-0000i-of-0000n.bin + its index

reading.py    which files count, and what is in them
writing.py    the cut into files, and the index
like.py       the names, fusions, shapes and element types of another folder

Names and shapes are canonical as models are published; what transformers has called or fused otherwise since is in reshard/spellings.py.
Measured on transformers 5.23 and safetensors 0.8; index rules: transformers, modeling_utils.py.
"""

from __future__ import annotations

from dataclasses import replace

from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.option import MAX_SHARD_SIZE, Option
from reshard.adapter.safetensors_writer import framed
from reshard.canonical.content import Content
from reshard.errors import RequestError
from reshard.geometry.stored import whole
from reshard.index.index import Index, RunFacts, StoredFile
from reshard.plans.layout import Layout
from reshard.plans.target import Target
from reshard.storage.files import Files

from . import like
from . import read as reading
from . import write as writing

LIKE = Option("like", "path", "Use the names, fusions, element types and files of this Hugging Face folder; only its headers are read.")


class HuggingFace(Format):
    name = "hf"
    summary = "Hugging Face: safetensors (single or with an index), pytorch_model*.bin"
    owns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
    options = (LIKE, MAX_SHARD_SIZE)

    def detect(self, files: Files) -> str | None:
        found = reading.weight_files(files)
        return f"{found[0]}" if found else None

    def read(self, files: Files, hints: Hints) -> Index:
        found = reading.read(files)
        stored = tuple(StoredFile(path, files.size(path) or 0) for path in found.paths)
        producer = "safetensors" if found.paths[0].endswith(reading.SAFETENSORS) else "torch.save"
        facts = RunFacts(producer=producer, config=hints.config, notes=found.notes)
        return Index(self.name, found.tensors, stored, facts, objects=found.objects)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        target.parallel.allow(what="a Hugging Face checkpoint, which is whole")
        if content.states:
            raise RequestError("a Hugging Face checkpoint holds weights, no optimizer state", do="Leave out --optimizer")
        matched = _like(content, target) if target.options.get("like") else _as_published(content, target)
        shards = matched.files or writing.cut(matched.tensors, target.max_shard_size)
        files = tuple(framed(path, stored) for path, stored in shards.items())
        sidecars = companions.sidecars([tensor.dtype for tensor in matched.tensors], main=writing.main_dtype(matched.tensors))
        if len(files) > 1:
            sidecars = (*sidecars, writing.index_of(files))
        return Layout(self.name, files, sidecars, notes=(*matched.notes, *_about(companions)))


def _as_published(content: Content, target: Target) -> like.Matched:
    tensors = ((name, content.tensors[name]) for name in writing.in_model_order(content))
    return like.Matched(tuple(whole(name, target.dtype_of(tensor), tensor.shape) for name, tensor in tensors), None, ())


def _like(content: Content, target: Target) -> like.Matched:
    if target.dtype is not None:
        raise RequestError("--like brings the element types of its folder, --dtype others", do="Say one of them")
    matched = like.match(content, like.reference(target.options["like"]))
    return replace(matched, files=None) if target.max_shard_size else matched


def _about(companions: ModelFiles) -> tuple[str, ...]:
    if companions.config is None:
        return ("no config.json is known: give one with --model DIR, engines need it",)
    if not companions.config.get("architectures"):
        return ("config.json names no architectures, and engines choose the model's class by them",)
    return ()


FORMAT = HuggingFace()
