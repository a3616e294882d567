"""Products with a bordered weight (`bordered.py`), and a layer of them as one autograd function.

With M = [[W, s B], [A, 0]], z = x A' and p = dy s B, K grows where what goes into the product is
the narrow side, else N does:

    y  = [x | z] M[:out]'      or  [y | z]  = x M[:, :in]',  then y  += z (s B)'
    dx = [dy | p] M[:, :in]    or  [dx | p] = dy M[:out],    then dx += p A
    dA = p' x,  dB = s dy' z
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_mlp.utils import compute_dtype, without_autocast

from .kernels.rows import empty_rows


class Bordered(NamedTuple):
    """One buffer and how it is laid out: what the products below need and do not train."""

    matrix: Tensor  # [out + width, in + width]
    bias: Tensor | None  # [out + width], zero after out
    in_features: int
    out_features: tuple[int, ...]  # of each projection; out is their sum
    blocks: tuple[int, ...]  # columns of the border for each; width is their sum, rounded up
    scalings: tuple[float, ...]

    @property
    def out(self) -> int:
        return sum(self.out_features)

    @property
    def width(self) -> int:
        return self.matrix.shape[1] - self.in_features


def grow_k_forward(x_ext: Tensor, bordered: Bordered) -> Tensor:
    """y [T, out] from x_ext [T, in + width], whose first columns are x; x A' is written into the
    others. Equivalent: ``x_ext[:, in:] = x @ A.t(); x_ext @ M[:out].t() + bias``."""
    matrix, bias, inputs, out = *bordered[:3], bordered.out
    torch.mm(x_ext[:, :inputs], matrix[out:, :inputs].t(), out=x_ext[:, inputs:])
    return _product(x_ext, matrix[:out], None if bias is None else bias[:out])


def grow_n_forward(x: Tensor, bordered: Bordered) -> Tensor:
    """[y | x A'] [T, out + width] from x [T, in].

    Equivalent: ``y_ext = x @ M[:, :in].t() + bias; y_ext[:, :out] += y_ext[:, out:] @ sB.t()``.
    """
    matrix, inputs, out = bordered.matrix, bordered.in_features, bordered.out
    y_ext = extended_product(x, bordered)
    y_ext[:, :out].addmm_(y_ext[:, out:], matrix[:out, inputs:].t())
    return y_ext


def extended_product(x: Tensor, bordered: Bordered) -> Tensor:
    """[y | x A'] of `grow_n_forward` before its addition: ``x @ M[:, :in].t() + bias``."""
    matrix, bias, inputs = bordered[:3]
    y_ext = empty_rows(x, x.shape[0], matrix.shape[0])
    return _product(x, matrix[:, :inputs], bias, out=y_ext)


def grow_k_backward(grad_ext: Tensor, bordered: Bordered) -> Tensor:
    """dx [T, in] from grad_ext [T, out + width], whose first columns are dy; p = dy sB is written
    into the others. Equivalent: ``grad_ext[:, out:] = dy @ sB; grad_ext @ M[:, :in]``."""
    matrix, inputs, out = bordered.matrix, bordered.in_features, bordered.out
    torch.mm(grad_ext[:, :out], matrix[:out, inputs:], out=grad_ext[:, out:])
    return grad_ext @ matrix[:, :inputs]


def grow_n_backward(grad: Tensor, bordered: Bordered) -> Tensor:
    """[dx | p] [T, in + width] from dy [T, out], with p = dy sB.

    Equivalent: ``x_ext = dy @ M[:out]; x_ext[:, :in] += x_ext[:, in:] @ A``.
    """
    matrix, inputs, out = bordered.matrix, bordered.in_features, bordered.out
    x_ext = grad @ matrix[:out]
    x_ext[:, :inputs].addmm_(x_ext[:, inputs:], matrix[out:, :inputs])
    return x_ext


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class BorderedLinear(torch.autograd.Function):
    """``BorderedLinear.apply(x, A, B, [A, B, ...,] bordered)``: the projections of one buffer.

    Equivalent PyTorch, for the W, b, A, B and s of each projection::

        outputs = [F.linear(x, W, b) + F.linear(F.linear(x, A), B) * s for ...]
        output = torch.cat(outputs, dim=-1)

    Args:
        x: [..., in], bf16, fp16 or fp32; any number of leading dimensions, any strides, any number
            of tokens including none.
        A: [r, in], B: [out, r] of each projection, r at most its block. Any dtype. They get the
            gradients; their values are those in the border, which must be fresh (`Borders.read`).
        bordered: the buffer in x's dtype (or any, under autocast, which casts all of it).

    Returns:
        [..., out], the projections' outputs side by side, in the dtype of the computation, which is
        autocast's where autocast is on and else x's. Rows are out + width apart where out <= in.
        Gradients come in the dtype of what they belong to, and only for what asks for one.

    Saved for backward: x, x A' and the buffer. No input, no incoming gradient and no saved tensor
    is written, so a second backward through a retained graph is right. Deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit.
        RuntimeError: from backward, under create_graph=True, or if the border was refreshed since.
    """

    @staticmethod
    def forward(ctx, x, *operands):
        *adapters, bordered = operands
        _check(x, adapters, bordered)
        ctx.kinds = kinds_of(adapters)
        ctx.dtype = x.dtype
        dtype = compute_dtype(x)
        x = x.to(dtype)
        matrix = bordered.matrix.to(dtype)
        bias = None if bordered.bias is None else bordered.bias.to(dtype)
        bordered = bordered._replace(matrix=matrix, bias=bias)
        # without the tensors, which save_for_backward keeps and watches
        ctx.layout = bordered._replace(matrix=None, bias=None)
        inputs, out = bordered.in_features, bordered.out

        rows = x.reshape(-1, inputs)
        if inputs < out:
            x_ext = _widened(rows, matrix.shape[1])
            y = grow_k_forward(x_ext, bordered)
            z = x_ext[:, inputs:].contiguous()
        else:
            y = grow_n_forward(rows, bordered)
            z = y[:, out:].contiguous()  # its own, so that it does not keep y
        strides = y.view(*x.shape[:-1], y.shape[1]).stride()
        # its memory, but no view of it: autograd would forbid to change that in place
        output = y.new_empty(0).set_(y.untyped_storage(), 0, (*x.shape[:-1], out), strides)
        ctx.save_for_backward(x, z, matrix)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        # see LoRA_W's for why not once_differentiable
        if torch.is_grad_enabled():
            raise RuntimeError(
                "BorderedLinear is not twice differentiable: call backward without "
                "create_graph=True, or use the unfused layers"
            )
        x, z, matrix = ctx.saved_tensors
        bordered = ctx.layout._replace(matrix=matrix)
        inputs, out = bordered.in_features, bordered.out
        need_x, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[1:-1]
        grad_x = None
        p: Any = None
        with without_autocast(x):
            grad = grad_output.reshape(-1, out).to(x.dtype)
            if need_x and out < inputs:
                grad_ext = _widened(grad, matrix.shape[0])
                grad_x = grow_k_backward(grad_ext, bordered).view(x.shape)
                p = grad_ext[:, out:]
            elif need_x:
                x_ext = grow_n_backward(grad, bordered)
                grad_x = x_ext.view(*x.shape[:-1], x_ext.shape[1])[..., :inputs]
                p = x_ext[:, inputs:]
            elif any(needed[::2]):
                p = grad @ matrix[:out, inputs:]
            gradients = adapter_gradients(
                bordered, ctx.kinds, needed, x.reshape(-1, inputs), grad, z, p
            )
        return None if grad_x is None else grad_x.to(ctx.dtype), *gradients, None


def kinds_of(adapters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    """Rank and dtype of A, B, A, B ...: what `adapter_gradients` wants to know of them."""
    return [(adapters[i - i % 2].shape[0], t.dtype) for i, t in enumerate(adapters)]


def adapter_gradients(
    bordered: Bordered,
    kinds: Sequence[tuple[int, torch.dtype]],
    needed: Sequence[bool],
    x: Tensor,
    grad: Tensor,
    z: Tensor,
    p: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of A, B, A, B ... of the projections of one buffer, None where not needed.

    Equivalent, for x [T, in], grad = dy [T, out], z = x A' and p = dy sB [T, width]:
    ``p.t() @ x`` and ``s * (dy.t() @ z)``, of each projection its part, in the adapters' dtypes.

    Each is one product for all projections, even where one of them is frozen. That of B computes
    blocks off the diagonal, too; the time goes into reading dy, once.
    """
    gradients: list[Tensor | None] = [None] * len(kinds)
    starts = list(accumulate(bordered.blocks, initial=0))[:-1]
    if any(needed[::2]):
        assert p is not None
        # one dtype for all, the widest among them, so that it loses nothing
        stacked = _sum_over_tokens(p, x, reduce(torch.promote_types, (d for _, d in kinds[::2])))
        for i, start in enumerate(starts):
            rank, dtype = kinds[2 * i]
            if needed[2 * i]:
                gradients[2 * i] = stacked[start : start + rank].to(dtype)
    if any(needed[1::2]):
        blocks = _sum_over_tokens(grad, z, torch.float32).split(bordered.out_features)
        for i, (start, block) in enumerate(zip(starts, blocks, strict=True)):
            rank, dtype = kinds[2 * i + 1]
            if needed[2 * i + 1]:
                # scaled and rounded at once, and contiguous, as a .grad has to be
                gradient = block.new_empty(block.shape[0], rank, dtype=dtype)
                torch.mul(block[:, start : start + rank], bordered.scalings[i], out=gradient)
                gradients[2 * i + 1] = gradient
    return gradients


def _sum_over_tokens(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a' b, in fp32 at once where that is wanted and PyTorch can: on a GPU."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a.t(), b, out_dtype=dtype)
    return a.t() @ b


def _widened(rows: Tensor, columns: int) -> Tensor:
    """A copy of `rows` [T, n] in the first columns of a new [T, columns]; the others are unset."""
    wide = empty_rows(rows, rows.shape[0], columns)
    wide[:, : rows.shape[1]].copy_(rows)
    return wide


def _check(x: Tensor, adapters: list[Tensor], bordered: Bordered) -> None:
    """Raise ValueError where shapes or dtypes do not fit together, naming the tensor."""
    matrix, inputs = bordered.matrix, bordered.in_features
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise ValueError(
            f"BorderedLinear: x is {list(x.shape)}, its last dimension should be {inputs}"
        )
    check_adapters("BorderedLinear", adapters, bordered)
    if matrix.dtype != compute_dtype(x) and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"BorderedLinear: the buffer is {matrix.dtype} and x {x.dtype}: give both one dtype, "
            "or run under torch.autocast"
        )


def check_adapters(name: str, adapters: Sequence[Tensor], bordered: Bordered) -> None:
    """Raise ValueError unless there is an A and a B of each projection that fit the border."""
    inputs, wanted = bordered.in_features, len(bordered.out_features)
    if len(adapters) != 2 * wanted:
        raise ValueError(
            f"{name}: {len(adapters)} adapter tensors given, should be {2 * wanted}: A and "
            f"B of each of {wanted} projections"
        )
    for i, (A, B) in enumerate(zip(adapters[::2], adapters[1::2], strict=True)):
        out, block, r = bordered.out_features[i], bordered.blocks[i], A.shape[0]
        if A.shape != (r, inputs) or B.shape != (out, r) or r > block:
            raise ValueError(
                f"{name}: A {i} is {list(A.shape)} and B {i} {list(B.shape)}, should be "
                f"[r, {inputs}] and [{out}, r] of one r up to {block}"
            )
