"""torch's own load and save: a StorageReader for every checkpoint that reshard reads, and a StorageWriter for what it writes.

import torch.distributed.checkpoint as dcp
from reshard.torch import Reader, Writer

dcp.load(state_dict, storage_reader=Reader("iter_1000", optimizer=True))           # any format, any sizes, into the tensors of any mesh
dcp.save(state_dict, storage_writer=Writer("out", to="vllm", tp=8, model="config"))    # what `dcp.save` and `convert` would write

Nothing else of reshard imports this room, and this room alone imports torch when it is imported.
"""

from reshard.torch.reader import StateDictReader as Reader
from reshard.torch.writer import StateDictWriter as Writer

__all__ = ["Reader", "Writer"]
