"""Origin: a tensor, and where its values come from. Origins form a tree: an origin names the tensors that its values are computed from.

    Stored     nothing: the tensor's own pieces hold its elements
    Patched    nothing: the tensor's own pieces hold the elements of a base, which deltas change
    Decoded    the codes, scales and zero points of a quantized tensor
    Encoded    the weight whose codes or scales they are
    Mapped     codes in 8 or 4 bits, one after the other, the scales of their blocks and their table
    Merged     the base, and the factors of a LoRA adapter
    Mixed      the same tensor of several checkpoints
    Weighted   the same factor of several LoRA adapters

An example: the average of two checkpoints, of which the second is quantized. The leaves are what is read.

    o_proj: Mixed --+-- o_proj: Stored                                leaf
                    +-- o_proj: Decoded --+-- o_proj: Stored          leaf
                                          +-- o_proj_scale: Stored    leaf

Nothing is read here. Each origin has a reader in engine/origins, which says how the values are computed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, F32, DType
from reshard.geometry.extents import Piece
from reshard.geometry.meshes import Distribution
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable, value
from reshard.index.shards import Shards
from reshard.models.stored_forms import BlockShape, Component

if TYPE_CHECKING:
    from reshard.index.deltas import Patch

Kind = Literal["weight", "buffer", "adapter", "other", "master", "moment1", "moment2", "step", "state"]
"""What a tensor is for in the training run. (A *role* is what a weight does in the model, such as attention.q.)"""


class Origin:
    """Where the values of a tensor come from."""

    __slots__ = ()
    computed_in: tuple[DType, ...] = ()
    """The element types in which the values are computed, besides those of the inputs."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the values are computed from; empty if the tensor's own pieces are read."""
        return ()

    @property
    def unchanged(self) -> tuple[Tensor, ...]:
        """The inputs that are the same tensor before a change."""
        return ()

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Origin:
        """The same origin with other inputs. change: the tensor in place of an input."""
        return self

    @property
    def decoded(self) -> Decoded | Mapped | None:
        """How the values of the first input are decoded, or those of its first input; None if nothing is."""
        return self.inputs[0].origin.decoded if self.inputs else None

    @property
    def changed_by(self) -> tuple[str, ...]:
        """The names of an adapter's tensors and the paths of the checkpoints that change the values, for messages."""
        return self.inputs[0].origin.changed_by if self.inputs else ()

    @property
    def identity(self) -> str:
        """A text that differs if the changes do."""
        return self.inputs[0].origin.identity if self.inputs else ""

    @property
    def checksums(self) -> tuple[str, ...]:
        """The checksums of what deltas make of the elements."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({plural(len(self.inputs), 'input')})"


class Stored(Origin):
    """The tensor's pieces hold its elements."""

    __slots__ = ()


STORED = Stored()


@value(eq=False)
class Tensor:
    """A canonical tensor and its pieces."""

    name: str
    """The canonical name."""
    dtype: DType
    """The element type in which it is stored."""
    shape: tuple[int, ...]
    """The global shape."""
    kind: Kind
    """What it is for in the run: a weight, a master, optimizer state, ..."""
    shards: Shards
    """Its pieces. Those of a computed tensor tell where the tensor lies in the order of the files."""
    distribution: Distribution | None = None
    """How it was distributed on the run's mesh; None if the files do not say."""
    origin: Origin = STORED
    """Where its values come from."""
    also_named: str | None = None
    """The other name under which it is stored as well, if the config ties the two."""

    @property
    def is_computed(self) -> bool:
        """Whether its values are computed from other tensors."""
        return bool(self.origin.inputs)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The stored tensors that are read for it."""
        inputs = self.origin.inputs
        return tuple(leaf for tensor in inputs for leaf in tensor.leaves) if inputs else (self,)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element types that are read for it, and those in which its values are computed."""
        of_inputs = (dtype for tensor in self.origin.inputs for dtype in tensor.dtypes)
        return (self.dtype, *self.origin.computed_in, *of_inputs)

    @property
    def values_dtype(self) -> DType:
        """An element type that holds every value."""
        return self.origin.decoded.exact_dtype if self.origin.decoded else self.dtype

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, stored once."""
        return self.elements * self.dtype.itemsize

    def without_replicas(self) -> Tensor:
        """The tensor with its primary pieces alone."""
        return replace(self, shards=self.shards.without_replicas())

    def with_aliases(self, aliases: Sequence[Tensor]) -> Tensor:
        """The tensor with its aliases as replicas, which are compared with it whenever it is read.

        Raises: CheckpointError if one of them is another tensor: of another type or shape, or changed by other deltas.
        """
        for alias in aliases:
            what = ""
            if (alias.dtype, alias.shape) != (self.dtype, self.shape):
                what = f"it is {alias.dtype} {list(alias.shape)}, {self.name} is {self.dtype} {list(self.shape)}"
            elif alias.origin.checksums != self.origin.checksums:
                what = f"deltas change it and {self.name} in different ways"
            if what:
                raise CheckpointError(what, where=alias.name, why="The target stores the two as one tensor")
        if not aliases:
            return self
        changed = {
            id(tensor): tensor.with_aliases([(alias.origin.unchanged or (alias,) * (i + 1))[i] for alias in aliases])
            for i, tensor in enumerate(self.origin.unchanged)
        }
        origin = self.origin.with_inputs(lambda tensor: changed.get(id(tensor), tensor)) if changed else self.origin
        distinct = {id(alias.shards): alias.shards for alias in aliases if alias.shards is not self.shards}
        return replace(self, shards=self.shards.with_copies(list(distinct.values())), origin=origin)

    def pieces(self) -> Iterator[Piece]:
        """Its pieces, made one at a time. Raises CheckpointError if a header that tells where a piece lies cannot be read."""
        return (self.shards.piece(i) for i in range(len(self.shards)))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, {self.kind}, {plural(len(self.shards), 'piece')})"


@mutable(eq=False)
class Checked:
    """Whether the result of patches has been compared with its checksum. All readers of a tensor share it."""

    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@value(eq=False, repr=False)
class Patched(Origin):
    """A chain of deltas changes the elements that the tensor's pieces hold. The last checksum is that of the result."""

    shape: tuple[int, ...]
    """The shape of the tensor: positions count its elements in row-major order."""
    steps: tuple[Patch, ...]
    """What each delta changes, the oldest first. At least one."""
    checked: Checked = field(default_factory=Checked)
    """Whether the result has been compared. It is compared when the tensor is first read."""

    @property
    def checksums(self) -> tuple[str, ...]:
        """The checksum after each delta."""
        return tuple(patch.checksum for patch in self.steps)

    def compared_later(self) -> Patched:
        """The patches without a comparison at the first read: whoever reads the whole tensor compares its digest."""
        return replace(self, checked=Checked(done=True))


@value(eq=False)
class EncodedPart:
    """One of the stored tensors of a quantized tensor."""

    tensor: Tensor
    """The stored tensor."""
    component: Component
    """What it is for, and how its values are packed."""
    block_shape: BlockShape
    """Elements of the quantized tensor per value, along each axis. None: one value for the whole axis."""
    axes: tuple[int, ...]
    """For each axis of the quantized tensor, the axis of the stored tensor. Empty if the stored tensor is one number."""

    def __repr__(self) -> str:
        return f"EncodedPart({self.component.use}, {self.tensor!r})"

    @property
    def packed_axis(self) -> int | None:
        """The axis of the stored tensor along which several values share a word."""
        packing = self.component.packing
        return len(self.axes) - 2 + (packing.axis ^ self.component.transposed) if packing else None

    @property
    def grid(self) -> BlockShape:
        """Elements of the quantized tensor per stored element, along each of its axes."""
        count = self.component.packing.count if self.component.packing else 1
        at = self.packed_axis
        return tuple(size * count if size and axis == at else size for size, axis in zip(self.block_shape, self.axes, strict=True))

    def box_of(self, box: Box) -> Box:
        """The box of the stored tensor that belongs to a box of elements: all of it, if it is one number."""
        shape = self.tensor.shape
        if not self.axes:
            return Box.whole(shape)
        starts, stops = [0] * len(shape), list(shape)
        for size, axis, start, stop in zip(self.grid, self.axes, box.offsets, box.stops, strict=True):
            if size is not None:
                run = self.component.packing.run if self.component.packing and axis == self.packed_axis else 1
                starts[axis], stops[axis] = start // size * run, -(-stop // size) * run
        return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


@value(eq=False, repr=False)
class Decoded(Origin):
    """The values of a quantized tensor follow from stored tensors."""

    name: str
    """What the form is called, such as "MXFP4"."""
    parts: tuple[EncodedPart, ...]
    """The stored tensors: the codes, then their scales and zero points."""
    dtype: DType
    """The element type of the values, unless another one is asked for."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return tuple(part.tensor for part in self.parts)

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Decoded:
        """The same form of other tensors."""
        return replace(self, parts=tuple(replace(part, tensor=change(part.tensor)) for part in self.parts))

    @property
    def decoded(self) -> Decoded:
        """Itself."""
        return self

    @property
    def exact_dtype(self) -> DType:
        """An element type that holds every value: bfloat16 for 4-bit floats that are scaled by powers of two, which end at its smallest
        number, 2^-133; otherwise float32."""
        codes, *others = (part.component for part in self.parts)
        return BF16 if codes.packing and codes.packing.name == "FP4" and all(other.exponents for other in others) else F32


@value(eq=False, repr=False)
class Encoded(Origin):
    """A component of a quantized weight follows from the weight's values; with a global scale, also from those of the weights with which an
    engine fuses it."""

    weight: Tensor
    """The weight [out, in]."""
    recipe: str
    """The name of the recipe, one of engine/origins."""
    component: Component
    """Which component it is."""
    dtype: DType
    """The element type in which the values are taken, and in which the recipe computes."""
    sharing: tuple[Tensor, ...] = ()
    """The weights that share its global scale, itself among them: they are read for it, once. Empty if there is no such scale."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The weight."""
        return (self.weight,)

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """The same component of another weight."""
        return replace(self, weight=change(self.weight), sharing=tuple(map(change, self.sharing)))


@value(eq=False, repr=False)
class Mapped(Origin):
    """Codes of 8 or 4 bits, as libraries pack optimizer state and weights: an element is the value that the table has for its code, times
    the scale of its block, in float32.

    A block is a run of elements in row-major order of the whole tensor; the last one may be shorter. Scales may be mapped themselves.
    """

    name: str
    """What the form is called, such as "8-bit state"."""
    codes: Tensor
    """The codes, of the tensor's shape; or two in a byte, the first in the high bits, in one piece or in rows."""
    scales: Tensor
    """[number of blocks]: the scale of each, float32."""
    table: Tensor | None
    """[256] or [16]: the value of each code, float32; None: a code is an 8-bit float or integer, which is the value."""
    block: int
    """The elements of a block."""
    dtype: DType = F32
    """The element type of the values of a weight, unless another one is asked for."""
    is_state: bool = False
    """Whether they are the state of an optimizer, in float32."""
    unit: float = 1.0
    """What the products are multiplied by, in float32."""
    offset: float | None = None
    """What is added to them then; None: nothing, which keeps the sign of zero."""
    computed_in = (F32,)
    exact_dtype = F32

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that are read for it."""
        return (self.codes, self.scales, *([self.table] if self.table else []))

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Mapped:
        """The same form of other tensors."""
        return replace(self, codes=change(self.codes), scales=change(self.scales), table=self.table and change(self.table))

    @property
    def decoded(self) -> Mapped | None:
        """Itself, if it is that of a weight."""
        return None if self.is_state else self


@value(eq=False)
class LowRankProduct:
    """What a merged LoRA adapter adds to a box of a tensor: scale * (rows x columns), in float32.

    The last two axes of the box are the rows and the columns; axes before them have one element. A vector is one row of columns.
    """

    box: Box
    """The box, in the coordinates of the tensor."""
    rows: Tensor | None
    """[rows of the box, r]: the factor of each row; None: ones."""
    columns: Tensor
    """[r, columns of the box]: the factor of each column."""
    scale: float
    """The factor of the product."""
    magnitude: Tensor | None = None
    """[rows of the box] with DoRA: each row is then scaled to this length; None without DoRA."""
    steps: tuple[int, int] = (1, 1)
    """The step from one row of the product to the next in the box, and from one column to the next. (1, 2): the product belongs to the
    columns 0, 2, 4, ... of the box, as those of gate in a weight in which gate and up alternate."""
    replaces: bool = False
    """Whether it takes the place of the values in the box (trained rows of an embedding), instead of being added."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The stored tensors that are read for it."""
        return tuple(factor for factor in (self.rows, self.columns, self.magnitude) if factor is not None)


@value(eq=False, repr=False)
class Merged(Origin):
    """Products of a LoRA adapter are added to the values of a base, one after the other."""

    base: Tensor
    """The same tensor without the adapter."""
    products: tuple[LowRankProduct, ...]
    """What is added."""
    computed_in = (F32,)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The base, and the factors of the products."""
        return (self.base, *(factor for product in self.products for factor in product.factors))

    @property
    def unchanged(self) -> tuple[Tensor, ...]:
        """The base."""
        return (self.base,)

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Merged:
        """The same products of other factors, and another base."""

        def changed(product: LowRankProduct) -> LowRankProduct:
            rows, magnitude = (factor and change(factor) for factor in (product.rows, product.magnitude))
            return replace(product, rows=rows, columns=change(product.columns), magnitude=magnitude)

        return Merged(change(self.base), tuple(map(changed, self.products)))

    @property
    def changed_by(self) -> tuple[str, ...]:
        """What changes the base, and the names of the factors."""
        return (*self.base.origin.changed_by, *(tensor.name for tensor in self.inputs[1:]))

    @property
    def identity(self) -> str:
        """A text that differs if the changes do."""
        texts = [self.base.origin.identity]
        for product in self.products:
            steps = "" if product.steps == (1, 1) and not product.replaces else f"{product.steps}{product.replaces}\0"
            texts += [f"{product.box}\0{steps}{product.scale!r}\0", *(f"{factor.name}\0{factor.shape}\0" for factor in product.factors)]
        return "".join(texts)


Rule = Literal["average", "task-arithmetic", "slerp", "equal"]
"""How the tensors of several checkpoints become one (engine/origins/mixed.py); "equal": all must hold the same elements."""


@value(eq=False, repr=False)
class Mixed(Origin):
    """The values of one tensor are computed from the same tensor of several checkpoints."""

    rule: Rule
    """How they are computed."""
    tensors: tuple[Tensor, ...]
    """The tensors, in the order of the checkpoints, under the paths that their files have in the joined tree."""
    checkpoints: tuple[str, ...]
    """The path of each checkpoint, as the caller gave it."""
    weights: tuple[float, ...]
    """The weight of each input; of slerp the angle's parts `1 - t` and `t`."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return self.tensors

    @property
    def unchanged(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return self.tensors

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Mixed:
        """The same mixture of other tensors."""
        return replace(self, tensors=tuple(map(change, self.tensors)))

    @property
    def changed_by(self) -> tuple[str, ...]:
        """What changes the first tensor, and the paths of the other checkpoints."""
        return (*self.tensors[0].origin.changed_by, *self.checkpoints[1:])

    @property
    def identity(self) -> str:
        """A text that differs if the mixture does."""
        inputs = (f"{term.dtype} {len(term.shards)} {[leaf.name for leaf in term.leaves]}{term.origin.identity}" for term in self.tensors)
        return f"{self.rule}\0{self.weights!r}\0" + "\0".join(inputs)


@value(eq=False)
class Term:
    """A part of a tensor that is computed from a tensor of one adapter, as values * factors[0] * factors[1] ..."""

    box: Box
    """The part, in the coordinates of the computed tensor."""
    tensor: Tensor
    """The values of the part, in its shape."""
    factors: tuple[float, ...]
    """Each product is rounded to float32, as are the factors themselves."""


@value(eq=False, repr=False)
class Weighted(Origin):
    """The sum of weighted parts, in float32 and in their order; zero where no part lies. For two adapters, as PEFT:

    cat      A = [A1 * w1 * s1; A2 * w2 * s2]      B = [B1, B2]          two parts that do not meet
    linear   A = A1 * c1 + A2 * c2                 B likewise            two parts of the whole tensor
    """

    terms: tuple[Term, ...]
    """The parts."""
    computed_in = (F32,)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the adapters."""
        return tuple(term.tensor for term in self.terms)

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Weighted:
        """The same sum of other tensors."""
        return Weighted(tuple(replace(term, tensor=change(term.tensor)) for term in self.terms))

    def of_parts(self, part: Callable[[Tensor], Tensor]) -> Weighted:
        """The sum of the same part of each tensor, where every term is of the whole tensor."""
        parts = ((term, part(term.tensor)) for term in self.terms)
        return Weighted(tuple(Term(Box.whole(tensor.shape), tensor, term.factors) for term, tensor in parts))

    @property
    def identity(self) -> str:
        """A text that differs if the sum does."""
        return "".join(f"{term.box}\0{term.factors!r}\0{term.tensor.name}\0{term.tensor.origin.identity}" for term in self.terms)
