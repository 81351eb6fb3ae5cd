"""The slow check of layouts that are learned from SGLang's own loader, against real SGLang ranks.

    python tests/serving/learned_sglang.py [--long] [--reshard PATH] [--python PATH]

1. For every model of fixtures/sglang: files by a learned layout hold what real ranks hold, bit for bit, at TP 2; with --long at all sizes
   that were compared. The declared rules are compared with the same references (tests/formats/test_sglang.py).
2. Tiny models of other kinds of loaders (tiny_models.py): the same at TP 1 and 2 against real ranks that are started here, and SGLang's own
   ShardedStateLoader loads the files. The files of `convert --learn`, for a type without a declaration, hold the same as real ranks.
3. A layout of TP 1, 2 and 4 covers TP 8, and equals the layout that is traced there.
4. SGLang's loader takes an adapter of experts that `--to peft --engine sglang` writes, and its buffers hold the updates; fused experts stop
   it, as serve-check says.
5. With --long: every type that tiny_models.py makes is traced at TP 1 and 2, and the rows of docs/reference/traced-models.md are printed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[1] / "fixtures"
sys.path[:0] = [str(HERE), str(HERE.parent), str(FIXTURES)]

import learned  # noqa: E402
import makers  # noqa: E402
import torch  # noqa: E402
from check import HF  # noqa: E402
from helpers.fixture_places import read_reference  # noqa: E402
from helpers.framework_environments import LONG, Environment, run_checks  # noqa: E402
from learned import Sizes  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from reshard.serving.learned.layout import LearnedLayout  # noqa: E402
from reshard.verbs.look.learn import write_layout  # noqa: E402

SGLANG = Environment("SGLang", HERE / "sglang_requirements.txt", options=("--no-deps",))
# SGLang's Transformers backend refuses more ranks than KV heads.
TWO_SIZES = ("seed_oss",)
# Experts, stacked experts, convolutions and segments of one tensor, norms per head, towers. No state-space models: of A = -exp(A_log) torch
# gives other last bits than the nearest number, which is written.
TINY = ("qwen3_next", "gpt_oss", "glm4_moe", "deepseek_v3", "gemma3_text", "lfm2", "olmo2", "qwen3_vl")
if LONG:
    TINY = (
        *TINY,
        *("qwen3_5_text", "kimi_linear", "minimax_m2", "cohere2", "starcoder2", "seed_oss"),
        *("granite", "stablelm", "ernie4_5_moe", "hy_v3", "glm4v", "qwen2_5_vl", "opt", "gptj"),
    )


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    yield from compared(reshard, python, work)
    yield from tiny(reshard, python, work)
    yield from in_one_command(reshard, python, work)
    yield from experts(reshard, python, work)
    if LONG:
        learned.make_tiny(python, work / "types", learned.TYPES)
        folders = sorted(path.parent for path in (work / "types").glob("*/config.json"))
        found = learned.learned(python, {folder: [{"tp": 1}, {"tp": 2}] for folder in folders}, "sglang")
        for folder, layout in found.items():
            print(learned.row_of(folder.name, layout))
        traced = [folder for folder, layout in found.items() if isinstance(layout, LearnedLayout)]
        yield "60 types are traced", len(traced) >= 60, f"{len(traced)}"


def compared(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Files by a learned layout against the references of real ranks."""
    also = makers.load("sglang").ALSO
    references = [read_reference(path) for path in sorted((FIXTURES / "sglang").glob("*/*.json"))]
    chosen = [each for each in references if LONG or (each["tp"], each["ep"]) == (2, 1)]
    cases: dict[Path, list[Sizes]] = {}
    for each in chosen:
        folder = work / "hf" / each["model"]
        if folder not in cases:
            shutil.copytree(HF / each["model"], folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | also.get(each["model"], {})))
        cases.setdefault(folder, []).append({"tp": each["tp"], "ep": each["ep"]})
    layouts = learned.learned(python, cases, "sglang")
    for each in chosen:
        sizes, folder = {"tp": each["tp"], "ep": each["ep"]}, work / "hf" / each["model"]
        what = f"{each['model']} at {learned.spelled(sizes)}: files by a learned layout hold what real ranks hold"
        found, detail = written(reshard, layouts[folder], folder, work, sizes)
        yield what, found == each["ranks"], detail or different(found, each["ranks"])


def tiny(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """The same for tiny models, against real ranks that are started here; and SGLang loads the files."""
    learned.make_tiny(python, work / "tiny", TINY)
    folders = {name: work / "tiny" / name for name in TINY}
    sizes = {name: (1, 2) if name in TWO_SIZES else (1, 2, 4) for name in TINY}
    layouts = learned.learned(python, {folders[name]: [{"tp": tp} for tp in sizes[name]] for name in TINY}, "sglang")
    files = {
        (name, tp): written(reshard, layouts[folders[name]], folders[name], work, {"tp": tp}, f"{name}-{tp}")
        for name in TINY
        for tp in (1, 2)
    }
    from_weights = real_ranks(python, work, [(name, folders[name], tp, False) for name, tp in files])
    from_files = real_ranks(python, work, [(name, work / f"{name}-2", 2, True) for name in TINY])
    for ((name, tp), (found, detail)), real in zip(files.items(), from_weights, strict=True):
        what = f"{name} at TP {tp}: files by a learned layout hold what real ranks hold"
        yield what, found == real, detail or (real if isinstance(real, str) else different(found, real))
    for name, real in zip(TINY, from_files, strict=True):
        yield f"{name} at TP 2: SGLang's ShardedStateLoader loads the files", real == files[name, 2][0], str(real)[-1500:]
    yield from learned.closed(python, {folder: each for folder, each in layouts.items() if isinstance(each, LearnedLayout)})


def in_one_command(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """`convert --learn` of a type without a declaration holds what real ranks hold; the second time the layout is there."""
    name, library = learned.WITHOUT_DECLARATION, work / "library"
    learned.make_tiny(python, work / "tiny", (name,))
    (real,) = real_ranks(python, work, [(name, work / "tiny" / name, 2, False)])
    for times in ("once", "again"):
        options = ("--tp", "2", "--learn", "--engine-python", str(python), "--layout-dir", str(library))
        found = learned.convert(reshard, work / "tiny" / name, work / "learned-at-once", "sglang", *options)
        kept = [path.name for path in library.glob("*")]
        what = f"{name} with --learn, {times}: files hold what real ranks hold, and one layout is kept"
        is_error = isinstance(found, str) or isinstance(real, str)
        yield what, found == real and not is_error and len(kept) == 1, f"{kept} {found}" if is_error else different(found, real)


def experts(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """What SGLang's loader makes of an adapter of experts, as PEFT stores it and as it is written for SGLang."""
    model, fused, for_sglang = HF / "qwen3_moe", work / "fused-experts", work / "experts-for-sglang"
    shutil.copytree(FIXTURES / "peft/experts/adapter", fused)
    # SGLang takes no v_proj without q_proj, and multiplies lora_B by the scale in its element type.
    tensors = {name: tensor.float() for name, tensor in load_file(fused / "adapter_model.safetensors").items() if ".experts" in name}
    save_file(tensors, fused / "adapter_model.safetensors")
    command = [reshard, "convert", fused, for_sglang, "--to", "peft", "--engine", "sglang", "--model", model, "-q"]
    subprocess.run(list(map(str, command)), check=True)
    questions, answers = work / "adapters.json", work / "of-adapters.json"
    questions.write_text(json.dumps([{"model": str(model), "adapter": str(adapter)} for adapter in (for_sglang, fused)]))
    command = [python, HERE / "sglang_adapters.py", questions, answers]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    updates, refusal = json.loads(answers.read_text())
    settings = json.loads((fused / "adapter_config.json").read_text())
    far, rank, scale = 0.0, settings["r"], settings["lora_alpha"] / settings["r"]
    for name, a in tensors.items() if isinstance(updates, dict) else ():
        if "lora_A" not in name:
            continue
        number, b = name.partition(".layers.")[2].partition(".")[0], tensors[name.replace("lora_A", "lora_B")]
        parts = ("gate", "up") if ".base_layer." in name else ("down",)
        of_experts = zip(a.reshape(-1, rank, a.shape[1]), b.reshape(len(b), rank, -1).permute(2, 0, 1), strict=True)
        for expert, (own_a, own_b) in enumerate(of_experts):
            for part, rows in zip(parts, own_b.chunk(len(parts)), strict=True):
                far = max(far, float((scale * rows @ own_a - torch.tensor(updates.pop(f"{number}.{expert}.{part}"))).abs().max()))
    is_loaded = isinstance(updates, dict) and not any(torch.tensor(update).any() for update in updates.values())
    what = "SGLang's buffers hold the updates of experts of `--engine sglang`, and no others"
    yield what, is_loaded and len(tensors) > 0 and far < 1e-5, str(updates)[:300] if isinstance(updates, str) else f"{far:.1e}"
    yield "SGLang stops at fused experts", "Cannot find target module name" in str(refusal), str(refusal)[:500]


def written(
    reshard: Path, layout: LearnedLayout | str, folder: Path, work: Path, sizes: Sizes, name: str = "out"
) -> tuple[dict[str, Any], str]:
    """What the files of a conversion by a layout hold, and the error if there are none."""
    if not isinstance(layout, LearnedLayout):
        return {}, layout
    write_layout(layout, work / "layout.json")
    options = [word for size, number in sizes.items() for word in (f"--{size}", str(number))]
    found = learned.convert(reshard, folder, work / name, "sglang", *options, "--layout", str(work / "layout.json"), "--accept-platform")
    return ({}, found) if isinstance(found, str) else (found, "")


def real_ranks(python: Path, work: Path, questions: list[tuple[str, Path, int, bool]]) -> list[dict[str, Any] | str]:
    """What real SGLang ranks hold, or the error, for each question: a model type, its folder, TP, whether the folder has ranks' files."""
    asked = [{"name": name, "folder": str(folder), "tp": tp, "sharded": sharded} for name, folder, tp, sharded in questions]
    (work / "questions.json").write_text(json.dumps(asked))
    command = [python, HERE / "sglang_ranks.py", work / "questions.json", work / "answers.json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    answers: list[dict[str, Any] | str] = json.loads((work / "answers.json").read_text())
    return answers


def different(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first tensors that differ."""
    lines = [
        f"{rank} {name}: {found.get(rank, {}).get(name)}, real ranks have {expected.get(rank, {}).get(name)}"
        for rank in sorted(found.keys() | expected.keys())
        for name in sorted(found.get(rank, {}).keys() | expected.get(rank, {}).keys())
        if found.get(rank, {}).get(name) != expected.get(rank, {}).get(name)
    ]
    return "\n".join(lines[:5])


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, SGLANG, __doc__))
