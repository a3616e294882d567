"""Warnings that point at the user's line, however deep in libraries our code runs."""

import sys
import warnings
from types import FrameType

PASSED_OVER = {
    "fused_lora", "fused_mlp", "torch", "transformers", "peft", "accelerate", "trl", "contextlib",
}  # fmt: skip


def warn(text: str) -> None:
    """Warn at the innermost line that is in none of these packages.

    Equivalent from Python 3.12 on: ``warnings.warn(text, skip_file_prefixes=...)``.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _package_of(frame) in PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
