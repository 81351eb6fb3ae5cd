"""FSDP1's LOCAL_STATE_DICT: each rank's run (consecutive elements) of the flat parameters. A flat parameter holds the parameters of a
wrapped unit end to end.

    pytorch_model_fsdp_rank{r}.bin   {"[unit.]_flat_param": ShardedTensor of one axis}; buffers as plain tensors
    optimizer_rank{r}.bin            that rank's optimizer.state_dict(): numbers, runs of the same elements, padded at the end

flat_parameters.py    where the parameters lie in a flat parameter
read.py               the index

The files do not tell which parameters lie in a flat parameter, in which shapes and order: the model's config does (--model).
With use_orig_params=True the files also hold each parameter's own run under its name. Then only shapes come from the config, and the
optimizer of a rank has state only for the parameters with elements on that rank.
Measured on torch 2.13 (fixtures/fsdp/fsdp1-local, fsdp1-local-orig, fsdp1-local-tied).
"""

from __future__ import annotations

from reshard.adapter.format import Format
from reshard.adapter.rank_files import first_rank_file
from reshard.storage.files import Files


class FsdpLocal(Format):
    name = "fsdp-local"
    summary = "FSDP1 LOCAL_STATE_DICT: flat parameters, one file per rank (needs `model=`)"
    owns = ("*_rank[0-9]*.bin",)

    def detect(self, files: Files) -> str | None:
        path = first_rank_file(files)
        if path is None:
            return None
        from reshard.adapter.state_dicts import holds_flat_parameters

        return path if holds_flat_parameters(files, path) else None


FORMAT = FsdpLocal()
