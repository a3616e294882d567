"""A short convolution (LFM2) in a layer that runs whole: out_proj(c conv(b x)), where in_proj gives
[b | c | x]. The convolution stays the library's. In parts each projection runs fused by itself."""

import sys
from typing import Any

from torch import Tensor

from .foreign.parallel import own_class
from .foreign.versions import CONVOLUTION
from .projection import why_call


def why_not_short_conv(mixer: Any) -> str | None:
    """Return the reason if a short convolution cannot be between the functions of a layer."""
    reason = why_call(mixer.conv)
    return f"conv: {reason}" if reason else None


def run_short_conv(mixer: Any, bx: Tensor, *, seq_idx: Tensor | None = None, **others) -> Tensor:
    """Convolve bx [batch, positions, hidden] as the class does. seq_idx: each token's document."""
    convolve = vars(sys.modules[own_class(mixer).__module__])[CONVOLUTION]
    weight, bias = mixer.conv.weight.squeeze(1), mixer.conv.bias
    return convolve(bx.transpose(1, 2), weight, bias, seq_idx=seq_idx).transpose(1, 2)
