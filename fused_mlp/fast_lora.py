"""LoRA_MLP: a gated MLP with LoRA adapters as one autograd function, with a backward by hand.

Forward, for x [T, hidden] and the frozen W, adapters A, B and scale s of each projection:

    z      = [zg, zu] = x [Ag; Au]'          [T, 2r]
    gate   = x Wg' + sg zg Bg'               [T, intermediate]
    up     = x Wu' + su zu Bu'               [T, intermediate]
    h      = silu(gate) * up                 [T, intermediate], or gelu(gate) * up
    output = h Wd' + sd (h Ad') Bd'          [T, hidden]

Backward, for dy = grad_output, in the order of execution:

    p   = sd dy Bd                           [T, r]
    dh  = p Ad + dy Wd
    h, dgate, dup = swiglu_backward(dh, gate, up)      or geglu_backward
    dAd = p' h                      dBd = sd dy' (h Ad')
    dz  = [sg dgate Bg, su dup Bu]           [T, 2r]
    dx  = dz [Ag; Au] + dgate Wg + dup Wu
    [dAg; dAu] = dz' x              dBg = sg dgate' zg,   dBu = su dup' zu

For the same MLP in PEFT autograd keeps gate, up, silu(gate), h, a copy of x for gate and one for
up, and the three x A'. LoRA_MLP keeps x, gate, up and z, and recomputes h and h Ad'.

With dropout x is masked for Ag and for Au, and h for Ad (`dropout.py`). `utils.py` has dx and dA.

LoRA: Hu et al., arXiv 2106.09685. Unsloth first published a LoRA MLP as one autograd function
(unsloth/kernels/fast_lora.py). This one is written from the equations above. Unlike Unsloth's it
overwrites nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import Masks, draw_masks, drop, masks_of, parts_of
from .geglu import geglu_backward, geglu_forward
from .swiglu import swiglu_backward, swiglu_forward
from .utils import (
    Group,
    adapter_gradients,
    bias_gradients,
    cast_adapters,
    check_activation,
    check_adapter,
    check_bias,
    check_frozen,
    compute_dtype,
    input_gradient,
    matmul_A,
    matmul_lora,
    refuse_second_derivative,
    split_frozen,
    without_autocast,
)


class FrozenMLP(NamedTuple):
    """The frozen operands of LoRA_MLP: base weights [out, in] and the adapters' scales.

    gate_dropout, up_dropout, down_dropout: the probability of dropping an element of an adapter's
    input. up's is None if it shares gate's mask: both are then parts of one projection with one A.
    seed: that of all three masks, `draw_seed(x.device)`, drawn anew for each call.
    output_needed: False when checkpointing recomputes the layer for what LoRA_MLP saves, without
    its output. The output is then zeros, and neither silu nor the down projection runs.
    activation: "silu", or "gelu_tanh" for GELU approximated by tanh.
    write_again: for weights in memory that others write into between forward and backward. Backward
    calls it before it reads them.
    """

    gate_weight: Tensor  # [intermediate, hidden]
    up_weight: Tensor  # [intermediate, hidden]
    down_weight: Tensor  # [hidden, intermediate]
    gate_scaling: float
    up_scaling: float
    down_scaling: float
    output_needed: bool = True
    activation: str = "silu"
    gate_dropout: float | None = 0.0
    up_dropout: float | None = 0.0
    down_dropout: float | None = 0.0
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None


class LoRA_MLP(torch.autograd.Function):
    """``LoRA_MLP.apply(x, gate_A, gate_B, up_A, up_B, down_A, down_B, frozen)``; with biases
    ``LoRA_MLP.apply(x, ..., down_B, gate_bias, up_bias, down_bias, frozen)``.

    Equivalent PyTorch, without biases::

        def adapted(x, weight, A, B, scaling, dropout):
            z = F.linear(F.dropout(x, dropout), A)
            return F.linear(x, weight) + F.linear(z, B) * scaling

        f = frozen
        gate = adapted(x, f.gate_weight, gate_A, gate_B, f.gate_scaling, f.gate_dropout)
        up = adapted(x, f.up_weight, up_A, up_B, f.up_scaling, f.up_dropout)
        hidden = F.silu(gate) * up  # or F.gelu(gate, approximate="tanh") * up
        output = adapted(hidden, f.down_weight, down_A, down_B, f.down_scaling, f.down_dropout)

    Args:
        x: [..., hidden], bf16, fp16 or fp32. Any number of leading dimensions, any strides, any
            number of tokens including none.
        gate_A, up_A: [r, hidden]; down_A: [r, intermediate]. gate_B, up_B: [intermediate, r];
            down_B: [hidden, r]. Any r, which may differ between projections. Any dtype: they are
            cast to the dtype of the computation (fp32 masters of a bf16 model, say).
        gate_bias, up_bias: [intermediate]; down_bias: [hidden]. Each may be None, trained or
            frozen, and of any dtype. They are added to the frozen matmuls.
        frozen: base weights in x's dtype (or any, under autocast) and the three scales.

    Returns:
        [..., hidden] in the dtype of the computation: autocast's if it is on, else x's. Matmuls
        accumulate in fp32. Each gradient has the dtype of its tensor, and exists only if that
        tensor requires it.

    Saves for backward: x (if gate_A or up_A is trained), gate, up, z, the adapters and the weights
    in the dtype of the computation. Dropout adds one bit per element of each masked input: 4% more
    in bf16 at Qwen2.5-3B's sizes. Writes to no input, incoming gradient or saved tensor, so x may
    have other consumers and a second backward through a retained graph is right. Deterministic. Not
    twice differentiable. Without dropout the gradients of gate_A and up_A share one storage.

    Raises:
        ValueError: shapes or dtypes do not fit, a base weight requires a gradient, or there is
            dropout without a seed.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, gate_A, gate_B, up_A, up_B, down_A, down_B, *rest):
        biases, frozen = split_frozen("LoRA_MLP", rest, FrozenMLP)
        dtype = compute_dtype(x)
        _check(x, dtype, (gate_A, gate_B, up_A, up_B, down_A, down_B), biases, frozen)
        ctx.dtypes_of_biases = [None if bias is None else bias.dtype for bias in biases]
        gate_bias, up_bias, down_bias = (
            None if bias is None else bias.to(dtype) for bias in biases or (None, None, None)
        )
        ctx.shape_of_x, ctx.dtype_of_x = x.shape, x.dtype
        ctx.dtypes_of_both = [t.dtype for t in (gate_A, gate_B, up_A, up_B)]
        ctx.dtypes_of_down = [t.dtype for t in (down_A, down_B)]
        ctx.scalings = frozen.gate_scaling, frozen.up_scaling, frozen.down_scaling
        ctx.is_geglu = frozen.activation == "gelu_tanh"
        ctx.write_again = frozen.write_again
        gate_scaling, up_scaling, down_scaling = ctx.scalings

        # cast to autocast's dtype if it is on: it then finds nothing to cast below
        x = x.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        A, (gate_B, up_B) = cast_adapters((gate_A, gate_B, up_A, up_B), dtype)
        down_A, (down_B,) = cast_adapters((down_A, down_B), dtype)
        gate_weight = frozen.gate_weight.to(dtype)
        up_weight = frozen.up_weight.to(dtype)
        down_weight = frozen.down_weight.to(dtype)

        masks = _draw_masks(frozen, rows)
        ranks = [gate_A.shape[0], up_A.shape[0]]
        z = matmul_A(rows, A, ranks, masks and masks[:2])
        z_gate, z_up = z.split_with_sizes(ranks, 1)
        gate = matmul_lora(rows, gate_weight, z_gate, gate_B, gate_scaling, gate_bias)
        up = matmul_lora(rows, up_weight, z_up, up_B, up_scaling, up_bias)
        if frozen.output_needed:
            hidden = (geglu_forward if ctx.is_geglu else swiglu_forward)(gate, up)
            # not itself a view: autograd forbids changing those in place
            output = rows.new_empty(x.shape)
            z_down = matmul_A(hidden, down_A, [down_A.shape[0]], masks and masks[2:])
            matmul_lora(hidden, down_weight, z_down, down_B, down_scaling, down_bias, output)
        else:
            output = rows.new_zeros(1).expand(x.shape)
        bits, ctx.scales = parts_of(masks)

        # only dA needs x. We save x, not its rows: autograd would not know whose memory a view made
        # in here is
        _, need_gate_A, _, need_up_A, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if need_gate_A or need_up_A else None,
            gate,
            up,
            z,
            A,
            gate_B,
            up_B,
            down_A,
            down_B,
            gate_weight,
            up_weight,
            down_weight,
            *bits,
        )
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("LoRA_MLP", "the unfused MLP")
        x, gate, up, z, A, gate_B, up_B, down_A, down_B, *weights = ctx.saved_tensors
        gate_weight, up_weight, down_weight, *bits = weights
        if ctx.write_again is not None:  # after a recompute, which ctx.saved_tensors may start
            ctx.write_again()
        masks = masks_of(bits, ctx.scales)
        gate_scaling, up_scaling, down_scaling = ctx.scalings
        (
            need_x, need_gate_A, need_gate_B, need_up_A, need_up_B, need_down_A, need_down_B,
            *need_biases, _,
        ) = ctx.needs_input_grad  # fmt: skip

        with without_autocast(grad_output):
            grad_rows = grad_output.reshape(-1, grad_output.shape[-1]).to(gate.dtype)

            # output = hidden Wd' + sd (hidden Ad') Bd'
            down = Group([down_weight], down_A, [down_B], [down_scaling], masks and masks[2:])
            grad_hidden, grad_z = input_gradient(down, [grad_rows], True, [need_down_A])
            assert grad_hidden is not None
            activation_backward = geglu_backward if ctx.is_geglu else swiglu_backward
            hidden, grad_gate, grad_up = activation_backward(grad_hidden, gate, up)
            del grad_hidden  # free it early: 361 MB for 16,384 tokens
            if masks is not None and masks[2] is not None:  # both gradients of down need it masked
                hidden, down = drop(hidden, masks[2]), down._replace(masks=None)
            z_down = hidden @ down_A.t() if need_down_B else None
            grads_down = adapter_gradients(
                down, hidden, z_down, [grad_rows], grad_z,
                [need_down_A, need_down_B], ctx.dtypes_of_down,
            )  # fmt: skip
            del hidden

            # [gate, up] = x [Wg; Wu]' + [sg zg Bg', su zu Bu']
            both = Group(
                [gate_weight, up_weight], A, [gate_B, up_B], [gate_scaling, up_scaling],
                masks and masks[:2],
            )  # fmt: skip
            grads = [grad_gate, grad_up]
            grad_x, grad_z = input_gradient(both, grads, need_x, [need_gate_A, need_up_A])
            rows = None if x is None else x.reshape(-1, x.shape[-1])
            grads_both = adapter_gradients(
                both, rows, z, grads, grad_z,
                [need_gate_A, need_gate_B, need_up_A, need_up_B], ctx.dtypes_of_both,
            )  # fmt: skip
            grads_of_biases = bias_gradients(
                [grad_gate, grad_up, grad_rows], need_biases, ctx.dtypes_of_biases
            )

        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape_of_x).to(ctx.dtype_of_x)
        return grad_x, *grads_both, *grads_down, *grads_of_biases, None


def _draw_masks(frozen: FrozenMLP, rows: Tensor) -> Masks | None:
    dropouts = frozen.gate_dropout, frozen.up_dropout, frozen.down_dropout
    intermediate, hidden = frozen.gate_weight.shape
    columns = hidden, hidden, intermediate
    return draw_masks("LoRA_MLP", frozen.seed, dropouts, [rows.shape[0]] * 3, columns)


def _check(
    x: Tensor,
    dtype: torch.dtype,
    adapters: tuple[Tensor, ...],
    biases: list[Tensor | None],
    frozen: FrozenMLP,
) -> None:
    """Raise ValueError, naming the tensor, if shapes or dtypes do not fit together."""
    check_activation("LoRA_MLP", frozen.activation)
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
        check_adapter("LoRA_MLP", f"{name}_", A, B, in_features, out_features)
    if len(biases) not in (0, 3):
        raise ValueError(
            f"LoRA_MLP: {len(biases)} biases given, should be none or those of gate, up and down, "
            "None for one without"
        )
    for name, bias, out_features in zip(("gate", "up", "down"), biases, outputs, strict=False):
        check_bias("LoRA_MLP", f"{name}_bias", bias, out_features)
    for name, weight in (
        ("gate", frozen.gate_weight), ("up", frozen.up_weight), ("down", frozen.down_weight),
    ):  # fmt: skip
        check_frozen("LoRA_MLP", f"{name}_weight", weight, x, dtype, "the unfused MLP")
