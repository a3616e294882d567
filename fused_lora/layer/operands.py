"""The operands of a block: what it trains, what it does not, and whether they fit together.

`Frame` names what all blocks have in common (`block.py` says what a block is).

An autograd function takes and returns its tensors as a flat sequence. `Trained` names them:
`from_flat` reads the tensors, or autograd's flags for them, and `flat` writes their gradients in
that order.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import draw_masks
from fused_mlp.launching import check_runnable
from fused_mlp.utils import compute_dtype

from ..kernels.magnitudes import Factors
from ..kernels.row_norm import MAX_HIDDEN, _rms_norm_forward_kernel
from .buffer import Dropout, WeightGroup
from .filling import Adapter, Filling, adapters_of
from .residual import Norm


class Trained(NamedTuple):
    """A value for each tensor that a block may train."""

    adapters: tuple[Adapter, ...]  # of its projections, the last one's last
    biases: Sequence[Any] = ()  # theirs, [out] in any dtype; none where only adapters are trained
    magnitudes: Sequence[Any] = ()  # DoRA's, likewise
    norm: Any = None  # [hidden], None where it is not trained
    norm_after: Any = None  # likewise

    @classmethod
    def from_flat(cls, values: Sequence, projections: int) -> "Trained":
        """Name these values: A and B of each projection; then, where anything else is trained, a
        bias and a magnitude of each and the weights of both norms, None for one that is not."""
        adapters, others = values[: 2 * projections], values[2 * projections :]
        if not others:
            return cls(adapters_of(adapters))
        *others, norm, norm_after = others
        biases, magnitudes = others[:projections], others[projections:]
        return cls(adapters_of(adapters), biases, magnitudes, norm, norm_after)

    def split_last(self) -> tuple["Trained", "Trained"]:
        """Return the values without those of the last projection, None in their place, and the
        last projection's."""
        *adapters, last = self.adapters
        none = [None][: len(self.biases)]  # nothing where only adapters are trained
        return (
            Trained(
                (*adapters, Adapter(None, None)), [*self.biases[:-1], *none],
                [*self.magnitudes[:-1], *none], self.norm,
            ),
            Trained((last,), self.biases[-1:], self.magnitudes[-1:], None, self.norm_after),
        )  # fmt: skip

    def flat(self) -> tuple:
        """Return the values as `from_flat` takes them."""
        adapters = tuple(chain.from_iterable(self.adapters))
        if not self.biases:
            return adapters
        return (*adapters, *self.biases, *self.magnitudes, self.norm, self.norm_after)


class Frame(NamedTuple):
    """Everything around the computation of a block that it does not train."""

    norm: Norm | None  # None: the projections take hidden as it is
    inputs: WeightGroup  # of the projections that read the norm
    output: WeightGroup  # of the one that is added to the residual
    filling: Filling
    norm_after: Norm | None = None  # of what is added to the residual; None: as it is
    multiplier: float = 1.0  # likewise
    # of the residual behind an attention or a mixer alone, for what follows; frozen. None: there is
    # nothing
    norm_next: Norm | None = None
    adds: bool = True  # False: the output is what would be added, in the buffers' dtype
    columns_before: int = 0  # of rows for hidden's gradient, which the layer before takes; 0: any
    has_entered: bool = False  # another function has run the projections that read the norm
    # of each projection: the probability with which an element of its adapter's input is dropped,
    # None to share the mask of the projection before; empty: none is
    dropout_rates: tuple[float | None, ...] = ()
    masks_before: int = 0  # projections of the same layer whose masks have the same seed
    trains_others: bool = False  # biases, magnitudes or norms, beside the adapters

    # --- of one call alone ---

    seed: Tensor | None = None  # [1] int64, of all masks: `draw_seed(hidden.device)`

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        return (self.output,) if self.has_entered else (self.inputs, self.output)

    @property
    def projections(self) -> int:
        return 1 if self.has_entered else len(self.inputs.out_features) + 1

    @property
    def tensors(self) -> int:
        """The number of tensors that it trains, as `Trained` has them."""
        others = 2 * self.projections + 2 if self.trains_others else 0
        return 2 * self.projections + others

    @property
    def adds_directly(self) -> bool:
        """Return True if the gradient of the output is that of what the last projection gave."""
        scale = self.output.scale
        return self.norm_after is None and self.multiplier == 1.0 and scale is None

    def with_others(self, name: str, trained: Trained) -> "Frame":
        """Return the block with its biases and norms replaced by those that are trained."""
        if not self.trains_others:
            return self
        *biases, bias = trained.biases
        return self._replace(
            norm=_with_weight(f"{name}: norm", self.norm, trained.norm),
            norm_after=_with_weight(f"{name}: norm_after", self.norm_after, trained.norm_after),
            inputs=_with_biases(f"{name}: inputs", self.inputs, biases),
            output=_with_biases(f"{name}: output", self.output, (bias,)),
        )

    def factors(self, trained: Trained) -> "BlockFactors":
        """Return what the magnitudes become. The buffers are filled."""
        if not trained.magnitudes:
            return BlockFactors()
        *magnitudes, last = trained.magnitudes
        return BlockFactors(self.inputs.factors(magnitudes), self.output.factors((last,)))

    def scaled(self, factors: "BlockFactors") -> "Frame":
        """Return the block with these factors."""
        if factors == (None, None):
            return self
        inputs, output = self.inputs.scaled(factors.inputs), self.output.scaled(factors.output)
        return self._replace(inputs=inputs, output=output)


class BlockFactors(NamedTuple):
    """The factors of a block's two buffers, None for one without magnitudes."""

    inputs: Factors | None = None
    output: Factors | None = None


def _with_weight(name: str, norm: Norm | None, weight: Tensor | None) -> Norm | None:
    if weight is None:
        return norm
    if norm is None:
        raise ValueError(f"{name} is given, and the block has no such norm: give None")
    return norm._replace(weight=weight)


def _with_biases(name: str, group: WeightGroup, biases: Sequence[Tensor | None]) -> WeightGroup:
    """Return the group with its bias replaced by those of its projections, unless all are None."""
    if all(bias is None for bias in biases):
        return group
    own = group.A.new_zeros(group.grad_columns)
    parts = own[: group.out].split_with_sizes(group.out_features)
    for i, (bias, part) in enumerate(zip(biases, parts, strict=True)):
        if bias is not None:
            if bias.shape != part.shape:
                raise ValueError(
                    f"{name}: bias {i} is {list(bias.shape)}, should be {list(part.shape)}"
                )
            part.copy_(bias)
    return group.with_own_bias(own)


class Kind(NamedTuple):
    """The shape and dtype of a gradient."""

    shape: Sequence[int]
    dtype: torch.dtype


class Kinds(NamedTuple):
    """The Kind of all that is trained beside adapters, None for one that is not."""

    biases: Sequence[Kind | None]
    magnitudes: Sequence[Kind | None]
    norm: Kind | None
    norm_after: Kind | None


def kinds_of(trained: Trained) -> Kinds | None:
    """Return the kinds, None where only adapters are trained."""
    if not trained.biases:
        return None
    biases, magnitudes = (
        tuple(map(_kind_of, some)) for some in (trained.biases, trained.magnitudes)
    )
    return Kinds(biases, magnitudes, _kind_of(trained.norm), _kind_of(trained.norm_after))


def _kind_of(tensor: Tensor | None) -> Kind | None:
    return None if tensor is None else Kind(tensor.shape, tensor.dtype)


class Dropouts(NamedTuple):
    """The masks of a block's two buffers, None for one without any."""

    inputs: Dropout | None = None
    output: Dropout | None = None

    def at(self, rows: slice) -> "Dropouts":
        """Return the masks of these rows. The first row begins a word of bits."""
        return Dropouts(*(one and one.at(rows) for one in self))


def draw_dropouts(name: str, frame: Frame, tokens: int, of_output: bool = True) -> Dropouts:
    """Draw the masks of the inputs of a block's projections. Each is the same, whichever others
    are drawn."""
    if not any(frame.dropout_rates):
        return Dropouts()
    is_drawn = [not frame.has_entered] * len(frame.inputs.out_features) + [of_output]
    rates = [
        rate if drawn else 0.0 for rate, drawn in zip(frame.dropout_rates, is_drawn, strict=True)
    ]
    columns = [frame.inputs.in_features] * (len(rates) - 1) + [frame.output.in_features]
    before = frame.masks_before
    masks = draw_masks(
        name, frame.seed, [0.0] * before + rates, [tokens] * (before + len(rates)),
        [0] * before + columns,
    )  # fmt: skip
    if masks is None:
        return Dropouts()
    *its, last = masks[before:]
    return Dropouts(
        Dropout(tuple(its), frame.inputs.blocks) if any(its) else None,
        Dropout((last,), frame.output.blocks) if last else None,
    )


def check_block(name: str, hidden: Tensor, trained: Trained, frame: Frame) -> None:
    """Raise ValueError where shapes do not fit together, naming the tensor."""
    *adapters, last = trained.adapters
    if not frame.has_entered:
        check_adapters(f"{name}: inputs", adapters, frame.inputs)
    check_adapters(f"{name}: output", (last,), frame.output)
    outs = frame.output.out_features
    outs = outs if frame.has_entered else (*frame.inputs.out_features, *outs)
    for i, (magnitude, out) in enumerate(zip(trained.magnitudes, outs, strict=False)):
        if magnitude is not None and magnitude.shape != (out,):
            raise ValueError(f"{name}: magnitude {i} is {list(magnitude.shape)}, should be [{out}]")
    for key in ("norm", "norm_after", "norm_next"):
        norm = getattr(frame, key)
        if norm is not None and norm.weight.shape != hidden.shape[2:]:
            raise ValueError(
                f"{name}: {key} is {list(norm.weight.shape)}, should be {list(hidden.shape[2:])}"
            )


def check_input(name: str, hidden: Tensor, group: WeightGroup) -> None:
    """Raise ValueError unless hidden is what this group's projections can read."""
    if hidden.ndim != 3 or hidden.shape[2] != group.in_features:
        raise ValueError(
            f"{name}: hidden is {list(hidden.shape)}, should be [batch, positions, "
            f"{group.in_features}]"
        )
    if hidden.shape[2] > MAX_HIDDEN:
        raise ValueError(f"{name}: hidden is {list(hidden.shape)}, wider than {MAX_HIDDEN}")
    check_runnable(name, _rms_norm_forward_kernel, hidden)
    computed = compute_dtype(hidden)
    if group.A.dtype != computed or hidden.dtype not in (computed, torch.float32):
        raise ValueError(
            f"{name}: hidden is {hidden.dtype}, the buffers {group.A.dtype} and the dtype of "
            f"the computation {computed}: give all one dtype, or use the unfused layer"
        )


def check_adapters(name: str, adapters: Sequence[Adapter], group: WeightGroup) -> None:
    """Raise ValueError unless A and B of each projection fit the border."""
    inputs = group.in_features
    sizes = zip(adapters, group.out_features, group.blocks, strict=True)
    for i, ((A, B), out, block) in enumerate(sizes):
        r = A.shape[0]
        if A.shape != (r, inputs) or B.shape != (out, r) or r > block:
            raise ValueError(
                f"{name}: A {i} is {list(A.shape)} and B {i} {list(B.shape)}, should be "
                f"[r, {inputs}] and [{out}, r] of one r up to {block}"
            )
