"""The rehearsal is the command without a GPU, and its tests are the same ones on every machine."""

import pytest
import torch

from bench import processes as isolated

WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_without_gpu.py runs this file with the GPU hidden"
)


def in_this_process(function, *arguments, on_message, silence_limit_s=None):
    """`isolated.run` without the process, which would import everything anew."""
    function(on_message, *arguments)
    return isolated.Ended(None, "")
