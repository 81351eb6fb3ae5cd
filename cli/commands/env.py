"""reshard env: what a bug report should say about the installation and the machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import reshard
from reshard.geometry.quantities import nbytes_text
from reshard.pages.sections import Rows, Section

from .. import options
from ..replies import Reply

# Looked up without importing them: importing torch takes seconds, and a broken installation of it is worth reporting.
_PACKAGES = (
    "numpy", "ml_dtypes", "blake3", "safetensors", "zstandard", "pyyaml", "click", "tqdm", "torch", "transformers", "vllm", "sglang",
    "tensorrt-llm", "deepspeed", "megatron-core", "accelerate", "fsspec", "s3fs", "gcsfs", "huggingface_hub",
)  # fmt: skip
# Only these variables are shown: others may hold secrets, or names of people and machines.
_VARIABLES = ("LANG", "LC_ALL", "PYTHONUTF8", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR", "COLUMNS")
_PLUGIN_GROUPS = ("vllm.general_plugins",)


@options.command("env", "reshard env", "reshard env --json")
def command() -> Reply:
    """Show versions, machine, formats and plugins, for a bug report. No package is imported for it.

    Of the environment variables only a few harmless ones are shown, and no names of users, hosts or directories.
    """
    made = _document()
    return Reply(made, _sections(made))


def _sections(made: dict[str, Any]) -> Iterator[Section]:
    for title, values in made.items():
        if not isinstance(values, dict):
            yield f"{title}  {values}"
        elif values:
            yield from (title, Rows(("", ""), [(name, _text(value)) for name, value in values.items()]))


def _document() -> dict[str, Any]:
    return {
        "reshard": reshard.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "machine": {
            "platform": platform.platform(),
            "architecture": platform.machine(),
            "processors": os.cpu_count(),
            "usable_processors": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_bytes": _memory(),
            "open_files": _open_files(),
        },
        "current_folder": {"file_system": _file_system(Path.cwd()), "free_bytes": shutil.disk_usage(".").free},
        "packages": {name: _version(name) for name in _PACKAGES},
        "formats": dict(_formats()),
        "plugins": {f"{group}:{point.name}": _origin(point) for group in _PLUGIN_GROUPS for point in entry_points(group=group)},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _formats() -> Iterator[tuple[str, str]]:
    """Each format with the package that brings it; one that cannot be loaded with the reason."""
    from reshard.adapter import registry
    from reshard.errors import RequestError

    for name in registry.names():
        point = registry.others(registry.GROUP).get(name)
        origin = _origin(point) if point else f"reshard {reshard.__version__}"
        try:
            registry.named(name)
        except RequestError as error:
            yield name, f"{origin}: cannot be loaded: {error}"
        else:
            yield name, origin


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"


def _memory() -> int | None:
    """The memory of the machine in bytes, or the limit of the container if that is less."""
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return nbytes
    return min(nbytes, int(limit)) if limit.isdecimal() else nbytes


def _open_files() -> int | None:
    """How many files a process may have open; None for no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _file_system(folder: Path) -> str | None:
    """The type of the file system of a folder, such as ext4, nfs4 or overlay; None if the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    # A mount point is written with octal escapes, such as \040 for a blank. The last of several mounts at one place is the visible one.
    file_system, longest = None, -1
    for _, point, kind, *_ in (line.split(" ") for line in mounts):
        place = Path(point.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"))
        if folder.is_relative_to(place) and len(place.parts) >= longest:
            file_system, longest = kind, len(place.parts)
    return file_system


def _text(value: object) -> str:
    if value is None:
        return "-"
    return nbytes_text(value) if isinstance(value, int) and value > 1 << 20 else str(value)
