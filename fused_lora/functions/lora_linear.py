"""LoRA_QKV: adapted linear layers that share an input as one autograd function, backward by hand.

Attention's q, k and v, say, or the four layers in front of a gated delta net; LoRA_W is one layer.
They are a group in the sense of `fused_mlp/utils.py`, and use its equations. For q, k and v that is
7 matmuls forward and 11 backward; layer by layer it is 9 and 15. For a gated delta net it is 9 and
14 instead of 12 and 20. Biases cost nothing: the epilogue of the frozen matmul adds them. The
gradient of a trained bias is the sum of its layer's dy over tokens.

For the same layers in PEFT, autograd keeps the three x A', and with fp32 adapters a copy of x for
each. We keep x and z = x A'. With only 3r columns z is cheaper to keep than to recompute, which
would read all of x. (`LoRA_Attention` of `layer/decoder_layer.py` fuses q, k, v, o and everything
between into one function.)

LoRA: Hu et al., arXiv 2106.09685. Unsloth was first to publish LoRA's QKV and single layers as
autograd functions (unsloth/kernels/fast_lora.py). It skips its QKV if a projection has a bias, as
in Qwen2.5. Ours are written from the equations above and overwrite nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp.dropout import draw_masks, masks_of, parts_of
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


class FrozenLinear(NamedTuple):
    """A base layer and its adapter's scale, which nothing here trains.

    dropout: the probability of dropping an element of the adapter's input in training. None: share
    the mask of the layer before; then both are parts of one projection, with one A.
    """

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    scaling: float
    dropout: float | None = 0.0


class FrozenLayers(NamedTuple):
    """The operands of LoRA_QKV that it does not train.

    seed: of all masks; draw a new one, `draw_seed(x.device)`, for each call. write_again: as in
    FrozenMLP, for all weights.
    """

    layers: tuple[FrozenLinear, ...]
    seed: Tensor | None = None  # [1] int64
    write_again: Callable[[], None] | None = None


class LoRA_QKV(torch.autograd.Function):
    """``LoRA_QKV.apply(x, q_A, q_B, k_A, k_B, v_A, v_B, frozen)``: linear layers that share x, with
    their adapters. Trained biases, one for each layer, go before frozen.

    Equivalent PyTorch::

        for layer, A, B in zip(frozen.layers, ...):
            base = F.linear(x, layer.weight, layer.bias)  # or the bias that is trained
            kept = F.dropout(x, layer.dropout)  # without dropout, x as it is
            base + F.linear(F.linear(kept, A), B) * layer.scaling

    Args:
        x: [..., in], bf16, fp16 or fp32; any number of leading dimensions, any strides, any number
            of tokens including none.
        A: [r, in]. B: [out, r]. Any r, which may differ between layers. Any dtype: they are cast to
            the compute dtype (fp32 masters of a bf16 model, say).
        bias: [out], or None, in any dtype. They replace frozen's.
        frozen: base weights and biases (each may be None) in x's dtype (or any, under autocast),
            and the scales.

    Returns:
        A tuple of [..., out], separate tensors in the compute dtype: autocast's if it is on, else
        x's. Matmuls accumulate in fp32. Each gradient has the dtype of its tensor, and is computed
        only if `requires_grad` asks for it. Without dropout the gradients of all A share one
        storage. An output that is in no loss costs nothing, and its A and B get no gradient (None),
        as with unfused layers.

    Saved for backward: x (if an A is trained), z = x [q_A; k_A; v_A]', the adapters and the weights
    in the compute dtype, and one bit for each element of x for each layer with dropout. It writes
    to no input, incoming gradient or saved tensor, so x may have other consumers, and a second
    backward through a retained graph is right. Deterministic. Not twice differentiable.

    Raises:
        ValueError: shapes or dtypes do not fit, a base weight or bias requires a gradient, or there
            is dropout and no seed.
        RuntimeError: from backward, under create_graph=True.
    """

    @staticmethod
    def forward(ctx, x, *operands):
        name = _name_of((len(operands) - 1) // 2)  # A and B of each layer, perhaps biases, frozen
        trained, frozen = split_frozen(name, operands, FrozenLayers)
        ctx.write_again, count = frozen.write_again, len(frozen.layers)
        adapters, biases = trained[: 2 * count], trained[2 * count :]
        prefixes = _prefixes_of(count)
        _check_layers(name, prefixes, x, adapters, frozen.layers)
        layers = _with_biases(name, prefixes, frozen.layers, biases)
        ctx.set_materialize_grads(False)  # a missing gradient is None, not zeros, in backward
        ctx.dtypes = [None if one is None else one.dtype for one in (x, *trained)]
        ctx.shape_of_x = x.shape
        # cast to autocast's dtype here, so autocast has nothing to cast below
        dtype = compute_dtype(x)
        x = x.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        masks = draw_masks(
            name, frozen.seed, [layer.dropout for layer in layers], [len(rows)] * count,
            [rows.shape[1]] * count,
        )  # fmt: skip
        A, B = cast_adapters(adapters, dtype)
        weights = tuple(layer.weight.to(dtype) for layer in layers)
        ctx.scalings = tuple(layer.scaling for layer in layers)
        group = Group(weights, A, tuple(B), ctx.scalings, None if masks is None else tuple(masks))
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
        bits, ctx.scales = parts_of(masks)
        # Only dA needs x. Save x itself, not its rows: autograd cannot tell whose memory a view
        # made in here is.
        kept = x if any(ctx.needs_input_grad[1 : 2 * count : 2]) else None
        ctx.save_for_backward(kept, z, A, *B, *weights, *bits)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        count = len(grad_outputs)
        refuse_second_derivative(_name_of(count), "the unfused layers")
        x, z, A, *others = ctx.saved_tensors
        B, weights, bits = others[:count], others[count : 2 * count], others[2 * count :]
        if ctx.write_again is not None:
            ctx.write_again()
        group = Group(weights, A, B, ctx.scalings, masks_of(bits, ctx.scales))
        need_x, *needs, _ = ctx.needs_input_grad
        dtype_of_x, *dtypes = ctx.dtypes
        with without_autocast(z):
            grads = [
                None if grad is None else grad.reshape(-1, grad.shape[-1]).to(z.dtype)
                for grad in grad_outputs
            ]
            grad_x, grad_z = input_gradient(group, grads, need_x, needs[: 2 * count : 2])
            rows = None if x is None else x.reshape(-1, x.shape[-1])
            gradients = adapter_gradients(
                group, rows, z, grads, grad_z, needs[: 2 * count], dtypes[: 2 * count]
            )
            gradients += bias_gradients(grads, needs[2 * count :], dtypes[2 * count :])
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape_of_x).to(dtype_of_x)
        return grad_x, *gradients, None


class LoRA_W(LoRA_QKV):
    """``(output,) = LoRA_W.apply(x, A, B, frozen)``: one linear layer with its adapter. With a
    trained bias: ``LoRA_W.apply(x, A, B, bias, frozen)``."""


def _name_of(layers: int) -> str:
    return (LoRA_QKV if layers > 1 else LoRA_W).__name__


def _prefixes_of(layers: int) -> Sequence[str]:
    """Return what stands before the name of each layer's tensors in an error."""
    names = {1: ("",), 3: ("q_", "k_", "v_")}
    return names.get(layers, tuple(f"layer {i}'s " for i in range(layers)))


def _with_biases(
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


def _check_layers(
    name: str,
    prefixes: Sequence[str],
    x: Tensor,
    adapters: Sequence[Tensor],
    layers: Sequence[FrozenLinear],
) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
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
