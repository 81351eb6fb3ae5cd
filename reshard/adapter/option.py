"""Option: a setting that only some targets understand. Declared once, in the format's light module.

The command line makes a flag of it, shown under the format's name; Python takes it as a keyword of `plan`.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal

from reshard.errors import RequestError, choices
from reshard.geometry.quantities import parse_size
from reshard.geometry.value import value


@value
class Option:
    """A setting of a target format."""

    name: str
    """Keyword in Python. The flag on the command line is the same word with dashes: `stage_layers` is --stage-layers."""

    type: Literal["number", "numbers", "size", "path", "text", "choice", "switch"]
    """number: a positive integer; numbers: a list such as 7,8,8,7; size: bytes such as 5GB; path: a path; text: any text;
    choice: one of `choices`; switch: yes or no."""

    help: str
    """One imperative sentence for --help."""

    choices: tuple[str, ...] = ()
    """The words that a `choice` takes."""

    opposite: str | None = None
    """For a switch: the name of the flag that means no, such as `plain_optimizer` beside `distributed_optimizer`."""

    @property
    def flag(self) -> str:
        """The option as the command line spells it: --stage-layers."""
        return "--" + self.name.replace("_", "-")

    def parse(self, value: Any) -> Any:
        """A value given in Python or on the command line, checked and in its own type.

        Raises: RequestError if it is of another type or not one of the choices.
        """
        match self.type:
            case "number" if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            case "number" if isinstance(value, str) and value.isdecimal() and int(value) > 0:
                return int(value)
            case "numbers" if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*", value):
                return tuple(map(int, value.split(",")))
            case "numbers" if isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value):
                return tuple(value)
            case "size":
                return parse_size(value, self.flag)
            case "path" if isinstance(value, str | os.PathLike):
                return os.fspath(value)
            case "text" if isinstance(value, str):
                return value
            case "choice" if value in self.choices:
                return value
            case "switch" if isinstance(value, bool):
                return value
        if self.type == "choice":
            raise RequestError(f"{self.flag} {value}: unknown value", do=choices(str(value), self.choices))
        raise RequestError(f"{self.flag} {value}: {self._expected()} is expected")

    def _expected(self) -> str:
        words = {
            "number": "a positive whole number",
            "numbers": "a list of whole numbers such as 7,8,8,7",
            "path": "a path",
            "text": "a word",
            "switch": "yes or no (True or False)",
        }
        return words[self.type]


# Options that several formats understand, with one meaning everywhere.
MAX_SHARD_SIZE = Option("max_shard_size", "size", "Start a new file when one would grow beyond SIZE.")
ENGINE_VERSION = Option("engine_version", "text", "Write for this version of the serving engine (default: the newest known).")
LAYOUT = Option("layout", "path", "Follow a layout file that `reshard learn` has written.")
ACCEPT_PLATFORM = Option("accept_platform", "switch", "Also write tensors whose shape depends on the platform that was traced.")
# Which LoRA adapter of a checkpoint is written or merged, and with which settings.
ADAPTER = (
    Option("adapter", "text", "Take this adapter, if the checkpoint holds several."),
    Option("adapter_config", "path", "Take the settings from this adapter_config.json, or from that in this directory."),
    Option("lora_alpha", "text", "lora_alpha of the training, if the checkpoint has no adapter_config.json that gives it."),
)
