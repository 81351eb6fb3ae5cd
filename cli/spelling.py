"""Keywords and flags: below the command line, messages name keywords; what the command line prints names its flags.

Leave out `overwrite=True`                 Leave out --overwrite
Add `model=DIR`                            Add --model DIR
`merge_adapter='self'`: no adapter         --merge-adapter self: no adapter
Without `dtype=` no tensor is cast         Without --dtype no tensor is cast
Add `part=actor`                           Add --component actor, as --part shares the work
"""

from __future__ import annotations

import re

# A keyword in backticks, with an equals sign and maybe a value, which may be quoted; in HTML the quote is escaped.
_KEYWORD = re.compile(r"`([a-z]\w*)=((?:True|False)?)(?:'|&#x27;)?([^`']*?)(?:'|&#x27;)?`")

_OTHER_FLAGS = {"part": "component"}


def with_flags(text: str) -> str:
    """A text in which keywords are spelled as flags."""
    return _KEYWORD.sub(_flag, text) if "=" in text else text


def _flag(match: re.Match[str]) -> str:
    name, switch, value = match.groups()
    name = _OTHER_FLAGS.get(name, name)
    return f"--{'no-' if switch == 'False' else ''}{name.replace('_', '-')}" + (f" {value}" if value else "")
