"""What one release of vLLM takes, asked of vLLM itself: classes, model types, quantizations, values of configs, and names of weights.

    python tests/serving/takes_names.py REQUESTS ANSWER

REQUESTS is a JSON list of {"model": folder with config.json, "sources": {name: [dtype, shape]}, "forms": {form: {name: other}}}, and
"class_sizes": {function or class of vLLM: {argument: value}}, what towers get in place of the sizes that vLLM's code gives them.
ANSWER gets one JSON document: the facts of the release, and for each request the forms of names with which vLLM's own loader fills the
same elements of the same tensors as with the names in `sources`, or why it does not take those.

Environment: that of tests/serving/requirements.txt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# By its folder: plugins/vllm.py would hide vLLM.
_TRACER = Path(__file__).resolve().parents[2] / "plugins" / "loader_tracer"
_SPEC = importlib.util.spec_from_file_location("loader_tracer", _TRACER / "__init__.py", submodule_search_locations=[str(_TRACER)])
assert _SPEC and _SPEC.loader
sys.modules["loader_tracer"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["loader_tracer"])

from loader_tracer import trace as tracer  # noqa: E402
from loader_tracer import vllm_ranks as engine  # noqa: E402
from loader_tracer.ranks import Case  # noqa: E402

# JSON's kinds of values, by the types in the annotations of transformers' config classes.
KINDS = {int: "int", float: "float", bool: "bool", str: "str", list: "list", tuple: "list", dict: "dict", type(None): "null"}
# A key whose type is that of this many config classes counts for all.
CLASSES_OF_A_KEY = 3


def main(requests: Path, answer: Path) -> None:
    """Answer the requests."""
    engine.prepare()
    asked = json.loads(requests.read_text())
    answer.write_text(json.dumps({"facts": facts(), "taken": [forms_taken(each) for each in asked]}))


def facts() -> dict[str, Any]:
    """What the release knows, apart from names of weights."""
    import transformers
    import vllm
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY, MODEL_MAPPING_NAMES

    of_transformers = [name for name in dir(transformers) if re.search(r"(?:Model|For[A-Z]\w+)$", name) and not name.startswith("Auto")]
    return {
        "release": vllm.__version__,
        "classes": sorted(registry.ModelRegistry.models),
        "removed": registry._PREVIOUSLY_SUPPORTED_MODELS,
        "suffixes": [suffix for suffix, _ in suffixes()],
        "refused_quantization": refused_methods(quantization),
        "known_quantization": known_methods(quantization),
        "transformers": transformers.__version__,
        "transformers_classes": sorted(of_transformers),
        "config_types": sorted(transformers.CONFIG_MAPPING),
        "model_types": sorted({*_CONFIG_REGISTRY} - {*transformers.CONFIG_MAPPING}),
        "types_with_a_class": sorted(MODEL_MAPPING_NAMES),
        "config_values": config_values(transformers),
        "config_keys": config_keys(transformers, {*_CONFIG_REGISTRY}),
    }


def refused_methods(quantization: Any) -> list[str]:
    """The methods of transformers' quantizers that no class of vLLM takes, as ModelConfig._verify_quantization looks for one. Methods that
    an option allows are not among them."""
    methods = [quantization.get_quantization_config(name) for name in quantization.QUANTIZATION_METHODS]

    def is_taken(name: str) -> bool:
        settings = {"quant_method": name, "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False}
        for method in methods:
            try:
                if method.override_quantization_method(settings, None, hf_config=None) is not None:
                    return True
            except Exception:  # it reads settings or a config that are not there, and so may take it
                return True
        return False

    return [name for name in known_methods(quantization) if name not in quantization.QUANTIZATION_METHODS and not is_taken(name)]


def known_methods(quantization: Any) -> list[str]:
    """The methods that vLLM's tables or transformers' quantizers name: vLLM refuses any other (ModelConfig._verify_quantization)."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return sorted({*quantization.QUANTIZATION_METHODS, *AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"})


def suffixes() -> Iterable[tuple[str, Any]]:
    """The endings of classes that vLLM exchanges for one another to find a class of its own."""
    from vllm.config.model import iter_architecture_defaults

    return iter_architecture_defaults()


def config_values(transformers: Any) -> dict[str, str]:
    """Key of a config -> the kinds of values that any of transformers' config classes allows for it. Only keys of numbers and flags."""
    kinds: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for model_type in transformers.CONFIG_MAPPING:
        cls = transformers.CONFIG_MAPPING[model_type]
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            kinds.setdefault(field.name, set()).update(_kinds(field.type))
            counts[field.name] = counts.get(field.name, 0) + 1
    return {
        key: " ".join(sorted(found))
        for key, found in sorted(kinds.items())
        if found & {"int", "float", "bool"} and not found & {"str", "any"} and counts[key] >= CLASSES_OF_A_KEY
    }


def config_keys(transformers: Any, own: set[str]) -> dict[str, list[str]]:
    """Model type -> the keys that its config class has, and so checks. A key of another class is kept as it is. own: types that vLLM reads
    by classes of its own, which check nothing."""
    classes = {model_type: transformers.CONFIG_MAPPING[model_type] for model_type in transformers.CONFIG_MAPPING if model_type not in own}
    return {
        model_type: sorted(field.name for field in dataclasses.fields(cls))
        for model_type, cls in classes.items()
        if dataclasses.is_dataclass(cls)
    }


def _kinds(annotation: Any) -> set[str]:
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, typing.get_args(annotation)))
    kind = KINDS.get(origin, "any")
    return {"int", "float"} if kind == "float" else {kind}


def forms_taken(request: dict[str, Any]) -> dict[str, Any]:
    """The forms of names with which a model is filled as with its own names; "failed" if it is not with these."""
    case = Case(tp=1, pp=1, ep=1)
    sources = {name: (dtype, tuple(shape)) for name, (dtype, shape) in request["sources"].items()}
    forms = {"": {name: name for name in sources}, **request["forms"]}
    with contextlib.ExitStack() as until:
        try:
            config = engine.engine_config(request["model"], case, trust_remote_code=False)
            _give_sizes(request["class_sizes"], until)
        except Exception as error:
            return {"failed": tracer._reason(error)}
        held = {
            form: _held(config, case, {renames[name]: header for name, header in sources.items()}, renames)
            for form, renames in forms.items()
        }
    own = held.pop("")
    return {"failed": own} if isinstance(own, str) else {"forms": [form for form, tensors in held.items() if tensors == own]}


def _give_sizes(given: dict[str, dict[str, Any]], until: contextlib.ExitStack) -> None:
    """Let functions and classes be called with other sizes than vLLM's code gives them, until `until` ends."""
    for path, sizes in given.items():
        module, _, name = path.rpartition(".")
        owner = importlib.import_module(module)
        real = getattr(owner, name)
        until.callback(setattr, owner, name, real)
        setattr(owner, name, lambda *args, real=real, sizes=sizes, **names: real(*args, **{**names, **sizes}))


def _held(config: Any, case: Case, sources: Any, renames: dict[str, str]) -> Any:
    """The tensors after loading `sources`, with the names of the elements in them as they were before `renames`; a text if it fails."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_traced, args=(send, config, case, sources, renames))
    process.start()
    send.close()
    try:
        return json.loads(receive.recv_bytes())
    except EOFError:
        return "its process ended"
    finally:
        process.join()


def _traced(send: Any, config: Any, case: Case, sources: Any, renames: dict[str, str]) -> None:
    before = {new: old for old, new in renames.items()}
    try:
        tensors: Any = tracer.trace(engine, config, case, 0, sources)["tensors"]
        for tensor in tensors.values():
            for part in tensor.get("parts", ()):
                part[0] = before[part[0]]
    except BaseException as error:
        tensors = tracer._reason(error)
    send.send_bytes(json.dumps(tensors).encode())
    send.close()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
