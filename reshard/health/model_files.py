"""Checks of the files that an engine needs beside the weights: of a checkpoint, and of a target before it is written."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.adapter import registry
from reshard.adapter.format import Format
from reshard.adapter.model_files import CONFIG, ModelFiles, has_tokenizer, is_in_pipeline
from reshard.health.findings import Finding, found
from reshard.models.config_values import component_class
from reshard.models.lookup import draft_class
from reshard.plans.plan import Plan


def missing_beside_weights(format: Format, model_files: ModelFiles) -> Iterator[Finding]:
    """What a checkpoint's engines will miss. In a diffusers pipeline the tokenizer lies in a folder of its own."""
    missing = _missing(format, model_files.names, model_files.config)
    yield from (finding for finding in missing if finding.id != "missing-tokenizer" or not is_in_pipeline(model_files.files))


def missing_in_target(plan: Plan) -> tuple[Finding, ...]:
    """What a target's engines will miss, known before anything is written."""
    files = {sidecar.path: sidecar.content for sidecar in plan.layout.sidecars}
    config = json.loads(files[CONFIG]) if CONFIG in files else None
    missing = _missing(registry.named(plan.layout.format), files.keys(), config)
    return tuple(finding for finding in missing if finding.id != "missing-tokenizer" or not is_in_pipeline(plan.source_files))


def _missing(format: Format, names: Collection[str], config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What is missing among the files with these names. A draft model shares the tokenizer of the model that it drafts for."""
    if not format.needs_model_files:
        return
    if config is None:
        yield found("missing-config", f"{CONFIG}: engines choose the model's class by it")
    if not has_tokenizer(names) and not draft_class(config or {}) and not component_class(config):
        yield found("missing-tokenizer", "tokenizer (tokenizer.json, tokenizer.model, ...): engines that serve the model need it")
