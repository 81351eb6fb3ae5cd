"""The weights of the base that an adapter changes, by the names that adapters have for them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reshard.canonical.content import Content
from reshard.canonical.name_variants import Names
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.value import value
from reshard.index.origin import Tensor
from reshard.models.model import Model

# Gate and up of one expert, where the two are rows of one tensor of all experts that alternate.
_GATE_OR_UP = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj)\.weight")
ALTERNATING = "expert.gate_up"
"""The role of a tensor in which the rows of gate and up alternate."""
# Names of Tinker's adapters (tinker-cookbook 0.6.1, weights/_merge_utils.py and _merge_gpt_oss.py), and those of the model in their place.
_OF_TINKER = (
    (".attn.", ".self_attn."), ("model.unembed_tokens.", "lm_head."), ("model.unembed_tokens.", "model.embed_tokens."),
    ("model.", "model.language_model."), ("model.", "language_model.model."), ("model.unembed_tokens.", "language_model.lm_head."),
    ("model.unembed_tokens.", "model.language_model.embed_tokens."), ("model.unembed_tokens.", "language_model.model.embed_tokens."),
)  # fmt: skip
# Modules that Tinker adapts one by one, as rows of a matrix that the model stores fused: the module, and the role of its rows (the same,
# _merge_qwen3_5.py and _merge_nemotron.py).
_ROWS_OF = {
    "linear_attn.in_proj_q": ("linear_attn.in_proj_qkv", "delta.q"),
    "linear_attn.in_proj_k": ("linear_attn.in_proj_qkv", "delta.k"),
    "linear_attn.in_proj_v": ("linear_attn.in_proj_qkv", "delta.v"),
    "mixer.gate_proj": ("mixer.in_proj", "ssm.z"),
    "mixer.x_proj": ("mixer.in_proj", "ssm.x"),
}


@value(eq=False)
class Place:
    """The canonical weights under a name, as an array of their stored axes."""

    array: Mosaic
    """The array as the model stores it: [out, in], [in, out], or with a first axis of all experts."""
    first_row: int = 0
    """For the gate or up of an expert whose rows alternate: the first of its output features in the array."""
    row_step: int = 1
    """The step to the next one."""


class AdaptedBase:
    """The base of an adapter: its weights, or what its config tells of them."""

    def __init__(self, model: Model | None, content: Content | None, path: str, trained_on: str | None) -> None:
        self.model = model
        """The model; None if it is not known."""
        self.path = path
        """The directory of the adapter."""
        self.has_weights = content is not None
        """Whether its weights are known, and not only what its config tells of them."""
        self._content, self._trained_on = content, trained_on
        self._names = Names(model) if model else None

    def find(self, name: str) -> Place | None:
        """The canonical weights that the model has under a name; None if it has none."""
        name = self.tied_to(name) or name
        array = self._names.array(name) if self._names else None
        if array is None and self._content is not None and name in self._content.tensors:
            array = Mosaic.of(name, Box.whole(self._content.tensors[name].shape))
        if array is None and self._names and (match := _GATE_OR_UP.fullmatch(name)):
            both = self._names.array(f"{match[1]}.gate_up_proj")
            if both is not None and both.tiles and self._role(both) == ALTERNATING and int(match[2]) < both.shape[0]:
                return Place(both.item(int(match[2])), int(match[3] == "up_proj"), 2)
        if array is None:
            array = self._rows(name)
        return None if array is None else Place(array)

    def _rows(self, name: str) -> Mosaic | None:
        """The rows of a fused matrix that a module of Tinker's adapters stands for."""
        before, *last = name.removesuffix(".weight").rsplit(".", 2)
        fused, role = _ROWS_OF.get(".".join(last), (None, None))
        whole = self._names.array(f"{before}.{fused}.weight") if self._names and fused else None
        weight = self.model.weights.get(whole.names[0]) if self.model and whole is not None else None
        return next((part.array for part in self.model.parts_of([weight]) if part.role == role), None) if self.model and weight else None

    def tied_to(self, name: str) -> str | None:
        """The weight that stands for another one, as the embedding does for a tied head; None for other names."""
        return self.model.aliases.get(name) if self.model else None

    def other_names(self, array: Mosaic) -> Iterator[str]:
        """Further names of the weight that an array is."""
        return (alias for alias, name in (self.model.aliases if self.model else {}).items() if array.names == (name,))

    def weight(self, name: str, tensor: Tensor) -> Place:
        """The canonical weights that the base has under a name. Raises CheckpointError if it has none."""
        place = self.find(name)
        content = self._content
        if place is not None and place.array.tiles and (content is None or all(part in content.tensors for part in place.array.names)):
            return place
        why = "The adapter was trained on another model, or the base ties this weight to another one"
        if content is not None:
            quantization = self.model.quantization if self.model else None
            form = quantization.form_of(name) if quantization else None
            if form is not None and form.names(name).keys() <= content.tensors.keys():
                raise is_quantized(name, form.name)
            if content.selection.is_partial:
                why = "`include=` or `exclude=` leaves it out"
        raise CheckpointError(
            f"the base has no weight {name}, which the adapter changes",
            where=tensor.name,
            why=why,
            do=f"Give the base that the adapter was trained on{self._named()}",
        )

    def renamed(self, module: str, inner: str = "") -> str:
        """The model's name for a module that Tinker's adapters have under another one. inner: the name of a part that has a weight."""
        if self._names is None or self.find(f"{module}{inner}.weight") is not None:
            return module
        names = (f"{module}.".replace(old, new, 1)[:-1] for old, new in _OF_TINKER if old in f"{module}.")
        return next((name for name in names if self.find(f"{name}{inner}.weight") is not None), module)

    def joined(self, module: str, *, attention: bool) -> str:
        """The fused module in which engines adapt a module of Mamba that Tinker adapts alone, as tinker-cookbook joins them; the module
        itself for others. attention: also of linear attention, which tinker-cookbook leaves apart."""
        before, *last = module.rsplit(".", 2)
        fused, role = _ROWS_OF.get(".".join(last), ("", ""))
        return (
            f"{before}.{fused}"
            if role.startswith(("ssm.", "delta.") if attention else "ssm.") and self.find(f"{module}.weight")
            else module
        )

    def is_in_out(self, array: Mosaic) -> bool | None:
        """Whether an array is [..., in, out], as a Conv1D, by the declaration of its weight; None if that is not declared."""
        weight = self.model.weights.get(array.names[0]) if self.model else None
        return None if weight is None else weight.declared.transposed and not is_turned(array)

    def _role(self, array: Mosaic) -> str:
        weight = self.model.weights.get(array.names[0]) if self.model else None
        return weight.role if weight else ""

    def is_resized(self, array: Mosaic, shape: tuple[int, ...]) -> bool:
        """Whether a shape is that of a table of the base with another number of tokens."""
        is_table = self._role(array) in ("embedding", "head") and len(array.names) == 1
        return is_table and shape != array.shape and shape[1:] == array.shape[1:]

    def alternates(self, array: Mosaic) -> bool:
        """Whether the rows of gate and up alternate in an array."""
        return self._role(array) == ALTERNATING

    def misshapen(self, tensor: Tensor, shape: tuple[int, ...], array: Mosaic, what: str) -> CheckpointError:
        """The error for a tensor that is for a weight of another shape: of another vocabulary, or what is said."""
        if self._role(array) not in ("embedding", "head") or shape[1:] != array.shape[1:]:
            return self.misfit(tensor, what)
        return CheckpointError(
            f"the adapter was trained with a vocabulary of {shape[0]}, the base has one of {array.shape[0]}",
            where=f"{tensor.name} in {self.path}",
            why="The training changed the number of tokens, so the embedding and the head of the base have another shape",
            do=f"Resize the base as the training did (resize_token_embeddings({shape[0]}) and save_pretrained of transformers), then merge",
        )

    def misfit(self, tensor: Tensor, what: str) -> CheckpointError:
        """The error for a tensor of the adapter that does not fit the base."""
        return CheckpointError(
            what,
            where=f"{tensor.name} in {self.path}",
            why="The adapter was trained on another model, or its file is damaged",
            do=f"Give the base that the adapter was trained on{self._named()}",
        )

    def ambiguous(self, tensor: Tensor, experts: Mosaic, why: str) -> RequestError:
        """The error for factors that fit experts in two ways."""
        return RequestError(
            f"its factors fit experts {list(experts.shape)} in two ways: lora_A meets their axis 1, or their axis 2",
            where=f"{tensor.name} in {self.path}",
            why=f"PEFT before 0.19 takes axis 1, and since 0.19.1 axis 2 unless the class has is_transposed; {why}",
            do='Put the release that trained it into adapter_config.json, such as "peft_version": "0.17.1", and give the base with its '
            "config.json; or merge it with the PEFT that trained it",
            id="ambiguous",
        )

    def _named(self) -> str:
        return f"; its adapter_config.json names {self._trained_on}" if self._trained_on else ""


def is_quantized(weight: str, form: str) -> RequestError:
    """The error for an update of a quantized weight."""
    return RequestError(
        f"`merge_adapter=`: it is quantized ({form})",
        where=weight,
        why="An update is added to values, and quantizing the sum again would need new scales",
        do="Add `dequantize=True`, or give the base that is not quantized",
    )


def is_turned(array: Mosaic) -> bool:
    """Whether canonical tensors hold the transpose of an array, in its last two axes."""
    tile, last = array.tiles[0], len(array.shape) - 1
    return tile.axes[-1] == last - 1 or (len(tile.axes) > 1 and tile.axes[-2] == last)


def by_expert(array: Mosaic) -> list[Mosaic]:
    """The matrix of each expert in an array [experts, rows, columns]."""
    tiles: list[list[Tile]] = [[] for _ in range(array.shape[0])]
    for tile in array.tiles:
        for number in range(*tile.span(0)):
            tiles[number].append(tile)
    return [Mosaic(array.shape, tuple(of_expert)).item(number) for number, of_expert in enumerate(tiles)]
