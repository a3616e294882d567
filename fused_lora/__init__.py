"""Fused LoRA training for any PEFT model, adopted with one call and taken back with another.

    from fused_lora import fuse, unfuse

    print(fuse(model))    # which modules run fused, and why the others do not
    ...                   # train, save, load, merge as before
    unfuse(model)

Nothing is patched at import, on a class or in a module of somebody else.
"""

from .fuse import Fusion, FusionReport, fuse, report, unfuse
from .packing import fill_row, pack
from .step.graph import GraphedStep

__version__ = "0.1.0"

__all__ = [
    "Fusion",
    "FusionReport",
    "GraphedStep",
    "fill_row",
    "fuse",
    "pack",
    "report",
    "unfuse",
]
