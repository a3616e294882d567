"""What people call the variants, in pictures and tables, and values, in messages."""

from typing import Any

from report.statistics import NO_CHECKPOINTING

NAMES = {
    "vanilla_peft": "vanilla PEFT",
    "vanilla_peft_again": "vanilla PEFT, again",
    "vanilla_peft_bf16": "vanilla PEFT, bf16 adapters",
    "compiled_peft": "compiled PEFT",
    "compiled_peft_bf16": "compiled PEFT, bf16 adapters",
    "liger_peft": "Liger",
    "full_unsloth": "full Unsloth",
    "unsloth_full": "Unsloth, plain checkpointing",
    "fused_mlp": "fused MLP",
    "fused_attention": "fused attention",
    "fused_rope": "fused RoPE",
    "fused_rms_norm": "fused RMSNorm",
    "fused_cross_entropy": "fused cross entropy",
    "fused_checkpoint": "fused checkpointing",
    "fused_bordered": "bordered weights",
    "fused_layer": "fused layers",
    "fused_layer_graph": "fused layers, CUDA graph",
    "fused_layer_graph_offload": "fused layers, CUDA graph, inputs offloaded",
    "fused_layer_graph_selective_10": "fused layers, CUDA graph, 10 GiB kept",
    "fused_all": "all fused",
    "fused_all_graph": "all fused, CUDA graph",
    "fused_all_offload": "all fused, inputs offloaded",
    "fused_all_selective_10": "all fused, 10 GiB kept",
    "fused_all_selective_20": "all fused, 20 GiB kept",
    "fused_all_but_mlp": "all fused but the MLP",
    "fused_all_but_attention": "all fused but attention",
    "fused_all_but_rope": "all fused but RoPE",
    "fused_all_but_rms_norm": "all fused but RMSNorm",
    "fused_all_but_cross_entropy": "all fused but cross entropy",
    "fused_all_but_checkpoint": "all fused but checkpointing",
}


def in_words(value: Any) -> str:
    """A value of results.json as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return ", ".join(map(in_words, value))
    return str(value)


def first_few(items: list[str], separator: str = "; ") -> str:
    """The first three of a list, and how many more there are."""
    more = [f"and {len(items) - 3} more"] if len(items) > 3 else []
    return separator.join(items[:3] + more)


def name_of(variant: str) -> str:
    """What people call a variant; one without a name of its own keeps the one it has."""
    plain = variant.removesuffix(NO_CHECKPOINTING)
    if plain not in NAMES:
        return variant
    return NAMES[plain] + (" without checkpointing" if plain != variant else "")
