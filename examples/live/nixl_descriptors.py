"""What a transport of remote memory takes, of a plan of reshard: copy this into your project.

    runs = list(descriptors(plan.sends(rank), way, own_addresses, addresses[way.target_rank]))

NIXL's descriptor lists are made of these: (address, bytes, device) of either side.
"""

from collections.abc import Iterator, Mapping
from operator import mul

import numpy as np

from reshard.errors import UnsupportedError
from reshard.live.plan.schedule import Schedule, Way


def descriptors(schedule: Schedule, way: Way, sources: Mapping[str, int], targets: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """(address in the source, address in the target, bytes) of each run of a way, one by one.

    sources, targets: where each tensor starts in the memory of its rank.

    Raises: UnsupportedError if an element type changes on the way.
    """
    forms = [schedule.forms[i] for i in np.unique(way.forms).tolist()]
    if any(form.source != form.target or form.derived for form in forms):
        raise UnsupportedError("a transport of remote memory copies bytes, and some elements of this way are cast", do="Send it packed")
    for run in schedule.runs(way):
        source, target = sources[run.source_tensor] + run.source_offset, targets[run.target_tensor] + run.target_offset
        for at in np.ndindex(*run.counts):
            a, b = (sum(map(mul, at, strides)) for strides in (run.source_strides, run.target_strides))
            yield source + a, target + b, run.length
