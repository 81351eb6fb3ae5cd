"""reshard sign, and verify --signed-by: what is signed, what is refused, and how a signature is followed to what was converted.

tests/signing/check.py checks the same bundles with the real package model-signing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import socket
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat, PublicFormat
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard, tree

import reshard as library
from reshard.engine.pool import Effort
from reshard.signing.signed_files import digests_of_files
from reshard.storage.files import LocalFiles

DCP = FIXTURES / "dcp" / "fsdp2"
STEP = {"model": DCP / "model"}
CURVES = {"secp256r1": ec.SECP256R1(), "secp384r1": ec.SECP384R1(), "secp521r1": ec.SECP521R1()}
HASHES = {"secp256r1": "sha256", "secp384r1": "sha384", "secp521r1": "sha512"}
PASSPHRASE = "correct-horse-7"


def write_key(folder, name, key=None, passphrase=None):
    """A pair of keys in PEM; returns both paths."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    how = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path):
    return write_key(tmp_path, "release")


@pytest.fixture
def step(tmp_path):
    shutil.copytree(DCP / "checkpoint", tmp_path / "step-1000")
    return tmp_path / "step-1000"


@pytest.fixture
def signed(step, keys):
    library.sign(step, key=keys[0], **STEP)
    return step


def parts_of(path):
    """The statement, its bytes, and the signature in a bundle, read without reshard."""
    envelope = json.loads(path.read_text())["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    return json.loads(payload), payload, base64.b64decode(envelope["signatures"][0]["sig"])


# ---- what is signed ----


def test_the_statement_lists_every_file_as_the_specification_says(signed, keys):
    (signed / "b").mkdir()
    (signed / "b" / ".hidden").write_text("x")
    (signed / "B.txt").write_text("y")
    (signed / ".git").mkdir()
    (signed / ".git" / "config").write_text("not covered")
    library.sign(signed, key=keys[0], **STEP)
    bundle, (statement, _, _) = json.loads((signed / "model.sig").read_text()), parts_of(signed / "model.sig")
    assert bundle.keys() == {"mediaType", "verificationMaterial", "dsseEnvelope"}
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert bundle["verificationMaterial"]["publicKey"] == {"hint": hashlib.sha256(keys[1].read_bytes()).hexdigest()}
    assert statement.keys() == {"_type", "subject", "predicateType", "predicate"} and statement["predicate"].keys() == {
        "resources",
        "serialization",
    }
    files = {name: hashlib.sha256(content).hexdigest() for name, content in tree(signed).items()}
    covered = sorted(files.keys() - {"model.sig", ".git/config"})
    assert statement["predicate"]["resources"] == [{"name": name, "digest": files[name], "algorithm": "sha256"} for name in covered]
    (subject,) = statement["subject"]
    root = hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in covered)).hexdigest()
    assert subject["name"] == "step-1000" and subject["digest"] == {"sha256": root}
    assert subject["annotations"]["reshard"]["fingerprint"] == library.fingerprint(library.open(signed, **STEP)).root
    assert subject["annotations"]["reshard"]["step"] == 1000


@pytest.mark.parametrize("curve", CURVES)
def test_openssl_finds_the_signature_right(curve, step, tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    private, public = write_key(tmp_path, curve, ec.generate_private_key(CURVES[curve]))
    library.sign(step, key=private, **STEP)
    _, payload, signature = parts_of(step / "model.sig")
    kind = b"application/vnd.in-toto+json"
    (tmp_path / "data").write_bytes(b" ".join([b"DSSEv1", b"%d" % len(kind), kind, b"%d" % len(payload), payload]))
    (tmp_path / "signature").write_bytes(signature)
    words = ("openssl", "dgst", f"-{HASHES[curve]}", "-verify", public, "-signature", tmp_path / "signature", tmp_path / "data")
    assert subprocess.run(words, capture_output=True, text=True, check=False).stdout == "Verified OK\n"
    assert library.verify(step, signed_by=public).equal


def test_each_file_is_read_once(signed):
    done = []
    digests = digests_of_files(LocalFiles(signed), (), Effort(progress=done.append))
    assert sum(done) == sum(path.stat().st_size for path in signed.iterdir()) and len(digests) == len([*signed.iterdir()])


def test_signing_and_checking_use_no_network(step, keys, monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    library.sign(step, key=keys[0], **STEP)
    assert library.verify(step, signed_by=keys[1]).equal


# ---- what is refused ----


def change_a_weight(folder):
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name, "values"


def remove_a_file(folder):
    path = min(path for path in folder.iterdir() if path.name != "model.sig")
    path.unlink()
    return path.name, "missing"


def add_a_file(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "added.py").write_text("import os")
    return "deep/added.py", "extra"


def add_a_hidden_file(folder):
    (folder / ".added").write_text("x")
    return ".added", "extra"


def put_a_link_in_place(folder):
    path = min(path for path in folder.iterdir() if path.name != "model.sig")
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    return path.name, "values"


def change_the_statement(folder):
    bundle = json.loads((folder / "model.sig").read_text())
    statement, _, _ = parts_of(folder / "model.sig")
    statement["subject"][0]["annotations"]["reshard"]["fingerprint"] = "blake3:" + "0" * 64
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (folder / "model.sig").write_text(json.dumps(bundle))
    return str(folder / "model.sig"), "signature"


def claim_another_key(folder):
    bundle = json.loads((folder / "model.sig").read_text())
    bundle["verificationMaterial"]["publicKey"]["hint"] = "0" * 64
    (folder / "model.sig").write_text(json.dumps(bundle))
    return str(folder / "model.sig"), "signature"


def cut_the_bundle(folder):
    content = (folder / "model.sig").read_bytes()
    (folder / "model.sig").write_bytes(content[: len(content) // 2])
    return str(folder / "model.sig"), "signature"


CHANGES = (
    change_a_weight, remove_a_file, add_a_file, add_a_hidden_file, put_a_link_in_place, change_the_statement, claim_another_key,
    cut_the_bundle,
)  # fmt: skip


@pytest.mark.distinct
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_named(change, signed, keys):
    assert library.verify(signed, signed_by=keys[1]).equal
    name, kind = change(signed)
    result = library.verify(signed, signed_by=keys[1])
    assert [(difference.name, difference.kind) for difference in result.differences] == [(name, kind)]
    shown = reshard("verify", signed, "--signed-by", keys[1])
    assert shown.code == 1 and name in shown.out and "not as signed: 1 difference" in shown.out
    document = reshard("verify", signed, "--signed-by", keys[1], "--json").document
    assert document["equal"] is False and (document["signature"] is None) == (kind == "signature")


def test_another_key_is_named_with_its_digest(signed, keys, tmp_path):
    _, other = write_key(tmp_path, "other")
    shown = reshard("verify", signed, "--signed-by", other)
    assert shown.code == 1
    for path in (keys[1], other):
        assert hashlib.sha256(path.read_bytes()).hexdigest()[:12] in shown.out


def test_a_bundle_that_names_no_key_is_checked_all_the_same(signed, keys, tmp_path):
    """As model-signing wrote them before version 1.1."""
    bundle = json.loads((signed / "model.sig").read_text())
    bundle["verificationMaterial"] = {"publicKey": {"rawBytes": "", "keyDetails": "PKIX_ECDSA_P256_SHA_256"}}
    (signed / "model.sig").write_text(json.dumps(bundle))
    assert library.verify(signed, signed_by=keys[1]).equal
    assert not library.verify(signed, signed_by=write_key(tmp_path, "other")[1]).equal


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"mediaType": 1, "verificationMaterial": {}, "dsseEnvelope": {}}', "[" * 5000, '{"dsseEnvelope": null}', "\xff"],
)
def test_what_is_no_bundle_is_one_clear_difference(content, signed, keys):
    (signed / "model.sig").write_text(content)
    shown = reshard("verify", signed, "--signed-by", keys[1])
    assert shown.code == 1 and "no bundle" in shown.out and not shown.err


def signed_as(statement, private, path, **bundle):
    """A bundle over any statement."""
    from reshard.signing.keys import private_key
    from reshard.signing.statement import Bundle, signed_bytes

    payload, key = json.dumps(statement).encode(), private_key(private)
    content = json.loads(Bundle(payload, key.sign(signed_bytes(payload)), key.public.digest).content())
    path.write_text(json.dumps({**content, **bundle}))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda statement: statement["predicate"]["serialization"].update(method="shards"), 6, "shards"),
        (lambda statement: statement.update(predicateType="https://model_signing/Digests/v0.1"), 1, "no statement|not a statement"),
        (lambda statement: statement["predicate"]["resources"].append(statement["predicate"]["resources"][0]), 1, "contradicts itself"),
        (lambda statement: statement["predicate"]["resources"].pop(), 1, "contradicts itself"),
        (lambda statement: statement["subject"].append({}), 1, "no statement"),
        (lambda statement: statement["predicate"]["resources"][0].update(digest=3), 1, "no statement"),
    ],
)
def test_a_statement_of_another_kind_is_refused_though_the_key_has_signed_it(change, code, words, signed, keys):
    import re

    statement, _, _ = parts_of(signed / "model.sig")
    change(statement)
    signed_as(statement, keys[0], signed / "model.sig")
    shown = reshard("verify", signed, "--signed-by", keys[1])
    assert shown.code == code and re.search(words, shown.out + shown.err)


def test_what_was_signed_with_a_certificate_is_not_supported(signed, keys):
    bundle = json.loads((signed / "model.sig").read_text())
    (signed / "model.sig").write_text(json.dumps({**bundle, "verificationMaterial": {"x509CertificateChain": {"certificates": []}}}))
    shown = reshard("verify", signed, "--signed-by", keys[1])
    assert shown.code == 6 and "certificate" in shown.err


def test_other_hashes_and_links_count_as_the_signature_says(signed, keys):
    (signed / "link").symlink_to(signed.parent / "step-1000" / ".metadata")
    statement, _, _ = parts_of(signed / "model.sig")
    files = {name: content for name, content in tree(signed).items() if name != "model.sig"}
    resources = [{"name": name, "digest": hashlib.blake2b(files[name]).hexdigest(), "algorithm": "blake2b"} for name in sorted(files)]
    statement["predicate"]["resources"] = resources
    statement["subject"][0]["digest"] = {
        "sha256": hashlib.sha256(b"".join(bytes.fromhex(file["digest"]) for file in resources)).hexdigest()
    }
    statement["predicate"]["serialization"].update(hash_type="blake2b", allow_symlinks=True)
    signed_as(statement, keys[0], signed / "model.sig")
    assert "link" in files and library.verify(signed, signed_by=keys[1]).equal


def test_what_cannot_be_signed_is_refused_and_nothing_is_written(step, keys, tmp_path):
    def refused(path, words, code=2):
        shown = reshard("sign", path, "--key", keys[0], "--model", DCP / "model")
        assert shown.code == code and words in shown.err, shown.err
        assert not (step / "model.sig").exists()

    refused(tmp_path / "nowhere", "no file or directory")
    (step / "link").symlink_to(step / ".metadata")
    refused(step, "link: it is a link", 3)
    (step / "link").unlink()
    (step / ".reshard").mkdir()
    refused(step, "an interrupted conversion lies here")
    (step / ".reshard").rmdir()
    next(step.glob("*.distcp")).unlink()
    refused(step, "distcp", 3)


def test_a_folder_that_is_not_what_reshard_wrote_is_not_signed(step, keys, tmp_path):
    library.convert(step, tmp_path / "out", to="vllm", tp=2, **STEP)
    change_a_weight(tmp_path / "out")
    shown = reshard("sign", tmp_path / "out", "--key", keys[0])
    assert shown.code == 1 and not (tmp_path / "out" / "model.sig").exists()


def test_a_file_that_is_written_meanwhile_is_told(step, keys, monkeypatch):
    from reshard.signing import signed_files

    read_into, victim = LocalFiles.read_into, max(step.iterdir(), key=lambda path: path.stat().st_size)

    def also_write(self, path, byte_offset, buffer):
        read_into(self, path, byte_offset, buffer)
        if path == victim.name and sys._getframe(1).f_code.co_filename == signed_files.__file__:
            victim.write_bytes(victim.read_bytes() + b"x")

    monkeypatch.setattr(LocalFiles, "read_into", also_write)
    with pytest.raises(library.CheckpointError, match="was written while it was read"):
        library.sign(step, key=keys[0], **STEP)
    assert not (step / "model.sig").exists()


# ---- keys ----


def test_keys_that_cannot_sign_are_refused_by_name(signed, keys, tmp_path, monkeypatch):
    strange, _ = write_key(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    curve, curve_pub = write_key(tmp_path, "k1", ec.generate_private_key(ec.SECP256K1()))
    locked, _ = write_key(tmp_path, "locked", passphrase=PASSPHRASE)
    (tmp_path / "empty").write_text("")
    for key, words in (
        (strange, "another kind"),
        (curve, "another kind"),
        (keys[1], "no private key"),
        (tmp_path / "empty", "no private key"),
    ):
        shown = reshard("sign", signed, "--key", key)
        assert shown.code == 2 and words in shown.err and str(key) in shown.err
    for key, words in ((keys[0], "private key, which must stay"), (curve_pub, "another kind"), (tmp_path / "empty", "no public key")):
        shown = reshard("verify", signed, "--signed-by", key)
        assert shown.code == 2 and words in shown.err and str(key) in shown.err
    assert "RESHARD_KEY_PASSPHRASE" in reshard("sign", signed, "--key", locked).err
    monkeypatch.setenv("RESHARD_KEY_PASSPHRASE", "wrong-passphrase")
    assert "not its passphrase" in (shown := reshard("sign", signed, "--key", locked)).err and shown.code == 2
    monkeypatch.setenv("RESHARD_KEY_PASSPHRASE", PASSPHRASE)
    (signed / "model.sig").unlink()
    assert reshard("sign", signed, "--key", locked, "--model", DCP / "model").code == 0
    (signed / "model.sig").unlink()
    assert reshard("sign", signed, "--key", keys[0], "--model", DCP / "model").code == 0  # one that needs none
    assert reshard("sign", signed, "--key", tmp_path / "absent").code == 2
    assert "needs the key" in reshard("verify", signed, "--signature-file", signed / "model.sig").err


def test_the_private_key_and_its_passphrase_are_in_no_text_and_no_file(step, tmp_path, monkeypatch):
    key = ec.generate_private_key(ec.SECP256R1())
    locked, public = write_key(tmp_path, "locked", key, PASSPHRASE)
    monkeypatch.setenv("RESHARD_KEY_PASSPHRASE", PASSPHRASE)
    words = ("--log-file", tmp_path / "log", "--verbose")
    shown = [reshard("--debug", "sign", step, "--key", locked, "--model", DCP / "model", *more, *words) for more in ((), ("--json",))]
    shown.append(reshard("--debug", "sign", step, "--key", public, *words))
    assert [result.code for result in shown] == [0, 0, 2]
    texts = [text.encode() for result in shown for text in (result.out, result.err)]
    texts += [path.read_bytes() for path in (tmp_path / "log", step / "model.sig")]
    secret = key.private_numbers().private_value
    forms = [PASSPHRASE.encode(), str(secret).encode(), f"{secret:x}".encode(), secret.to_bytes(32, "big"), b"PRIVATE KEY"]
    forms += [base64.b64encode(secret.to_bytes(32, "big")), *locked.read_bytes().splitlines()[1:-1]]
    assert not [form for form in forms for text in texts if form in text]
    from reshard.signing.keys import private_key

    assert "locked" not in repr(private_key(locked)) and repr(private_key(locked)).startswith("PrivateKey of PublicKey(")


def test_without_cryptography_the_extra_is_named(step, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    shown = reshard("sign", step, "--key", keys[0])
    assert shown.code == 6 and "pip install cryptography" in shown.err


# ---- to what was converted ----


def test_a_signature_is_followed_to_what_was_converted(signed, keys, tmp_path):
    library.convert(signed, tmp_path / "serving", to="vllm", tp=2, card=True, **STEP)
    library.convert(tmp_path / "serving", tmp_path / "hf", to="hf")
    assert not (tmp_path / "serving" / "model.sig").exists()
    shutil.copy(signed / "model.sig", tmp_path / "step-1000.sig")  # all that travels
    for folder in ("serving", "hf"):
        shown = reshard("verify", tmp_path / "step-1000.sig", tmp_path / folder, "--signed-by", keys[1])
        assert shown.code == 0 and "holds the weights of step-1000, step 1000" in shown.out, shown.out + shown.err
    shown = reshard("verify", signed, tmp_path / "serving", "--signed-by", keys[1], "--json").document
    assert shown["equal"] and "step-1000, step 1000" in shown["notes"][0]
    assert library.verify(signed / "model.sig", tmp_path / "hf", signed_by=keys[1]).equal


def test_other_weights_are_refused_by_name(signed, keys, tmp_path):
    library.convert(signed, tmp_path / "fp16", to="hf", dtype="fp16", **STEP)
    for folder in (tmp_path / "fp16", HF / "llama"):
        result = library.verify(signed / "model.sig", folder, signed_by=keys[1])
        (difference,) = result.differences
        assert (
            difference.name == str(folder) and "step-1000, step 1000" in difference.detail and any("casts" in note for note in result.notes)
        )
        assert reshard("verify", signed / "model.sig", folder, "--signed-by", keys[1]).code == 1
        assert reshard("verify", signed, folder, "--signed-by", keys[1]).code == 1
    assert reshard("verify", signed, tmp_path / "fp16", "--signed-by", keys[1], "--cast").code == 0
    _, other = write_key(tmp_path, "other")
    assert not library.verify(signed / "model.sig", tmp_path / "fp16", signed_by=other).equal


def test_serving_files_that_were_changed_are_not_those_that_were_signed(signed, keys, tmp_path):
    library.convert(signed, tmp_path / "serving", to="vllm", tp=2, **STEP)
    change_a_weight(tmp_path / "serving")
    result = library.verify(signed / "model.sig", tmp_path / "serving", signed_by=keys[1])
    assert not result.equal
    change_a_weight(signed)
    shown = reshard("verify", signed, tmp_path / "serving", "--signed-by", keys[1])
    assert shown.code == 1 and "not as signed" in shown.out


def test_a_signature_of_another_program_follows_nothing(signed, keys, tmp_path):
    statement, _, _ = parts_of(signed / "model.sig")
    del statement["subject"][0]["annotations"]
    signed_as(statement, keys[0], signed / "model.sig")
    assert library.verify(signed, signed_by=keys[1]).equal
    shown = reshard("verify", signed / "model.sig", HF / "llama", "--signed-by", keys[1])
    assert shown.code == 2 and "no fingerprint" in shown.err


def test_a_signature_may_lie_elsewhere_and_two_may_lie_in_one_folder(step, keys, tmp_path):
    other = write_key(tmp_path, "other")
    result = library.sign(step, key=keys[0], signature_file=tmp_path / "step.sig", **STEP)
    assert result.path == str(tmp_path / "step.sig") and not (step / "model.sig").exists()
    assert result.key == hashlib.sha256(keys[1].read_bytes()).hexdigest() and result.files == len([*step.iterdir()])
    assert library.verify(step, signed_by=keys[1], signature_file=tmp_path / "step.sig").equal
    library.sign(step, key=other[0], signature_file=step / "second.sig", **STEP)
    assert library.verify(step, signed_by=other[1], signature_file=step / "second.sig").equal
    added = library.verify(step, signed_by=keys[1], signature_file=tmp_path / "step.sig").differences
    assert [(difference.name, difference.kind) for difference in added] == [("second.sig", "extra")]
    shown = reshard("verify", step, "--signed-by", keys[1])
    assert shown.code == 2 and "model.sig" in shown.err and "[not-found]" in shown.err


def test_a_signature_of_another_key_is_not_replaced(signed, keys, tmp_path):
    first, other = (signed / "model.sig").read_bytes(), write_key(tmp_path, "other")
    refused = reshard("sign", signed, "--key", other[0], "--model", DCP / "model")
    assert refused.code == 4 and hashlib.sha256(keys[1].read_bytes()).hexdigest() in refused.err and "--signature-file" in refused.err
    assert (signed / "model.sig").read_bytes() == first
    library.sign(signed, key=keys[0], **STEP)
    assert (signed / "model.sig").read_bytes() != first and library.verify(signed, signed_by=keys[1]).equal
    (signed / "model.sig").write_bytes(first[:50])
    assert library.sign(signed, key=keys[0], **STEP).path == str(signed / "model.sig")
    (signed / "model.sig").unlink()
    assert library.sign(signed, key=other[0], **STEP).path == str(signed / "model.sig")


@pytest.mark.parametrize("words", [("--cast",), ("--include", "*norm*"), ("--format", "dcp")])
def test_what_does_not_go_with_a_signature_is_an_error(words, signed, keys):
    assert reshard("verify", signed, "--signed-by", keys[1], *words).code == 2


def test_a_signature_alone_or_a_server_is_an_error(signed, keys):
    assert reshard("verify", signed / "model.sig", "--signed-by", keys[1]).code == 2
    with pytest.raises(library.RequestError, match="A server has no files"):
        library.verify(signed, "http://127.0.0.1:9", signed_by=keys[1])
