"""Everything that DecoderLayer's backward needs, by name: `store` of `rerun.py` keeps it."""

from typing import NamedTuple

from torch import Tensor

from ..kernels.qkv_attention import AttentionSaved
from .buffer import ProductInput
from .operands import Adapters, Dropouts, FrozenLayer, Others
from .residual import Normed


class Added(NamedTuple):
    """The output projection o, added to the residual."""

    x: Tensor  # [T, in of o], what o reads
    total: Tensor  # [T, hidden], the sum
    z: Tensor  # x A' of o
    normed: Normed | None  # what o gave, where that is normed


class Attended(NamedTuple):
    """Attention, and its output projection added to the residual."""

    added: Added
    saved: AttentionSaved
    before_gate: Tensor | None = None  # what o reads before its gate, if it has one


class SavedMLP(NamedTuple):
    """The MLP between a norm and the residual."""

    m: ProductInput  # what gate and up read
    rstd: Tensor | None  # of the norm
    gate_up: Tensor
    z_down: Tensor  # h A' of down
    normed: Normed | None  # what down gave, where that is normed


class Saved(NamedTuple):
    """Results of DecoderLayer's forward that its backward needs."""

    hidden: Tensor
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    n: ProductInput  # what q, k and v read
    input_rstd: Tensor | None
    raw: Tensor | None  # [q | k | v] before the norms of heads, if there are any; with gates
    qkv: Tensor
    attended: Attended
    mlp: SavedMLP
    frozen: FrozenLayer
    adapters: Adapters
    dropouts: Dropouts
    kinds: Others  # of what is trained beside the adapters
