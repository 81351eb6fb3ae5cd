"""docs/reference/json.md names every key of every JSON document, and no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from helpers.doc_pages import FIXTURES, ROOT
from helpers.published_configs import LLAMA_70B
from helpers.reshard_command import reshard
from helpers.weight_servers import held, server, vllm

import reshard as library
from reshard.verbs.convert import conversion

FSDP2, VERL = FIXTURES / "dcp" / "fsdp2", FIXTURES / "fsdp" / "verl" / "checkpoint"
MODEL = ("--model", FSDP2 / "model")
SCHEMAS = ROOT / "docs" / "reference" / "schemas"
LLAMA, QWEN3 = FIXTURES / "hf" / "llama", FIXTURES / "hf" / "qwen3"


def documented(section: str) -> set[str]:
    """The keys in a section's tables."""
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    (part,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    cells = [line.split("|")[1] for line in part.split("\n") if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, ...]]:
    """The paths of all values that are no dict and no list of dicts, in segments."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            for rest in leaves(inner):
                yield (key, *rest)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for each in value:
            for rest in leaves(each):
                yield ("[]", *rest)
    else:
        yield ()


def matches(key: str, leaf: tuple[str, ...]) -> bool:
    """Whether a documented key such as `files[].ranks.*` is that of a value, or of a null in the place of a dict or list."""
    words = key.replace("[]", ".[]").strip(".").split(".")
    return all(word in ("*", segment) for word, segment in zip(words, leaf, strict=False)) and len(leaf) <= len(words)


def check(section: str, *documents: Any) -> None:
    """The page names each key of these documents and no other; and the schema, which is a file, allows each document."""
    keys = documented(section)
    found = {leaf for document in documents for leaf in leaves(document) if leaf != ("schema_version",) or section == "reshard.json"}
    if section != "reshard.json":
        schema = json.loads((SCHEMAS / f"{section.replace(' --', '-').replace(' ', '-')}.json").read_text())
        for document in documents:
            assert not (wrong := list(violations(document, schema))), wrong[:3]
    unknown = [leaf for leaf in found if not any(matches(key, leaf) for key in keys)]
    assert not unknown, f"json.md does not tell of {unknown[:3]} in {section}"
    stale = [key for key in keys if not any(matches(key, leaf) for leaf in found)]
    assert not stale, f"json.md tells of {stale[:3]}, which {section} does not print"


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def violations(value: Any, schema: dict[str, Any], path: str = "$") -> Iterator[str]:
    """Where a value breaks a schema, for the keywords that our schemas use."""
    assert schema.keys() <= {"$schema", "title", "type", "properties", "required", "additionalProperties", "items", "const"}
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    # In Python a bool is an int; in JSON it is not.
    if not any(isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in types):
        yield f"{path}: {value!r} is not of type {types}"
    elif "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    elif isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{path}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, inner in value.items():
            if key in properties or isinstance(rest, dict):
                yield from violations(inner, properties.get(key, rest), f"{path}.{key}")
            elif not rest:
                yield f"{path}: {key} is not in the schema"
    elif isinstance(value, list) and "items" in schema:
        for i, inner in enumerate(value):
            yield from violations(inner, schema["items"], f"{path}[{i}]")


def printed(*arguments: object) -> Any:
    return reshard(*arguments, "--json").document


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "torch_dtype": "bfloat16"}))
    return tmp_path


def test_inspect():
    check("inspect", printed("inspect", VERL, "--by", "rank"), printed("inspect", VERL, "--full"), printed("inspect", LLAMA))


def test_plan_and_convert(tmp_path):
    arguments = (FSDP2 / "checkpoint", tmp_path / "out", "--to", "vllm", "--tp", 2, *MODEL)
    documents = [printed("plan", arguments[0], *arguments[2:], "--full"), printed("convert", *arguments, "--dry-run")]
    check("plan", *documents, *in_a_store(*arguments), into_a_pipeline(tmp_path))
    result = printed("convert", *arguments, "--overwrite", "--full")
    check("plan", {"schema_version": 1, **result["plan"]}, *in_a_store(*arguments), into_a_pipeline(tmp_path))
    check("convert", printed("convert", *arguments, "--overwrite"), {**result, "plan": {}})
    parts = [printed("convert", *arguments[:1], tmp_path / "parts", *arguments[2:], "--part", part) for part in ("0/2", "1/2")]
    check("convert --part", *({**part, "result": None} for part in parts))
    check("convert", {"schema_version": 1, **parts[1]["result"], "plan": {}})
    check("reshard.json", json.loads((patched(tmp_path) / "reshard.json").read_text()))


def patched(folder):
    """A conversion of a checkpoint with a delta, which changes nothing."""
    printed("delta", LLAMA, LLAMA, folder / "delta")
    printed("apply", LLAMA, folder / "delta", folder / "applied", "--to", "hf")
    return folder / "applied"


def test_delta_and_apply(tmp_path):
    check("delta", printed("delta", LLAMA, LLAMA, tmp_path / "none"))
    plan = printed("apply", LLAMA, tmp_path / "none", tmp_path / "out", "--to", "hf", "--dry-run")
    assert [each.keys() for each in plan["deltas"]] == [{"path", "version", "fingerprint"}]


def pipeline(folder):
    """A diffusers pipeline of one component."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(LLAMA, folder / "text_encoder", dirs_exist_ok=True)
    index = {"_class_name": "X", "_diffusers_version": "0.42.1", "text_encoder": ["transformers", "LlamaForCausalLM"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def into_a_pipeline(folder):
    """A plan that also copies the other files of a pipeline."""
    model = pipeline(folder / "pipeline") / "text_encoder"
    return printed("convert", LLAMA, folder / "tuned", "--to", "hf", "--model", model, "--whole-pipeline", "--dry-run")


def in_a_store(source, target, *options):
    """The same plan into a store."""
    return (printed("convert", source, "memory://json/planned", *options, "--dry-run"),)


def test_verify_sign_fingerprint_and_roundtrip(tmp_path):
    digests = held("llama")
    digests["dp0:pp0:pcp0:tp0:renamed"], digests["dp0:pp0:pcp0:tp0:new"] = digests.pop("dp0:pp0:pcp0:tp0:model.norm.weight"), "0"
    shutil.copytree(LLAMA, tmp_path / "step")
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "pub").write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    check("sign", printed("sign", tmp_path / "step", "--key", tmp_path / "key"))
    by_key = printed("verify", tmp_path / "step" / "model.sig", QWEN3, "--signed-by", tmp_path / "pub")
    with server(vllm(digests)) as (address, _):
        check("verify", printed("verify", LLAMA, QWEN3), printed("verify", LLAMA, address), by_key)
    check("fingerprint", printed("fingerprint", LLAMA), printed("fingerprint", LLAMA, "--full"))
    check("roundtrip", printed("roundtrip", LLAMA, "--to", "vllm"))


def test_diff_stats_cat_and_export(tmp_path):
    assert reshard("convert", LLAMA, tmp_path / "fp16", "--to", "hf", "--dtype", "fp16").code == 0
    check("diff", printed("diff", LLAMA, tmp_path / "fp16", "--full"), printed("diff", LLAMA, QWEN3, "--threshold", 1))
    check("log", printed("log", FIXTURES / "delta"), printed("log", FIXTURES / "delta", "--stats"))
    check("stats", printed("stats", LLAMA, "*norm*"))
    check("cat", printed("cat", LLAMA, "lm_head.weight"), printed("cat", LLAMA, "lm_head.weight", "--slice", "0,0"))
    check("export", *(printed("export", LLAMA, "model.norm.weight", "-o", tmp_path / name) for name in ("x.npy", "x.safetensors")))


def test_explain(tmp_path):
    for name, options in (("fp8", ("--dtype", "fp8")), ("back", ("--dtype", "bf16"))):
        source = LLAMA if name == "fp8" else tmp_path / "fp8"
        assert reshard("convert", source, tmp_path / name, "--to", "hf", *options).code == 0
    check("explain", printed("explain", tmp_path / "back", LLAMA), printed("explain", LLAMA, QWEN3))


def test_digests(tmp_path):
    arguments = ("digests", LLAMA, "--to", "vllm")
    alone, key, answer = printed(*arguments), "dp0:pp0:pcp0:tp0:model.norm.weight", tmp_path / "server.json"
    found = dict(alone["baseline"])
    found["dp0:pp0:pcp0:tp0:renamed"], found["dp0:pp0:pcp0:tp0:new"] = found.pop(key), "0"
    answer.write_text(json.dumps({"checksums": found}))
    check("digests", alone, printed(*arguments, "--compare", answer), printed("digests", LLAMA, "--to", "sglang"))


def test_a_run_and_its_watch(tmp_path):
    for step in (1, 2):
        shutil.copytree(FSDP2 / "checkpoint", tmp_path / "run" / f"step-{step}")
    check("inspect RUN", printed("inspect", tmp_path / "run"), printed("inspect", pipeline(tmp_path / "pipeline")))
    lines = reshard("watch", tmp_path / "run", "--to", "hf", "--into", tmp_path / "out/{step}", *MODEL, "--all", "--json").out
    kept = reshard("delta", "--of", tmp_path / "run", tmp_path / "kept", *MODEL, "--json").out
    check("watch", *map(json.loads, (lines + kept).splitlines()))


def test_doctor():
    check("doctor", printed("doctor", LLAMA, "--deep"))
    check("doctor --list", printed("doctor", "--list"))


def test_cache_and_serve_check(tmp_path):
    where = ("--cache", tmp_path)
    check("cache get", printed("cache", "get", LLAMA, "--to", "vllm", *where))
    check("cache list", printed("cache", "list", *where))
    check("cache clean", printed("cache", "clean", *where))
    check("serve-check", printed("serve-check", LLAMA))


def test_degrees(config):
    check("degrees", printed("degrees", config, "--tp", "3,4", "--gpu-memory", "80GiB", "--max-model-len", 8192))


def test_estimate(config):
    check(
        "estimate",
        printed("estimate", config, "--gpus", 8, "--seq-len", 128, "--link", "1GB"),
        printed("estimate", "--parameters", "7B", "--gpus", "8,16", "--pp", 2, "--gpu-memory", "80GB", "--max-bubble", "10%"),
    )


def test_learn():
    """The document of a layout that lies in the fixtures: the command itself needs vLLM."""
    from importlib import import_module

    from reshard.adapter.serving_format.learned import read_layout

    document = import_module("reshard.cli.commands.look.learn").document
    layouts = sorted((FIXTURES / "learned").glob("*/layout.json"))
    documents = [{"schema_version": 1, **document(read_layout(str(path)), "layout.json", 1.0)} for path in layouts]
    # No model of the fixtures has a tensor that the engine computes.
    check("learn", *documents, {**documents[0], "problems": {"a": "b"}})
    schema = json.loads((SCHEMAS / "layout.json").read_text())
    assert not [wrong for path in layouts for wrong in violations(json.loads(path.read_text()), schema)]


def test_lists():
    check("formats", printed("formats"))
    check("versions", printed("versions"))
    check("architectures", printed("architectures"), printed("architectures", "--start", LLAMA))


def test_env_and_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("LANG", "C.UTF-8")
    check("env", printed("env"))
    stopped = conversion(library.plan(LLAMA, to="hf"), tmp_path / "out").run()
    next(stopped), stopped.close()
    in_store = conversion(library.plan(LLAMA, to="hf"), "memory://json/out").run()
    next(in_store), in_store.close()
    check("clean", printed("clean", tmp_path), printed("clean", tmp_path, "--yes"), printed("clean", "memory://json", "--yes"))


def test_several_checkpoints():
    schema = json.loads((SCHEMAS / "inspect-several.json").read_text())
    several = printed("inspect", LLAMA, QWEN3)
    assert not list(violations(several, schema))
    alone = printed("inspect", LLAMA)
    assert several["checkpoints"][0] == {key: alone[key] for key in alone if key != "schema_version"}
    check("fingerprint several", printed("fingerprint", LLAMA, QWEN3, "--full"))


def test_errors():
    check("errors", printed("inspect", "nowhere"), printed("inspect", LLAMA, "--nonsense"))


def test_a_schema_refuses_what_it_does_not_allow():
    schema, good = json.loads((SCHEMAS / "roundtrip.json").read_text()), printed("roundtrip", LLAMA, "--to", "vllm")
    assert not list(violations(good, schema))
    for bad in (
        {**good, "tensors": "21"},
        {**good, "new": 1},
        {**good, "losses": [1]},
        {**good, "lossless": 1},
        {**good, "schema_version": 2},
    ):
        assert len(list(violations(bad, schema))) == 1
    assert list(violations({key: good[key] for key in good if key != "bytes"}, schema)) == ["$: bytes is missing"]
