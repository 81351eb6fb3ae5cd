"""reshard sign: who says that these are the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Facts, Section

from ... import options
from ...invocation import current
from ...progress import weight_bytes, working
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.verbs.serve.sign import Signed


@options.command(
    "sign",
    "reshard sign out --key release.key",
    "reshard sign step-1000 --key release.key --model llama-3-8b",
    "reshard sign /shared/step-1000 --key release.key --signature-file step-1000.sig",
)
@options.checkpoint("source")
@click.option("--key", required=True, metavar="FILE", help="The private key, in PEM; RESHARD_KEY_PASSPHRASE decrypts it.")
@options.output_file("--signature-file", "Write the signature to this file (default: model.sig in SOURCE).")
@options.format_name
@options.model
@options.effort
def command(source: str, **given: Any) -> Reply:
    """Sign the files of SOURCE, and the fingerprint of its weights, with a private key. No network is used.

    The signature is a bundle of OpenSSF Model Signing 1.0. `model_signing verify key` accepts it, and `reshard verify SOURCE --signed-by
    PUBLIC_KEY` checks it. Every file counts, whichever program wrote it. The fingerprint is signed too, so that a signature of a training
    checkpoint can be followed to what it was converted to: `reshard verify SOURCE/model.sig OUT --signed-by PUBLIC_KEY`.

    The weights are read for the fingerprint, and then every file for its SHA-256.
    """
    import reshard
    from reshard.opening.keywords import OpenOptions

    checkpoint = reshard.open(source, **options.take(given, OpenOptions))
    key, signature = given.pop("key"), given.pop("signature_file")
    total = weight_bytes(checkpoint) + sum(file.nbytes for file in checkpoint.index.files)
    with working("sign", total, given) as effort:
        result = reshard.sign(checkpoint, key=key, signature_file=signature, **effort)
    current().metrics.record(bytes_read=result.nbytes)
    return Reply(result.to_json(), _sections(result), brief=True)


def _sections(result: Signed) -> Iterator[Section]:
    yield f"{result.path}: {plural(result.files, 'file')}, {nbytes_text(result.nbytes)}, every byte"
    yield Facts([("signed", result.name), ("fingerprint", result.fingerprint), ("key", result.key)])
