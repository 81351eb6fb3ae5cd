"""Models of random sizes, at random degrees: what reshard writes against what real vLLM's ranks hold.

    python tests/serving/random_models.py [--reshard PATH] [--seeds FIRST LAST]

A line for each case; the exit code is 0 if all are the same, or refused by both. The fixtures have sizes that somebody thought of; these
have none: heads, KV heads and experts that ranks do not divide, stages without layers or experts, biases here and there, tied or not.

Environment: that of fixtures/vllm.
"""

import argparse
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "fixtures"))

import makers  # noqa: E402
import models  # noqa: E402
from engine_ranks import RankFailed, State, described  # noqa: E402

vllm_make = makers.load("vllm")
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "gpt2", "gpt_neox", "gemma2", "phi3"),
)
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
CASES_OF_A_MODEL = 2
MOST_RANKS = 12
# Ranks are forked, so what starts threads is done in a process of its own.
FORK = multiprocessing.get_context("fork")


def sizes_of(model: str, draw: random.Random) -> dict[str, object]:
    """What the model's config says. Of experts vLLM's CPU kernels take hidden sizes of 32, and intermediate ones of 16, or multiples."""
    one = draw.choice
    heads = one((1, 2, 3, 4, 6, 8))
    tables = {"vocab_size": one((50, 64, 65, 97, 128, 200, 251)), "tie_word_embeddings": one((True, False))}
    if model == "gpt2":
        return tables | {
            "n_head": heads,
            "n_embd": heads * one((2, 4, 6)),
            "n_layer": one((1, 2, 3, 5)),
            "n_inner": one((None, 24, 36, 40)),
        }
    sizes = tables | {
        "num_attention_heads": heads,
        "num_hidden_layers": one((1, 2, 3, 4, 5)),
        "intermediate_size": one((24, 36, 40, 48, 72)),
    }
    if model == "gpt_neox":
        return sizes | {
            "hidden_size": heads * one((4, 8)),
            "use_parallel_residual": one((True, False)),
            "attention_bias": one((True, False)),
        }
    if model.startswith("deepseek"):
        sizes |= {"num_key_value_heads": heads, "hidden_size": heads * 32, "attention_bias": one((True, False, False))}
        sizes |= {"q_lora_rank": one((None, 10, 14, 16)), "kv_lora_rank": one((8, 12)), "v_head_dim": one((4, 6, 8))}
        sizes |= {"qk_nope_head_dim": one((4, 6)), "qk_rope_head_dim": one((2, 4)), "first_k_dense_replace": one((0, 1, 2))}
        sizes |= {"n_routed_experts": one((4, 6, 8)), "n_shared_experts": one((1, 2, 3)), "moe_intermediate_size": one((16, 32, 48))}
        groups = {"n_group": 1} if model == "deepseek_v2" else {"n_group": one((1, 2)), "topk_method": "noaux_tc"}
        return sizes | groups
    sizes |= {"num_key_value_heads": one([kv for kv in range(1, heads + 1) if heads % kv == 0])}
    plain = model in ("qwen2", "qwen2_moe", "phi3")
    width = 32 if model == "qwen2_moe" else one((2, 4, 6, 8))
    sizes |= {"hidden_size": heads * width} if plain else {"hidden_size": heads * 32, "head_dim": width}
    if model == "llama":
        sizes |= {"attention_bias": one((True, False)), "mlp_bias": one((True, False))}
    if model in ("qwen3", "qwen3_moe", "gemma2"):
        sizes |= {"attention_bias": one((True, False))}
    if model == "gemma2":
        sizes |= {"tie_word_embeddings": True}  # vLLM's class knows no other, and reshard refuses it
    if model == "mixtral":
        sizes |= {"num_local_experts": one((2, 3, 4, 5, 6, 8)), "intermediate_size": one((16, 32, 48, 96))}
    if model in ("qwen2_moe", "qwen3_moe"):
        sizes |= {"num_experts": one((3, 4, 5, 6, 8)), "moe_intermediate_size": one((16, 32, 48, 96))}
        sizes |= {"decoder_sparse_step": one((1, 1, 2)), "mlp_only_layers": one(([], [], [0], [1]))}
    if model == "qwen2_moe":
        sizes |= {"shared_expert_intermediate_size": one((12, 20, 24, 30))}
    return sizes


def degrees_of(model: str, sizes: dict[str, object], draw: random.Random) -> object:
    """Mostly tensor-parallel sizes that divide the heads, and a layer for every stage: reshard refuses a stage without one."""
    heads = sizes.get("num_attention_heads", sizes.get("n_head"))
    tp = draw.choice([tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or draw.random() < 0.1])
    layers = sizes.get("num_hidden_layers", sizes.get("n_layer"))
    pp = draw.choice([pp for pp in (1, 1, 2, 3) if pp <= layers and tp * pp <= MOST_RANKS])
    return vllm_make.Degree(tp, pp, tp if model in WITH_EXPERTS and draw.random() < 0.4 else 1)


def written(reshard: Path, source: Path, target: Path, degrees: object) -> tuple[dict[str, State] | None, str]:
    """What reshard writes, or None, and what it says. What vLLM would leave out without a word is left out on purpose."""
    sizes = [f"--{key}={value}" for key, value in degrees.facts().items()]
    command = [reshard, "convert", source, target, "--to=vllm", *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    if "has no slot for it" in done.stderr:
        globs = [f"--exclude={glob}" for glob in re.findall(r"--exclude '(.*?)'", done.stderr)]
        done = subprocess.run([*command, *globs], capture_output=True, text=True)
    if done.returncode not in (0, 2, 6):  # done, or refused
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stderr}")
    return (None if done.returncode else ranks(target)), done.stderr.strip()


def ranks(folder: Path) -> dict[str, State]:
    """A sharded_state folder in the form of vLLM's ranks."""
    from safetensors.torch import load_file

    found: dict[str, State] = {}
    for path in folder.glob("model-*-part-*.safetensors"):
        state = found.setdefault(path.name.removeprefix("model-").split("-part-")[0], {})
        state |= {name: described(tensor) for name, tensor in load_file(path).items()}
    return found


def cases(seed: int, reshard: Path, work: Path) -> Iterator[tuple[str, str]]:
    """Each case of one model, and what came of it."""
    draw, model = random.Random(seed), NAMES[seed % len(NAMES)]
    sizes = sizes_of(model, draw)
    made = FORK.Process(target=lambda: models.build(model, **sizes).save_pretrained(work / "source"))
    made.start(), made.join()
    if made.exitcode:
        raise SystemExit(f"{model} was not made: {sizes}")
    for number in range(CASES_OF_A_MODEL):
        degrees = degrees_of(model, sizes, draw)
        ours, told = written(reshard, work / "source", work / str(number), degrees)
        try:
            real, says = vllm_make.all_ranks(vllm_make.options_of(work / "source", degrees, {})), ""
        except RankFailed as refused:
            real, says = None, refused.facts["says"]
        if model.startswith("deepseek") and sizes["tie_word_embeddings"]:
            _without_unset_heads(ours, real)
        yield f"seed {seed}: {model} at {degrees}", _outcome(ours, real, told, says) or f"DIFFERENT: {sizes} vLLM: {says} reshard: {told}"


def _without_unset_heads(*sides: dict[str, State] | None) -> None:
    """vLLM's class does not tie its tables, and serves a head that nothing has filled; what is written has the embedding there."""
    for side in sides:
        for state in (side or {}).values():
            state.pop("lm_head.weight", None)


def _outcome(ours: dict[str, State] | None, real: dict[str, State] | None, told: str, says: str) -> str | None:
    if ours is None and real is None:
        return f"refused by both: {told}"
    if real is None and "No Unquantized MoE backend" in says:
        return "no kernel on a CPU"
    return "the same" if ours == real else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reshard", type=Path, default=ROOT / ".venv" / "bin" / "reshard")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, len(NAMES)), metavar=("FIRST", "LAST"))
    options = parser.parse_args()
    vllm_make.arrange()
    outcomes: list[str] = []
    for seed in range(*options.seeds):
        with tempfile.TemporaryDirectory() as work:
            for case, outcome in cases(seed, options.reshard, Path(work)):
                outcomes.append(outcome)
                print(json.dumps({"case": case, "outcome": outcome}), flush=True)
    return 1 if any(outcome.startswith("DIFFERENT") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
