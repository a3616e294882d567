"""LoRA_W and LoRA_QKV: adapted linear layers as one autograd function, its backward by hand.

LoRA_W is one layer (attention's output projection), LoRA_QKV the three that share attention's
input; both are the same few products. For x [T, in], the frozen W and bias b, adapters A, B and
scale s of each of q, k and v, forward in the order of execution:

    A   = [Aq; Ak; Av]                       [3r, in]
    z   = [zq, zk, zv] = x A'                [T, 3r]
    q   = x Wq' + bq + sq zq Bq'             [T, out], and k and v alike

Backward, for the incoming dq, dk and dv, in the order of execution:

    dz  = [sq dq Bq, sk dk Bk, sv dv Bv]     [T, 3r]
    dA  = [dAq; dAk; dAv] = dz' x
    dBq = sq dq' zq, and dBk and dBv alike
    dx  = dz A + dq Wq + dk Wk + dv Wv

So x is read once for the three A and not three times, dA is one product, and the three adapters
reach dx in one. That leaves 7 products forward and 11 backward, where layer by layer it is 9
and 15. b costs nothing: the frozen product adds it as it stores.

Of the same layers in PEFT autograd keeps a copy of x for each, where adapters are fp32, and the
three x A'. This keeps x and z, which at 3r columns is cheaper to keep than to compute again: that
would read all of x.

LoRA: Hu et al., arXiv 2106.09685. LoRA's QKV and single layers as autograd functions were first
published by Unsloth (unsloth/kernels/fast_lora.py), which leaves its QKV off where a projection
has a bias, as in Qwen2.5; these are written from the equations above and overwrite nothing.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.utils import compute_dtype, scaled_matmul


class FrozenLinear(NamedTuple):
    """What LoRA_W needs and does not train: a base layer and its adapter's scale."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    scaling: float


class LoRA_W(torch.autograd.Function):
    """``LoRA_W.apply(x, A, B, frozen)``: a linear layer with its adapter.

    Equivalent PyTorch::

        base = F.linear(x, frozen.weight, frozen.bias)
        output = base + F.linear(F.linear(x, A), B) * frozen.scaling

    Args:
        x: [..., in], bf16, fp16 or fp32; any number of leading dimensions, any strides, any number
            of tokens including none.
        A: [r, in]. B: [out, r]. Any r. Any dtype: they are cast to that of the computation (fp32
            masters of a bf16 model, say).
        frozen: base weight and bias (or None) in x's dtype (or any, under autocast), and the scale.

    Returns:
        [..., out] in the dtype of the computation, which is autocast's where autocast is on and
        else x's. Products accumulate in fp32. Gradients come in the dtype of what they belong to,
        and only for what `requires_grad` asks for.

    Saved for backward: x, x A', the adapter and the weight in the dtype of the computation. No
    input, no incoming gradient and no saved tensor is written, so x may have other consumers and a
    second backward through a retained graph is right. Deterministic. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, or the base weight or bias requires a gradient.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, A, B, frozen):
        _check("LoRA_W", ("",), x, (A, B), [frozen])
        (output,) = _forward(ctx, x, (A, B), [frozen])
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return *_backward(ctx, "LoRA_W", grad_output), None


class FrozenQKV(NamedTuple):
    """What LoRA_QKV needs and does not train: three base layers and the adapters' scales."""

    q_weight: Tensor  # [q_out, in]
    k_weight: Tensor  # [k_out, in]
    v_weight: Tensor  # [v_out, in]
    q_bias: Tensor | None  # [q_out]
    k_bias: Tensor | None  # [k_out]
    v_bias: Tensor | None  # [v_out]
    q_scaling: float
    k_scaling: float
    v_scaling: float


class LoRA_QKV(torch.autograd.Function):
    """``LoRA_QKV.apply(x, q_A, q_B, k_A, k_B, v_A, v_B, frozen)``: attention's q, k and v.

    Equivalent PyTorch::

        def adapted(x, weight, bias, A, B, scaling):
            return F.linear(x, weight, bias) + F.linear(F.linear(x, A), B) * scaling

        q = adapted(x, frozen.q_weight, frozen.q_bias, q_A, q_B, frozen.q_scaling)
        k = adapted(x, frozen.k_weight, frozen.k_bias, k_A, k_B, frozen.k_scaling)
        v = adapted(x, frozen.v_weight, frozen.v_bias, v_A, v_B, frozen.v_scaling)

    Args:
        x: [..., in], as for LoRA_W.
        q_A, k_A, v_A: [r, in]. q_B: [q_out, r]; k_B: [k_out, r]; v_B: [v_out, r]. Any r, which may
            differ between projections. Any dtype, as for LoRA_W.
        frozen: base weights and biases (or None, each) in x's dtype (or any, under autocast), and
            the three scales.

    Returns:
        (q, k, v): [..., q_out], [..., k_out] and [..., v_out], three tensors of their own, in the
        dtype of the computation. Dtypes of these and of gradients are as for LoRA_W. The gradients
        of the three A lie in one storage. An output that takes part in no loss costs nothing and
        gives its own A and B no gradient (None), as unfused layers would.

    Saved for backward: x, z = x [q_A; k_A; v_A]', the adapters and the weights in the dtype of the
    computation. Nothing is written that came in or was saved; see LoRA_W for what follows from it.

    Raises:
        ValueError: shapes or dtypes do not fit, or a base weight or bias requires a gradient.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, q_A, q_B, k_A, k_B, v_A, v_B, frozen):
        adapters = (q_A, q_B, k_A, k_B, v_A, v_B)
        # three weights, three biases, three scales
        layers = [FrozenLinear(*frozen[i::3]) for i in range(3)]
        _check("LoRA_QKV", ("q_", "k_", "v_"), x, adapters, layers)
        return _forward(ctx, x, adapters, layers)

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        return *_backward(ctx, "LoRA_QKV", grad_q, grad_k, grad_v), None


def _forward(ctx, x: Tensor, adapters: tuple[Tensor, ...], layers: list[FrozenLinear]):
    """One output for each of the layers that share x; `adapters` holds an A and a B for each."""
    A = adapters[0] if len(layers) == 1 else torch.cat(adapters[::2])
    ctx.set_materialize_grads(False)  # no gradient is None in backward, and not a tensor of zeros
    ctx.dtypes = [t.dtype for t in (x, *adapters)]
    ctx.dtype_of_A = A.dtype
    ctx.ranks = [t.shape[0] for t in adapters[::2]]
    ctx.scalings = [layer.scaling for layer in layers]

    # all in autocast's own dtype where it is on, so that it finds nothing to cast below
    dtype = compute_dtype(x)
    x = x.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    A = A.to(dtype)
    B = [t.to(dtype) for t in adapters[1::2]]
    weights = [layer.weight.to(dtype) for layer in layers]

    z = rows @ A.t()
    outputs = []
    for layer, weight, one_B, columns in zip(
        layers, weights, B, z.split(ctx.ranks, 1), strict=True
    ):
        # not a view itself, or autograd would forbid to change it in place, as RoPE may do to q
        output = rows.new_empty(*x.shape[:-1], weight.shape[0])
        output_rows = output.view(-1, weight.shape[0])
        if layer.bias is None:
            torch.mm(rows, weight.t(), out=output_rows)
        else:
            torch.addmm(layer.bias.to(dtype), rows, weight.t(), out=output_rows)
        output_rows.addmm_(columns, one_B.t(), alpha=layer.scaling)
        outputs.append(output)

    # x itself and not its rows: a view made in here hides from autograd whose memory it is
    ctx.save_for_backward(x, z, A, *B, *weights)
    return tuple(outputs)


def _backward(ctx, name: str, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of x and of each A and B, in the order of `_forward`'s x and adapters."""
    # autograd leaves gradients on in a backward only where it should build a graph of it;
    # its own once_differentiable would call ours a constant and say nothing
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is not twice differentiable: call backward without create_graph=True, "
            "or use the unfused layers"
        )
    x, z, A, *others = ctx.saved_tensors
    count = len(grad_outputs)
    B, weights = others[:count], others[count:]
    need_x = ctx.needs_input_grad[0]
    need_B = ctx.needs_input_grad[2:-1:2]
    need_A = [
        need and grad is not None
        for need, grad in zip(ctx.needs_input_grad[1:-1:2], grad_outputs, strict=True)
    ]
    grad_x = None
    grad_A: list[Tensor | None] = [None] * count
    grad_B: list[Tensor | None] = [None] * count

    with torch.autocast(x.device.type, enabled=False):
        grads = [
            None if grad is None else grad.reshape(-1, grad.shape[-1]).to(x.dtype)
            for grad in grad_outputs
        ]
        if need_x or any(need_A):
            grad_z = torch.empty_like(z)
            for i, (grad, columns) in enumerate(
                zip(grads, grad_z.split(ctx.ranks, 1), strict=True)
            ):
                if grad is not None and (need_x or need_A[i]):
                    # beta = 0 makes addmm ignore what the new tensor holds
                    columns.addmm_(grad, B[i], beta=0, alpha=ctx.scalings[i])
                else:
                    columns.zero_()
        if any(need_A):  # all in one product, even where one of them is frozen
            rows = x.reshape(-1, x.shape[-1])
            # one cast for all three, to the widest dtype among them, so that it loses nothing
            stacked = (grad_z.t() @ rows).to(ctx.dtype_of_A).split(ctx.ranks)
            grad_A = [one if need else None for one, need in zip(stacked, need_A, strict=True)]
        for i, (grad, columns) in enumerate(zip(grads, z.split(ctx.ranks, 1), strict=True)):
            if need_B[i] and grad is not None:
                grad_B[i] = scaled_matmul(grad.t(), columns, ctx.scalings[i])
        if need_x:
            grad_x = grad_z @ A
            for grad, weight in zip(grads, weights, strict=True):
                if grad is not None:
                    grad_x.addmm_(grad, weight)
            grad_x = grad_x.view(x.shape)

    gradients = (grad_x, *chain.from_iterable(zip(grad_A, grad_B, strict=True)))
    return tuple(
        None if gradient is None else gradient.to(dtype)
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
    )


def _check(
    name: str,
    prefixes: tuple[str, ...],
    x: Tensor,
    adapters: tuple[Tensor, ...],
    layers: list[FrozenLinear],
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    in_features = layers[0].weight.shape[1]
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"{name}: x is {list(x.shape)}, its last dimension should be {in_features}"
        )
    dtype = compute_dtype(x)
    for prefix, A, B, layer in zip(prefixes, adapters[::2], adapters[1::2], layers, strict=True):
        out_features, r = layer.weight.shape[0], A.shape[0]
        if layer.weight.shape != (out_features, in_features):
            raise ValueError(
                f"{name}: {prefix}weight is {list(layer.weight.shape)}, "
                f"should be {[out_features, in_features]} as x is {list(x.shape)}"
            )
        if layer.bias is not None and layer.bias.shape != (out_features,):
            raise ValueError(
                f"{name}: {prefix}bias is {list(layer.bias.shape)}, should be {[out_features]}"
            )
        if A.shape != (r, in_features) or B.shape != (out_features, r):
            raise ValueError(
                f"{name}: {prefix}A is {list(A.shape)} and {prefix}B {list(B.shape)}, "
                f"should be [r, {in_features}] and [{out_features}, r] of one r"
            )
        for kind, tensor in (("weight", layer.weight), ("bias", layer.bias)):
            if tensor is None:
                continue
            if tensor.requires_grad:
                raise ValueError(
                    f"{name}: {prefix}{kind} requires a gradient, which it would not get: freeze "
                    "it with requires_grad_(False), or use the unfused layers"
                )
            if tensor.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise ValueError(
                    f"{name}: {prefix}{kind} is {tensor.dtype} and x {x.dtype}: give both one "
                    "dtype, or run under torch.autocast"
                )
