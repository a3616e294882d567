"""Proof that a step ran what its variant fuses: autograd functions and GPU kernels by name."""

from typing import NamedTuple

from bench.profiler import Profile
from variants import BF16, NF4, Base, Lora, Recipe

HEAD_NORMS = ("q_norm: rms_norm", "k_norm: rms_norm")  # as `fuse` reports them
EVERYWHERE = Lora()
FIRST_TARGETS = {"q_proj", "k_proj", "v_proj"}  # the first projections of a layer


class Evidence(NamedTuple):
    """Functions and kernels that run in a step for every module of a fused part.

    functions: backward functions, with the number of modules each stands for. Forwards do not
        count: they may run twice.
    kernels: parts of the names of GPU kernels. Each runs at least once a module. "a|b": one of the
        two does.
    without_backward: modules without a backward, because nothing before them is trained.
    lora_mlp_kernels: kernels that run only where gate, up and down have adapters without dropout.
    nf4_kernels: kernels that run only on a base in NF4.
    """

    functions: dict[str, int]
    kernels: tuple[str, ...] = ()
    without_backward: int = 0
    lora_mlp_kernels: tuple[str, ...] = ()
    nf4_kernels: tuple[str, ...] = ()


ROTATED = "_qkv_rope_kernel|_qkv_norm_rope_kernel"  # the second where heads have norms
EVIDENCE = {  # by fused part, and for a library as a whole
    "mlp": Evidence(
        {"LoRA_MLPBackward": 1}, ("_swiglu_forward_kernel", "_swiglu_backward_kernel"),
        nf4_kernels=("_dequantize_4bit_kernel",),
    ),
    # with rope, one function stands for q, k, v and o
    "attention": Evidence(
        {"LoRA_QKVBackward": 1, "LoRA_WBackward": 1, "LoRA_AttentionBackward": 2},
        nf4_kernels=("_dequantize_4bit_kernel",),
    ),
    "rope": Evidence({"RoPEBackward": 1, "LoRA_AttentionBackward": 1}, ("_rope_kernel",)),
    "rms_norm": Evidence(
        {"RMSNormBackward": 1, "AddRMSNormBackward": 1},
        ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
        without_backward=1,
    ),
    "cross_entropy": Evidence({"LinearCrossEntropyBackward": 1}, ("_cross_entropy_kernel",)),
    "layer": Evidence(
        {"DecoderLayerBackward": 1},
        (ROTATED, "_swiglu_backward_products_kernel",
         "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
        nf4_kernels=("_dequantize_4bit_kernel",),
    ),
    "fp8": Evidence(  # a layer in FP8
        {"DecoderLayerBackward": 1},
        (ROTATED, "_swiglu_backward_products_kernel", "_rms_norm_backward_kernel",
         "_fp8_rows_kernel", "_fp8_borders_kernel"),
    ),
    "fp8_lm_head": Evidence({}, ("_logit_codes_kernel",)),
    "checkpoint": Evidence({}),
    "unsloth": Evidence(
        # Unsloth 2026.10.9 rotates q and k of Qwen3 in the kernel that norms them
        {}, ("_rms_layernorm_forward", "_rope_embedding|_qk_norm_rope_forward"),
        lora_mlp_kernels=("_fg_kernel",),
    ),
    "liger": Evidence({}, ("_swiglu_forward_kernel", "_rms_norm_forward_kernel")),
}  # fmt: skip


def evidence_of(recipe: Recipe) -> dict[str, Evidence]:
    """Return the evidence of a recipe's library and fused parts, by part."""
    renamed = {"layer": "fp8"} if recipe.fp8 else {}
    parts = [part for part in (recipe.library, *recipe.fused) if part != "peft"]
    return {part: EVIDENCE[renamed.get(part, part)] for part in parts}


def not_run(
    recipe: Recipe,
    fused_modules: list[str],
    profile: Profile,
    on_gpu: bool,
    micro_batches: int = 1,
    lora: Lora = EVERYWHERE,
    base: Base = BF16,
) -> str | None:
    """Name a part that ran less often than `micro_batches` ask for, in one line.

    torch.compile merges a layer into a single function, so compiled parts show only in kernels. A
    replayed graph runs no function either. We count its kernels instead: just seeing one would not
    prove that every module runs it. If neither q, k nor v has an adapter, modules of the first
    layer may have no backward: nothing before the first adapter is trained. With both "attention"
    and "rope", the norms of q's and k's heads run inside the attention's function.
    """
    is_trained_from_the_start = bool(FIRST_TARGETS & set(lora.targets))
    if on_gpu and recipe.compiled and not any("triton_" in name for name in profile.kernels_seen):
        return "no kernel of torch.compile's ran: the layers ran uncompiled"
    has_functions = not (recipe.compiled or recipe.graph)
    if {"attention", "rope"} <= set(recipe.fused):
        fused_modules = [name for name in fused_modules if not name.endswith(HEAD_NORMS)]
    for part, evidence in evidence_of(recipe).items():
        modules = [name for name in fused_modules if name.endswith(f": {part}")]
        spared = evidence.without_backward
        if not is_trained_from_the_start:
            spared = max(spared, sum(".layers.0." in f".{name}" for name in modules))
        expected = micro_batches * max(1, len(modules) - spared)
        ran = sum(
            stands_for * profile.functions_seen.get(name, 0)
            for name, stands_for in evidence.functions.items()
        )
        if evidence.functions and has_functions and ran < expected:
            names = " and ".join(evidence.functions)
            return f"{names} ran {ran} times in a step, for {len(modules)} modules"
        if not on_gpu:
            continue
        kernels = evidence.kernels + (evidence.lora_mlp_kernels if lora.is_plain_in_mlp else ())
        kernels += evidence.nf4_kernels if base == NF4 else ()
        counts = {
            kernel: sum(
                count
                for name, count in profile.kernels_seen.items()
                if any(part in name for part in kernel.split("|"))
            )
            for kernel in kernels
        }
        if missing := [kernel for kernel, count in counts.items() if not count]:
            names = ", ".join(missing).replace("|", " or ")
            return f"{names} did not run: {part} was not what was timed"
        for kernel, count in counts.items():
            if recipe.graph and count < expected:
                return f"{kernel} ran {count} times in a step, for {len(modules)} modules"
    return None
