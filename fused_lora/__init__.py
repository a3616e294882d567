"""Fused LoRA training for any PEFT model, added with one call and undone with another.

    from fused_lora import fuse, unfuse

    print(fuse(model))    # which modules run fused, and why the others do not
    ...                   # train, save, load, merge as before
    unfuse(model)

Nothing is patched at import, nor on any class or library module.
"""

from .fuse import Fusion, FusionReport, fuse, report, unfuse
from .log_probs import log_probs
from .packing import fill_row, pack
from .step.graph import GraphedStep

__version__ = "0.1.0"

__all__ = [
    "Fusion",
    "FusionReport",
    "GraphedStep",
    "fill_row",
    "fuse",
    "log_probs",
    "pack",
    "report",
    "unfuse",
]
