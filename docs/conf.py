"""The site: Sphinx reads the same Markdown that the hosting site shows (`make docs`).

Sphinx, because it is maintained and checks every link: MkDocs has had no release since 2024, and its Material theme gets no new ones. The
pages stay plain Markdown; the table of contents, which only Sphinx needs, stands here and not in them. What commands print is wrapped here
to the width of the site, as a terminal of that width would show it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

project = "reshard"
copyright = "the reshard authors"
extensions = ["myst_parser", "sphinx_copybutton"]
# Of a console block the button copies the commands, without their prompt and without what they print.
copybutton_prompt_text = "$ "
exclude_patterns = ["requirements.txt", "_build"]
html_theme = "furo"
html_title = "reshard"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
# Anchors as on the hosting site, so that links such as page.md#a-heading work in both.
myst_heading_anchors = 3
# The output of a command is no code: an apostrophe in it is not an open quotation.
suppress_warnings = ["misc.highlighting_failure"]
# Blocks without a language are drawings.
highlight_language = "text"

CONTENTS = {
    "Start": "for/inference for/training for/platform nouns",
    "Look": "recipes/look recipes/runs",
    "Convert": """
        recipes/hf recipes/merge-ranks recipes/deepspeed recipes/megatron recipes/adapters recipes/averaging recipes/fp8 recipes/packed
        recipes/undeclared-model recipes/trainer-names recipes/coming-from
    """,
    "Serve": """
        recipes/serving recipes/hub recipes/verl recipes/megatron-run recipes/cache recipes/serve-without-converting recipes/preshard
    """,
    "Update live": "recipes/live recipes/push recipes/deltas",
    "Resume": "recipes/torch-load recipes/torch-save recipes/optimizer-state recipes/interrupted",
    "Check": "recipes/compare recipes/doctor recipes/sign recipes/troubleshooting",
    "Plan": "recipes/degrees recipes/training-memory",
    "Automate": "recipes/nightly recipes/many-machines recipes/stores",
    "Formats": """
        formats/index formats/dcp formats/dcp-safetensors formats/fsdp formats/fsdp-local formats/pt formats/torch-checkpointing
        formats/deepspeed formats/universal formats/megatron formats/megatron-dist formats/fsdp-dtensor formats/consolidated
        formats/nanotron formats/hf formats/peft formats/delta formats/vllm formats/sglang formats/trtllm
    """,
    "Evidence": "verification benchmarks",
    "Reference": """
        reference/cli reference/python reference/json reference/logs reference/fingerprint reference/exit-codes reference/errors
        reference/models reference/megatron-models reference/software reference/trainers reference/traced-models
        reference/versions glossary
    """,
    "Why": "why/no-conversion-code why/own-unpickler why/files-not-dump why/live",
    "Extending": "design extending/format extending/engine architectures extending/option extending/check extending/storage "
    "extending/transport",
}

# What people type to find a page, beyond its own words. tests/pictures/search.py asks the built site.
KEYWORDS = {
    "for/inference": "deploy production",
    "formats/index": "which formats are supported, list of formats",
    "recipes/adapters": "merge lora, peft, qlora, dora",
    "recipes/averaging": "soup, ema, merge checkpoints, mean of the last steps",
    "recipes/compare": "same, equal, difference, diff two checkpoints, verify",
    "recipes/deepspeed": "zero_to_fp32, ds_to_universal, zero stage 3 to hugging face hf safetensors",
    "recipes/degrees": "which tensor parallel size fits tp pp gpus, vram, out of memory, kv cache",
    "recipes/doctor": "damaged, broken, corrupt, nan, github action, pre-commit hook, gate",
    "recipes/fp8": "quantize, dequantize, block scales",
    "recipes/hf": "safetensors, huggingface, transformers, from_pretrained, fsdp dcp distcp to hf",
    "recipes/hub": "download, hf_hub, s3 bucket of a checkpoint",
    "recipes/interrupted": "resume interrupted conversion, killed, crash, continue",
    "recipes/live": "live weight update, rlhf, rl, sync weights",
    "recipes/many-machines": "many machines, slurm, ray, cluster, parallel conversion",
    "recipes/megatron": "megatron to hugging face hf, mcore, nemo, bridge",
    "recipes/merge-ranks": "consolidate, merge rank files shards, fsdp",
    "recipes/nightly": "cron, airflow, automate",
    "recipes/optimizer-state": "adam, resume on more gpus, change world size",
    "recipes/packed": "gptq, awq, nvfp4, mxfp4, quantized",
    "recipes/push": "push weights into a running server, reload, hot swap",
    "recipes/runs": "latest step, list steps, log",
    "recipes/serving": "serve, deploy, vllm, sglang, tensorrt-llm trtllm",
    "recipes/stores": "s3, gcs, azure, bucket, object store",
    "recipes/torch-load": "resume on more gpus, fewer, other number, distributed checkpoint load",
    "recipes/training-memory": "gpu memory for training, zero, activations, estimate",
    "recipes/troubleshooting": "error message, fails, out of memory",
    "recipes/undeclared-model": "unknown, unsupported, own, new model, custom architecture",
    "reference/exit-codes": "exit code status",
    "reference/json": "json output, schema, machine readable",
    "reference/python": "python api, import reshard, notebook, jupyter",
}


def add_keywords(app: Any, name: str, source: list[str]) -> None:
    """Make a page findable by its search words: they go into its <meta>, which the search reads, and the index, which the scorer reads."""
    if words := KEYWORDS.get(name):
        title, _, rest = source[0].partition("\n")
        entries = ", ".join(f"! {entry.strip()}" for entry in words.split(","))
        single = ", ".join(dict.fromkeys(words.replace(",", "").lower().replace("-", " ").split()))
        head = f'---\nmyst:\n  html_meta:\n    keywords: "{single}"\n---\n'
        source[0] = f"{head}{title}\n\n```{{index}} {entries}\n```\n{rest}"


def show_reasons(app: Any, name: str, source: list[str]) -> None:
    """Show why commands are not run by the tests: the pages say it in comments."""
    source[0] = re.sub(r"^<!-- not run: (.+) -->$", r"*Not run by the tests: \1.*", source[0], flags=re.MULTILINE)


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Append the table of contents to the first page."""
    if name == "index":
        for caption, pages in CONTENTS.items():
            lines = ("", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages.split(), "```", "")
            source[0] += "\n".join(lines)


# What fits a block of code of the site (_static/site.css).
COLUMNS = 120


def wrap_output(app: Any, doctree: Any) -> None:
    """Wrap the long lines of console blocks: commands with a backslash, and the last cell of a row with a hanging indent."""
    from docutils import nodes

    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "console":
            text = "\n".join(part for line in block.astext().split("\n") for part in wrapped(line))
            block.rawsource, block.children = text, []
            block += nodes.Text(text)


def wrapped(line: str) -> list[str]:
    """The lines of COLUMNS characters that a line becomes."""
    is_command, last = line.startswith("$ "), line.rfind("  ") + 2  # where the last cell of a row begins
    if len(line) <= COLUMNS or (not is_command and last > COLUMNS - 40):
        return [line]
    indent = 4 if is_command else last if last > 1 else 2
    lines = textwrap.wrap(
        line, COLUMNS - 2 * is_command, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return [f"{each} \\" for each in lines[:-1]] + lines[-1:] if is_command else lines


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", wrap_output)
    app.connect("source-read", add_contents)
    app.connect("source-read", add_keywords)
    app.connect("source-read", show_reasons)
