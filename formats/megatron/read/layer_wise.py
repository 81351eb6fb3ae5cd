"""Layer-wise optimizers (Muon with --use-distributed-optimizer, --ckpt-format torch): a file of each data-parallel rank, with whole
parameters.

    mp_rank_TT[_PPP][_EEE]/layer_wise_optimizer_D.pt    the chain of torch's state dicts of data-parallel rank D, which number its own
                                                        parameters only; model_optim_rng.pt repeats that of one rank

No file tells which parameters a rank has. They are dealt out: all parameters of all groups, sorted by their sizes, go to the ranks
0, 1, .., n - 1, n - 1, .., 1, 0, 0, 1, .., those of groups of experts to the ranks that share experts. One rank alone has all of them in
their usual order. The masters show whether this was so: a conversion compares them with the weights.

Source: megatron/core/optimizer/layer_wise_optimizer.py (_shard_params_ping_pong, save_state_dict_to_file) and
megatron/training/checkpointing.py of 0.19.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reshard.containers import torch_zip
from reshard.geometry.value import value
from reshard.storage.files import Files

from ..layout.chunks import ChunkTensor
from ..layout.save_folders import LAYER_WISE
from ..layout.stages import ParallelSizes, parallel_size
from .optimizer import OF_EXPERTS, ChainLink, Members, OptimizerState, numbered_optimizer
from .ranks import MegatronRank

Dealt = tuple[int, int, ChunkTensor]
"""(link of the chain, param group, parameter)"""


def layer_wise_optimizer(files: Files, rank: MegatronRank, sizes: ParallelSizes, parameters: Sequence[ChunkTensor]) -> list[OptimizerState]:
    """The optimizers of the data-parallel ranks that have files in the folder of this rank; none if there are no such files.

    parameters: of the rank.
    """
    listing = files.list(rank.folder)
    paths = {int(match[1]): path for path in listing if (match := LAYER_WISE.fullmatch(path.removeprefix(rank.folder)))}
    if not paths:
        return []
    data_parallel = parallel_size(rank.args, "data_parallel_size") * parallel_size(rank.args, "context_parallel_size")
    # Data-parallel ranks count expert-parallel ranks first (parallel_state.py), if experts are split as the rest is.
    owners = range(rank.ep_rank, data_parallel, sizes.ep)
    problem = ""
    if sorted(paths) != list(owners):
        problem = f"{len(paths.keys() & set(owners))} of the {len(owners)} data-parallel ranks that share these parameters have such a file"
    elif sizes.ep > 1 and sizes.etp != sizes.tp:
        problem = "nothing tells which data-parallel ranks share experts whose tensor-parallel size is another one than the model's"
    if problem:
        first = min(paths.values())
        return [OptimizerState(first, notes=(f"the optimizer's state in {first} is left out: {problem}",))]
    states = []
    for number, path in sorted(paths.items()):
        dense = Dealing(number, data_parallel)
        experts = Dealing(owners.index(number), len(owners)) if sizes.ep > 1 else dense
        share = partial(_share, dense=dense, experts=experts) if data_parallel > 1 else None
        states.append(numbered_optimizer(torch_zip.read(files, path), parameters, path, share))
    return states


@value
class Dealing:
    """Whose turn it is when parameters are dealt out."""

    rank: int
    """The rank."""
    ranks: int
    """The number of ranks."""

    def of(self, parameters: Sequence[Dealt]) -> list[Dealt]:
        """Those of the parameters, which are sorted by their sizes."""
        rounds = (self.rank, 2 * self.ranks - 1 - self.rank)
        return [parameter for i, parameter in enumerate(parameters) if i % (2 * self.ranks) in rounds]


def _share(links: Sequence[ChainLink], members: Sequence[Members], *, dense: Dealing, experts: Dealing) -> list[Members]:
    """What a rank has of the parameters of each group of each link."""
    groups = [(link.number, number, bool(group.get(OF_EXPERTS))) for link in links for number, group in enumerate(link.groups)]
    own: list[Members] = [[[] for _ in link.groups] for link in links]
    for share, is_expert in ((dense, False), (experts, True)):
        dealt = [(link, group, parameter) for link, group, flag in groups if flag is is_expert for parameter in members[link][group]]
        for link, group, parameter in share.of(sorted(dealt, key=lambda one: one[2].elements)):
            own[link][group].append(parameter)
    return own
