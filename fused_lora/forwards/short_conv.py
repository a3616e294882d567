"""A short convolution (LFM2): out_proj(c conv(b x)), where in_proj gives [b | c | x]. Its
projections run fused by themselves, or in a layer that runs whole."""

import sys
from typing import Any

from torch import Tensor

from ..foreign.originals import why_replaced
from ..foreign.parallel import own_class
from ..foreign.versions import CONVOLUTION, class_forward, name_of_cache
from ..functions.causal_conv import MAX_TAPS, Conv, causal_conv
from ..reading.known import why_not_class
from ..reading.projection import why_call
from ..reading.refusal import refuse_documents


def why_not_short_conv(mixer: Any) -> str | None:
    """Return the reason if a short convolution cannot be between the functions of a layer."""
    reason = why_call(mixer.conv) or why_not_conv(mixer.conv, own_class(mixer))
    return f"conv: {reason}" if reason else None


def why_not_conv(conv: Any, mixer_class: type) -> str | None:
    """Return the reason if a mixer's convolution does not run fused."""
    if (taps := conv.weight.shape[-1]) > MAX_TAPS:
        return f"its kernel size is {taps}, should be {MAX_TAPS} at most"
    return why_replaced(mixer_class.__module__, CONVOLUTION)


def why_conv_mixes(mixer: Any) -> str | None:
    """Return the reason if the documents of its rows cannot be kept apart."""
    return why_not_class(mixer, "ShortConv") or why_not_short_conv(mixer)


def run_short_conv(mixer: Any, bx: Tensor, *, seq_idx: Tensor | None = None, **others) -> Tensor:
    """Convolve bx [batch, positions, hidden]. seq_idx: each token's document."""
    conv = Conv((bx.shape[-1],), has_silu=False, seq_idx=seq_idx)
    (found,) = causal_conv(bx, mixer.conv.weight.squeeze(1), mixer.conv.bias, conv)
    return found


def short_conv_forward(
    mixer: Any,
    parts: frozenset[str],
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **options,
):
    """Run the class's forward, with the convolution of each document by itself."""
    cache = options.get(name_of_cache(mixer) or "")
    if seq_idx is None or cache is not None:
        options |= {"attention_mask": attention_mask, "seq_idx": seq_idx}
        return class_forward(mixer, hidden_states, **options)
    refuse_documents(mixer, why_conv_mixes(mixer))
    named = vars(sys.modules[own_class(mixer).__module__])
    x = named["apply_mask_to_padding_states"](hidden_states, attention_mask)
    b, c, x = mixer.in_proj(x).chunk(3, -1)
    return mixer.out_proj(c * run_short_conv(mixer, b * x, seq_idx=seq_idx))
