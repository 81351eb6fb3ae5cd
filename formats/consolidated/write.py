"""The layout of new files: a file for each tensor-parallel rank (llama), or one safetensors file (mistral, mixtral), and params.json."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial

from reshard.adapter.model_files import CONFIG, ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.trainer_names import Places, axis_of, named_places
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile, framed

from .files import EMBEDDING, PARAMS
from .params import params_of


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of weights, params.json, and the tokenizer's files.

    Raises: RequestError if the tensor-parallel size does not divide the model or is not allowed for it; UnsupportedError for other models.
    """
    if content.states:
        raise RequestError("these files hold weights, no optimizer state", do="Leave out `optimizer=True`")
    places = named_places("meta", content.model, asked="`to=consolidated`")
    is_mistral = places.model.architecture.model_type != "llama"
    arrays = places.written(content.weights.keys())
    dtypes = {name: target.dtype_of(content.tensors[arrays[name].names[0]]) for name in arrays}
    if is_mistral:
        target.parallel.allow(what="Mistral's files, which are whole")
        files = [framed("consolidated.safetensors", [places.stored(name, dtype) for name, dtype in dtypes.items()])]
    else:
        target.parallel.allow("tp", what="Meta's files, where tensor-parallel ranks share the weights (`tp=`)")
        files = [_file_of_rank(places, dtypes, rank, target) for rank in range(target.parallel.tp)]
    params = json.dumps(params_of(places.model, mistral=is_mistral), indent=2).encode() + b"\n"
    carried = [sidecar for sidecar in companions.sidecars(dtypes.values()) if sidecar.path != CONFIG]
    return Layout("consolidated", tuple(files), (*carried, Sidecar(PARAMS, params)), target.parallel, _notes(places, is_mistral))


def _notes(places: Places, is_mistral: bool) -> tuple[str, ...]:
    dimensions = places.model.dimensions
    head_dim = dimensions["hidden"] // dimensions["heads"]
    if is_mistral or dimensions["head_dim"] == head_dim:
        return ()
    return (f"Meta's code does not load this model: its heads are hidden / heads wide, {head_dim} and not {dimensions['head_dim']}",)


def _file_of_rank(places: Places, dtypes: dict[str, DType], rank: int, target: Target) -> TargetFile:
    file = TorchFile(f"consolidated.{rank:02d}.pth", {"tp": rank})
    root: OrderedDict[str, object] = OrderedDict()
    for name, dtype in dtypes.items():
        root[name] = file.tensor(places.stored(name, dtype, partial(_share, name=name, rank=rank, target=target, places=places)))
    return file.close(root)


def _share(array: Mosaic, *, name: str, rank: int, target: Target, places: Places) -> Mosaic:
    """The part of a tensor that a rank holds.

    Raises: RequestError if ranks cannot share it equally, or if it is the embedding and nothing says how they do.
    """
    ranks = target.parallel.tp
    axis = axis_of(name)
    if ranks == 1 or axis is None:
        return array
    if name == EMBEDDING:
        cut = target.options.get("embedding_cut")
        if cut is None:
            raise RequestError(
                f"how {ranks} ranks divide the embedding differs between Meta's models, and the config does not tell it",
                do="Add `embedding_cut=rows` for the code of Llama 3, or `embedding_cut=columns` for that of Llama 1 and 2",
            )
        axis = ("rows", "columns").index(cut)
    # The heads that share a key head stay together.
    heads = places.heads.get(name) or (places.model.dimensions["kv_heads"] if ".wv." in name else 1)
    if array.shape[axis] % ranks or (heads > 1 and heads % ranks):
        shape = f"{heads} heads" if heads > 1 else f"{array.shape[axis]} {('rows', 'columns')[axis]}"
        raise RequestError(f"`tp={ranks}` does not divide the {shape} of {name}", do="Choose a size that divides them")
    return array.part(axis, ranks, rank)
