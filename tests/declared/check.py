"""The slow check of declarations: names, shapes and order of the weights are those of transformers' own models, on the meta device.

    python tests/declared/check.py [--reshard PATH] [--python PATH]

For every declared type transformers makes small models (transformers_models.py): a plain one, one for each true-or-false setting that
changes the weights, one with all of these reversed, one whose config has settings that the class ignores, and one whose config says
nothing: it shows the defaults of the config class. The config is what `save_pretrained` writes. LISTED says where a declaration differs on
purpose; a row that is no longer needed fails. An environment with transformers is made in .venv-transformers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from helpers.framework_environments import Environment, run_checks  # noqa: E402
from helpers.rank_contents import published_shapes  # noqa: E402

from reshard.errors import RequestError  # noqa: E402
from reshard.models.lookup import built_in_model_types, find_architecture, find_model  # noqa: E402

ENVIRONMENT = Environment("transformers", HERE / "requirements.txt")

# Types that transformers 5.23 has no class for, or not one with a head.
ABSENT = {
    **dict.fromkeys(
        (
            *("bailing_moe", "chatglm", "deepseek", "exaone", "internlm", "internlm2", "kimi_k2", "longcat_flash_ngram", "mimo"),
            *("minimax_m1", "nemotron_h_puzzle", "panguembedded", "qwen", "sarvam_mla", "sarvam_moe", "solar"),
        ),
        "its code comes with the checkpoint",
    ),
    **dict.fromkeys(
        (
            "deepseek_ocr",
            "deepseek_vl_v2",
            "deepseekocr",
            "dots_ocr",
            "eagle2_5_vl",
            "h2ovl_chat",
            "internvl_chat",
            "interns1",
            "isaac",
            "keye",
            "keyevl1_5",
            "kimi_k3",
            "kimi_vl",
            "mimo_v2",
            "minicpmo",
            "minicpmv",
            "molmo",
            "opencua",
            "skywork_chat",
            "ultravox",
        ),
        "its code comes with the checkpoint",
    ),
    **dict.fromkeys(("refinedweb", "refinedwebmodel"), "falcon's first code came with the checkpoint"),
    "deepseek_v41": "transformers has no class of it",
    "glm5_next_text": "transformers has its language model only inside glm5_next",
    "deepseek_ocr2": "transformers' class is for files of other names and another config (DeepSeek-OCR-2-hf)",
    "mistral_large_3": "published under Mistral's own names",
    "step3p5": "transformers has its language model only inside step3p7",
}
_OUTER = "the outer config ties the head; the published models store one, and canonical/tied_head.py takes the embedding where they do not"
_THINKER = "transformers heeds thinker_config, and vLLM text_config, which says the contrary here; a stored head that differs is refused"
_POOLING = "the order of the tower's pooling head, which is carried and not declared"
# Names that published files have in place of those that transformers saves: (regular expression, what stands in its place) by type.
RENAMED = {
    **dict.fromkeys(
        ("gemma3", "llava", "llava_next", "llava_next_video", "llava_onevision", "paligemma"),
        ((r"^vision_tower\.", "vision_tower.vision_model."),),
    ),
    **dict.fromkeys(("cohere2_vision", "lfm2_vl"), ((r"^model\.vision_tower\.", "model.vision_tower.vision_model."),)),
    "qianfan_ocr": ((r"^language_model\.model\.encoder\.", "language_model.model."),),  # as for hy_v4: a renaming of the tower, reversed
    "deepseek_v4": (
        (r"^model\.embed_tokens", "embed"),
        (r"^model\.hc_head\.hc", "hc_head"),
        (r"^model\.", ""),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
    "hy_v4": (  # transformers saves more names than it reads: it reverses each of its renamings, wherever it fits
        (r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r".\1.hc_pre."),
        (r"\.hc_pre\.hc_head\.", ".hc_head."),
        (r"mlp\.(shared_experts\.)?linear_gate\.", r"mlp.\1gate_proj."),
    ),
}
# (type, regular expression of the case) -> why the declaration differs from what transformers saves.
LISTED = {
    ("bailing_hybrid", "defaults"): "Ling 2.5 has the same type, whose class has other defaults; configs give all sizes",
    ("bailing_hybrid", ".*"): "transformers saves o_proj of linear attention as dense, which the published files do not",
    ("cohere2_vision", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("cohere2_vision", "vision_use_head reversed|defaults"): _POOLING,
    ("deepseek_v4", "defaults"): "every second layer has an indexer; configs list the layers",
    ("exaone4_5", "tie_word_embeddings reversed"): _OUTER,
    ("gemma3", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("paligemma", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("gemma4", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("gemma4", "defaults"): "transformers makes the last of 3 layers one of full attention; configs list the layers",
    ("gemma4_text", "defaults"): "transformers makes the last of 3 layers one of full attention; configs list the layers",
    ("gemma4_unified", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("gemma4_unified", "defaults"): "transformers makes the last of 3 layers one of full attention; configs list the layers",
    ("glm4_moe", "defaults"): "the width of a head is rounded down; configs give it",
    ("glm4v_moe", "defaults"): "the width of a head is rounded down; configs give it",
    ("glm4v_moe", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("glm5_next", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("glmasr", "small|(attention|mlp)_bias reversed|settings of other classes"): _OUTER,
    ("idefics3", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("inkling_mm_model", "defaults"): "24 projections in the tower, where published models have four; configs give the number",
    ("internvl", ".*"): _OUTER,
    ("kimi_k25", ".*"): "transformers saves `layers` of the language model as `blocks`, which the published files do not",
    ("kimi_linear", ".*"): "transformers saves dense layers as `block_sparse_moe`, which the published files do not",
    ("lfm2_vl", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("lfm2_vl", "vision_use_head reversed|defaults"): _POOLING,
    ("lighton_ocr", "small|attention_bias reversed|settings of other classes"): _OUTER,
    ("llava", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("llava_next", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("llava_next_video", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("llava_onevision", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("longcat_flash", ".*"): "transformers saves weights of experts that do nothing, which the published files lack",
    ("mimo_v2_flash", "defaults"): "every sixth layer has full attention; configs list the layers",
    ("minicpmv4_6", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("minicpmv4_7", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("minimax_m3_vl", "tie_word_embeddings reversed"): _OUTER,
    ("mistral3", ".*"): _OUTER,
    ("molmo2", ".*"): "transformers saves the two tables of tokens as equal halves, and widths of the tower are those of the adapter there",
    ("nemotron_h", "defaults"): "configs with experts give their number; 8 would count as experts of models without any",
    ("olmo_hybrid", ".*"): "transformers saves the convolution in equal thirds, and a norm of some layers under its name in others",
    ("paddleocr_vl", "tie_word_embeddings reversed|all of these reversed"): "read again, the config ties: the class heeds text_config",
    ("qianfan_ocr", "tie_word_embeddings reversed"): _OUTER,
    ("qianfan_ocr", "use_.* reversed|all of these reversed"): "settings of transformers' class, which the published code lacks",
    ("qwen2_5_omni", "small|enable_audio_output reversed|settings of other classes"): _THINKER,
    ("qwen3_asr", ".*"): "transformers' class is for files of other names and another config (Qwen3-ASR-hf), which is refused",
    ("qwen3_omni_moe", "tie_word_embeddings reversed"): _THINKER,
    ("qwen4_exp", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("qwen3_5", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("qwen3_5_moe", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("qwen3_vl_moe", ".*"): "transformers saves experts as [out, in], the published files and vLLM have [in, out]",
    ("smolvlm", "tie_word_embeddings reversed|all of these reversed"): _OUTER,
    ("stablelm", "qk_layernorm reversed|all of these reversed"): "the order of the norms of each head, which are carried and not declared",
}  # fmt: skip


def checks(_reshard: Path, python: Path, _work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    classes = {
        model_type: architecture.class_name for model_type in built_in_model_types() if (architecture := find_architecture(model_type))
    }
    made = subprocess.run(
        [python, HERE / "transformers_models.py"], input=json.dumps(classes), stdout=subprocess.PIPE, text=True, check=True
    )
    needed = set[tuple[str, str]]()
    for line in made.stdout.splitlines():
        case = json.loads(line)
        what = f"{case['type']}, {case['case']}"
        if "error" in case:
            yield f"{case['type']}: transformers has a class", case["type"] in ABSENT, case["error"]
            continue
        shapes = {published(name, case["type"]): shape for name, shape in case["shapes"].items()}
        different = difference(case["config"], shapes)
        reason = next((row for row in LISTED if row[0] == case["type"] and re.fullmatch(row[1], case["case"])), None)
        if different and reason:
            needed.add(reason)
        yield f"{what}: names, shapes and order of the weights", not different or reason is not None, different
    unneeded = sorted(LISTED.keys() - needed)
    yield "every row of LISTED is needed", not unneeded, str(unneeded)


def published(name: str, model_type: str) -> str:
    """The name in published files of a tensor that transformers saves."""
    for pattern, new in RENAMED.get(model_type, ()):
        name = re.sub(pattern, new, name)
    return name


def difference(config: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """How the weights that follow from the config differ from those of transformers; empty if they are the same."""
    ordered = shapes.pop("", None) is None
    try:
        model = find_model(config)
        assert model is not None
        ours = {name: list(shape) for name, shape in published_shapes(model).items()}
    except RequestError as error:
        return str(error)
    theirs = {name: shape for name, shape in shapes.items() if not model.reason_to_drop(name) and not model.reason_not_served(name)}
    if ours.keys() != theirs.keys():
        return f"only declared: {some(ours.keys() - theirs.keys())}; only in transformers: {some(theirs.keys() - ours.keys())}"
    if other := {name: (shape, theirs[name]) for name, shape in ours.items() if shape != theirs[name]}:
        return f"other shapes, declared and in transformers: {dict(list(other.items())[:4])}"
    if ordered and list(ours) != list(shapes):
        return f"another order: {next((pair for pair in zip(ours, shapes, strict=False) if pair[0] != pair[1]), '')}"
    return ""


def some(names: set[str]) -> list[str]:
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})[:8]


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, ENVIRONMENT, __doc__ or ""))
