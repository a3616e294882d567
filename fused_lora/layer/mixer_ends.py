"""The two ends of a mixer (`mixer_block.py`): of a gated delta net, and of a short convolution.

Gated delta nets: Yang, Kautz & Hatamizadeh, arXiv 2412.06464. Short convolutions: LFM2, arXiv
2511.23404.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functions.causal_conv import Conv, causal_conv_backward, causal_conv_forward
from ..functions.gated_norm import gated_rms_norm_backward, gated_rms_norm_forward
from ..kernels.document_bounds import begins_of

# A logarithm of a decay that leaves nothing: exp of it is 0 in fp32, below half the smallest number
# (-104). A larger one would cost the differences of the sums of decays more digits.
FORGETS = -110.0


def decay_of(A_log: Tensor, a: Tensor, dt_bias: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Return the logarithm of a gated delta net's decay, [batch, positions, heads] in fp32.

    seq_idx: each token's document, [batch, positions]. At its first token the recurrence forgets
    everything, so no library has to know of documents, and a CUDA graph replays any of them.
    """
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    if seq_idx is None:
        return decay
    return decay.masked_fill(begins_of(seq_idx)[..., None], FORGETS)


class DeltaNetEnds(NamedTuple):
    """The ends of a gated delta net, with its frozen tensors. From the projections' [q | k | v], z,
    b and a they compute

        q, k, v     = silu(conv([q | k | v]))               one pass (`causal_conv.py`)
        beta        = sigmoid(b)
        decay       = -exp(A_log) softplus(a + dt_bias)     in fp32; FORGETS at a document's first
                                                            token, where the recurrence then gives
                                                            decay no gradient but rounding
        y           = norm(found) silu(z)                   one pass (`gated_norm.py`)

    The mixer is the recurrence of q, k, v, beta and decay. Its result, `found`, is [batch,
    positions, heads, head_dim].
    """

    conv_weight: Tensor  # [channels, taps]
    conv_bias: Tensor | None  # [channels]
    A_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    norm_weight: Tensor  # [head_dim]
    norm_eps: float
    sizes: tuple[int, int, int]  # features of q, k and v
    seq_idx: Tensor | None  # [batch, positions], each token's document

    @property
    def conv(self) -> Conv:
        return Conv(self.sizes, seq_idx=self.seq_idx)

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mixed, z, b, a = parts
        q, k, v = causal_conv_forward(mixed, self.conv_weight, self.conv_bias, self.conv)
        decay = decay_of(self.A_log, a, self.dt_bias, self.seq_idx)
        return q, k, v, b.sigmoid(), decay, z

    def enter_backward(
        self, grads: Sequence[Tensor], parts: Sequence[Tensor], grad_parts: Sequence[Tensor]
    ) -> None:
        *grad_qkv, grad_beta, grad_decay, grad_z = grads
        mixed, _, b, a = parts
        in_mixed, in_z, in_b, in_a = grad_parts
        causal_conv_backward(
            grad_qkv, mixed, self.conv_weight, self.conv_bias, self.conv, in_mixed.flatten(0, 1),
            need_weights=False,
        )  # fmt: skip
        in_z.copy_(grad_z)
        beta = b.float().sigmoid()
        in_b.copy_(grad_beta * beta * (1.0 - beta))
        slope = -self.A_log.float().exp() * (a.float() + self.dt_bias).sigmoid()
        in_a.copy_(grad_decay * slope)

    def leave(self, found: Tensor, gate: Tensor, y: Tensor) -> Tensor | None:
        by_head = y.view(-1, *found.shape[2:])
        z = gate.view(found.shape)
        _, rstd = gated_rms_norm_forward(found, z, self.norm_weight, self.norm_eps, by_head)
        return rstd

    def leave_backward(
        self, grad_y: Tensor, found: Tensor, gate: Tensor, saved: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert saved is not None
        shape = found.shape
        grad_found, grad_z, _ = gated_rms_norm_backward(
            grad_y.view(shape), found, gate.view(shape), self.norm_weight, saved,
            need_weight=False,
        )  # fmt: skip
        return grad_found, grad_z.view(gate.shape)


class ShortConvEnds(NamedTuple):
    """The ends of a short convolution. From its projection's [b | c | x] they compute

    b x         the input of the mixer, a causal convolution of each channel
    y           = c found
    """

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        b, c, x = parts[0].chunk(3, -1)
        return b * x, c

    def enter_backward(
        self, grads: Sequence[Tensor], parts: Sequence[Tensor], grad_parts: Sequence[Tensor]
    ) -> None:
        grad_bx, grad_c = grads
        b, _, x = parts[0].chunk(3, -1)
        in_b, in_c, in_x = grad_parts[0].chunk(3, -1)
        torch.mul(grad_bx, x, out=in_b)
        in_c.copy_(grad_c)
        torch.mul(grad_bx, b, out=in_x)

    def leave(self, found: Tensor, gate: Tensor, y: Tensor) -> Tensor | None:
        torch.mul(found, gate, out=y.unflatten(0, gate.shape[:2]))
        return None

    def leave_backward(
        self, grad_y: Tensor, found: Tensor, gate: Tensor, saved: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        grad_y = grad_y.unflatten(0, gate.shape[:2])
        # in found's layout, which the convolution's backward would otherwise copy it into
        return torch.mul(grad_y, gate, out=torch.empty_like(found)), grad_y * found
