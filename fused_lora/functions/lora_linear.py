"""LoRA_W and LoRA_QKV: adapted linear layers as one autograd function, backward by hand.

LoRA_W is one layer (attention's output projection), LoRA_QKV any number of layers that share an
input: attention's q, k and v, or the four in front of a gated delta net. Both are a group of layers
in the sense of `fused_mlp/utils.py`, and use its equations. For q, k and v that is 7 matmuls
forward and 11 backward; layer by layer it is 9 and 15. For a gated delta net it is 9 and 14 instead
of 12 and 20. Biases cost nothing: the epilogue of the frozen matmul adds them. The gradient of a
trained bias is the sum of its layer's dy over tokens.

For the same layers in PEFT, autograd keeps the three x A', and with fp32 adapters a copy of x for
each. We keep x and z = x A'. With only 3r columns z is cheaper to keep than to recompute, which
would read all of x. (`LoRA_Attention` of
`layer/decoder_layer.py` fuses both and everything between into one function.)

LoRA: Hu et al., arXiv 2106.09685. Unsloth was first to publish LoRA's QKV and single layers as
autograd functions (unsloth/kernels/fast_lora.py). It skips its QKV if a projection has a bias, as
in Qwen2.5. Ours are written from the equations above and overwrite nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import Masks, draw_masks, masks_of, parts_of
from fused_mlp.utils import (
    Group,
    adapter_gradients,
    bias_gradients,
    cast_adapters,
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

QKV_PREFIXES = ("q_", "k_", "v_")


class FrozenLinear(NamedTuple):
    """The operands of LoRA_W that it does not train: a base layer and its adapter's scale.

    dropout: the probability of dropping an element of the adapter's input in training. None, among
    layers of one input: share the mask of the layer before. seed: of the mask; draw a new one,
    `draw_seed(x.device)`, for each call. write_again: as in FrozenMLP.
    """

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    scaling: float
    dropout: float | None = 0.0
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None


class LoRA_W(torch.autograd.Function):
    """``LoRA_W.apply(x, A, B, frozen)``: a linear layer with its adapter. With a trained bias:
    ``LoRA_W.apply(x, A, B, bias, frozen)``.

    Equivalent PyTorch::

        base = F.linear(x, frozen.weight, frozen.bias)  # or the bias that is trained
        kept = F.dropout(x, frozen.dropout)  # without dropout, x as it is
        output = base + F.linear(F.linear(kept, A), B) * frozen.scaling

    Args:
        x: [..., in], bf16, fp16 or fp32; any number of leading dimensions, any strides, any number
            of tokens including none.
        A: [r, in]. B: [out, r]. Any r. Any dtype: they are cast to the compute dtype (fp32 masters
            of a bf16 model, say).
        bias: [out], or None, in any dtype. It replaces frozen's.
        frozen: base weight and bias (or None) in x's dtype (or any, under autocast), and the scale.

    Returns:
        [..., out] in the compute dtype: autocast's if it is on, else x's. Matmuls accumulate in
        fp32. Each gradient has the dtype of its tensor, and is computed only if `requires_grad`
        asks for it.

    Saved for backward: x (if A is trained), x A', the adapter and the weight in the compute dtype,
    and with dropout one bit for each element of x. It writes to no input, incoming gradient or
    saved tensor, so x may have other consumers, and a second backward through a retained graph is
    right. Deterministic. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, the base weight or frozen's bias requires a
            gradient, or there is dropout without a seed.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, A, B, *rest):
        biases, frozen = split_frozen("LoRA_W", rest, FrozenLinear)
        ctx.write_again = frozen.write_again
        (output,) = group_forward(ctx, "LoRA_W", ("",), x, (A, B), biases, [frozen], frozen.seed)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return *group_backward(ctx, "LoRA_W", grad_output), None


class FrozenQKV(NamedTuple):
    """The operands of LoRA_QKV that it does not train. seed: as for LoRA_W, one for all masks; the
    layers' own are not read. write_again: as in FrozenMLP, for all weights."""

    layers: tuple[FrozenLinear, ...]
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None


class LoRA_QKV(torch.autograd.Function):
    """``LoRA_QKV.apply(x, q_A, q_B, k_A, k_B, v_A, v_B, frozen)``: layers that share x, such as
    attention's q, k and v. Trained biases, one for each layer, go before frozen.

    Equivalent PyTorch::

        for layer, A, B in zip(frozen.layers, ...):
            z = F.linear(F.dropout(x, layer.dropout), A)  # without dropout, of x as it is
            F.linear(x, layer.weight, layer.bias) + F.linear(z, B) * layer.scaling

    Args:
        x: [..., in], as for LoRA_W.
        A: [r, in]. B: [out, r]. Any r, which may differ between layers. Any dtype, as for LoRA_W.
        bias: [out], or None. They replace frozen's.
        frozen: for each layer what LoRA_W takes. A dropout of None shares the mask of the layer
            before: then both are parts of one projection, with one A.

    Returns:
        A tuple of [..., out], separate tensors in the compute dtype. Their dtypes and those of
        gradients are as for LoRA_W. Without dropout the gradients of all A share one storage. An
        output that is in no loss costs nothing, and its A and B get no gradient (None), as with
        unfused layers.

    Saved for backward: x (if an A is trained), z = x [q_A; k_A; v_A]', the adapters and the weights
    in the compute dtype, and one bit for each element of x for each layer with dropout. Like
    LoRA_W, it writes to no input, incoming gradient or saved tensor.

    Raises:
        ValueError: shapes or dtypes do not fit, a base weight or bias requires a gradient, or there
            is dropout and no seed.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, *rest):
        trained, frozen = split_frozen("LoRA_QKV", rest, FrozenQKV)
        ctx.write_again = frozen.write_again
        count = len(frozen.layers)
        prefixes = QKV_PREFIXES if count == 3 else tuple(f"layer {i}'s " for i in range(count))
        adapters, biases = tuple(trained[: 2 * count]), trained[2 * count :]
        return group_forward(
            ctx, "LoRA_QKV", prefixes, x, adapters, biases, [*frozen.layers], frozen.seed
        )

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *group_backward(ctx, "LoRA_QKV", *grad_outputs), None


def group_forward(
    ctx,
    name: str,
    prefixes: tuple[str, ...],
    x: Tensor,
    adapters: tuple[Tensor, ...],
    biases: list[Tensor | None],
    layers: list[FrozenLinear],
    seed: Tensor | None,
):
    """Return one output for each layer that shares x. `adapters` holds an A and a B for each, and
    `biases` is empty or holds a trained one (or None) for each."""
    check_layers(name, prefixes, x, adapters, layers)
    layers = with_biases(name, prefixes, layers, biases)
    ctx.set_materialize_grads(False)  # a missing gradient is None, not zeros, in backward
    ctx.dtypes = dtypes_of(x, *adapters, *biases)
    ctx.scalings = tuple(layer.scaling for layer in layers)
    ctx.shape_of_x = x.shape
    x = x.to(compute_dtype(x))
    rows, columns = ([n] * len(layers) for n in (x.shape[:-1].numel(), x.shape[-1]))
    masks = draw_masks(name, seed, [layer.dropout for layer in layers], rows, columns)
    outputs, z, group = project(x, adapters, layers, masks)
    bits, ctx.scales = parts_of(masks)
    # Only dA needs x. Save x itself, not its rows: autograd cannot tell whose memory a view made in
    # here is.
    trained = x if any(ctx.needs_input_grad[1 : 2 * len(layers) : 2]) else None
    ctx.save_for_backward(trained, z, group.A, *group.B, *group.weights, *bits)
    return tuple(outputs)


def project(
    x: Tensor,
    adapters: Sequence[Tensor],
    layers: Sequence[FrozenLinear],
    masks: Masks | None,
) -> tuple[list[Tensor], Tensor, Group]:
    """Return new outputs [..., out] of layers that share x [..., in], z [T, r of all] and their
    group for backward, all in x's dtype."""
    # cast to autocast's dtype here, so autocast has nothing to cast below
    dtype = x.dtype
    rows = x.reshape(-1, x.shape[-1])
    A, B = cast_adapters(adapters, dtype)
    weights = tuple(layer.weight.to(dtype) for layer in layers)
    scalings = tuple(layer.scaling for layer in layers)
    group = Group(weights, A, tuple(B), scalings, None if masks is None else tuple(masks))
    z = matmul_A(rows, A, group.ranks, masks)
    outputs = []
    for layer, weight, one_B, columns in zip(
        layers, weights, B, z.split_with_sizes(group.ranks, 1), strict=True
    ):
        # Not a view: autograd forbids changing one in place, as RoPE may do to q.
        output = rows.new_empty(*x.shape[:-1], weight.shape[0])
        bias = None if layer.bias is None else layer.bias.to(dtype)
        matmul_lora(rows, weight, columns, one_B, layer.scaling, bias, out=output)
        outputs.append(output)
    return outputs, z, group


def group_backward(ctx, name: str, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, of each A and B, and of each bias given to `group_forward`."""
    refuse_second_derivative(name, "the unfused layers")
    x, z, A, *others = ctx.saved_tensors
    count = len(grad_outputs)
    B, weights, bits = others[:count], others[count : 2 * count], others[2 * count :]
    if ctx.write_again is not None:
        ctx.write_again()
    group = Group(weights, A, B, ctx.scalings, masks_of(bits, ctx.scales))
    need_x, *needs, _ = ctx.needs_input_grad
    dtype_of_x, *dtypes = ctx.dtypes
    dtypes, dtypes_of_biases = dtypes[: 2 * count], dtypes[2 * count :]

    with without_autocast(z):
        grads = [
            None if grad is None else grad.reshape(-1, grad.shape[-1]).to(z.dtype)
            for grad in grad_outputs
        ]
        needs, needs_of_biases = needs[: 2 * count], needs[2 * count :]
        grad_x, grad_z = input_gradient(group, grads, need_x, needs[::2])
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        gradients = adapter_gradients(group, rows, z, grads, grad_z, needs, dtypes)
        gradients += bias_gradients(grads, needs_of_biases, dtypes_of_biases)
    if grad_x is not None:
        grad_x = grad_x.view(ctx.shape_of_x).to(dtype_of_x)
    return grad_x, *gradients


def dtypes_of(*tensors: Tensor | None) -> list[torch.dtype | None]:
    """Return the dtype of each tensor, which is also its gradient's."""
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def with_biases(
    name: str,
    prefixes: Sequence[str],
    layers: Sequence[FrozenLinear],
    biases: Sequence[Tensor | None],
) -> list[FrozenLinear]:
    """Return the layers with these trained biases, if any, instead of their frozen ones."""
    if not biases:
        return [*layers]
    if len(biases) != len(layers):
        raise ValueError(
            f"{name}: {len(biases)} biases given, should be none or those of all {len(layers)} "
            "layers, None for one without"
        )
    for prefix, layer, bias in zip(prefixes, layers, biases, strict=True):
        check_bias(name, f"{prefix}bias", bias, len(layer.weight))
    return [layer._replace(bias=bias) for layer, bias in zip(layers, biases, strict=True)]


def check_layers(
    name: str,
    prefixes: tuple[str, ...],
    x: Tensor,
    adapters: Sequence[Tensor],
    layers: Sequence[FrozenLinear],
    in_features: int | None = None,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor.

    x: the layers' input, or with in_features another tensor of its dtype and device.
    """
    if in_features is None:
        in_features = layers[0].weight.shape[1]
        if x.ndim == 0 or x.shape[-1] != in_features:
            raise ValueError(
                f"{name}: x is {list(x.shape)}, its last dimension should be {in_features}"
            )
    dtype = compute_dtype(x)
    for prefix, A, B, layer in zip(prefixes, adapters[::2], adapters[1::2], layers, strict=True):
        out_features = layer.weight.shape[0]
        if layer.weight.shape != (out_features, in_features):
            raise ValueError(
                f"{name}: {prefix}weight is {list(layer.weight.shape)}, "
                f"should be {[out_features, in_features]} as x is {list(x.shape)}"
            )
        check_bias(name, f"{prefix}bias", layer.bias, out_features)
        check_adapter(name, prefix, A, B, in_features, out_features)
        for kind, tensor in (("weight", layer.weight), ("bias", layer.bias)):
            if tensor is not None:
                check_frozen(name, f"{prefix}{kind}", tensor, x, dtype, "the unfused layers")
