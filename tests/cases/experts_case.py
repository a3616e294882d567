"""A mixture of experts with adapters to try LoRA_Experts on."""

import torch
import torch.nn.functional as F
from cases.reference import adapted_linear, random, seeded

from fused_lora.functions.lora_experts import FrozenExperts
from fused_lora.kernels.routed_rows import SWIGLU

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 40, 24
NAMES = ("gate_up_A", "gate_up_B", "down_A", "down_B")


def choices(*shape, spread="usual", device="cpu"):
    """The experts of each token. "usual": the second has no tokens; "one": all go to the third."""
    choice = torch.rand(*shape, EXPERTS, generator=seeded(3))
    choice[..., 1] = 0
    chosen = choice.topk(TOP_K, dim=-1).indices
    return (torch.full_like(chosen[..., :1], 2) if spread == "one" else chosen).to(device)


def mixture(dtype, device, *, r=(4, 8), adapter_dtype=None, gate=SWIGLU):
    """Four adapters, no B zero, and two frozen weights with two different scales. A clamped gate
    comes with biases, and with weights that lie as [experts, in, out]."""
    sizes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    adapters, weights = [], []
    for seed, (rank, (rows, columns)) in enumerate(zip(r, sizes, strict=True)):
        options = {"dtype": adapter_dtype or dtype, "device": device}
        A, B = (EXPERTS, rank, columns), (EXPERTS, rows, rank)
        adapters.append(random(*A, seed=10 + seed, scale=columns**-0.5, **options))
        adapters.append(random(*B, seed=20 + seed, scale=max(rank, 1) ** -0.5, **options))
        options["dtype"] = dtype
        weights.append(
            random(EXPERTS, rows, columns, seed=30 + seed, scale=columns**-0.5, **options)
        )
    if gate == SWIGLU:
        return adapters, FrozenExperts(*weights, 2.0, 0.5)
    biases = [random(*w.shape[:2], seed=40 + i, **options) for i, w in enumerate(weights)]
    weights = [weight.mT.contiguous().mT for weight in weights]
    return adapters, FrozenExperts(*weights, 2.0, 0.5, gate, *biases)


def with_limit_in_a_gap(frozen, x, adapters, chosen):
    """Return the operands with the gate's limit in the widest gap among large values. At the
    limit a gradient jumps, so a value that rounds across it is off by all of its gradient."""
    A, B = (adapter.double() for adapter in adapters[:2])
    rows, every = x.double().reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1])
    found = [
        adapted_linear(rows[(every == expert).any(1)], weight.double(), A[expert], B[expert],
                       frozen.gate_up_scaling, frozen.gate_up_bias[expert].double())
        for expert, weight in enumerate(frozen.gate_up_weight)
    ]  # fmt: skip
    values = torch.cat(found).abs().flatten().sort().values[-120:-30]
    if len(values) < 2:
        return frozen
    widest = values.diff().argmax()
    limit = (values[widest] + values[widest + 1]).item() / 2
    return frozen._replace(gate=frozen.gate._replace(limit=limit))


def gated(gate_up, gate):
    if gate == SWIGLU:
        first, up = gate_up.chunk(2, dim=-1)
        return F.silu(first) * up
    first = gate_up[..., ::2].clamp(max=gate.limit)
    up = gate_up[..., 1::2].clamp(-gate.limit, gate.limit)
    return (up + 1) * (first * torch.sigmoid(first * gate.alpha))


def eager(x, weights, gate_up_A, gate_up_B, down_A, down_B, residual, chosen, f):
    """Each expert as PEFT computes a linear layer with an adapter. A token's sum is fp32, as
    transformers' grouped experts have it. The layer adds its residual."""
    rows, every = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1])
    parts = []
    for choice in range(every.shape[1]):
        outputs: list = [None] * len(rows)
        for expert in range(len(f.gate_up_weight)):
            (token,) = torch.where(every[:, choice] == expert)
            gate_up = adapted_linear(
                rows[token], f.gate_up_weight[expert], gate_up_A[expert], gate_up_B[expert],
                f.gate_up_scaling,
            )  # fmt: skip
            if f.gate_up_bias is not None:
                gate_up = gate_up + f.gate_up_bias[expert].to(gate_up.dtype)
            output = adapted_linear(
                gated(gate_up, f.gate), f.down_weight[expert], down_A[expert], down_B[expert],
                f.down_scaling,
            )  # fmt: skip
            if f.down_bias is not None:
                output = output + f.down_bias[expert].to(output.dtype)
            for place, row in zip(token.tolist(), output, strict=True):
                outputs[place] = row
        unused = output.new_zeros(0, output.shape[1])
        parts.append(torch.stack(outputs) if outputs else unused)
    routed = weights.reshape(every.shape).to(parts[0].dtype)
    output = (torch.stack(parts, 1) * routed[..., None]).sum(1)  # fp32 under CUDA's autocast
    output = output.to(parts[0].dtype).view(*x.shape)
    return output if residual is None else residual + output
