"""The site: Sphinx reads the same Markdown that the hosting site shows (`make docs`).

Sphinx, because it is maintained and checks every link: MkDocs has had no release since 2024, and its Material theme gets no new ones. The
pages stay plain Markdown; the table of contents, which only Sphinx needs, stands here and not in them. What commands print is wrapped here
to the width of the site, as a terminal of that width would show it.
"""

from __future__ import annotations

import textwrap
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
