"""The slow check of what is shipped: complete, reproducible, and it works without torch on every Python that is found here.

    python tests/packaging/check.py

Makes a release twice, under different settings of the machine, and compares the bytes. Compares the files in the wheel with those that git
tracks, and the provenance with the files and the commit. Exchanges a digest, and sees the installation refused. Runs the RUN lines of
Containerfile in a virtual environment of each Python from 3.11 on, since no container engine may be here, and converts a checkpoint with
the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURE = ROOT / "fixtures" / "dcp" / "fsdp2"
# Folder in the tree -> folder in the wheel.
INSTALLED_AS = {"reshard": "reshard", "formats": "reshard/formats", "cli": "reshard/cli", "plugins": "reshard/plugins"}
NEWEST = 14

Check = tuple[str, bool, str]


def main() -> int:
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        for what, passed, detail in checks(Path(folder)):
            results.append(passed)
            print(f"{'ok  ' if passed else 'FAIL'} {what}{'' if passed else ': ' + detail}", flush=True)
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


def checks(work: Path) -> Iterator[Check]:
    subprocess.run(["make", "--silent", "release"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    yield reproducible(ROOT / "dist", work / "again")
    (wheel,), (sdist,) = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    yield from wheel_is_the_tree(wheel)
    yield from sdist_is_small(sdist)
    yield from provenance_is_true(ROOT / "dist")
    yield exchanged_file_is_refused(work / "exchanged")
    for python in interpreters():
        yield from works_without_torch(python, wheel, work / python.name)


def reproducible(dist: Path, again: Path) -> Check:
    """A second release, made with another time zone, umask and locale, has the same checksums."""
    python = ROOT / ".venv-release" / "bin" / "python"
    different = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run(
        [python, ROOT / ".ci" / "release.py", again, "--without-sbom"], check=True, umask=0o077, env=different, stdout=subprocess.DEVNULL
    )
    first, second = ((folder / "SHA256SUMS").read_text().splitlines()[:2] for folder in (dist, again))
    return "a second release has the same bytes", first == second and len(first) == 2, f"{first} {second}"


def tracked(folder: str) -> set[str]:
    """The files of a folder that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path for path in paths if (ROOT / path).exists()}


def wheel_is_the_tree(wheel: Path) -> Iterator[Check]:
    """Every file of the four folders is in the wheel, code or data, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    expected = {inside + path.removeprefix(folder) for folder, inside in INSTALLED_AS.items() for path in tracked(folder)}
    missing, unexpected = sorted(expected - names), sorted(names - information - expected)
    yield "the wheel has every file of the tree", bool(expected) and not missing, ", ".join(missing)
    yield "the wheel has no other file", not unexpected, ", ".join(unexpected)
    licensed = any(name.endswith("/licenses/LICENSE") for name in information)
    yield "the wheel has the licence", licensed, ", ".join(sorted(information))


def sdist_is_small(sdist: Path) -> Iterator[Check]:
    """It has what a build needs, and neither tests nor fixtures."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        modules = [file.read() for each in archive if each.name.endswith(".py") and (file := archive.extractfile(each))]
    per_line = sdist.stat().st_size / sum(content.count(b"\n") for content in modules)
    expected = {path for folder in INSTALLED_AS for path in tracked(folder)} | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    yield "the source distribution has what a build needs", expected <= names, ", ".join(sorted(expected - names))
    extra = sorted(name for name in names if name.split("/")[0] in ("tests", "fixtures", "docs", "benchmarks"))
    yield "the source distribution has no fixtures", not extra, ", ".join(extra[:5])
    # Beside its modules there is little: data that are read, and the licence. What does not belong there costs more than a line does.
    yield "the source distribution has at most 17 bytes for each line of Python", per_line <= 17, f"{per_line:.1f} bytes"


def provenance_is_true(dist: Path) -> Iterator[Check]:
    """The statement names every file of the release with its digest, and the commit; SHA256SUMS names the statement."""
    (path,) = dist.glob("*.intoto.json")
    statement = json.loads(path.read_text())
    said = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    lies = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in dist.iterdir() if file not in (path, dist / "SHA256SUMS")}
    yield "the provenance names the wheel, the source distribution and the SBOM", said == lies and len(said) == 3, f"{said} {lies}"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    source = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
    yield "the provenance names the commit", source == commit, f"{source} {commit}"
    listed = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    yield "the checksums name the provenance", listed.get(path.name) == hashlib.sha256(path.read_bytes()).hexdigest(), str(listed)


def exchanged_file_is_refused(work: Path) -> Check:
    """A file of another digest than requirements/image.txt says is not installed."""
    work.mkdir()
    digits = re.compile(r"(?<=sha256:)[0-9a-f]{8}")
    (work / "image.txt").write_text(digits.sub("00000000", (ROOT / "requirements" / "image.txt").read_text()))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-r", work / "image.txt", "-d", work / "files"]
    result = subprocess.run(command, capture_output=True, text=True)
    refused = result.returncode != 0 and "DO NOT MATCH THE HASHES" in result.stderr
    return "a file of another digest is refused", refused, result.stderr[-500:]


def interpreters() -> list[Path]:
    """A Python of each minor version from 3.11 on that this machine has; those that it lacks are printed."""
    try:
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        root = "/nonexistent"
    pythons = []
    for minor in range(11, NEWEST + 1):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *map(str, sorted(Path(root).glob(f"versions/3.{minor}.*/bin/{name}")))]
        working = [path for path in candidates if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
        if working:
            pythons.append(Path(working[-1]))
        else:
            print(f"skip {name} is not on this machine", flush=True)
    return pythons


def works_without_torch(python: Path, wheel: Path, work: Path) -> Iterator[Check]:
    """What the container holds, in a virtual environment of this Python: it has no torch, and it inspects, converts and verifies."""
    work.mkdir()
    container = (ROOT / "Containerfile").read_text()
    (copied,) = re.findall(r"^COPY (.+) \./$", container, re.MULTILINE)
    for pattern in copied.split():
        for path in ROOT.glob(pattern):
            shutil.copy(path, work)
    subprocess.run([python, "-m", "venv", work / "venv"], check=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PATH": f"{work / 'venv' / 'bin'}:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(command: str) -> Check:
        result = subprocess.run(["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True)
        shown = command.replace(f"{ROOT}/", "").replace(f"{work}/", "")
        return f"{python.name}: {shown}", result.returncode == 0, result.stdout[-500:] + result.stderr[-2000:]

    for command in re.findall(r"^RUN (.+)$", container, re.MULTILINE):
        yield run(command)
    yield run("! python -c 'import torch' 2> /dev/null")
    yield run(f"python -W error -m compileall -q -f {next((work / 'venv' / 'lib').glob('python3*'))}/site-packages/reshard")
    yield run("reshard --version && reshard formats")
    source, model = FIXTURE / "checkpoint", FIXTURE / "model"
    yield run(f"reshard inspect {source} --model {model}")
    same = ("hf --dtype bf16", "vllm --tp 2", "dcp", "megatron --tp 2 --optimizer")
    cast = ("hf --dtype fp16", "deepspeed --dp 2")  # of another type than the weights of the source
    for target in (*same, *cast):
        output = target.replace(" ", "")
        yield run(f"reshard convert {source} {output} --to {target} --model {model}")
        yield run(f"reshard verify {source} {output}{' --cast' if target in cast else ''}")
        yield run(f"reshard verify {output}")
    yield run(f"reshard roundtrip {source} --to vllm --tp 2 --model {model} && reshard fingerprint hf--dtypebf16")


if __name__ == "__main__":
    sys.exit(main())
