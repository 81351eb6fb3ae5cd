"""AutoRound's own format, whose tensors are those of GPTQ, mostly without g_idx, or of AWQ. Modules may have settings of their own.

Source: auto-round 0.16, export_to_autoround; vLLM 0.32, quantization/inc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.models.stored_forms import StoredForm, UnknownForm

Reader = Callable[[Mapping[str, Any]], tuple[StoredForm, ...]]


def forms(settings: Mapping[str, Any], readers: Mapping[str, Reader]) -> tuple[StoredForm, ...]:
    """How the weights are stored: in the form of modules with settings of their own first, then in that of all others.

    readers: packing_format -> what reads the settings of a library that packs so. Raises UnknownForm.
    """
    packing, bits = str(settings.get("packing_format") or "auto_round:auto_gptq"), settings.get("bits")
    read = readers.get(packing)
    if read is None or settings.get("data_type", "int") != "int":
        raise UnknownForm(f" in the format {packing[:40]} of the type {str(settings.get('data_type', 'int'))[:20]}")
    if (settings.get("act_bits") or 16) < 16:
        raise UnknownForm(" with quantized activations")
    blocks = settings.get("block_name_to_quantize") or settings.get("to_quant_block_names") or ()
    listed = blocks.split(",") if isinstance(blocks, str) else blocks
    if not isinstance(listed, list | tuple) or not all(isinstance(block, str) for block in listed):
        raise UnknownForm(f" with the blocks {str(blocks)[:40]}")
    usual = {"bits": bits, "group_size": settings.get("group_size")}
    of_patterns = [*_settled(settings, usual), (tuple(block.strip() for block in listed), usual)]
    return tuple(
        replace(
            form,
            name=form.name.replace("GPTQ", "AutoRound").replace("AWQ", "AutoRound, AWQ"),
            components=tuple(replace(each, may_lack=each.use == "group index") for each in form.components),
            targets=targets,
        )
        for targets, known in of_patterns
        for form in read(known)
    )


def _settled(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The patterns of modules with their own number of bits or group size, and these; empty if all modules have those of `usual`. A module
    named in full has its own settings, whatever regular expressions fit it, and of these the first counts."""
    settled: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for name, of_module in sorted(_extra_config(settings).items(), key=lambda item: _REGEX.search(str(item[0])) is not None):
        known = {key: of_module.get(key, value) for key, value in usual.items()}
        if known["bits"] >= 16:
            continue
        if any(of_module.get(key, settings.get(key)) != settings.get(key) for key in ("sym", "data_type")):
            raise UnknownForm(f" with settings of single modules (extra_config, {str(name)[:40]})")
        settled.append((_patterns_of(str(name)), known))
    return settled if any(known != usual for _, known in settled) else []


def _extra_config(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of single modules, by name or regular expression. Raises UnknownForm if they are not a mapping of this form."""
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(of_module, Mapping) for of_module in extra.values()):
        raise UnknownForm(f" with the extra_config {str(extra)[:40]}")
    if not all(isinstance(of_module.get("bits", settings.get("bits")), int) for of_module in extra.values()):
        raise UnknownForm(" with an extra_config without numbers of bits")
    return extra


_REGEX = re.compile(r"[*+?^$()\[\]{}|\\]")


def left_out(settings: Mapping[str, Any]) -> Iterator[str]:
    """The patterns of the modules that AutoRound leaves as they are."""
    for name, of_module in _extra_config(settings).items():
        if of_module.get("bits", settings.get("bits")) >= 16:
            yield from _patterns_of(str(name))


def _patterns_of(name: str) -> tuple[str, ...]:
    """The patterns of the modules that a name in extra_config is for. It may be the end of a longer one, and a regular expression may fit
    any part of a name (vLLM 0.32, inc/config_parser.py)."""
    return (f"re:.*(?:{name})",) if _REGEX.search(name) else (name, f"*.{name}")
