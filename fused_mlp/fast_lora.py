"""LoRA_MLP: a SwiGLU MLP with LoRA adapters as one autograd function, its backward by hand.

Forward, for x [T, hidden] and the frozen W, adapters A, B and scale s of each projection:

    gate   = x Wg' + sg (x Ag') Bg'          [T, intermediate]
    up     = x Wu' + su (x Au') Bu'          [T, intermediate]
    h      = silu(gate) * up                 [T, intermediate]
    output = h Wd' + sd (h Ad') Bd'          [T, hidden]

Backward, for dy = grad_output, in the order of execution:

    dh  = dy Wd + sd (dy Bd) Ad
    h, dgate, dup = swiglu_backward(dh, gate, up)
    dAd = sd (dy Bd)' h             dBd = sd dy' (h Ad')
    dAu = su (dup Bu)' x            dBu = su dup' (x Au')
    dAg = sg (dgate Bg)' x          dBg = sg dgate' (x Ag')
    dx  = dup Wu + su (dup Bu) Au + dgate Wg + sg (dgate Bg) Ag

Autograd keeps more of the same MLP in PEFT: gate, up, silu(gate), h, a copy of x for gate and one
for up, and the three x A'. This keeps x, gate and up, and computes the rest again.

LoRA: Hu et al., arXiv 2106.09685. A LoRA MLP as one autograd function was first published by
Unsloth (unsloth/kernels/fast_lora.py); this one is written from the equations above and, unlike
it, overwrites nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .swiglu import swiglu_backward, swiglu_forward
from .utils import adapter_gradients, compute_dtype, matmul_lora


class FrozenMLP(NamedTuple):
    """What LoRA_MLP needs and does not train: base weights [out, in] and the adapters' scales.

    output_needed: False where a checkpointed layer runs again, for what LoRA_MLP saves and not for
    its output: that is zeros then, and neither silu nor the down projection is computed.
    """

    gate_weight: Tensor  # [intermediate, hidden]
    up_weight: Tensor  # [intermediate, hidden]
    down_weight: Tensor  # [hidden, intermediate]
    gate_scaling: float
    up_scaling: float
    down_scaling: float
    output_needed: bool = True


class LoRA_MLP(torch.autograd.Function):
    """``LoRA_MLP.apply(x, gate_A, gate_B, up_A, up_B, down_A, down_B, frozen)``.

    Equivalent PyTorch::

        def adapted(x, weight, A, B, scaling):
            return F.linear(x, weight) + F.linear(F.linear(x, A), B) * scaling

        gate = adapted(x, frozen.gate_weight, gate_A, gate_B, frozen.gate_scaling)
        up = adapted(x, frozen.up_weight, up_A, up_B, frozen.up_scaling)
        hidden = F.silu(gate) * up
        output = adapted(hidden, frozen.down_weight, down_A, down_B, frozen.down_scaling)

    Args:
        x: [..., hidden], bf16, fp16 or fp32; any number of leading dimensions, any strides, any
            number of tokens including none.
        gate_A, up_A: [r, hidden]; down_A: [r, intermediate]. gate_B, up_B: [intermediate, r];
            down_B: [hidden, r]. Any r, which may differ between projections. Any dtype: they are
            cast to that of the computation (fp32 masters of a bf16 model, say).
        frozen: base weights in x's dtype (or any, under autocast) and the three scales.

    Returns:
        [..., hidden] in the dtype of the computation, which is autocast's where autocast is on and
        else x's. Products accumulate in fp32. Gradients come in the dtype of what they belong to,
        and only for what `requires_grad` asks for.

    Saved for backward: x, gate, up and the adapters in the dtype of the computation. No input, no
    incoming gradient and no saved tensor is written, so x may have other consumers and a second
    backward through a retained graph is right. Deterministic. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, or a base weight requires a gradient.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, gate_A, gate_B, up_A, up_B, down_A, down_B, frozen):
        dtype = compute_dtype(x)
        _check(x, dtype, (gate_A, gate_B, up_A, up_B, down_A, down_B), frozen)
        ctx.dtypes = [t.dtype for t in (x, gate_A, gate_B, up_A, up_B, down_A, down_B)]
        ctx.scalings = frozen[3:6]

        # all in autocast's own dtype where it is on, so that it finds nothing to cast below
        x = x.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        adapters = [t.to(dtype) for t in (gate_A, gate_B, up_A, up_B, down_A, down_B)]
        weights = [weight.to(dtype) for weight in frozen[:3]]
        gate_A, gate_B, up_A, up_B, down_A, down_B = adapters
        gate_weight, up_weight, down_weight = weights

        gate = matmul_lora(rows, gate_weight, gate_A, gate_B, frozen.gate_scaling)
        up = matmul_lora(rows, up_weight, up_A, up_B, frozen.up_scaling)
        if frozen.output_needed:
            hidden = swiglu_forward(gate, up)
            # not a view itself, or autograd would forbid to change it in place
            output = rows.new_empty(x.shape)
            matmul_lora(hidden, down_weight, down_A, down_B, frozen.down_scaling, out=output)
        else:
            output = rows.new_zeros(1).expand(x.shape)

        # x itself and not its rows: a view made in here hides from autograd whose memory it is
        ctx.save_for_backward(x, gate, up, *adapters, *weights)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        # autograd leaves gradients on in a backward only where it should build a graph of it;
        # its own once_differentiable would call ours a constant and say nothing
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LoRA_MLP is not twice differentiable: call backward without create_graph=True, "
                "or use the unfused MLP"
            )
        x, gate, up, *others = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        gate_A, gate_B, up_A, up_B, down_A, down_B, gate_weight, up_weight, down_weight = others
        gate_scaling, up_scaling, down_scaling = ctx.scalings
        need_x, need_gate_A, need_gate_B, need_up_A, need_up_B, need_down_A, need_down_B, _ = (
            ctx.needs_input_grad
        )
        grad_x = grad_gate_A = grad_gate_B = grad_up_A = grad_up_B = None

        with torch.autocast(grad_output.device.type, enabled=False):
            grad_rows = grad_output.reshape(-1, grad_output.shape[-1]).to(rows.dtype)

            # output = hidden Wd' + sd (hidden Ad') Bd'
            grad_down_rank = grad_rows @ down_B
            grad_hidden = grad_rows @ down_weight
            grad_hidden.addmm_(grad_down_rank, down_A, alpha=down_scaling)
            hidden, grad_gate, grad_up = swiglu_backward(grad_hidden, gate, up)
            del grad_hidden  # at 16,384 tokens each [T, intermediate] is 361 MB: let it go early
            grad_down_A, grad_down_B = adapter_gradients(
                hidden, grad_rows, grad_down_rank, down_A, down_scaling, need_down_A, need_down_B
            )
            del hidden

            # up = x Wu' + su (x Au') Bu', and gate alike
            grad_up_rank = grad_up @ up_B if need_x or need_up_A else None
            grad_gate_rank = grad_gate @ gate_B if need_x or need_gate_A else None
            grad_up_A, grad_up_B = adapter_gradients(
                rows, grad_up, grad_up_rank, up_A, up_scaling, need_up_A, need_up_B
            )
            grad_gate_A, grad_gate_B = adapter_gradients(
                rows, grad_gate, grad_gate_rank, gate_A, gate_scaling, need_gate_A, need_gate_B
            )
            if need_x:
                grad_x = grad_up @ up_weight
                grad_x.addmm_(grad_up_rank, up_A, alpha=up_scaling)
                grad_x.addmm_(grad_gate, gate_weight)
                grad_x.addmm_(grad_gate_rank, gate_A, alpha=gate_scaling)
                grad_x = grad_x.view(x.shape)

        gradients = (
            grad_x, grad_gate_A, grad_gate_B, grad_up_A, grad_up_B, grad_down_A, grad_down_B
        )  # fmt: skip
        return *(
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ), None


def _check(x: Tensor, dtype: torch.dtype, adapters: tuple[Tensor, ...], frozen: FrozenMLP) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    intermediate, hidden = frozen.gate_weight.shape
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"LoRA_MLP: x is {list(x.shape)}, its last dimension should be {hidden}")
    if frozen.up_weight.shape != (intermediate, hidden):
        raise ValueError(
            f"LoRA_MLP: up_weight is {list(frozen.up_weight.shape)}, "
            f"should be {[intermediate, hidden]} as gate_weight is"
        )
    if frozen.down_weight.shape != (hidden, intermediate):
        raise ValueError(
            f"LoRA_MLP: down_weight is {list(frozen.down_weight.shape)}, "
            f"should be {[hidden, intermediate]}"
        )
    inputs, outputs = (hidden, hidden, intermediate), (intermediate, intermediate, hidden)
    for name, A, B, in_features, out_features in zip(
        ("gate", "up", "down"), adapters[::2], adapters[1::2], inputs, outputs, strict=True
    ):
        r = A.shape[0]
        if A.shape != (r, in_features) or B.shape != (out_features, r):
            raise ValueError(
                f"LoRA_MLP: {name}_A is {list(A.shape)} and {name}_B {list(B.shape)}, "
                f"should be [r, {in_features}] and [{out_features}, r] of one r"
            )
    for name, weight in zip(("gate", "up", "down"), frozen[:3], strict=True):
        if weight.requires_grad:
            raise ValueError(
                f"LoRA_MLP: {name}_weight requires a gradient, which it would not get: freeze it "
                "with requires_grad_(False), or use the unfused MLP"
            )
        if weight.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"LoRA_MLP: {name}_weight is {weight.dtype} and x {x.dtype}: give both one dtype, "
                "or run under torch.autocast"
            )
