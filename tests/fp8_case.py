"""The oracle of layers in FP8: it quantises as `fp8_rows` says, and computes in fp64."""

import copy

import layer_case
import torch
import torch.nn.functional as F

from fused_lora import Fusion, fuse
from fused_lora.fp8 import Fp8Buffer
from fused_lora.kernels.fp8_rows import E4M3
from fused_lora.kernels.fp8_swiglu import new_codes

FP8 = Fusion(layer=True, fp8=True)
CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 1,
}  # fmt: skip


def pair(device, fusion=FP8, **options):
    """A model with a layer in FP8, and plain PEFT's."""
    plain = layer_case.peft_model(device, config=CONFIG, **options)
    fused = copy.deepcopy(plain)
    return fused, plain, fuse(fused, fusion)


def quantised(x, border=None, weights=None):
    """x as its codes have it, with a scale a row, of x and its border; and the border's product
    with these weights, both in two halves."""
    largest = (x if border is None else torch.cat([x, border], 1)).abs().amax(1, keepdim=True)
    scales = largest.clamp(min=1e-30) / 448
    codes = nearest(x / scales) * scales
    if border is None:
        return codes
    (hi, lo), (of_hi, of_lo) = halves(border / scales), halves(weights)
    return codes, (hi @ (of_hi + of_lo).t() + lo @ of_hi.t()) * scales


def product_of_border(border, weights, scales):
    """The same where the codes were there first, whose scales a larger border makes powers of two
    larger."""
    passed = border.abs().amax(1, keepdim=True) / (448 * scales)
    scales = scales * passed.log2().ceil().clamp(min=0).exp2()
    (hi, lo), (of_hi, of_lo) = halves(border / scales), halves(weights)
    return (hi @ (of_hi + of_lo).t() + lo @ of_hi.t()) * scales


def nearest(x):
    return x.float().to(E4M3).double()


def halves(x):
    hi = nearest(x)
    return hi, nearest(x - hi)


def factor(largest, expected):
    found = torch.where(largest > 0, (largest / expected).sqrt(), 1 / expected)
    return torch.maximum(torch.where(expected > 0, found, 1.0), largest / 448)


class OracleBuffer(Fp8Buffer):
    """As Fp8Buffer, of the same weights. Codes of SwiGLU's gradient it takes as they are."""

    def __init__(self, weight, bias, like):
        self.scales = weight.float().abs().amax(1) / 448
        self.codes = nearest(weight.float() / self.scales[:, None])
        self.A, self.sB = torch.zeros_like(like.A), torch.zeros_like(like.sB)
        self.bias, self.holds = bias, None

    def encode(self):
        A, sB = self.A.double(), self.sB.double()
        in_codes = (sB / self.scales[:, None]).abs().amax(0)
        spread = self.scales.square().mean().sqrt()
        self.factors = factor(in_codes, 56 * A.norm(dim=1))
        self.factors_t = factor(A.abs().amax(1), 56 * sB.norm(dim=0) / spread)

    def product(self, x_ext, bias):
        x, z = x_ext.double().tensor_split([self.A.shape[1]], 1)
        border = self.sB.double() / self.scales[:, None] / self.factors
        rows, adapted = quantised(x, z * self.factors, border)
        y = (rows @ self.codes.t() + adapted) * self.scales
        return (y if bias is None else y + bias.double()).to(x_ext.dtype)

    def product_and_z(self, x, bias, with_z):
        y = quantised(x.double()) @ self.codes.t() * self.scales
        y = y if bias is None else y + bias[: y.shape[1]].double()
        return y.to(x.dtype), x @ self.A.t() if with_z else x.new_empty(len(x), len(self.A))

    def add_product(self, total, x_ext, multiplier):
        total.add_(self.product(x_ext, None), alpha=multiplier)

    def product_of_norm(self, x, weight, eps, zero_centered, bias, copy):
        normed, rstd = x.double(), None
        if weight is not None:
            rstd = (normed.square().mean(1) + eps).rsqrt()
            normed = normed * rstd[:, None] * (weight.double() + zero_centered)
            rstd = rstd.float()
        if copy is not None:
            copy.copy_(x)
        scales = normed.abs().amax(1, keepdim=True) / 448
        codes = nearest(normed / scales)
        z = (codes * scales @ self.A.double().t()).to(x.dtype)
        border = self.sB.double() / self.scales[:, None] / self.factors
        adapted = product_of_border(z.double() * self.factors, border, scales)
        y = (codes * scales @ self.codes.t() + adapted) * self.scales
        y = y if bias is None else y + bias.double()
        return y.to(x.dtype), codes.to(x.dtype), z, scales.to(x.dtype), rstd

    def add_swiglu(self, total, gate_up, multiplier, activation):
        gate, up = gate_up.double().chunk(2, 1)
        hidden = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        rows = quantised(hidden)
        z = (rows @ self.A.double().t()).to(gate_up.dtype)
        if total is not None:
            scales = hidden.abs().amax(1, keepdim=True) / 448
            border = self.sB.double() / self.scales[:, None] / self.factors
            adapted = product_of_border(z.double() * self.factors, border, scales)
            product = ((rows @ self.codes.t() + adapted) * self.scales).to(total.dtype)
            total.add_(product, alpha=multiplier)
        return z

    def room_for_codes(self, like):
        return new_codes(like, len(self.sB))

    def gradient_of_codes(self, codes, scales, dtype):
        rows, scales = codes.double() * scales.double(), scales.double()
        p = (rows @ (self.sB.double() / self.scales[:, None])).to(dtype)
        border = self.A.double().t() / self.factors_t
        adapted = product_of_border(p.double() * self.factors_t, border, scales)
        return (rows @ self.codes + adapted).to(dtype), p

    def gradient(self, grad_ext):
        dy, p = grad_ext.double().tensor_split([len(self.sB)], 1)
        border = self.A.double().t() / self.factors_t
        rows, adapted = quantised(dy * self.scales, p * self.factors_t, border)
        return (rows @ self.codes + adapted).to(grad_ext.dtype)

    def add_gradient(self, grad, dy):
        grad.add_((quantised(dy.double() * self.scales) @ self.codes).to(dy.dtype))
