"""The switch `mlp` for a mixture: the forward it sets on its experts.

PEFT wraps experts once for each of their parameters in target_parameters, one wrapper around the
other. We set the forward of the outermost one, or of experts without adapters. PEFT's layout of an
adapter for E experts: A is [E r, in], expert by expert, and B is [out, r E], with the experts of
each rank side by side.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.integrations import moe

from fused_mlp.utils import compute_dtype

from ..foreign.originals import why_not, why_patched
from ..foreign.ownership import why_not_own_forward
from ..functions.lora_experts import FrozenExperts, LoRA_Experts, why_not_sizes
from ..kernels.routed_rows import SWIGLU, ClampedGate
from ..reading.aside import step_aside
from ..reading.known import known_form, why_not_class
from ..reading.projection import BASE_IS_TRAINED, active_adapter, why_call, why_not_plain
from ..reading.refusal import Refusal, attempt, refuse
from ..rerun import saving_last
from ..weights.expert_weight import ExpertWeight
from ..weights.four_bit_parts import in_memory, write_again
from .mlp import why_not_one_of

PARAMETERS = ("gate_up_proj", "down_proj")
# transformers' classes of quantised experts, and why they stay
NOT_TRAINED = {
    "Mxfp4GptOssExperts": "its experts run on kernels that pass no gradients on: load the model "
    "with config=keep_mxfp4(config)",
    "FP8Experts": "its experts are in FP8, whose kernels pass no gradients on: load the model with "
    "FineGrainedFP8Config(dequantize=True), then call quantize_experts",
}
# The functions of transformers that compute what the class's forward does, each in its own order.
IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")


class AdaptedParameter(NamedTuple):
    """A parameter of experts as it is now: its weight [experts, out, in] and bias [experts, out],
    and its adapter's A and B as PEFT lays them out, None if none is active. All are the module's
    own tensors."""

    weight: Tensor
    bias: Tensor | None
    A: Tensor | None = None
    B: Tensor | None = None
    scaling: float = 0.0
    base: ExpertWeight | None = None  # the weight, where it is in 4 bits
    is_packed: bool = False  # and its matrix [experts out, in] is not `in_memory` yet

    def by_expert(self) -> "AdaptedParameter":
        """Return it with A [experts, r, in] and B [experts, out, r], and in 4 bits with a weight
        that only stands for what `in_memory` gives."""
        weight = self.weight if self.base is None else self.base.stand_in()
        if self.A is None or self.B is None:
            return self._replace(weight=weight)
        count = len(self.weight)
        A = self.A.view(count, -1, self.A.shape[1])
        B = self.B.view(len(self.B), -1, count).permute(2, 0, 1)
        return self._replace(weight=weight, A=A, B=B)


class ReadExperts(NamedTuple):
    """Experts as they are now."""

    gate_up: AdaptedParameter
    down: AdaptedParameter
    gate: ClampedGate

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up.weight.dtype


def experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield experts, or the outermost wrapper of those with adapters."""
    for name, module in model.named_modules():
        if name.endswith(".base_layer"):  # of a wrapper
            continue
        base: Any = module.get_base_layer() if isinstance(module, ParamWrapper) else module
        is_wrapped = base is not module and "down_proj" in base._parameters
        if is_wrapped or known_form(base, "Experts") or type(base).__name__ in NOT_TRAINED:
            yield name, module


def read_experts(outermost: Any) -> ReadExperts:
    refuse(why_not_own_forward(outermost))
    adapters: dict[str, tuple] = {}
    module = outermost
    while type(module) is ParamWrapper:
        refuse(why_call(module, own_forward=module is not outermost))
        name = module.parameter_name
        if name not in PARAMETERS or name in adapters:
            raise Refusal(f"its adapter of {name} is not the only one of {' or '.join(PARAMETERS)}")
        adapters[name] = _adapter_of(module)
        module = module.base_layer
    base: Any = module
    refuse(NOT_TRAINED.get(type(base).__name__))
    refuse(why_not_class(base, "Experts") or why_call(base, own_forward=base is not outermost))
    is_clamped = known_form(base, "Experts").is_clamped
    refuse(_why_not_gate(base, is_clamped))
    implementation = getattr(base.config, "_experts_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise Refusal(
            f"its experts are {implementation}'s: call "
            "model.set_experts_implementation('grouped_mm')"
        )
    if getattr(base, "_is_expert_parallel", False):
        raise Refusal(
            "its experts are spread over ranks: load the model without expert parallelism"
        )
    gate = ClampedGate(base.alpha, base.limit) if is_clamped else SWIGLU
    parameters = []
    for name in PARAMETERS:
        weight, bias = getattr(base, name), getattr(base, f"{name}_bias") if is_clamped else None
        for tensor in (weight, *([] if bias is None else [bias])):
            if (reason := why_not_plain(base, tensor)) is not None:
                raise Refusal(f"{name}: its base weight {reason}")
            refuse(BASE_IS_TRAINED if tensor.requires_grad else None)
        if weight.ndim != 3:
            raise Refusal(f"{name} is {list(weight.shape)} now, not [experts, out, in]")
        refuse(why_not_sizes(*weight.shape[1:]))
        one = AdaptedParameter(weight, bias, *adapters.get(name, ()))
        if isinstance(weight, ExpertWeight):
            one = one._replace(base=weight, is_packed=True)
        parameters.append(one)
    if len({one.weight.dtype for one in parameters}) > 1:
        raise Refusal("its weights are of two dtypes: give both one")
    gate_up, down = parameters
    return ReadExperts(gate_up, down, gate)


def _adapter_of(wrapper: Any) -> tuple:
    """Return A, B and scaling of a wrapper's active adapter, () if it has none."""
    if wrapper.merged:
        raise Refusal("adapters are merged into the weight: unmerge_adapter() takes them out")
    adapter = None if wrapper.disable_adapters else active_adapter(wrapper)
    if adapter is None or adapter not in wrapper.lora_A:
        return ()
    scaling = wrapper.scaling[adapter]
    if isinstance(scaling, Tensor):
        raise Refusal("its scaling is a tensor: hotswap_adapter works without it")
    return wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, float(scaling)


def _why_not_gate(base: Any, is_clamped: bool) -> str | None:
    """Return the reason if the experts apply their gate in another way than we know."""
    if is_clamped:
        return why_patched(type(base), "_apply_gate")
    return why_not(type(base)._apply_gate, moe.__name__, "_default_apply_gate") or why_not_one_of(
        ("silu",), base, "act_fn"
    )


def _matrices(read: AdaptedParameter, gate: ClampedGate) -> Tensor:
    """Return a weight as [experts, out, in]."""
    weight = read.weight if read.base is None else read.base.shaped(read.weight)
    return weight.mT if gate.limit else weight


def experts_forward(wrapper: nn.Module, parts: frozenset[str], x: Tensor, *rest, **options):
    read, reason = attempt(read_experts, wrapper)
    if len(rest) != 2 or options:
        reason = "it was given something else than tokens, their experts and routing weights"
    if not reason and read.dtype != (dtype := compute_dtype(x)):
        reason = f"its weights are {read.dtype}, computation {dtype}: give both one dtype"
    if reason:
        return step_aside(wrapper, reason, x, *rest, **options)
    chosen, weights = rest
    return run_experts(wrapper, read, x, weights, chosen).to(x.dtype)


def run_experts(
    owner: nn.Module, read: ReadExperts, x: Tensor, weights: Tensor, chosen: Tensor,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run experts as one function. owner: the module whose forward this is."""
    gate = read.gate
    reads = [read.gate_up.by_expert(), read.down.by_expert()]
    (both, down), in_turns = in_memory(owner, reads)
    buffers = iter(in_turns)
    writes = [partial(write_again, [next(buffers)]) if one.is_packed else None for one in reads]
    frozen = FrozenExperts(
        _matrices(both, gate), _matrices(down, gate), both.scaling, down.scaling, gate,
        both.bias, down.bias, True, *writes,
    )  # fmt: skip

    def run(output_needed: bool) -> Tensor:
        now = frozen._replace(output_needed=output_needed)
        adapters = both.A, both.B, down.A, down.B
        return LoRA_Experts.apply(x, weights, *adapters, residual, chosen, now)

    return saving_last(run)
