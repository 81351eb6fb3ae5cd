"""What vLLM 0.32 and SGLang 0.5.23 take: makes formats/vllm/release.json, formats/sglang/release.json and the file of
transformers beside reshard/adapter/serving_format/release.py, or compares them.

    python tests/serving/release.py [--check] [--sglang WHEEL] [--only MODEL ...]

With --only, these models of tests/helpers/declared_models.py alone are tried, and what is known of other types stays. All of them take 20
minutes of two idle cores; a few take seconds each.

vLLM is asked itself (takes_names.py): its own loader gets each declared model under the names of `FORMS`. SGLang's wheel is read as text,
and no name of a weight was tried with it: its loaders leave unknown names out without a word.

Environment of this script: reshard's own; it starts that of tests/serving/requirements.txt.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIXTURES = ROOT / "fixtures"
sys.path[:0] = [str(HERE), str(HERE.parent), str(FIXTURES), str(FIXTURES / "vllm_declared")]

import named_weights  # noqa: E402
from helpers.declared_models import declared_models, type_of_model  # noqa: E402
from recipes import READ_AS  # noqa: E402

from reshard.adapter.serving_format.release import forms_of  # noqa: E402
from reshard.models.lookup import built_in_model_types, find_model  # noqa: E402

# Without a class in vLLM 0.32, or one that takes other files or names.
NOT_ASKED = ("dbrx", "deepseekocr", "internlm", "longcat_flash_ngram", "minimax_m1", "qwen", "refinedweb", "refinedwebmodel")
# What vLLM reads as another type, as its config comes with the checkpoint; keys that published configs have and the fixture lacks.
READ = {**READ_AS, "internlm2": {"model_type": "llama"}, "sarvam_mla": {"model_type": "deepseek_v3"},
        "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}}  # fmt: skip
OF_TRANSFORMERS = ("transformers_classes", "config_types", "checked_types", "config_values", "config_keys")
RELEASES = ROOT / "reshard" / "adapter" / "serving_format"
PYTHON = Path(os.environ.get("RESHARD_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def models(only: list[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The small declared models that vLLM can be asked about without the code of a checkpoint."""
    for name, config, about in declared_models():
        if (not only or name in only) and name not in NOT_ASKED and "config_class" not in about:
            yield name, config, about


def requests(folder: Path, only: list[str]) -> dict[str, dict[str, Any]]:
    """A request for each model, by its name."""
    asked = {}
    for name, config, about in models(only):
        model, place = find_model(config), folder / name
        assert model is not None
        weights = {weight.name: weight.shape for weight in model.weights.values() if not weight.optional}
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**config, **READ.get(type_of_model(name), {}), "torch_dtype": "bfloat16"}))
        sources = {key: [named_weights.type_of(key, about.get("types", {})), list(shape)] for key, shape in weights.items()}
        asked[name] = {"model": str(place), "sources": sources, "forms": forms_of(model, list(weights)),
                       "class_sizes": about.get("class_sizes", {})}  # fmt: skip
    return asked


def of_vllm(python: Path, only: list[str]) -> dict[str, Any]:
    """The document of vLLM's release."""
    with tempfile.TemporaryDirectory() as work:
        asked = requests(Path(work), only)
        (Path(work) / "requests.json").write_text(json.dumps(list(asked.values())))
        subprocess.run([python, HERE / "takes_names.py", f"{work}/requests.json", f"{work}/answer.json"], check=True)
        answer = json.loads((Path(work) / "answer.json").read_text())
    return {**with_keys_of_declared_types(answer["facts"]), "names": taken_names(asked, answer["taken"])}


def with_keys_of_declared_types(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with the keys that config classes of declared types check: keys -> the types, or after a minus all but these types."""
    declared = {model_type: {*keys} for model_type, keys in facts["config_keys"].items() if model_type in built_in_model_types()}
    groups: dict[str, list[str]] = {}
    for key in facts["config_values"]:
        having = sorted(model_type for model_type, keys in declared.items() if key in keys)
        others = sorted(declared.keys() - {*having})
        if having:
            groups.setdefault(" ".join(having) if len(having) <= len(others) else " ".join(["-", *others]), []).append(key)
    keys = {" ".join(of_group): types for types, of_group in groups.items()}
    values = {key: kinds for key, kinds in facts["config_values"].items() if any(key in of_group for of_group in groups.values())}
    return {**facts, "checked_types": sorted(declared), "config_values": values, "config_keys": keys}


def taken_names(asked: dict[str, dict[str, Any]], taken: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By model type the forms of names that are taken; with a question mark those that some models of the type take."""
    by_type: dict[str, dict[str, set[bool]]] = {}
    for (name, request), answer in zip(asked.items(), taken, strict=True):
        if "failed" in answer:
            print(f"{name}: not traced: {answer['failed']}", file=sys.stderr)
            continue
        forms = by_type.setdefault(type_of_model(name), {})
        for form in request["forms"]:
            forms.setdefault(form, set()).add(form in answer["forms"])
    return {
        model_type: [form + "?" * (len(is_taken) - 1) for form, is_taken in forms.items() if True in is_taken]
        for model_type, forms in sorted(by_type.items())
    }


def of_sglang(wheel: Path, vllm: dict[str, Any]) -> dict[str, Any]:
    """The document of SGLang's release, from its wheel. It installs the release of transformers that vLLM's document names."""
    classes, pipelines = set[str](), set[str]()
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = archive.read(metadata).decode()
        version, of_transformers = re.search(r"^Version: (.+)$", about, re.M), re.search(r"transformers==([\d.]+)", about)
        assert version and of_transformers and of_transformers[1] == vllm["transformers"]
        for path in archive.namelist():
            if re.fullmatch(r"sglang/srt/models/\w+\.py", path):
                classes |= entry_classes(ast.parse(archive.read(path)))
            if re.fullmatch(r"sglang/multimodal_gen/runtime/pipelines/\w+\.py", path):
                pipelines |= {*re.findall(r'^    pipeline_name = "(\w+)"$', archive.read(path).decode(), re.M)}
        methods = quantization_methods(ast.parse(archive.read("sglang/srt/layers/quantization/__init__.py")))
    return {
        "release": version[1],
        "classes": sorted(classes),
        "pipelines": sorted(pipelines - {"DiffusersPipeline"}),
        "removed": {},
        "suffixes": [],
        "refused_quantization": sorted(method for method in vllm["refused_quantization"] if method not in methods),
        "transformers": vllm["transformers"],
        "model_types": [],
        "types_with_a_class": [],
        "names": {},
    }


def entry_classes(module: ast.Module) -> set[str]:
    """The names of the classes that a module of models registers."""
    values = (node.value for node in module.body if isinstance(node, ast.Assign) and "EntryClass" in map(ast.unparse, node.targets))
    return {name.id for value in values for name in ast.walk(value) if isinstance(name, ast.Name)}


def quantization_methods(module: ast.Module) -> set[str]:
    """The methods that any platform has: the keys of all tables."""
    return {key.value for node in ast.walk(module) if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}


def written(document: dict[str, Any]) -> str:
    """A document as it is stored: lists of words as lines of several words."""
    packed = {key: lines_of(value) for key, value in document.items()}
    packed["names"] = {model_type: " ".join(forms) for model_type, forms in document["names"].items()} if "names" in document else None
    return json.dumps({key: value for key, value in packed.items() if value is not None}, indent=1) + "\n"


def lines_of(value: Any) -> Any:
    """A list of words as lines of at most 130 characters; any other value unchanged."""
    return textwrap.wrap(" ".join(value), 130, break_on_hyphens=False, break_long_words=False) if isinstance(value, list) else value


def divided(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is the engine's, and what is that of the release of transformers that it runs with."""
    return (
        {key: value for key, value in document.items() if key not in OF_TRANSFORMERS},
        {key: document[key] for key in OF_TRANSFORMERS},
    )


def main() -> int:
    """Make or compare; the number of documents that differ."""
    words = sys.argv[1:]
    only = words[words.index("--only") + 1 :] if "--only" in words else []
    vllm, stored = of_vllm(PYTHON, only), ROOT / "formats" / "vllm" / "release.json"
    if only and "--check" not in words:
        others = json.loads(stored.read_text())["names"]
        vllm["names"] = dict(sorted({**{key: forms.split() for key, forms in others.items()}, **vllm["names"]}.items()))
    documents = {
        ROOT / "formats" / "vllm" / "release.json": divided(vllm)[0],
        RELEASES / f"transformers-{vllm['transformers']}.json": divided(vllm)[1],
    }
    if "--sglang" in words:
        documents[ROOT / "formats" / "sglang" / "release.json"] = of_sglang(Path(words[words.index("--sglang") + 1]), vllm)
    return sum(
        not same(path, document, only) if "--check" in words else not path.write_text(written(document))
        for path, document in documents.items()
    )


def same(path: Path, document: dict[str, Any], only: list[str]) -> bool:
    """Whether a file says the same; with `only`, the names of these models alone are compared."""
    stored, new = json.loads(path.read_text()), json.loads(written(document))
    if only and "names" in new:
        stored["names"] = {key: forms for key, forms in stored["names"].items() if key in new["names"]}
    differing = [key for key in {**stored, **new} if stored.get(key) != new.get(key)]
    if differing:
        print(f"{path}: differs in {', '.join(differing)}", file=sys.stderr)
    return not differing


if __name__ == "__main__":
    sys.exit(main())
