"""The layout of a Hugging Face folder: how weights are divided into files, and the index that says where they are.

Files are divided as huggingface_hub does it (serialization/_base.py, split_state_dict_into_shards_factory): tensors in the model's order,
a new file where the next tensor would make one too large. A tensor that is larger than the limit has a file for itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.adapter.model_files import FileNames, ModelFiles
from reshard.canonical.content import Content
from reshard.canonical.trainer_names import named_places
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.sections import StoredTensor, constant, whole
from reshard.models.config_values import component_class
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile, framed

from .reference_layout import TargetFolder, laid_out_like


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of weights, the model's files, and the index if there are several files of weights.

    Raises: RequestError for parallel sizes, for optimizer state, or if the weights do not fit the folder of --like.
    """
    target.parallel.allow(what="a Hugging Face checkpoint, which is whole")
    if content.states:
        raise RequestError("a Hugging Face checkpoint holds weights, no optimizer state", do="Leave out `optimizer=True`")
    if target.options.get("like"):
        folder = _like(content, target)
    else:
        folder = _as_trainer(content, target) if target.options.get("names") else _as_published(content, target)
    named = folder.named or FileNames.of(companions.config)
    tensors_by_file = folder.files or divided(folder.tensors, target.max_shard_size, named)
    names = {path: frozenset(tensor.name for tensor in tensors) for path, tensors in tensors_by_file.items()}
    headers = headers_of(content, names)
    files = tuple(framed(path, tensors, metadata=headers[path]) for path, tensors in tensors_by_file.items())
    companions, added = companions.completed(content.model)
    sidecars = companions.sidecars([tensor.dtype for tensor in folder.tensors], main=_main_dtype(folder.tensors), weights=True)
    # Without an index vLLM would load the files that the source's index does not name.
    beside = any(sidecar.path.endswith(".safetensors") and "/" not in sidecar.path for sidecar in sidecars)
    if len(files) > 1 or (beside and any(name.endswith(".safetensors.index.json") for name in companions.names)):
        sidecars = (*sidecars, _index(files, named))
    notes = [*folder.notes, *added]
    if companions.config is not None and not (companions.config.get("architectures") or component_class(companions.config)):
        notes.append("config.json names no architectures, and engines choose the model's class by them")
    return Layout("hf", files, sidecars, notes=tuple(notes), headers=frozenset().union(*headers.values()))


def headers_of(content: Content, names: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Path -> `__metadata__` of that file. names: path -> the tensors of that file.

    An entry that names a tensor goes into the file of that tensor, all others into every file. Entries that another one lists stay
    together: torchao looks for the class of every name in `tensor_names` in each file, as transformers writes it (torchao 0.18,
    safetensors_utils.py: is_metadata_torchao). What is said of a tensor is left where its stored form changes.
    """
    entries = {key: text for key, text in content.facts.headers.items() if text is not None}
    listed = {name for text in entries.values() if text.startswith("[") for name in re.findall(r'"((?:[^"\\]|\\.)*)"', text)}
    changed = {name for name, tensor in content.tensors.items() if tensor.is_computed}
    if not changed.isdisjoint(entries):
        entries = {key: text for key, text in entries.items() if key not in listed | changed and not text.startswith("[")}
    cut = frozenset().union(*names.values()) - listed
    return {path: {"format": "pt", **{k: text for k, text in entries.items() if k in own or k not in cut}} for path, own in names.items()}


def _like(content: Content, target: Target) -> TargetFolder:
    if target.dtype is not None:
        raise RequestError("`like=` takes the element types of its folder, and `dtype=` asks for another one", do="Give only one of them")
    folder = laid_out_like(content, target.options["like"])
    return replace(folder, files=None) if target.max_shard_size else folder


def _as_published(content: Content, target: Target) -> TargetFolder:
    implied = dict(_implied(content))
    pieces: dict[str, dict[str, Mosaic]] = {}
    for name, array in content.model.pieces.items() if content.model else ():
        pieces.setdefault(array.names[0], {})[name] = array

    def stored(name: str) -> Iterator[StoredTensor]:
        if name in implied:
            yield implied[name]
            return
        dtype = target.dtype_of(content.tensors[name])
        if name in pieces:
            yield from (array.stored(piece, dtype) for piece, array in pieces[name].items())
        else:
            yield whole(name, dtype, content.tensors[name].shape)

    return TargetFolder(tuple(file for name in _in_model_order(content, implied) for file in stored(name)), None, ())


def _implied(content: Content) -> Iterator[tuple[str, StoredTensor]]:
    """What loaders expect beside packed weights and engines do not keep, such as the shapes of weights that they fuse."""
    codes = None
    for name, weight in content.model.weights.items() if content.model else ():
        if weight.component is not None and weight.component.use == "codes":
            codes = name
        component = weight.component
        if component and not component.may_lack and weight.implied is not None and name not in content.tensors and codes in content.tensors:
            assert component.element_type is not None
            dtype = from_safetensors(component.element_type, where=name)
            yield name, constant(name, dtype, weight.shape, weight.implied)


def _as_trainer(content: Content, target: Target) -> TargetFolder:
    """The weights as a trainer holds them."""
    places = named_places(target.options["names"], content.model)
    arrays = places.written(content.weights.keys())
    dtypes = {name: target.dtype_of(content.tensors[array.names[0]]) for name, array in arrays.items()}
    note = f"the names are those of {places.table.trainer}, which transformers and serving engines do not load"
    return TargetFolder(tuple(places.stored(name, dtypes[name]) for name in arrays), None, (note,))


def _in_model_order(content: Content, implied: Container[str]) -> list[str]:
    """The names in the order of the model's declaration; names that it does not declare follow in the order of the source."""
    declared = [name for name in content.model.weights if name in content.tensors or name in implied] if content.model else []
    return list(dict.fromkeys((*declared, *content.tensors)))


def divided(tensors: Iterable[StoredTensor], max_nbytes: int | None, named: FileNames) -> dict[str, list[StoredTensor]]:
    """Path -> the tensors of that file. max_nbytes: most bytes of tensors in one file; None: the usual limit of files with these names."""
    max_nbytes = max_nbytes or named.most
    shards: list[list[StoredTensor]] = []
    shard: list[StoredTensor] = []
    nbytes = 0
    for tensor in tensors:
        if tensor.nbytes > max_nbytes:
            shards.append([tensor])
            continue
        if nbytes + tensor.nbytes > max_nbytes:
            shards.append(shard)
            shard, nbytes = [], 0
        shard.append(tensor)
        nbytes += tensor.nbytes
    if shard:
        shards.append(shard)
    return {named.file(number, len(shards)): shard for number, shard in enumerate(shards, start=1)}


def _index(files: Sequence[TargetFile], named: FileNames) -> Sidecar:
    """The index that says which tensor is in which file."""
    weight_map = {placed.tensor.name: file.path for file in files for placed in file.tensors}
    total = sum(placed.tensor.nbytes for file in files for placed in file.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Sidecar(named.index, (json.dumps(document, indent=2) + "\n").encode())


def _main_dtype(tensors: Iterable[StoredTensor]) -> DType | None:
    """The floating-point type of most elements; None without any.

    A type of 8 bits counts only if there is no wider one: such weights have scales, and the model computes with the wider type.
    """
    elements = Counter[DType]()
    for tensor in tensors:
        if tensor.dtype.floating:
            elements[tensor.dtype] += tensor.nbytes // tensor.dtype.itemsize
    return max(elements, key=lambda dtype: (dtype.itemsize > 1, elements[dtype]), default=None)
