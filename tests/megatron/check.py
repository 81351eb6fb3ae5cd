"""The slow check: real megatron-core loads what reshard wrote, its logits are transformers', and it goes on training.

    python tests/megatron/check.py [--reshard PATH] [--python PATH] [--long]

Makes the Megatron environment (.venv-megatron) where there is none. On CPU ranks over gloo, by files of both formats, each as a check:
1. a Hugging Face folder: every rank loads its part, the weights have the folder's bits, the logits are transformers' of that folder;
   with two query heads exchanged on the way they are not;
2. a run saves and goes on; reshard converts what it saved; another run loads that at the same sizes or at others, with the same
   optimizer or the other one: masters, moments and step have the bits of the run that saved, and the losses are those of the run that was
   never stopped, bit by bit at the same sizes. With one parameter's moment for another's the check fails;
3. tiny models of declared model types, converted to one of the formats, with --long to both: a model is built from nothing but the
   settings that reshard wrote, loads its weights, and has transformers' logits; what Megatron's own writer then saves has the folder's bits
   again, and one step trains all parameters. With another window in the folder's config the logits differ. Of a type that transformers has
   no class for, the logits are those of one that computes the same (tiny_models.py, TWINS);
4. FSDP2's bundled checkpoint: Megatron's distributed optimizer has the state that the FSDP2 run told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from helpers.asked_process import Ask, asking  # noqa: E402
from helpers.fixture_places import exchange_query_heads  # noqa: E402
from helpers.framework_environments import LONG, Environment, run_checks  # noqa: E402

# Without dependencies: megatron-core's own would bring CUDA.
MEGATRON = Environment("Megatron", HERE / "requirements.txt", options=("--no-deps",))
FORMATS = ("megatron", "megatron-dist")
FSDP2 = ROOT / "fixtures" / "dcp" / "fsdp2"
SMALL = {
    "hidden_size": 8,
    "head_dim": 6,
    "intermediate_size": 20,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
HEADED = {key: size for key, size in SMALL.items() if key != "head_dim"} | {"hidden_size": 16}  # Qwen2's config has no head_dim
FOUR, TIED = {"num_hidden_layers": 4}, {"tie_word_embeddings": True}
DISTRIBUTED = {"use_distributed_optimizer": True}


@dataclass(frozen=True)
class Run:
    """A run of Megatron. args: Megatron's own names; saved_as: its --ckpt-format; options: what reshard is told of it beside its sizes."""

    model: str
    layout: dict[str, int]
    sizes: dict[str, object] = field(default_factory=dict)
    precision: str = "bf16"
    args: dict[str, object] = field(default_factory=dict)
    adam: str = "torch"
    saved_as: str = "torch"
    options: tuple[str, ...] = ()

    def asked(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "options"}

    def sizes_of_ranks(self) -> list[str]:
        named = ("tp", "pp", "vp", "ep", "etp")
        return [word for axis in named if axis in self.layout for word in (f"--{axis}", str(self.layout[axis]))]

    def of(self) -> str:
        return " ".join(f"{axis}{size}" for axis, size in self.layout.items())

    def __str__(self) -> str:
        kind = "distributed optimizer" if self.args.get("use_distributed_optimizer") else "plain optimizer"
        return f"{self.of()}, {self.precision}, {kind}{', FusedAdam' if self.adam == 'fused' else ''}"


def weights(model: str, layout: dict[str, int], sizes: dict[str, object] | None = None, *options: str, **args: object) -> Run:
    return Run(model, layout, sizes or {}, "fp32", args, options=options)


# Tables are padded to a multiple of 8 x tp: 50 rows to 56 or 64, Qwen3's 30 to 64, so that its last ranks hold nothing but padding.
WEIGHTS = {
    "llama": weights("llama", {"tp": 2}, SMALL),
    "llama, 5 layers as 1, 2, 1, 1": weights(
        "llama",
        {"pp": 2, "vp": 2},
        SMALL | {"num_hidden_layers": 5},
        "--stage-layers",
        "1,2,1,1",
        pipeline_model_parallel_layout="Et|tt|t|tL",
    ),
    "llama tied": weights("llama", {"tp": 2, "pp": 2}, SMALL | TIED),
    "qwen2, biases": weights("qwen2", {"pp": 2, "vp": 2}, HEADED | FOUR),
    "qwen3, 2 query groups": weights("qwen3", {"tp": 4}, SMALL | {"vocab_size": 30}),
    "mixtral": weights("mixtral", {"tp": 2, "dp": 2, "ep": 2}),
    "mixtral, experts whole": weights("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
    "qwen2-moe": weights("qwen2_moe", {"tp": 2}),
    "qwen3-moe": weights("qwen3_moe", {"pp": 2, "dp": 2, "ep": 2}),
    "deepseek-v3, one dense layer of 3": weights("deepseek_v3", {"tp": 2}),
    "gpt2 tied": weights("gpt2", {"tp": 2, "pp": 2}),
    "gpt-neox": weights("gpt_neox", {"tp": 2}),
}
# Model type -> the layouts of a legacy save and of a distributed one. A layout's data-parallel ranks share experts.
DENSE, SPARSE = ({"tp": 2}, {"pp": 2}), ({"tp": 2, "dp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2})
DECLARED = {
    **dict.fromkeys(
        (
            "arcee",
            "cwm",
            "ernie4_5",
            "exaone",
            "gemma",
            "gemma2",
            "glm",
            "internlm2",
            "internlm3",
            "jais2",
            "mimo",
            "mistral",
            "phi3",
            "qwen",
            "qwen3",
            "qwen3_5_text",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
        ),
        DENSE,
    ),
    **dict.fromkeys(
        (
            "bailing_moe",
            "deepseek_v2",
            "dots1",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe-mtp",
            "glm4_moe_lite",
            "hy_v3",
            "llama4_text",
            "nemotron_h",
            "qwen3_5_moe_text",
            "qwen3_next",
        ),
        SPARSE,
    ),
    "gpt_bigcode": ({"pp": 2}, {}),  # one query group
    "gpt_oss": ({"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "dp": 2, "ep": 2}),  # Megatron wants experts with biases whole
}
# Megatron-Core builds these of Transformer Engine's layers only; gpu_layers.py has others in their place, but none for grouped experts.
BUILT_OF_TE = {
    "gemma": (),
    "gemma2": (),
    "nemotron_h": ("--experts", "sequential"),
    "qwen3_5_moe_text": (),
    "qwen3_5_text": (),
    "qwen3_next": (),
}
# 48 rows need no padding: padding, which reshard writes as zeros, takes part in Megatron's losses.
UNPADDED = {"vocab_size": 48}
LLAMA, QWEN2 = SMALL | UNPADDED, HEADED | UNPADDED | FOUR
DIST = {"args": DISTRIBUTED, "adam": "fused"}
# What is saved, and what goes on from it beside the same run: format, sizes of ranks, more.
GOES_ON = {
    "llama": (
        Run("llama", {"tp": 2, "pp": 2}, LLAMA | FOUR),
        [("megatron", {"pp": 2, "vp": 2}, {}), ("megatron-dist", {"tp": 2, "dp": 2}, DIST)],
    ),
    "llama with FusedAdam": (
        Run("llama", {"tp": 2}, LLAMA, adam="fused", saved_as="torch_dist"),
        [("megatron", {"pp": 2}, {}), ("megatron-dist", {"pp": 2}, DIST)],
    ),
    "llama in fp32": (Run("llama", {"tp": 2}, LLAMA, "fp32"), [("megatron", {"pp": 2, "dp": 2}, {}), ("megatron-dist", {"pp": 2}, {})]),
    "llama tied": (Run("llama", {"pp": 2, "dp": 2}, LLAMA | TIED, **DIST), [("megatron", {"tp": 2}, {}), ("megatron-dist", {"tp": 2}, {})]),
    "qwen2": (
        Run("qwen2", {"pp": 2, "vp": 2, "dp": 2}, QWEN2, saved_as="torch_dist", **DIST),
        [("megatron", {"tp": 2, "pp": 2}, {}), ("megatron-dist", {"tp": 2}, {"args": {}})],
    ),
    "mixtral": (
        Run("mixtral", {"dp": 2, "ep": 2}, UNPADDED, **DIST),
        [("megatron", {"tp": 2, "pp": 2}, {}), ("megatron-dist", {"tp": 2, "dp": 2, "ep": 2}, {})],
    ),
    "mixtral with a plain optimizer": (
        Run("mixtral", {"dp": 2, "ep": 2}, UNPADDED),
        [("megatron", {"tp": 2}, {}), ("megatron-dist", {"pp": 2}, {})],
    ),
    "deepseek-v3": (
        Run("deepseek_v3", {"tp": 2}, UNPADDED, **DIST),
        [("megatron", {"pp": 3}, {}), ("megatron-dist", {"dp": 2, "ep": 2}, {})],
    ),
}
# How far losses may be from those at other sizes, where sums have another order. That all state arrived is proven by its bits.
NEAR = {"bf16": 0.05, "fp32": 1e-4}


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    with asking([python, "-W", "ignore", HERE / "run.py"]) as ask:
        yield from weights_checks(reshard, ask, work)
        yield from training_checks(reshard, ask, work)
        yield from declared_checks(reshard, ask, work)
        found = from_fsdp2(reshard, ask, work)
        yield "FSDP2's checkpoint -> megatron-dist: the distributed optimizer has its state", "failed" not in found, str(found)


def weights_checks(reshard: Path, ask: Ask, work: Path) -> Iterator[tuple[str, bool, str]]:
    for number, (name, run) in enumerate(WEIGHTS.items()):
        hub = work / f"hub-{number}"
        ask({"hub": run.model, "sizes": run.sizes, "to": str(hub)})
        for to in FORMATS:
            made = work / f"weights-{number}-{to}"
            found = converted(reshard, hub, made, to, run, "--transformer-impl", "local", "--vocab-multiple", "8") or ask(
                run.asked() | {"load": str(made), "weights": str(hub)}
            )
            yield f"{name} -> {to} at {str(run).split(',')[0]}: the folder's weights and logits", "failed" not in found, str(found)
    run, wrong = WEIGHTS["llama"], work / "exchanged"
    exchange_query_heads(work / "hub-0" / "model.safetensors", "model.layers.1.self_attn.q_proj.weight", head_dim=6)
    found = converted(reshard, work / "hub-0", wrong, "megatron", run, "--transformer-impl", "local", "--vocab-multiple", "8")
    ask({"hub": run.model, "sizes": run.sizes, "to": str(work / "hub-0")})
    found = found or ask(run.asked() | {"load": str(wrong), "weights": str(work / "hub-0")})
    yield "with two query heads exchanged the logits differ", "logits 0 differ" in found.get("failed", ""), str(found)


def twin_of(folder: Path) -> Path:
    """The model with the same logits that transformers has: the folder's own, or that beside it (tiny_models.py, TWINS)."""
    twin = folder.parent / f"{folder.name}-twin"
    return twin if twin.exists() else folder


def declared_checks(reshard: Path, ask: Ask, work: Path) -> Iterator[tuple[str, bool, str]]:
    for number, (model, layouts) in enumerate(DECLARED.items()):
        hub = work / f"tiny-{model}"
        ask({"tiny": model, "to": str(hub)})
        cases = list(zip(FORMATS, layouts, ("torch_dist", "torch"), strict=True))
        for to, layout, saved_as in cases if LONG else [cases[number % 2]]:
            run, made, again = Run("", layout), work / f"{model}-{to}", work / f"{model}-{to}-again"
            options = options_for(model)
            asked = {"settled": str(made), "weights": str(twin_of(hub)), "layout": layout, "to": str(again)}
            found = converted(reshard, hub, made, to, run, *options) or ask(asked)
            if "failed" not in found:
                found |= of(reshard, "verify", hub, again / saved_as, "--model", hub)
            yield f"{model} -> {to} at {run.of() or 'one rank'}: logits, weights there and back, a step", "failed" not in found, str(found)
        if model == "cwm":
            config = json.loads((hub / "config.json").read_text())
            (hub / "config.json").write_text(json.dumps(config | {"sliding_window": 7}))
            found = ask(asked)
            yield "with another window the logits differ", "logits 0 differ" in found.get("failed", ""), str(found)


def options_for(model: str) -> tuple[str, ...]:
    if model in BUILT_OF_TE:
        return ("--vocab-multiple", "8", *BUILT_OF_TE[model])
    return ("--transformer-impl", "local", "--vocab-multiple", "8")


def training_checks(reshard: Path, ask: Ask, work: Path) -> Iterator[tuple[str, bool, str]]:
    for number, (name, (run, others)) in enumerate(GOES_ON.items()):
        saved, truth, hub = work / f"saved-{number}", work / f"truth-{number}.json", work / f"model-{number}"
        ask({"hub": run.model, "sizes": run.sizes, "to": str(hub)})
        expected = ask(run.asked() | {"save": str(saved), "truth": str(truth)})
        same = [(to, run.layout, {}) for to in FORMATS]
        for to, layout, more in same + others:
            target = Run(**vars(run) | {"layout": layout} | more)
            kind = "--distributed-optimizer" if target.args else "--plain-optimizer"
            made = work / f"made-{number}-{to}-{len(list(work.iterdir()))}"
            asked = target.asked() | {"load": str(made), "truth": str(truth)}
            found = converted(reshard, saved, made, to, target, "--optimizer", kind, "--model", str(hub)) or ask(asked)
            near = 0.0 if target == run else NEAR[run.precision]
            detail = f"{found} and {expected}"
            yield f"{name} ({run}, {run.saved_as}) -> {to} ({target}): the same state and losses", goes_on(found, expected, near), detail
            if number == 0 and (to, target) == ("megatron", run):
                ask({"exchange": str(made)})
                found = ask(asked)
                yield (
                    "with another parameter's moment it is not the same state",
                    "not the source's, moment1" in found.get("failed", ""),
                    str(found),
                )


def from_fsdp2(reshard: Path, ask: Ask, work: Path) -> dict:
    """AdamW's state of bf16 weights: Megatron keeps it in fp32, and has full-precision copies, which are the weights."""
    run = Run("llama", {"tp": 2, "pp": 2}, {"intermediate_size": 24}, **DIST)
    options = (
        "--optimizer",
        "--distributed-optimizer",
        "--model",
        str(FSDP2 / "model"),
        "--transformer-impl",
        "local",
        "--vocab-multiple",
        "8",
    )
    refused = converted(reshard, FSDP2 / "checkpoint", work / "fsdp2", "megatron-dist", run, *options)
    return refused or ask(run.asked() | {"load": str(work / "fsdp2"), "truth": str(FSDP2 / "truth.json"), "own_schedule": True})


def goes_on(found: dict, expected: dict, near: float) -> bool:
    if "failed" in found or "failed" in expected or found["steps"] != [2.0]:
        return False
    pairs = zip(found["losses"], expected["losses"], strict=True)
    return all(abs(float.fromhex(one) - float.fromhex(other)) <= near for one, other in pairs)


def converted(reshard: Path, source: Path, target: Path, to: str, run: Run, *options: str) -> dict:
    """Nothing, or why reshard did not do it."""
    return of(reshard, "convert", source, target, "--to", to, *run.sizes_of_ranks(), *run.options, *options)


def of(reshard: Path, *command: str | Path) -> dict:
    """Nothing, or why a command failed."""
    done = subprocess.run([reshard, *command], capture_output=True, text=True)
    return {"failed": done.stdout[-500:] + done.stderr} if done.returncode else {}


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, MEGATRON, __doc__))
