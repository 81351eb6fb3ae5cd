"""What a conversion will ask of stores: requests and bytes, before anything is read."""

from __future__ import annotations

from dataclasses import asdict

from reshard.engine.read_ahead import LONGEST_REQUEST
from reshard.geometry.value import value
from reshard.plans.manifest import sample_ranges
from reshard.plans.plan import Plan
from reshard.storage.stores.file_fronts import SMALLEST_PART, part_bytes


@value
class StoreForecast:
    """The traffic with one store. Requests are about those that will be made: how ranges meet is known when they are read."""

    url: str
    """The store's URL."""
    reads: int
    """Requests that read."""
    read: int
    """Bytes that are read."""
    writes: int
    """Requests that write: parts, the beginning and the end of each upload, small files."""
    written: int
    """Bytes that are written."""

    def to_json(self) -> dict[str, object]:
        """Plain values with stable keys."""
        return asdict(self)


def forecast(plan: Plan, target: str | None) -> list[StoreForecast]:
    """The traffic with the store of the source and with that of the target, if they are in stores. target: its URL; None: a directory."""
    forecasts = []
    if plan.source_files.store is not None:
        by_file: dict[str, int] = {}
        for route in plan.routes:
            shards, itemsize = route.source.shards, route.source.dtype.itemsize
            nbytes = shards.sizes.prod(axis=1) * itemsize
            for row, path in enumerate(shards.paths[file] for file in shards.files.tolist()):
                by_file[path] = by_file.get(path, 0) + int(nbytes[row])
        # At the end, each file is looked at once more: nobody may have written it.
        reads = sum(1 + -(-nbytes // LONGEST_REQUEST) for nbytes in by_file.values())
        forecasts.append(StoreForecast(plan.source_files.root, reads, sum(by_file.values()), 0, 0))
    if target is not None:
        files, small = plan.layout.files, len(plan.layout.sidecars) + 2
        parts = sum(1 if file.nbytes < SMALLEST_PART else 2 + -(-file.nbytes // part_bytes(file.nbytes)) for file in files)
        samples = [stop - start for file in files for start, stop in sample_ranges(file.nbytes)]
        written = sum(file.nbytes for file in files) + sum(len(sidecar.content) for sidecar in plan.layout.sidecars)
        # For each file its record is written, and both are looked at. Once, the folder is listed twice, a record says that the conversion
        # has begun, and the records are removed.
        reads, writes = len(samples) + 2 * len(files) + 2, parts + len(files) + small + 3
        forecasts.append(StoreForecast(target, reads, sum(samples), writes, written))
    return forecasts
