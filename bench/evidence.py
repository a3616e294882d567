"""Proof that a step ran what its variant fuses: autograd functions and GPU kernels by name.

The proof of our own parts stands in `fused_lora/adopt/switches.py`. It is imported only where a
variant fuses any: that imports transformers, and Unsloth has to be first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bench.profiler import Kinds, Profile
from variants import BF16, NF4, Base, Lora, Recipe

if TYPE_CHECKING:
    from fused_lora.reading.site import Evidence

HEAD_NORMS = ("q_norm: rms_norm", "k_norm: rms_norm")  # as `fuse` reports them
EVERYWHERE = Lora()
FIRST_TARGETS = {"q_proj", "k_proj", "v_proj"}  # the first projections of a layer


class Library(NamedTuple):
    """Kernels that run in every step of another library, written as in `Evidence`.

    lora_mlp_kernels: those that run only where gate, up and down have adapters without dropout.
    """

    kernels: tuple[str, ...]
    lora_mlp_kernels: tuple[str, ...] = ()


LIBRARIES = {
    "peft": Library(()),
    # Unsloth 2026.10.9 rotates q and k of Qwen3 in the kernel that norms them
    "unsloth": Library(
        ("_rms_layernorm_forward", "_rope_embedding|_qk_norm_rope_forward"), ("_fg_kernel",)
    ),
    "liger": Library(("_swiglu_forward_kernel", "_rms_norm_forward_kernel")),
}


def evidence_of(recipe: Recipe) -> dict[str, Evidence]:
    """Return the evidence of a recipe's fused parts. "checkpoint" has none."""
    if not recipe.fused:
        return {}
    from fused_lora.adopt.switches import BORDERS, switches_for

    switches = switches_for(BORDERS["fp8"] if recipe.fp8 else None)
    return {part: switches[part].evidence for part in recipe.fused if part != "checkpoint"}


def functions_of(recipe: Recipe) -> list[str]:
    """Return the autograd functions of a recipe's fused parts, as a profile names them."""
    return [f"{name}Backward" for one in evidence_of(recipe).values() for name in one.functions]


def kinds_of_kernels(recipe: Recipe) -> Kinds:
    """Return the kinds of our kernels whose names do not tell. A part runs kernels of others."""
    if not recipe.fused:
        return ()
    from fused_lora.adopt.switches import SWITCHES

    return [kind for part in SWITCHES.values() for kind in part.kinds.items()]


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
    library = LIBRARIES[recipe.library]
    kernels = library.kernels + (library.lora_mlp_kernels if lora.is_plain_in_mlp else ())
    if on_gpu and (problem := _missing(recipe.library, _counts(profile, kernels))):
        return problem
    has_functions = not (recipe.compiled or recipe.graph)
    if {"attention", "rope"} <= set(recipe.fused):
        fused_modules = [name for name in fused_modules if not name.endswith(HEAD_NORMS)]
    for part, evidence in evidence_of(recipe).items():
        modules = [name for name in fused_modules if name.endswith(f": {part}")]
        spared = evidence.without_backward
        if not is_trained_from_the_start:
            spared = max(spared, sum(".layers.0." in f".{name}" for name in modules))
        expected = micro_batches * max(1, len(modules) - spared)
        functions = {f"{name}Backward": count for name, count in evidence.functions.items()}
        ran = sum(count * profile.functions_seen.get(name, 0) for name, count in functions.items())
        if functions and has_functions and ran < expected:
            names = " and ".join(functions)
            return f"{names} ran {ran} times in a step, for {len(modules)} modules"
        if not on_gpu:
            continue
        unpacks = evidence.kernels_in_4_bits if base == NF4 else ()
        counts = _counts(profile, evidence.kernels + unpacks)
        if problem := _missing(part, counts):
            return problem
        for kernel, count in counts.items():
            if recipe.graph and count < expected:
                return f"{kernel} ran {count} times in a step, for {len(modules)} modules"
    return None


def _counts(profile: Profile, kernels: tuple[str, ...]) -> dict[str, int]:
    """Return how often each kernel ran; of "a|b", how often the two did."""
    return {
        kernel: sum(
            count
            for name, count in profile.kernels_seen.items()
            if any(part in name for part in kernel.split("|"))
        )
        for kernel in kernels
    }


def _missing(part: str, counts: dict[str, int]) -> str | None:
    missing = [kernel.replace("|", " or ") for kernel, count in counts.items() if not count]
    return f"{', '.join(missing)} did not run: {part} was not what was timed" if missing else None
