"""Checking a signature: was a folder, or were these weights, signed by the owner of a key?"""

from __future__ import annotations

import os
from typing import Any

from reshard.engine.compare import Comparison, Difference
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, TargetError, UnsupportedError
from reshard.geometry.quantities import nbytes_text, plural
from reshard.geometry.value import mutable
from reshard.signing.keys import PublicKey, public_key
from reshard.signing.signed_files import compare_files
from reshard.signing.statement import MOST_BYTES, SIGNATURE, Bundle, Statement
from reshard.storage.files import Files, read_whole
from reshard.storage.system_calls import is_url
from reshard.storage.tar import open_files


@mutable
class SignedComparison(Comparison):
    """What was compared with a signature."""

    path: str = ""
    """The file of the signature."""
    key: str = ""
    """The digest of the public key that it was checked with."""
    statement: Statement | None = None
    """What was signed; None if the signature is not one of the key."""
    of_weights: bool = False
    """Whether the weights of another folder were compared, and not the files that were signed."""
    compared: str = ""
    """What was compared, in words."""

    def signature(self) -> dict[str, Any] | None:
        """The signature as plain values with stable keys; None if it is not one of the key."""
        signed = self.statement
        if signed is None:
            return None
        about = {"fingerprint": signed.fingerprint, "step": signed.step, "files": len(signed.files)}
        return {"path": self.path, "key": self.key, "name": signed.name, **about}


def is_signature(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a signature, and not of a checkpoint."""
    name = os.fspath(path)
    return name.endswith((".sig", ".sigstore")) and open_files(path).is_file


def check_replaces_own(path: str, key: PublicKey) -> None:
    """Raises TargetError if a signature that is not of this key lies at the path: it may be the only one of its owner."""
    folder, _, name = path.rpartition("/")
    if not is_url(path) and not os.path.isfile(path):
        return  # a device, or nothing
    files = open_files(folder or ".")
    if files.size(name) is None:
        return
    try:
        of = Bundle.parse(read_whole(files, name, limit=MOST_BYTES), where=path).key
    except UnsupportedError:
        of = "a certificate, or Sigstore"
    except CheckpointError:
        return  # no signature
    if of != key.digest:
        raise TargetError(
            f"a signature lies there that is not of this key: {of or 'it names no key'}",
            where=path,
            do="Write this one elsewhere with `signature_file=`, or remove the other first",
        )


def read_signature(path: str | os.PathLike[str], signed_by: str | os.PathLike[str]) -> SignedComparison:
    """What a file of a signature says, if the owner of the public key `signed_by` says it; else the difference.

    Raises: RequestError if one of the files does not exist, or is no public key.
    """
    key = public_key(signed_by)
    files = open_files(path)
    result = SignedComparison(path=os.fspath(path), key=key.digest)
    try:
        bundle = Bundle.parse(read_whole(files, files.list()[0], limit=MOST_BYTES), where=result.path)
        if refusal := _refusal(bundle, key, os.fspath(signed_by)):
            result.differences.append(Difference(result.path, "signature", refusal))
        else:
            result.statement = Statement.parse(bundle.payload, where=result.path)
    except CheckpointError as error:
        result.differences.append(Difference(result.path, "signature", error.what))
    return result


def check_folder(
    files: Files, signed_by: str | os.PathLike[str], signature: str | os.PathLike[str] | None, effort: Effort
) -> SignedComparison:
    """Whether a folder holds what was signed, each file whole, and no other file. signature: where it lies; None: in the folder."""
    path = f"{files.root.rstrip('/')}/{SIGNATURE}" if signature is None else os.fspath(signature)
    if signature is None and files.size(SIGNATURE) is None:
        raise RequestError(
            f"there is no {SIGNATURE}, so nothing says what was signed",
            where=files.root,
            do="Name the file of its signature with `signature_file=`, or sign it: reshard sign FOLDER --key KEY",
            id="not-found",
        )
    result = read_signature(path, signed_by)
    if result.statement:
        try:
            compare_files(files, result.statement, ignored_in(files.root, path), result, effort)
        except CheckpointError as error:
            result.blame(error, files)
        result.compared = f"{plural(len(result.statement.files), 'file')}, {nbytes_text(result.nbytes)}, every byte"
    return result


def check_fingerprint(result: SignedComparison, fingerprint: str, of: str) -> None:
    """Compare the fingerprint of the weights of another folder with the signed one."""
    signed = result.statement
    assert signed is not None
    if signed.fingerprint != fingerprint:
        detail = f"its weights have the fingerprint {fingerprint}, signed is {signed.fingerprint} ({signed})"
        result.differences.append(Difference(of, "values", detail))
        result.notes.append("a conversion that casts, quantizes or merges makes other weights: its result has a signature of its own")
    result.compared = f"{of} holds the weights of {signed}"


def check_tells_fingerprint(result: SignedComparison) -> None:
    """Raises RequestError if the signature is that of another program, which knows no fingerprints."""
    if result.statement and result.statement.fingerprint is None:
        what = "the signature tells no fingerprint of the weights, as reshard did not make it"
        raise RequestError(what, where=result.path, do="Compare with the signed folder itself: reshard verify SIGNED OUT --signed-by KEY")


def ignored_in(root: str, signature: str) -> tuple[str, ...]:
    """The path of a signature in the folder that it signs; empty if it lies elsewhere."""
    if "://" in root or "://" in signature:
        inside = signature.removeprefix(f"{root.rstrip('/')}/")
        return () if inside == signature else (inside,)
    relative = os.path.relpath(os.path.realpath(signature), os.path.realpath(root))
    return () if relative.startswith("..") else (relative.replace(os.sep, "/"),)


def _refusal(bundle: Bundle, key: PublicKey, name: str) -> str | None:
    """Why a bundle is not signed by a key, in words; None if it is."""
    if bundle.key not in (None, key.digest):
        return f"it was signed with another key ({str(bundle.key)[:12]}) than {name} ({key.digest[:12]})"
    if not key.has_signed(bundle.signed_bytes, bundle.signature):
        return f"the signature is not one of {name} ({key.digest[:12]}) over what it says: one of the two was changed"
    return None
