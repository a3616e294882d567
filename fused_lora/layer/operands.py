"""FrozenLayer: the operands of DecoderLayer (`decoder_layer.py`) that it does not train, and Others
that it may; its masks of dropout, and the checks of all operands before a layer runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fused_mlp.dropout import Masks, draw_masks
from fused_mlp.utils import compute_dtype

from ..kernels.qkv_norm_rope import HeadNorms
from .buffer import Bordered, check_adapters, with_own_biases
from .filling import Filling

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
ADAPTERS = 2 * len(PROJECTIONS)  # tensors: A and B of each
NORMS = ("input_norm", "post_norm", "attended_norm", "mlp_norm")
GROUPS = ("qkv", "o", "gate_up", "down")  # the buffers that these lie in, of FrozenLayer


class FrozenLayer(NamedTuple):
    """The operands of DecoderLayer that it does not train."""

    input_norm: Tensor | None  # [hidden]; None: attention takes hidden as it is
    post_norm: Tensor | None  # [hidden], of what the MLP takes; None likewise
    qkv: Bordered
    o: Bordered
    gate_up: Bordered
    down: Bordered
    input_eps: float
    post_eps: float
    heads: int
    kv_heads: int
    attention_scaling: float
    borders: Filling
    head_norms: HeadNorms | None = None  # of q and k; None: these are turned as they come
    multiplier: float = 1.0  # of what attention and the MLP add to the residual
    # [hidden], of what attention and the MLP add to the residual; None: they add it as it is
    attended_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    attended_eps: float = 0.0
    mlp_eps: float = 0.0
    zero_centered: bool = False  # these four norms multiply by one more than their weight
    activation: str = "silu"  # of gate, as LoRA_MLP has it: "gelu_tanh" for GELU by tanh
    # False while checkpointing runs a layer again only for what it saves: no output is computed
    output_needed: bool = True
    # of q, k, v, o, gate, up and down: the probability with which an element of the adapter's input
    # is dropped; empty: none is
    dropouts: tuple[float | None, ...] = ()
    seed: Tensor | None = None  # [1] int64, of all masks: `draw_seed(hidden.device)`, for each call
    # [n], of batch * positions: the only tokens whose output is wanted, each once; that of others
    # is 0, and their gradient is not read. None: all
    rows: Tensor | None = None


class Others(NamedTuple):
    """The biases and norms of a layer where some are trained. Of biases all are given, [out] in any
    dtype, if one is trained; of norms those that are, [hidden]; None for the others."""

    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    input_norm: Tensor | None = None
    post_norm: Tensor | None = None
    attended_norm: Tensor | None = None
    mlp_norm: Tensor | None = None

    @property
    def biases(self) -> tuple[Sequence[Tensor | None], ...]:
        """The biases of each of GROUPS."""
        return self[:3], self[3:4], self[4:6], self[6:7]


def with_others(frozen: FrozenLayer, others: Sequence[Tensor | None]) -> FrozenLayer:
    """The operands with Others, if they are given, in the place of their own."""
    if not others:
        return frozen
    if len(others) != len(Others._fields):
        raise ValueError(
            f"DecoderLayer: {len(others)} biases and norms given, should be none, or each of "
            f"{', '.join(Others._fields)}, None for one that is not there"
        )
    given = Others(*others)
    own: dict[str, Any] = {
        group: with_own_biases(f"DecoderLayer: {group}", getattr(frozen, group), biases)
        for group, biases in zip(GROUPS, given.biases, strict=True)
    }
    own |= {name: getattr(given, name) for name in NORMS if getattr(given, name) is not None}
    return frozen._replace(**own)


def new_gradients(x: Tensor, kinds: Sequence, needed: Sequence[bool]) -> Others:
    """New tensors for the gradients of Others, of these shapes and dtypes, where they are
    needed."""
    return Others(*(
        x.new_empty(kind[0], dtype=kind[1]) if need else None
        for kind, need in zip(kinds, needed, strict=True)
    ))  # fmt: skip


def by_group(values: Sequence) -> tuple[Sequence, ...]:
    """One value for each A and B, by the buffer that they belong to."""
    return values[:6], values[6:8], values[8:12], values[12:]


def draw_layer_masks(frozen: FrozenLayer, x: Tensor) -> Masks | None:
    """The masks of the seven projections' inputs: of tokens that are wanted, from o on."""
    tokens = len(x)
    wanted = tokens if frozen.rows is None else len(frozen.rows)
    rows, columns = [], []
    for name in GROUPS:
        bordered = getattr(frozen, name)
        for _ in bordered.out_features:
            rows.append(tokens if name == "qkv" else wanted)
            columns.append(bordered.in_features)
    return draw_masks("DecoderLayer", frozen.seed, frozen.dropouts, rows, columns)


def masks_by_group(masks: Masks | None) -> Sequence[Masks | None]:
    """The masks of each of GROUPS, None for one without any."""
    if masks is None:
        return None, None, None, None
    groups = masks[:3], masks[3:4], masks[4:6], masks[6:]
    return [group if any(group) else None for group in groups]


def check_layer_operands(
    hidden: Tensor, cos: Tensor | None, sin: Tensor | None, adapters: Sequence[Tensor],
    frozen: FrozenLayer,
) -> None:  # fmt: skip
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    name = "DecoderLayer"
    qkv = frozen.qkv
    if hidden.ndim != 3 or hidden.shape[2] != qkv.in_features:
        raise ValueError(
            f"{name}: hidden is {list(hidden.shape)}, should be [batch, positions, "
            f"{qkv.in_features}]"
        )
    if compute_dtype(hidden) != hidden.dtype or qkv.A.dtype != hidden.dtype:
        raise ValueError(
            f"{name}: hidden is {hidden.dtype}, the buffers {qkv.A.dtype} and the dtype of "
            f"the computation {compute_dtype(hidden)}: give all one dtype, or use the unfused layer"
        )
    if any(angle is not None and angle.requires_grad for angle in (cos, sin)):
        raise ValueError(
            f"{name}: cos or sin requires a gradient, which it would not get: detach them, or use "
            "the unfused layer"
        )
    if len(adapters) != ADAPTERS:
        raise ValueError(
            f"{name}: {len(adapters)} adapter tensors given, should be {ADAPTERS}: A "
            f"and B of {', '.join(PROJECTIONS)}"
        )
    for group, tensors in zip(GROUPS, by_group(adapters), strict=True):
        check_adapters(f"{name}: {group}", tensors, getattr(frozen, group))
