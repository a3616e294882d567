"""The operands of DecoderLayer: what it trains, what it does not, and whether they fit together.

An autograd function takes and returns its tensors as a flat sequence. `Trained` names them:
`from_flat` reads the tensors, or autograd's flags for them, and `flat` writes their gradients in
that order.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import Masks, draw_masks
from fused_mlp.launching import check_runnable
from fused_mlp.utils import check_activation, compute_dtype

from ..functions.rope import check_angles, check_head_norms
from ..kernels.head_norms import HeadNorms
from ..kernels.row_norm import MAX_HIDDEN, _rms_norm_forward_kernel
from .buffer import Dropout, WeightGroup
from .filling import Adapter, Filling, adapters_of
from .residual import Norm

NAME = "DecoderLayer"


class Adapters(NamedTuple):
    """The adapters of a layer's seven projections."""

    q: Adapter
    k: Adapter
    v: Adapter
    o: Adapter
    gate: Adapter
    up: Adapter
    down: Adapter

    @property
    def qkv(self) -> tuple[Adapter, Adapter, Adapter]:
        return self.q, self.k, self.v

    @property
    def after_attention(self) -> "AdaptersAfterAttention":
        return AdaptersAfterAttention(self.o, self.gate, self.up, self.down)


class AdaptersAfterAttention(NamedTuple):
    """The adapters from o on."""

    o: Adapter
    gate: Adapter
    up: Adapter
    down: Adapter


class Others(NamedTuple):
    """The biases and norms of a layer in which some are trained. If one bias is trained, all biases
    are given, [out] in any dtype. Of the norms only the trained ones are given, [hidden], and None
    for the others."""

    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    norm_before_attention: Any = None
    norm_after_attention: Any = None
    norm_before_mlp: Any = None
    norm_after_mlp: Any = None

    @property
    def qkv_biases(self) -> tuple[Any, Any, Any]:
        return self.q_bias, self.k_bias, self.v_bias

    @property
    def gate_up_biases(self) -> tuple[Any, Any]:
        return self.gate_bias, self.up_bias


NORMS = tuple(name for name in Others._fields if name.startswith("norm_"))
TENSORS = 2 * len(Adapters._fields)  # of adapters: A and B of each projection


class Trained(NamedTuple):
    """A value for each tensor that a layer may train."""

    adapters: Adapters
    others: Others | None

    @classmethod
    def from_flat(cls, values: Sequence) -> "Trained":
        """Name these values: A and B of each adapter, then Others, if there are any."""
        adapters, others = values[:TENSORS], values[TENSORS:]
        if len(adapters) != TENSORS:
            raise ValueError(
                f"{NAME}: {len(adapters)} adapter tensors given, should be {TENSORS}: A "
                f"and B of {', '.join(Adapters._fields)}"
            )
        if others and len(others) != len(Others._fields):
            raise ValueError(
                f"{NAME}: {len(others)} biases and norms given, should be none, or each of "
                f"{', '.join(Others._fields)}, None for one that is not there"
            )
        return cls(Adapters(*adapters_of(adapters)), Others(*others) if others else None)

    def flat(self) -> Iterator:
        """Return the values as `from_flat` takes them."""
        for adapter in self.adapters:
            yield from adapter
        yield from self.others or ()


class FrozenLayer(NamedTuple):
    """The operands of DecoderLayer that it does not train."""

    norm_before_attention: Norm | None  # None: attention takes hidden as it is
    norm_before_mlp: Norm | None  # None likewise
    qkv: WeightGroup
    o: WeightGroup
    gate_up: WeightGroup
    down: WeightGroup
    filling: Filling
    # of what attention and the MLP add to the residual; None: as it is
    norm_after_attention: Norm | None = None
    norm_after_mlp: Norm | None = None
    multiplier: float = 1.0  # likewise of both
    activation: str = "silu"  # of gate, as LoRA_MLP has it: "gelu_tanh" for GELU by tanh
    heads: int = 0  # 0: it has no attention
    kv_heads: int = 0
    attention_scaling: float = 1.0
    head_norms: HeadNorms | None = None  # of q, k and v; None: q and k are rotated as they are
    has_gate: bool = False  # q's projection gives a gate beside each head (`output_gate.py`)
    interleaved: bool = False  # RoPE pairs neighbours of a head, not its halves
    # of q, k, v, o, gate, up and down: the probability with which an element of the adapter's input
    # is dropped, None to share the mask of the projection before; empty: none is
    dropout_rates: tuple[float | None, ...] = ()

    # --- of one call alone ---

    seed: Tensor | None = None  # [1] int64, of all masks: `draw_seed(hidden.device)`
    # [batch or 1, positions] in fp32, multiplies q after RoPE; None: 1
    q_scale: Tensor | None = None
    window: int | None = None  # tokens of its document that each sees, itself the last; None: all
    # False while checkpointing runs a layer again only for what it saves: no output is computed
    output_needed: bool = True

    @property
    def groups(self) -> tuple[WeightGroup, WeightGroup, WeightGroup, WeightGroup]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def attention_adds_directly(self) -> bool:
        return self.norm_after_attention is None and self.multiplier == 1.0

    @property
    def mlp_adds_directly(self) -> bool:
        return self.norm_after_mlp is None and self.multiplier == 1.0

    def with_others(self, others: Others | None) -> "FrozenLayer":
        """Return the operands, with their biases and norms replaced by those given in Others."""
        if others is None:
            return self
        norms: dict[str, Any] = {
            name: _with_weight(name, getattr(self, name), getattr(others, name)) for name in NORMS
        }
        return self._replace(
            qkv=_with_biases("qkv", self.qkv, others.qkv_biases),
            o=_with_biases("o", self.o, (others.o_bias,)),
            gate_up=_with_biases("gate_up", self.gate_up, others.gate_up_biases),
            down=_with_biases("down", self.down, (others.down_bias,)),
            **norms,
        )

    def for_backward(self) -> "FrozenLayer":
        """Return the operands without the tensors that backward does not read."""
        if self.seed is None and all(group.own_bias is None for group in self.groups):
            return self
        qkv, o, gate_up, down = (group._replace(own_bias=None) for group in self.groups)
        return self._replace(qkv=qkv, o=o, gate_up=gate_up, down=down, seed=None)


def _with_weight(name: str, norm: Norm | None, weight: Tensor | None) -> Norm | None:
    if weight is None:
        return norm
    if norm is None:
        raise ValueError(f"{NAME}: {name} is given, and the layer has no such norm: give None")
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
                    f"{NAME}: {name}: bias {i} is {list(bias.shape)}, should be {list(part.shape)}"
                )
            part.copy_(bias)
    return group._replace(own_bias=own)


class Kind(NamedTuple):
    """The shape and dtype of a gradient."""

    shape: Sequence[int]
    dtype: torch.dtype


def kinds_of(others: Others | None) -> Others:
    """Return the Kind of each, None for one that is not there."""
    return Others(
        *(None if other is None else Kind(other.shape, other.dtype) for other in others or ())
    )


def new_gradients(x: Tensor, kinds: Others, needed: Others | None) -> Others:
    """Return new tensors of these kinds where a gradient is needed, None elsewhere."""
    return Others(*(
        x.new_empty(kind.shape, dtype=kind.dtype) if need else None
        for kind, need in zip(kinds, needed or Others(), strict=True)
    ))  # fmt: skip


class Dropouts(NamedTuple):
    """The masks of a layer's four buffers, None for one without any."""

    qkv: Dropout | None = None
    o: Dropout | None = None
    gate_up: Dropout | None = None
    down: Dropout | None = None


def draw_dropouts(
    frozen: FrozenLayer, tokens: int, wanted: Sequence[WeightGroup] | None = None
) -> Dropouts:
    """Draw the masks of the projections' inputs.

    wanted: the groups to draw for, None for all. Their masks are the same, whichever these are.
    """
    if not any(frozen.dropout_rates):
        return Dropouts()
    groups = [group for group in frozen.groups for _ in group.out_features]
    dropouts = [
        dropout if wanted is None or any(group is one for one in wanted) else 0.0
        for dropout, group in zip(frozen.dropout_rates, groups, strict=True)
    ]
    columns = [group.in_features for group in groups]
    masks = draw_masks(NAME, frozen.seed, dropouts, [tokens] * len(groups), columns)
    if masks is None:
        return Dropouts()
    left = iter(masks)
    return Dropouts(*(
        _dropout(group, tuple(next(left) for _ in group.out_features)) for group in frozen.groups
    ))  # fmt: skip


def _dropout(group: WeightGroup, masks: Masks) -> Dropout | None:
    return Dropout(masks, group.blocks) if any(masks) else None


def check_operands(
    hidden: Tensor, cos: Tensor | None, sin: Tensor | None, adapters: Adapters, frozen: FrozenLayer
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    check_layer_input(NAME, hidden, frozen.qkv)
    check_activation(NAME, frozen.activation)
    for name in NORMS:
        norm = getattr(frozen, name)
        if norm is not None and norm.weight.shape != hidden.shape[2:]:
            raise ValueError(
                f"{NAME}: {name} is {list(norm.weight.shape)}, should be {list(hidden.shape[2:])}"
            )
    if any(angle is not None and angle.requires_grad for angle in (cos, sin)):
        raise ValueError(
            f"{NAME}: cos or sin requires a gradient, which it would not get: detach them, or use "
            "the unfused layer"
        )
    if frozen.heads:
        heads, kv_heads = frozen.heads, frozen.kv_heads
        head_dim = frozen.o.in_features // heads
        check_angles(NAME, cos, sin, (*hidden.shape[:2], head_dim), hidden.device)
        if frozen.head_norms is not None:
            check_head_norms(NAME, frozen.head_norms, heads, kv_heads, head_dim, hidden.device)
    check_adapters(NAME, "qkv", adapters.qkv, frozen.qkv)
    check_adapters(NAME, "o", (adapters.o,), frozen.o)
    check_adapters(NAME, "gate_up", (adapters.gate, adapters.up), frozen.gate_up)
    check_adapters(NAME, "down", (adapters.down,), frozen.down)


def check_layer_input(name: str, hidden: Tensor, group: WeightGroup) -> None:
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


def check_adapters(name: str, part: str, adapters: Sequence[Adapter], group: WeightGroup) -> None:
    """Raise ValueError unless A and B of each projection fit the border."""
    inputs = group.in_features
    sizes = zip(adapters, group.out_features, group.blocks, strict=True)
    for i, ((A, B), out, block) in enumerate(sizes):
        r = A.shape[0]
        if A.shape != (r, inputs) or B.shape != (out, r) or r > block:
            raise ValueError(
                f"{name}: {part}: A {i} is {list(A.shape)} and B {i} {list(B.shape)}, should be "
                f"[r, {inputs}] and [{out}, r] of one r up to {block}"
            )
