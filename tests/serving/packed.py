"""The slow check of packed weights: real vLLM lays out the fixtures in fixtures/hf_packed as reshard does, and loads what it writes.

    python tests/serving/packed.py [--engine-python PYTHON] [--long] [case ...]

The cases are those fixtures, models that --quantize makes of stacked experts, and experts in the forms of other libraries.
Each case is traced with vLLM's own loader, as by `reshard learn`, at TP 2, with --long at TP 1, 2 and 4, and with experts also at EP 2.
It is converted with the learned layout and with reshard's own rules: all names, shapes, element types and bytes must be equal. For the
files of each rank real vLLM is built (built.py): its tensors, by which one sees what it takes for quantized, must be those in the files.
The sizes that `reshard degrees` refuses are those that vLLM refuses. That the values are those of the libraries is checked by
fixtures/hf_packed/make.py --check, in its own environment.

vLLM's build for CPUs has kernels for the linear layers of some forms, and for no experts. For models in these forms ("decoded") it is
started on what reshard wrote, and answers with the tokens and log-probabilities of the Hugging Face folder.

Two cases run at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"))

import seeded_models
from check import VLLM, compared, decode, served
from helpers.asked_process import Ask, asking
from helpers.framework_environments import LONG

import reshard
from reshard.errors import ReshardError, UnsupportedError
from reshard.serving.learned.learn import learned_layout, traced_rank
from reshard.verbs.look.learn import config_of, write_layout

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent.parent / "fixtures" / "hf_packed"
CASES = ("llama-ct-int4", "llama-ct-int4-asym", "llama-ct-int4-channel", "llama-ct-nvfp4", "llama-ct-mxfp4", "llama-ct-mxfp8",
         "llama-modelopt-nvfp4", "llama-modelopt-mxfp8", "llama-awq", "llama-gptq", "qwen3_moe-ct-mxfp4", "qwen3_moe-ct-int4",
         "qwen3_moe-ct-mxfp8", "qwen3_moe-ct-nvfp4", "gpt_oss-mxfp4", "llama-modelopt-nvfp4-kv", "llama-modelopt-fp8",
         "llama-modelopt-fp8-channel", "llama-ct-fp8-int4", "llama-modelopt-mixed", "llama-ct-w8a8",
         "llama-autofp8-kv", "llama-quark-fp8", "blocks modelopt", "quantized llama4_text",
         "quantized qwen3_vl_moe",
         *(f"quantized {model} {form}" for model in ("llama", "qwen3_moe") for form in ("nvfp4", "mxfp8", "fp8-channel")),
         *(f"linear {form}" for form in seeded_models.LINEAR), *(f"experts {form}" for form in seeded_models.EXPERTS))  # fmt: skip
# Those whose form vLLM's build for CPUs computes.
DECODED = ("llama-ct-int4", "llama-ct-int4-asym", "llama-ct-int4-channel", "llama-ct-fp8-int4", "llama-awq", "llama-gptq", "llama-gptq-v2",
           "llama-modelopt-fp8-channel")  # fmt: skip
SIZES = (1, 2, 4) if LONG else (2,)
AT_A_TIME = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", help=f"of an environment that has vLLM; made in {VLLM.folder.name} if not given")
    parser.add_argument("--long", action="store_true", help="all sizes")
    parser.add_argument("cases", nargs="*", default=(*CASES, *(f"decoded {case}" for case in DECODED)))
    given = parser.parse_args()
    python = given.engine_python or str(VLLM.python())
    failed = 0
    with engines(Path(python)) as (ask, built), ThreadPoolExecutor(AT_A_TIME) as pool:

        def check(case: str) -> list[str]:
            with tempfile.TemporaryDirectory() as work:
                try:
                    if case.startswith("decoded "):
                        return list(decoded_otherwise(case.removeprefix("decoded "), Path(work), ask))
                    return list(differences(prepared(case, Path(work)), Path(work), built))
                except ReshardError as error:
                    return [str(error)]

        for case, different in zip(given.cases, pool.map(check, given.cases), strict=True):
            failed += bool(different)
            print(f"{'FAILED' if different else 'passed'}  {case}" + "".join(f"\n        {each}" for each in different), flush=True)
    print(f"{len(given.cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


@contextlib.contextmanager
def engines(python: Path) -> Iterator[tuple[Ask, Ask]]:
    """Real vLLM that is started (server.py), and one that is only built and traced (built.py)."""
    with (
        tempfile.TemporaryDirectory() as hub,
        served(python, Path(hub)) as ask,
        asking([python, HERE / "built.py"], {**os.environ, "PYTHONPATH": str(HERE / "startup")}) as built,
    ):
        yield one_at_a_time(ask), one_at_a_time(built)


def one_at_a_time(ask: Ask) -> Ask:
    """What can be asked by several threads."""
    lock = threading.Lock()

    def alone(request: dict[str, Any]) -> Any:
        with lock:
            return ask(request)

    return alone


def decoded_otherwise(case: str, work: Path, ask: Ask) -> Iterator[str]:
    """What vLLM answers otherwise from the files of two ranks than from the Hugging Face folder."""
    write_decodable(case, work / "source")
    reshard.convert(reshard.plan(work / "source", to="vllm", tp=2), work / "ranks")
    found, expected = decode(ask, work / "ranks", 2, "sharded_state"), decode(ask, work / "source", 2, "auto")
    _, is_same, detail = compared(case, found, expected)
    if not is_same:
        yield detail


def write_decodable(case: str, folder: Path) -> None:
    """A model in the form of a fixture, with heads that vLLM's attention on a CPU takes."""
    config = json.loads((FIXTURES / case / "config.json").read_text())
    settings = config["quantization_config"]
    settings |= {"gptq": {"sym": True}, "awq": {"modules_to_not_convert": None}}.get(settings["quant_method"], {})
    sizes = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "num_hidden_layers": 2,
    }
    model = seeded_models.CONFIGS["llama"] | sizes | {"model_type": "llama", "intermediate_size": 256, "quantization_config": settings}
    seeded_models.write_random(model | {"torch_dtype": config.get("dtype") or config["torch_dtype"]}, folder)
    _make_telling(folder / "model.safetensors")


def _make_telling(path: Path) -> None:
    """Give a model values with which it answers differently to different questions."""
    torch.manual_seed(9)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("scales", "weight_scale")):
            tensors[name] = (0.01 + 0.02 * torch.rand(tensor.shape)).to(tensor.dtype)
        elif tensor.dtype.is_floating_point and tensor.ndim == 2:
            tensors[name] = torch.randn(tensor.shape).to(tensor.dtype)
        elif name.endswith(("qweight", "weight_packed")):
            tensors[name] = torch.randint(-(1 << 31), 1 << 31, tensor.shape, dtype=torch.int64).int()
        elif name.endswith(("qzeros", "weight_zero_point")):  # 7 and 8, in the middle of the codes
            bytes_ = torch.tensor([0x77, 0x78, 0x87, 0x88], dtype=torch.uint8)[torch.randint(4, (tensor.numel(), 4))]
            tensors[name] = bytes_.view(torch.int32).reshape(tensor.shape)
    save_file(tensors, path, metadata={"format": "pt"})


def prepared(case: str, work: Path) -> Path:
    """A copy of a case, changed where vLLM does not load it as it is; or a model that is made here."""
    if case not in _CHANGES and not (FIXTURES / case).exists():
        kind, _, name = case.partition(" ")
        {"quantized": _quantized, "experts": _experts, "linear": _linear, "blocks": _blocks}[kind](name, work / "source")
        return work / "source"
    folder = shutil.copytree(FIXTURES / case, work / "source")
    if case in _CHANGES:
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        _CHANGES[case](config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    return folder


def _quantized(name: str, folder: Path) -> None:
    """A model that reshard quantizes, to MXFP4 if no form is named; experts are stacked in it."""
    plain, (model, _, form) = folder.parent / "plain", name.partition(" ")
    if model == "qwen3_vl_moe":
        text = seeded_models.CONFIGS["qwen3_moe"] | {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True}
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
        vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 128, "patch_size": 4}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "spatial_merge_size": 2, "temporal_patch_size": 2}
        config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "tie_word_embeddings": False}
        config |= {
            "text_config": text,
            "vision_config": vision | {"model_type": "qwen3_vl_moe", "in_channels": 3},
            "torch_dtype": "bfloat16",
        }
        seeded_models.write_random(config, plain)
    else:
        seeded_models.write(model, plain, "bfloat16" if form else None)
    reshard.convert(reshard.plan(plain, to="hf", quantize=form or "mxfp4"), folder)


def _experts(name: str, folder: Path) -> None:
    """A model with experts in the form of a library. The values of the form are checked on linear layers."""
    seeded_models.write_random(seeded_models.with_experts(name), folder)


def _linear(name: str, folder: Path) -> None:
    """A model with linear layers and scales of the KV cache in the form of a library; AutoRound stores no g_idx."""
    seeded_models.write_random(seeded_models.with_linear(name), folder)
    tensors = load_file(folder / "model.safetensors")
    stored = {key: tensor for key, tensor in tensors.items() if not key.endswith(".g_idx")}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _blocks(name: str, folder: Path) -> None:
    """A model in ModelOpt's FP8 blocks: the fixture is too narrow to be cut."""
    seeded_models.write_random(seeded_models.in_blocks(), folder)


def _symmetric(config: dict, tensors: dict) -> None:
    """vLLM loads symmetric GPTQ alone; its layout is that of this fixture without the zero points' values."""
    config["quantization_config"]["sym"] = True


def _with_input_scales(config: dict, tensors: dict) -> None:
    """In the scheme without input scales vLLM leaves those of experts unset."""
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    for name in [name for name in tensors if name.endswith(".weight_global_scale")]:
        tensors[name.replace(".weight_global", ".input_global")] = torch.rand(1)


def _of_seven_groups(config: dict, tensors: dict) -> None:
    """Experts of a width that neither 2 nor 4 ranks share evenly, as those of the published models: 2880 are 90 groups of 32."""
    torch.manual_seed(7)
    experts, hidden, width = 4, config["hidden_size"], 7 * 32
    config |= {"intermediate_size": width, "num_local_experts": experts, "num_key_value_heads": 4}
    shapes = {"router.weight": (experts, hidden), "router.bias": (experts,)}
    shapes |= {f"{name}_proj.{kind}": (hidden,) * (2 if kind == "weight" else 1) for name in "kv" for kind in ("weight", "bias")}
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        shapes |= {f"{name}_blocks": (experts, rows, columns // 32, 16), f"{name}_scales": (experts, rows, columns // 32)}
        shapes |= {f"{name}_bias": (experts, rows)}
    for name, tensor in tensors.items():
        if shape := next((shape for end, shape in shapes.items() if name.endswith(end)), None):
            is_packed = tensor.dtype == torch.uint8
            tensors[name] = torch.randint(0, 255, shape, dtype=torch.uint8) if is_packed else torch.randn(shape).to(tensor.dtype)


_CHANGES: dict[str, Callable[[dict, dict], None]] = {
    "llama-gptq": _symmetric,
    "qwen3_moe-ct-nvfp4": _with_input_scales,
    "gpt_oss-mxfp4": _of_seven_groups,
}


def differences(source: Path, work: Path, built: Ask) -> Iterator[str]:
    """What differs between the files by reshard's rules and those by the layout of vLLM's loader, between a rank file and the tensors
    that vLLM has for it, and between the sizes that both take."""
    has_experts = bool(reshard.open(source).model.dimensions.get("experts"))
    problems = {(row.parallel.tp, 1): row.problem for row in reshard.degrees(source, to="vllm", tp=SIZES).rows}
    if has_experts:
        problems |= {(row.parallel.tp, 2): row.problem for row in reshard.degrees(source, to="vllm", tp=(2,), ep=True).rows}
    legal = [sizes for sizes, problem in problems.items() if problem is None]
    layout = learned(source, sorted({tp for tp, _ in legal}), sorted({ep for _, ep in legal}), work, built)
    for tp, ep in legal:
        written = {}
        for name, options in {"rules": {}, "learned": {"layout": layout, "accept_platform": True}}.items():
            out = work / f"{name}-{tp}-{ep}"
            reshard.convert(reshard.plan(source, to="vllm", tp=tp, ep=ep, **options), out)
            written[name] = tensors_of(out)
        yield from built_otherwise(work / f"rules-{tp}-{ep}", tp, ep, built)
        for key in sorted(written["rules"].keys() | written["learned"].keys()):
            ours, theirs = (written[name].get(key) for name in ("rules", "learned"))
            if ours != theirs:
                yield f"TP {tp} EP {ep}, {key}: {ours and ours[:2]} by the rules, {theirs and theirs[:2]} by vLLM"
    for tp, ep in problems.keys() - set(legal):
        if "depends on the kernel" in problems[tp, ep]:
            continue  # and a GPU's is not this platform's
        try:
            learned(source, [tp], [ep], work, built)
            yield f"TP {tp} EP {ep}: refused by the rules ({problems[tp, ep]}), and accepted by vLLM"
        except UnsupportedError:
            pass


def built_otherwise(folder: Path, tp: int, ep: int, built: Ask) -> Iterator[str]:
    """Of the last rank: the tensors that are in its file alone, or in vLLM alone, which then is no form of this file."""
    found = built({"ask": "built", "model": str(folder), "tp": tp, "ep": ep, "rank": tp - 1})
    with safe_open(folder / f"model-rank-{tp - 1}-part-0.safetensors", "pt") as file:
        names = {*file.keys()}
    if isinstance(found, str):
        yield f"TP {tp} EP {ep}, vLLM is not built: {found}"
    elif any(len(names.intersection(of_tensor)) != 1 for of_tensor in found) or not names <= {name for each in found for name in each}:
        yield f"TP {tp} EP {ep}, vLLM is built otherwise: {sorted({name for each in found for name in each} ^ names)}"


def learned(source: Path, tp: list[int], ep: list[int], work: Path, built: Ask) -> Path:
    """The layout by vLLM's loader, as by `reshard learn`. Raises UnsupportedError for sizes that vLLM or its kernels refuse."""
    path = work / "layout.json"
    cases = [{"tp": t, "pp": 1, "ep": e} for e in ep for t in tp if e in (1, t)]
    answer = built({"ask": "traced", "model": str(source.resolve()), "cases": cases})
    if isinstance(answer, str):
        raise RuntimeError(f"the tracer did not finish: {answer}")
    about, *lines = answer
    write_layout(learned_layout(about, map(traced_rank, lines), config_of(source)), path)
    document = json.loads(path.read_text())
    used = {part["from"] for template in document["templates"] for part in template.get("parts", ())}
    if lost := [
        name
        for name, *_ in document["sources"]
        if name.endswith(("scale", "scales"))
        and not name.endswith("input_scale")
        and _without_expert(name) not in map(_without_expert, used)
    ]:
        raise UnsupportedError(f"{lost[0]}: a rank has less than a group, and gets no scale; the kernels, which are absent here, refuse it")
    for template in document["templates"]:
        # vLLM allocates the shapes of packed experts in bfloat16, and does not read them.
        if any(part["from"].endswith("weight_shape") for part in template.get("parts", ())):
            template["dtype"] = "I64"
    for stage in document["stages"]:
        for name, _, number, *_ in stage["tensors"]:
            # vLLM leaves them unset where activations are not quantized. reshard writes 1, and says so.
            if name.endswith("_input_global_scale") and not document["templates"][number].get("parts"):
                document["templates"][number] |= {"fill": 1.0, "problem": ""}
    path.write_text(
        json.dumps({key: value for key, value in document.items() if key != "digest"})
    )  # it was that of the document as learned
    return path


def _without_expert(name: str) -> str:
    return re.sub(r"experts\.[^.]+\.", "experts.", name)


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(file, tensor) -> its element type, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                words = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[f"{path.name} {name}"] = str(tensor.dtype), tuple(tensor.shape), words
    return found


if __name__ == "__main__":
    sys.exit(main())
