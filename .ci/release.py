"""Make a release in a folder: source distribution, wheel, software bill of materials, provenance and checksums.

Two runs on one commit make the same bytes: times come from SOURCE_DATE_EPOCH, the source distribution is packed again with sorted names,
fixed owners and modes, and the wheel is built from the source distribution. `make release` runs this with the tools of
requirements/release.txt; `--without-sbom` saves the installation that the bill of materials describes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
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
        files.append(provenance(files, epoch))
    sums = "".join(f"{sha256(path)}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def time_of_commit() -> str:
    """Seconds since 1970 of the last commit."""
    return git("log", "-1", "--format=%ct")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
    """A CycloneDX document about the wheel, and its dependencies as requirements/image.txt names them."""
    python = work / "installed" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", work / "installed")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*install, "--require-hashes", "-r", ROOT / "requirements" / "image.txt")
    run(*install, "--no-deps", wheel)
    sbom = out / f"{wheel.name.removesuffix('-py3-none-any.whl')}.cdx.json"
    cyclonedx = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    run(*cyclonedx, "--pyproject", ROOT / "pyproject.toml", "--output-file", sbom, python)
    return sbom


def provenance(files: list[Path], epoch: int) -> Path:
    """What the files were made from, and how: an in-toto statement with the SLSA v1 predicate, without a signature.

    Whoever publishes the files signs it. It names no time and no machine, so that another builder of the commit makes the same statement.
    Source: https://slsa.dev/spec/v1.0/provenance, https://in-toto.io/Statement/v1.
    """
    sdist = files[0]
    made_from = [ROOT / "requirements" / name for name in ("release.txt", "image.txt")]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "tag:reshard,2026:make-release",
                "externalParameters": {"command": "make release", "SOURCE_DATE_EPOCH": epoch},
                "internalParameters": {"python": platform.python_version(), "changedFiles": git("status", "--porcelain").splitlines()},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": git("rev-parse", "HEAD")}},
                    *({"name": str(path.relative_to(ROOT)), "digest": {"sha256": sha256(path)}} for path in made_from),
                ],
            },
            "runDetails": {"builder": {"id": "tag:reshard,2026:.ci/release.py"}},
        },
    }
    path = sdist.with_name(f"{sdist.name.removesuffix('.tar.gz')}.intoto.json")
    path.write_text(json.dumps(statement, indent=2) + "\n")
    return path


def run(*command: str | Path) -> None:
    """Run a command; its output is shown if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout}\n{' '.join(map(str, command))}: exit code {result.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_sbom="--without-sbom" not in sys.argv[2:])
