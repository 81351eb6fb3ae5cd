"""The verb `sign`: a signature of a folder's files, and of the fingerprint of its weights, as other tools check it."""

from __future__ import annotations

import os
import time
from typing import Any, Unpack

import reshard
from reshard.engine.events import event
from reshard.engine.pool import Effort
from reshard.errors import RequestError
from reshard.geometry.documents import document
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, OpenOptions, PathLike, checked_keywords, take
from reshard.opening.open import opened
from reshard.signing.check import check_replaces_own, ignored_in
from reshard.signing.keys import private_key
from reshard.signing.signed_files import OF_DOWNLOADS, USUALLY_IGNORED, check_can_be_signed, digests_of_files
from reshard.signing.statement import SIGNATURE, Bundle, Statement, signed_bytes
from reshard.storage.output_file import OutputFile
from reshard.storage.system_calls import is_url
from reshard.storage.tar import open_files
from reshard.storage.trees import chain_of
from reshard.verbs.look.fingerprint import fingerprint


class SignOptions(OpenOptions, EffortOptions, total=False):
    """Keywords of `sign`."""


@value
class Signed:
    """A signature that was written."""

    JSON = "path name files bytes=nbytes fingerprint key seconds"

    path: str
    """The file of the signature."""
    name: str
    """The name of the folder, as it is signed."""
    files: int
    """How many files are signed."""
    nbytes: int
    """Their bytes."""
    fingerprint: str
    """The fingerprint of the weights, which is signed too."""
    key: str
    """The digest of the public key: SHA-256 of its PEM text."""
    seconds: float
    """How long it took."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return document(self, seconds=round(self.seconds, 3))


@checked_keywords
def sign(
    source: Checkpoint | PathLike, *, key: PathLike, signature_file: PathLike | OutputFile | None = None, **options: Unpack[SignOptions]
) -> Signed:
    """Sign the files of a checkpoint, and the fingerprint of its weights, with the private key in the PEM file `key`.

    signature_file: what to write; None: model.sig in the folder. It is a bundle of OpenSSF Model Signing 1.0, so `model_signing verify key`
    accepts it. The passphrase of an encrypted key comes from RESHARD_KEY_PASSPHRASE. The weights are read for their fingerprint, and then
    every file once for its SHA-256.

    Raises: RequestError for a file, a folder that is still written, and a key that cannot sign. TargetError if a
    signature of another key lies at the place. DifferenceFound if reshard wrote the
    folder, and its weights are not those that it wrote. CheckpointError for a checkpoint that is not whole, a link in it, and a file that
    is written meanwhile. UnsupportedError if the package cryptography is not installed.
    """
    began = time.monotonic()
    given: dict[str, Any] = {**options}
    effort_options = take(given, EffortOptions)
    effort, private = Effort.of(effort_options), private_key(key)
    checkpoint = opened(source, **given)
    root = checkpoint.path
    if len(chain_of(root)) > 1:
        raise RequestError("a folder is signed, and this is a base with deltas", where=root, do="Sign what `reshard apply` makes of it")
    files = open_files(root)
    check_can_be_signed(files)
    path = f"{root.rstrip('/')}/{SIGNATURE}" if signature_file is None else os.fspath(signature_file)
    output = None if is_url(path) else OutputFile.at(path if signature_file is None else signature_file)
    check_replaces_own(path, private.public)
    weights = fingerprint(checkpoint, **effort_options)
    ignored = (*USUALLY_IGNORED, *OF_DOWNLOADS, *ignored_in(root, path))
    digests = digests_of_files(files, ignored, effort)
    about = {
        "fingerprint": weights.root,
        "format": checkpoint.format,
        "step": checkpoint.index.facts.step,
        "version": reshard.__version__,
    }
    name = os.path.basename(root.rstrip("/") if is_url(root) else os.path.realpath(root))
    payload = Statement(name or "model", digests, ignored=ignored, about=about).payload()
    content = Bundle(payload, private.sign(signed_bytes(payload)), private.public.digest).content()
    if output is not None:
        output.write(content)
    else:
        from reshard.storage.stores.urls import open_store

        folder, _, file = path.rpartition("/")
        open_store(folder).put(file, content)
    nbytes = sum(files.size(path) or 0 for path in digests)
    event("signed", f"signed {plural(len(digests), 'file')} of {root}: {path}", path=path, files=len(digests), fingerprint=weights.root)
    return Signed(path, name, len(digests), nbytes, weights.root, private.public.digest, time.monotonic() - began)
