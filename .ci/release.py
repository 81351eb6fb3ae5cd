"""Make a release in a folder: source distribution, wheel, software bill of materials and checksums.

Two runs on one commit make the same bytes: times come from SOURCE_DATE_EPOCH, the source distribution is packed again with sorted names,
fixed owners and modes, and the wheel is built from the source distribution. `make release` runs this with the tools of
release-requirements.txt; `--without-sbom` saves the installation that the bill of materials describes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(out: Path, *, with_sbom: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if leftovers := sorted(path.name for path in out.iterdir()):
        sys.exit(f"{out}: {', '.join(leftovers)} would mix with the release; remove the folder first")
    os.umask(0o022)
    epoch = int(os.environ.setdefault("SOURCE_DATE_EPOCH", time_of_commit()))
    with tempfile.TemporaryDirectory() as work:
        sdist = source_distribution(out, epoch, Path(work))
        files = [sdist, wheel_of(sdist, out, Path(work))]
        if with_sbom:
            files.append(bill_of_materials(files[1], out, Path(work)))
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def time_of_commit() -> str:
    """Seconds since 1970 of the last commit."""
    return subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def source_distribution(out: Path, epoch: int, work: Path) -> Path:
    """The source distribution. setuptools keeps the times and modes of the working tree; they are replaced here."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work / "sdist", ROOT)
    (made,) = (work / "sdist").iterdir()
    sdist = out / made.name
    with (
        tarfile.open(made) as source,
        open(sdist, "wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() else 0o644
            target.addfile(entry, source.extractfile(member) if member.isfile() else None)
    return sdist


def wheel_of(sdist: Path, out: Path, work: Path) -> Path:
    """The wheel, built from the source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "tree", filter="data")
    (tree,) = (work / "tree").iterdir()
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree)
    (wheel,) = out.glob("*.whl")
    return wheel


def bill_of_materials(wheel: Path, out: Path, work: Path) -> Path:
    """A CycloneDX document about the wheel, and the versions of its dependencies that constraints.txt names."""
    python = work / "installed" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", work / "installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    sbom = out / f"{wheel.name.removesuffix('-py3-none-any.whl')}.cdx.json"
    cyclonedx = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    run(*cyclonedx, "--pyproject", ROOT / "pyproject.toml", "--output-file", sbom, python)
    return sbom


def run(*command: str | Path) -> None:
    """Run a command; its output is shown if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout}\n{' '.join(map(str, command))}: exit code {result.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_sbom="--without-sbom" not in sys.argv[2:])
