"""The site: Sphinx reads the same Markdown that the hosting site shows (`make docs`).

Sphinx, because it is maintained and checks every link: MkDocs has had no release since 2024, and its Material theme gets no new ones. The
pages stay plain Markdown; the table of contents, which only Sphinx needs, stands here and not in them.
"""

from __future__ import annotations

from typing import Any

project = "reshard"
copyright = "the reshard authors"
extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt", "_build"]
html_theme = "furo"
html_title = "reshard"
html_show_sphinx = False
# Anchors as on the hosting site, so that links such as page.md#a-heading work in both.
myst_heading_anchors = 3
# The output of a command is no code: an apostrophe in it is not an open quotation.
suppress_warnings = ["misc.highlighting_failure"]
# Blocks without a language are drawings.
highlight_language = "text"

CONTENTS = {
    "Recipes": """
        recipes/verl recipes/megatron-run recipes/serving recipes/preshard recipes/cache recipes/serve-without-converting
        recipes/live recipes/push recipes/degrees recipes/fp8 recipes/packed recipes/hf recipes/merge-ranks recipes/deepspeed
        recipes/megatron recipes/optimizer-state recipes/training-memory recipes/undeclared-model recipes/averaging
        recipes/adapters recipes/trainer-names recipes/doctor recipes/look recipes/interrupted recipes/many-machines
        recipes/nightly recipes/runs recipes/deltas recipes/stores recipes/compare recipes/coming-from recipes/troubleshooting
    """,
    "Formats": """
        formats/index formats/dcp formats/dcp-safetensors formats/fsdp formats/fsdp-local formats/pt formats/torch-checkpointing
        formats/deepspeed formats/universal formats/megatron formats/megatron-dist formats/consolidated formats/nanotron
        formats/hf formats/peft formats/delta formats/vllm formats/sglang formats/trtllm
    """,
    "Evidence": "verification benchmarks",
    "Reference": """
        reference/cli reference/python reference/json reference/logs reference/fingerprint reference/exit-codes reference/errors
        reference/models reference/megatron-models reference/traced-models
        reference/versions glossary
    """,
    "Why": "why/no-conversion-code why/own-unpickler why/files-not-dump why/live",
    "Extending": "design extending/format extending/engine architectures extending/option extending/check extending/storage "
    "extending/transport",
}


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Append the table of contents to the first page."""
    if name == "index":
        for caption, pages in CONTENTS.items():
            lines = ("", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages.split(), "```", "")
            source[0] += "\n".join(lines)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
