"""Compares signatures with those of the real package model-signing: each accepts what the other has signed, and refuses what has changed.

    python tests/signing/check.py [--reshard COMMAND] [--python INTERPRETER]

An environment with the package is made in .venv-signing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.framework_environments import ROOT, Environment, run_checks

ENVIRONMENT = Environment("signing", ROOT / "tests" / "signing" / "requirements.txt", with_torch=False)
DCP = ROOT / "fixtures" / "dcp" / "fsdp2"
CURVES = ("prime256v1", "secp384r1", "secp521r1")


def done(*words: object) -> tuple[bool, str]:
    """Whether a command has ended well, and what it printed."""
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    return result.returncode == 0, (result.stdout + result.stderr).strip()


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """What both programs say of the same folders."""
    for curve in CURVES:
        done("openssl", "ecparam", "-name", curve, "-genkey", "-noout", "-out", work / f"{curve}.key")
        done("openssl", "ec", "-in", work / f"{curve}.key", "-pubout", "-out", work / f"{curve}.pub")
    signing, other = (python, "-m", "model_signing"), work / "secp384r1.pub"

    def accepts(folder: Path, key: Path, signature: Path | None = None) -> tuple[bool, str]:
        return done(*signing, "verify", "key", folder, "--signature", signature or folder / "model.sig", "--public_key", key)

    step, out = work / "step-1000", work / "out"
    shutil.copytree(DCP / "checkpoint", step)
    done(reshard, "convert", step, out, "--to", "vllm", "--tp", 2, "--model", DCP / "model", "--card", "--checksums")
    for curve in CURVES:
        public = work / f"{curve}.pub"
        for folder in (step, out):
            (folder / "model.sig").unlink(missing_ok=True)  # of the curve before
            made = done(reshard, "sign", folder, "--key", work / f"{curve}.key", "--model", DCP / "model")
            made = made if folder is step else done(reshard, "sign", folder, "--key", work / f"{curve}.key")
            yield f"{curve}: reshard signs {folder.name}", *made
            yield f"{curve}: model_signing accepts {folder.name}", *accepts(folder, public)
        yield f"{curve}: and so does reshard", *done(reshard, "verify", out, "--signed-by", public)
        signed = done(*signing, "sign", "key", step, "--signature", work / f"{curve}.sig", "--private_key", work / f"{curve}.key")
        yield f"{curve}: model_signing signs", *signed
        accepted = done(reshard, "verify", step, "--signed-by", public, "--signature-file", work / f"{curve}.sig")
        yield f"{curve}: reshard accepts it", *accepted
    followed = done(reshard, "verify", step / "model.sig", out, "--signed-by", work / "secp521r1.pub")
    yield "the signature of the step is followed to the serving files", *followed

    def refuses(what: str, key: Path) -> Iterator[tuple[str, bool, str]]:
        for program, (passed, detail) in {
            "model_signing": accepts(out, key),
            "reshard": done(reshard, "verify", out, "--signed-by", key),
        }.items():
            yield f"{program} refuses {what}", not passed, detail

    yield from refuses("another key", other)
    changes = {
        "an added file": lambda: (out / "added").write_text("x"),
        "a changed file": lambda: (out / "config.json").write_text("{}"),
        "a removed file": lambda: (out / "README.md").unlink(),
        "a cut signature": lambda: (out / "model.sig").write_bytes((out / "model.sig").read_bytes()[:100]),
    }
    for what, change in changes.items():
        kept = work / "kept"
        shutil.copytree(out, kept)
        change()
        yield from refuses(what, work / "secp521r1.pub")
        shutil.rmtree(out)
        kept.rename(out)
    for folder in (".git", ".cache/huggingface"):  # what git and a download leave is not covered
        (out / folder).mkdir(parents=True)
        (out / folder / "file").write_text("x")
    yield "model_signing accepts a clone and a download", *accepts(out, work / "secp521r1.pub")
    yield "reshard accepts a clone and a download", *done(reshard, "verify", out, "--signed-by", work / "secp521r1.pub")


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
