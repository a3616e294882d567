"""Compile the kernels of a step, with parts or whole layers fused, for GPUs that are not there.

``python compile_case.py 80 90`` prints how many bytes of shared memory a program of each kernel
takes on these architectures. It needs the compiler, not Triton's interpreter, so tests start it in
a separate process.
"""

import json
import re
import sys

import contract
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from fused_lora.functions import causal_conv, rope
from fused_lora.kernels import (
    causal_attention,
    causal_attention_backward,
    dequantize_4bit,
    head_norms,
    magnitudes,
    many_copies,
    output_gate,
    qkv_rope,
    routed_rows,
    row_norm,
)
from fused_lora.kernels.dropped_products import dropped_gradient, dropped_products
from fused_lora.kernels.extend_rows import extend_rows
from fused_lora.kernels.fp8_borders import Bordering, Halves, fp8_borders
from fused_lora.kernels.fp8_logits import logit_codes, transposed
from fused_lora.kernels.fp8_products import add_coded_border
from fused_lora.kernels.fp8_rows import fp8_rows
from fused_lora.kernels.fp8_swiglu import guess_gradient_scales, repair_gradient_codes, swiglu_codes
from fused_lora.kernels.logits import LogitScaling, Statistics, cross_entropy_, log_probs_gradient_
from fused_lora.kernels.magnitudes import ColumnScale
from fused_lora.kernels.products import Product, SwiGLUProducts
from fused_lora.kernels.sums_over_tokens import sums_over_tokens
from fused_lora.kernels.swiglu_products_backward import swiglu_backward_products
from fused_lora.kernels.swiglu_products_forward import swiglu_forward_product
from fused_lora.loss.label_check import find_wrong_label
from fused_mlp.dropout import Mask, drop, keep_bits, kept_share
from fused_mlp.geglu import geglu_backward, geglu_forward
from fused_mlp.launching import launch_by_triton
from fused_mlp.swiglu import swiglu_backward, swiglu_forward

BATCH, POSITIONS, HIDDEN, COLUMNS, VOCABULARY, RANK = 32, 64, 2048, 11_008, 151_936, 32
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
TOKENS = BATCH * POSITIONS


ROUNDS_TWICE = {"dequantize_4bit._dequantize_4bit_kernel"}  # as bitsandbytes


class Driver:
    """The part of a driver that Triton needs to compile."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, device):
        return 0


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def mask_of(x):
    seed = empty(1, dtype=torch.int64)
    return Mask(keep_bits(seed, 0, kept_share(0.05), *x.shape), 1.0)


def launch_parts():
    """Launch the kernels of parts."""
    gate, x = empty(TOKENS, COLUMNS), empty(TOKENS, HIDDEN)
    swiglu_forward(gate, gate)
    swiglu_backward(gate, gate, gate)
    geglu_forward(gate, gate)
    geglu_backward(gate, gate, gate)
    both, routed = empty(TOKENS, 2 * COLUMNS), empty(TOKENS)
    for addend, narrow in ((both, gate), (None, None)):
        routed_rows.routed_swiglu_forward(both, addend, 2.0, routed)
        routed_rows.routed_swiglu_backward(gate, narrow, 2.0, both, routed)
        routed_rows.sum_routed(gate, narrow, 2.0, empty(TOKENS // 8, 8, dtype=torch.int64))
    clamped, experts = routed_rows.ClampedGate(1.702, 7.0), empty(TOKENS, dtype=torch.int64)
    bias = empty(8, 2 * COLUMNS)
    routed_rows.routed_swiglu_forward(both, both, 2.0, routed, clamped, bias, experts)
    routed_rows.routed_swiglu_backward(gate, gate, 2.0, both, routed, clamped)
    bias = routed_rows.RoutedBias(empty(8, COLUMNS), experts, routed)
    places = empty(TOKENS // 8, 8, dtype=torch.int64)
    for addend, of_row in ((gate, bias), (None, None)):
        routed_rows.sum_routed(gate, addend, 2.0, places, gate[: TOKENS // 8], of_row)
    sizes = 2 * HEAD_DIM, 2 * HEAD_DIM, 4 * HEAD_DIM
    mixed, taps = empty(BATCH, POSITIONS, sum(sizes)), empty(sum(sizes), 4)
    packed = empty(BATCH, POSITIONS, dtype=torch.int32)
    for conv in (causal_conv.Conv(sizes), causal_conv.Conv((sum(sizes),), False, packed)):
        grads = causal_conv.causal_conv_forward(mixed, taps, None, conv)
        for trained in (False, True):
            grad = mixed.view(TOKENS, -1)
            causal_conv.causal_conv_backward(grads, mixed, taps, None, conv, grad, trained)
    q, k = (empty(BATCH, heads, POSITIONS, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    cos = empty(1, POSITIONS, HEAD_DIM)
    rope.rope(q, k, cos, cos)
    drop(x, mask_of(x))
    labels, found = (empty(size, dtype=torch.int64) for size in (TOKENS, 2))
    cross_entropy_(empty(TOKENS, VOCABULARY), labels, -100, True)
    for scaling in (LogitScaling(), LogitScaling(0.5), LogitScaling(0.5, 30.0)):
        rows = [empty(TOKENS, dtype=torch.float32) for _ in range(5)]
        statistics = Statistics(*rows, empty(TOKENS, dtype=torch.int8))
        for given in (statistics, Statistics()):
            cross_entropy_(empty(TOKENS, VOCABULARY), labels, -100, False, given, scaling)
        for gradients in ((rows[0], rows[0]), (rows[0], None), (None, rows[0])):
            logits = empty(TOKENS, VOCABULARY)
            log_probs_gradient_(logits, labels, -100, statistics, *gradients, scaling)
    find_wrong_label(labels, found, VOCABULARY, -100)
    launch_operations_on_rows()


def launch_operations_on_rows():
    """Run these operations of contract.py's table forward and backward: with options at their
    defaults and all trained, then with options at their last values and only x trained."""
    for operation in contract.OPERATIONS.values():
        if operation.shapes is contract.ROWS:
            last = {name: values[-1] for name, values in operation.options.items()}
            for options, trained in (({}, operation.trained), (last, operation.trained[:1])):
                case = operation.case("meta", shape=(TOKENS, HIDDEN), **options)
                leaves = contract.leaves_of(operation, case, trained)
                outputs = contract.as_tuple(operation.function(*leaves.values()))
                torch.autograd.backward(outputs, case.gradients)


def launch_layer():
    """Launch the kernels that only a whole layer has."""
    x, wide, weight = empty(TOKENS, HIDDEN), empty(TOKENS, HIDDEN + RANK), empty(HIDDEN)
    y = wide[:, :HIDDEN]
    rstd = row_norm.rms_norm_forward(x, weight, 1e-6, y, total=x)
    row_norm.rms_norm_backward(x, y, x, weight, rstd, y)
    in_fp32, weight_in_fp32 = x.float(), weight.float()  # a residual, beside matmuls in 16 bits
    row_norm.rms_norm_forward(in_fp32, weight_in_fp32, 1e-6, y, total=in_fp32)
    row_norm.rms_norm_backward(x, in_fp32, in_fp32, weight_in_fp32, rstd, in_fp32)
    row_norm.add_normed(x, y, weight, 1e-6, x)
    A, z_copy = empty(RANK, HIDDEN), empty(TOKENS, RANK)
    extend_rows(x, A, wide, z_copy)
    qkv = empty(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos = empty(1, POSITIONS, HEAD_DIM)
    qkv_rope.rope_forward(qkv, cos, cos, HEADS, KV_HEADS)
    grad, grad_qkv = empty(TOKENS, HEADS * HEAD_DIM), torch.empty_like(qkv)
    attention = causal_attention.Attention(POSITIONS, HEADS, KV_HEADS, 0.1)
    attended, logsumexp = causal_attention.causal_attention_forward(qkv, attention)
    for angles in ((cos, cos), (None, None)):
        causal_attention_backward.causal_attention_backward(
            grad, qkv, angles, attended, logsumexp, attention, grad_qkv
        )
    documents = empty(BATCH, 1, 2, POSITIONS, dtype=torch.int32)
    attention = attention._replace(window=40)
    causal_attention.causal_attention_forward(qkv, attention, documents, sinks=empty(HEADS))
    causal_attention_backward.causal_attention_backward(
        grad, qkv, (cos, cos), attended, logsumexp, attention, grad_qkv, documents
    )
    launch_wide_attention(documents)
    grads = [empty(BATCH, heads, POSITIONS, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    qkv_rope.rope_backward(*grads, cos, cos, qkv)
    qkv_rope.rope_backward(*grads, None, None, qkv)
    part = cos[..., : HEAD_DIM // 2]
    qkv_rope.rope_backward(*grads, part, part, qkv, interleaved=True)
    qkv_rope.rotate_back(qkv, part, part, HEADS, KV_HEADS)
    by_head = head_norms.HeadNorms(empty(HEAD_DIM), empty(HEAD_DIM), 1e-6, 1e-6)
    weights = (empty(count * HEAD_DIM) for count in (HEADS, KV_HEADS))
    token_norms = head_norms.HeadNorms(*weights, 1e-6, 1e-6)
    for norms, angles in (
        (by_head, (cos, cos)),
        (by_head, (part, part)),
        (token_norms, (None, None)),
        (by_head._replace(v_eps=1e-6), (cos, cos)),
    ):
        qkv_rope.norm_rope_together(*grads, norms, *angles, qkv)
        head_norms.head_norms_backward(*grads, norms, qkv)
    raw = empty(TOKENS, 2 * (HEADS + KV_HEADS) * HEAD_DIM)
    output_gate.gate_forward(grad, raw, HEAD_DIM)
    output_gate.gate_backward(grad, grad, raw, HEAD_DIM, torch.empty_like(raw))
    # its launcher reads addresses, and these tensors have none
    table = [empty(1, dtype=d) for d in (torch.int64, torch.float32, torch.int32, torch.int32)]
    source, block = empty(1, dtype=torch.float32), many_copies.BLOCK_COPIED
    for run in (1, many_copies.MAX_RUN):
        launch_by_triton(many_copies._copy_kernel, (1,), *table, source, empty(1), block, run)
    ends = empty(32, dtype=torch.int32)
    kinds = (1, False, False, None), (64, True, False, ends), (32, True, True, ends)
    for run, *kind, at in kinds:
        sizes = 8, dequantize_4bit.TILE, run, 4, dequantize_4bit.MAX_WRITE, *kind, tl.int32
        prepared = dequantize_4bit._Prepared(1, empty(1, dtype=torch.int64), empty(1), *sizes)
        dequantize_4bit._launch(prepared, at)
    products = [Product(empty(TOKENS, RANK), empty(COLUMNS, RANK)) for _ in range(3)]
    gate_up, hidden = empty(TOKENS, 2 * COLUMNS), empty(TOKENS, COLUMNS)
    three = SwiGLUProducts(*products)
    swiglu_backward_products(hidden, gate_up, three, torch.empty_like(gate_up))
    swiglu_forward_product(gate_up, empty(RANK, COLUMNS), hidden, empty(TOKENS, RANK))
    swiglu_backward_products(hidden, gate_up, three, torch.empty_like(gate_up), "gelu_tanh")
    swiglu_forward_product(gate_up, empty(RANK, COLUMNS), hidden, None, None, "gelu_tanh")
    sums_over_tokens([(hidden, products[:1])])
    launch_dropout(gate_up, hidden, products)
    launch_magnitudes(gate_up, hidden, three)


def launch_magnitudes(gate_up, hidden, three):
    """Launch a layer's kernels where it has magnitudes."""
    f32, grad = torch.float32, torch.empty_like(gate_up)
    scale = ColumnScale(*(empty(2 * COLUMNS, dtype=d) for d in (f32, f32, torch.bfloat16)))
    three = three._replace(magnitudes=(empty(COLUMNS), empty(COLUMNS, dtype=f32)))
    swiglu_forward_product(gate_up, empty(RANK, COLUMNS), hidden, None, None, "silu", scale)
    swiglu_backward_products(hidden, gate_up, three, grad, "silu", None, scale)
    magnitudes.scale_columns(gate_up.float(), scale, grad, gate_up, grad)
    magnitudes.scale_columns_backward(grad, gate_up, scale.factor, grad)
    A, sB = empty(2 * RANK, HIDDEN), empty(2 * COLUMNS, 2 * RANK)
    both = [
        magnitudes.Rescaled(empty(COLUMNS, dtype=f32), i * COLUMNS, COLUMNS, i * RANK, RANK)
        for i in range(2)
    ]
    operands = A, sB, None, both, scale.factor, scale.inverse_norm
    magnitudes.magnitude_factors(empty(2 * COLUMNS, HIDDEN), *operands)


def launch_wide_attention(documents):
    """Launch attention to documents with heads of 256."""
    heads, kv_heads, head_dim = 8, 4, 256
    qkv = empty(TOKENS, (heads + 2 * kv_heads) * head_dim)
    cos, grad = empty(1, POSITIONS, head_dim), empty(TOKENS, heads * head_dim)
    for window in (None, 40):
        attention = causal_attention.Attention(POSITIONS, heads, kv_heads, 0.1, window=window)
        attended, logsumexp = causal_attention.causal_attention_forward(qkv, attention, documents)
        causal_attention_backward.causal_attention_backward(
            grad, qkv, (cos, cos), attended, logsumexp, attention, torch.empty_like(qkv), documents
        )


def launch_dropout(gate_up, hidden, products):
    """Launch a layer's kernels with masks."""
    mask, masked = mask_of(hidden), products[0]._replace(mask=mask_of(hidden))
    three = SwiGLUProducts(masked, *products[1:])
    swiglu_backward_products(hidden, gate_up, three, torch.empty_like(gate_up))
    swiglu_forward_product(gate_up, empty(RANK, COLUMNS), hidden, empty(TOKENS, RANK), mask)
    x, A, z = empty(TOKENS, HIDDEN), empty(3 * RANK, HIDDEN), empty(TOKENS, 3 * RANK)
    three = [Product(z[:, :RANK], empty(HIDDEN, RANK), 1.0, mask_of(x)) for _ in range(3)]
    sums_over_tokens([(x, three)])
    operands = A, [RANK] * 3, [mask_of(x)] * 3
    dropped_products(x, *operands, z)
    dropped_gradient(z, *operands, x)


def launch_fp8():
    """Launch the kernels of a layer in FP8."""
    f32 = torch.float32
    width = 2 * RANK
    vectors = empty(width, dtype=f32), empty(2 * COLUMNS, dtype=f32)
    x = empty(TOKENS, HIDDEN)
    fp8_rows(x, 2 * HIDDEN)
    read, *_ = row_norm.norm_codes(x, empty(HIDDEN), 1e-6, 2 * HIDDEN)
    norm_operands = empty(TOKENS, dtype=f32), x, empty(HIDDEN, dtype=f32)
    row_norm.norm_backward_codes(x, x, x, empty(HIDDEN), *norm_operands, 2 * HIDDEN)
    x_products = [Product(empty(TOKENS, RANK), empty(HIDDEN, RANK)) for _ in range(3)]
    sums_over_tokens([(read[:, :HIDDEN], x_products)])
    fp8_rows(empty(TOKENS, 2 * COLUMNS), 2 * COLUMNS, vectors[1])
    codes, codes_t = (empty(n, n, dtype=torch.float8_e4m3fn) for n in (2 * COLUMNS, 2 * COLUMNS))
    border = empty(2 * COLUMNS, width), empty(width, HIDDEN)
    B_halves, A_halves = (
        Halves(empty(2, width, n, dtype=torch.float8_e4m3fn), vectors[0])
        for n in (2 * COLUMNS, HIDDEN)
    )
    one = Bordering(*border, vectors[1], codes, codes_t, vectors[0], vectors[0], B_halves, A_halves)
    fp8_borders([one] * 4)
    A, sB, rows = empty(RANK, 2 * COLUMNS), empty(2 * COLUMNS, RANK), vectors[1]
    one = magnitudes.Rescaled(rows, 0, 2 * COLUMNS, 0, RANK)
    magnitudes.magnitude_factors(codes, A, sB, rows, [one], rows, rows)
    gate_up, hidden = empty(TOKENS, 2 * COLUMNS), empty(TOKENS, COLUMNS)
    codes, scales = swiglu_codes(gate_up, 2 * COLUMNS, "silu")
    add_coded_border(codes, scales, B_halves, vectors[0], torch.bfloat16)
    add_coded_border(fp8_rows(x, 2 * HIDDEN)[0], scales, A_halves, vectors[0], torch.bfloat16)
    head = empty(1024, HIDDEN, dtype=torch.float8_e4m3fn)
    transposed(head)
    row_values = [empty(TOKENS, dtype=f32) for _ in range(2)]
    labels = empty(TOKENS, dtype=torch.int64)
    logit_codes(empty(TOKENS, VOCABULARY), labels, *row_values, empty(VOCABULARY, dtype=f32), -100)
    coded = guess_gradient_scales(hidden, gate_up, codes, scales, vectors[1], "silu")
    products = [Product(empty(TOKENS, RANK), empty(COLUMNS, RANK)) for _ in range(3)]
    swiglu_backward_products(hidden, gate_up, SwiGLUProducts(*products), None, "silu", coded)
    repair_gradient_codes(hidden, gate_up, coded, "silu")


def casts_back(ttir: str) -> bool:
    """Return whether a kernel casts back the FP8 codes that it has just made."""
    made = re.findall(r"(%\w+) = tt.fp_to_fp .* -> tensor<\S*xf8E4M3FN", ttir)
    return any(re.search(rf"= tt.fp_to_fp {name} : tensor<\S*xf8E4M3FN", ttir) for name in made)


def shared_bytes(arch: int) -> dict[str, int]:
    triton.runtime.driver.set_active(Driver(arch))
    found = {}
    run = triton.JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        compiled = run(self, *arguments, warmup=True, **options)
        name = f"{self.__module__.split('.')[-1]}.{self.__name__}"
        found[name] = max(compiled.metadata.shared, found.get(name, 0))
        is_fused = compiled.metadata.enable_fp_fusion
        assert is_fused == (name not in ROUNDS_TWICE), f"{name}: see launch_by_triton"
        assert not casts_back(compiled.asm["ttir"]), f"{name}: see fp8_rows.halves"

    triton.JITFunction.run = compile_only
    try:
        launch_parts()
        launch_layer()
        if arch >= 89:  # older ones cannot convert
            launch_fp8()
    finally:
        triton.JITFunction.run = run
    return found


if __name__ == "__main__":
    print(json.dumps({arch: shared_bytes(int(arch)) for arch in sys.argv[1:]}))
