"""Fused LoRA training for PEFT models, added with one call and undone with another.

    from fused_lora import fuse, unfuse

    print(fuse(model))    # which modules run fused, and why the others do not
    ...                   # train, save, load, merge as before
    unfuse(model)

Nothing is patched at import, nor on any class or library module.
"""

from .adopt.graph_steps import graph_steps
from .adopt.keep_mxfp4 import keep_mxfp4
from .adopt.quantize_experts import quantize_experts
from .adopt.where_base_lies import host_base, shard_base
from .fuse import Fusion, FusionReport, fuse, report, unfuse
from .loss.log_probs import log_probs
from .packing import FilledRows, fill_row, pack
from .step.graph import GraphedStep

__version__ = "0.1.0"

__all__ = [
    "FilledRows",
    "Fusion",
    "FusionReport",
    "GraphedStep",
    "fill_row",
    "fuse",
    "graph_steps",
    "host_base",
    "keep_mxfp4",
    "log_probs",
    "pack",
    "quantize_experts",
    "report",
    "shard_base",
    "unfuse",
]
