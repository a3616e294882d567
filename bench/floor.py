"""The floor: the time of the operations that every LoRA step at this precision needs.

Each layer has its own weights and runs the frozen matmuls q+k+v, o, gate+up and down, forward and
for the gradient of their input, and attention both ways. Then comes the lm_head both ways over the
labelled tokens, which are all the loss needs. After its attention the last layer also runs over
these alone. There are no adapters, norms, activations or optimizer. The operations run in a step's
order as one CUDA graph, replayed like steps: short bursts would flatter a card at its power limit.
A checkpointed step also needs part of each layer's forward a second time. We measure this
recomputation the same way.

In FP8 all operands are codes with one scale for all of them. Nothing makes these codes: the matmuls
alone are the floor.

On a base in NF4 each layer's weights are also dequantised, once in the forward and once in the
backward, which the recomputation shares. A device copy that moves as many bytes stands for that.
All layers then multiply with the same weights, because a step keeps one layer dequantised.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.records import Floor
from trainer import Clock
from variants import BF16, FP8, FP8_LM_HEAD, FP32, NF4

WARMUP_STEPS = 5
STEPS = 20
# Read for a value of NF4, and written for it: half a byte, a byte of absmax for 64 values, 4 bytes
# for 256 of those; and bf16.
DEQUANTISED_BYTES = (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 2


@dataclass(frozen=True)
class Shape:
    """The model sizes behind the floor."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @staticmethod
    def of(config) -> "Shape":
        """Read the sizes from a transformers config."""
        heads = config.num_attention_heads
        return Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
        )

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Matrix:
    """A frozen weight [out, in] and its two matmuls."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()

    def backward(self, grad: Tensor) -> Tensor:
        return grad @ self.weight


class Fp8Matrix(Matrix):
    """The same in FP8, whose matmuls each want another layout of the weight."""

    def __init__(self, weight: Tensor):
        super().__init__(weight.to(torch.float8_e4m3fn))
        self.transposed = self.weight.t().contiguous()
        self.scale = torch.ones((), device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight)

    def backward(self, grad: Tensor) -> Tensor:
        return self._multiply(grad, self.transposed)

    def _multiply(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch._scaled_mm(
            x, rows.t(), self.scale, self.scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )


class FrozenOperations:
    """The frozen operations of one step, with weights for each layer, or on NF4 for all of them.

    Operands are random tensors of the right shapes. A matmul takes as long as with real ones, and
    no copy between layouts gets into the floor.
    """

    # The logits [labelled tokens, vocabulary] come in chunks, which fit any card.
    LM_HEAD_CHUNK = 4096

    def __init__(self, shape: Shape, device: str, precision: str = BF16):
        self.shape = shape
        self.device = device
        self.dtype = torch.float32 if precision == FP32 else torch.bfloat16
        in_layers = Fp8Matrix if precision in (FP8, FP8_LM_HEAD) else Matrix
        in_head = Fp8Matrix if precision == FP8_LM_HEAD else Matrix
        projections = (
            (shape.qkv, shape.hidden),
            (shape.hidden, shape.heads * shape.head_dim),
            (2 * shape.intermediate, shape.hidden),
            (shape.hidden, shape.intermediate),
        )
        in_4_bits = precision == NF4
        self.layers = [
            [in_layers(self._random(*size) * size[1] ** -0.5) for size in projections]
            for _ in range(1 if in_4_bits else shape.layers)
        ]
        self.stored = self.written = torch.empty(0, device=device)
        if in_4_bits:
            values = sum(rows * columns for rows, columns in projections)
            half = round(values * DEQUANTISED_BYTES / 2)  # a copy reads it and writes it
            self.stored = torch.ones(half, device=device, dtype=torch.uint8)
            self.written = torch.empty_like(self.stored)
            self.layers *= shape.layers
        self.lm_head = in_head(self._random(shape.vocabulary, shape.hidden) * shape.hidden**-0.5)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _operands(self, batch_size: int, seq_len: int) -> "Operands":
        shape, tokens = self.shape, batch_size * seq_len
        in_layers, in_head = self.layers[0][0].weight.dtype, self.lm_head.weight.dtype
        q, k, v = (
            self._random(batch_size, seq_len, heads, shape.head_dim)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        return Operands(
            hidden=self._random(tokens, shape.hidden).to(in_layers),
            attended=self._random(tokens, shape.heads * shape.head_dim).to(in_layers),
            intermediate=self._random(tokens, shape.intermediate).to(in_layers),
            grad_qkv=self._random(tokens, shape.qkv).to(in_layers),
            grad_gate_up=self._random(tokens, 2 * shape.intermediate).to(in_layers),
            last=self._random(self.LM_HEAD_CHUNK, shape.hidden).to(in_head),
            grad_logits=self._random(self.LM_HEAD_CHUNK, shape.vocabulary).to(in_head),
            heads=(q, k, v),
            grad_heads=torch.randn_like(q),
        )

    def chain(self, batch_size: int, seq_len: int, labelled_tokens: int) -> Callable[[], None]:
        """Return a function that runs the operations of one step, forward and then backward."""
        given = self._operands(batch_size, seq_len)
        # as gradients of outputs the same tensors serve backward
        backward_inputs = (given.grad_qkv, given.hidden, given.grad_gate_up, given.hidden)
        tokens = batch_size * seq_len
        needed = [tokens] * (len(self.layers) - 1) + [labelled_tokens]

        def step() -> None:
            outputs = []
            for matrices, rows in zip(self.layers, needed, strict=True):
                self._copy_stored()
                outputs.append(_forward(matrices, given, rows))
            for start in range(0, labelled_tokens, self.LM_HEAD_CHUNK):
                rows = min(self.LM_HEAD_CHUNK, labelled_tokens - start)
                self.lm_head.forward(given.last[:rows])
                self.lm_head.backward(given.grad_logits[:rows])
            for matrices, rows in zip(reversed(self.layers), reversed(needed), strict=True):
                self._copy_stored()
                torch.autograd.grad(outputs.pop(), given.heads, given.grad_heads)
                (qkv, *others), (grad_qkv, *grads) = matrices, backward_inputs
                qkv.backward(grad_qkv)
                for matrix, grad in zip(others, grads, strict=True):
                    matrix.backward(grad[:rows])

        return step

    def _copy_stored(self) -> None:
        """Move as many bytes as dequantising a layer does. A base in bf16 has none stored."""
        if self.stored.numel():
            self.written.copy_(self.stored)

    def recomputation(self, batch_size: int, seq_len: int) -> Callable[[], None]:
        """Return a function that runs what checkpointed layers must recompute: their forward
        without the down projection, because nothing saves its output."""
        given = self._operands(batch_size, seq_len)

        def run() -> None:
            for matrices in self.layers:
                _forward(matrices[:-1], given, batch_size * seq_len)

        return run


@dataclass(frozen=True)
class Operands:
    """Random tensors in place of a step's own. `heads` are q, k and v, and `last` is what lm_head
    gets."""

    hidden: Tensor
    attended: Tensor
    intermediate: Tensor
    grad_qkv: Tensor
    grad_gate_up: Tensor
    last: Tensor
    grad_logits: Tensor
    heads: tuple[Tensor, Tensor, Tensor]
    grad_heads: Tensor


def is_possible(precision: str, shape: Shape, device: str) -> bool:
    """Return True if matmuls of these sizes can be in a precision on this device."""
    if precision not in (FP8, FP8_LM_HEAD):
        return True
    from fused_lora.weights.fp8_weight import why_not_in_fp8

    sizes = [shape.qkv, shape.hidden, shape.heads * shape.head_dim, shape.intermediate]
    sizes += [shape.vocabulary] if precision == FP8_LM_HEAD else []
    row = torch.empty(1, device=device, dtype=torch.bfloat16)
    return all(why_not_in_fp8(row.expand(size)) is None for size in sizes)


def _forward(matrices: list[Matrix], given: Operands, rows: int) -> Tensor:
    """Multiply inputs with a layer's weights in order, attend, and return attention's output. After
    attention only the first `rows` count."""
    inputs = (given.hidden, given.attended[:rows], given.hidden[:rows], given.intermediate[:rows])
    for x, matrix in zip(inputs, matrices, strict=False):
        matrix.forward(x)
    return F.scaled_dot_product_attention(*given.heads, is_causal=True, enable_gqa=True)


def time_floor(
    operations: FrozenOperations,
    batch_size: int,
    seq_len: int,
    labelled_tokens: int,
    clock: Clock,
    accumulate: int = 1,
) -> Floor:
    """Time the floor and the recomputation at one length: medians of STEPS replays after
    WARMUP_STEPS. A micro-batch's times are multiplied by `accumulate`."""
    chains = (operations.chain(batch_size, seq_len, labelled_tokens),
              operations.recomputation(batch_size, seq_len))  # fmt: skip
    samples_ms, again_ms = (
        [accumulate * ms for ms in _samples(chain, operations.device == "cuda", clock)]
        for chain in chains
    )
    return Floor(
        floor_ms=statistics.median(samples_ms),
        samples_ms=samples_ms,
        recomputation_ms=statistics.median(again_ms),
        recomputation_samples_ms=again_ms,
        labelled_tokens=accumulate * labelled_tokens,
        tokens=accumulate * batch_size * seq_len,
    )


def _samples(operations: Callable[[], None], on_gpu: bool, clock: Clock) -> list[float]:
    run = _captured(operations) if on_gpu else operations
    samples_ms = []
    for index in range(WARMUP_STEPS + STEPS):
        start = clock.mark()
        run()
        end = clock.mark()
        clock.synchronize()
        if index >= WARMUP_STEPS:
            samples_ms.append(clock.elapsed_ms(start, end))
    return samples_ms


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture `step` in a CUDA graph, after a run on a side stream that initialises cuBLAS."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
