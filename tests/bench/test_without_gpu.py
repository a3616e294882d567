"""The tests meant for machines without a GPU, run on a GPU machine with the GPU hidden. Importing a
kernel decides whether it runs in Triton's interpreter, so they need a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
MARKED = re.compile(r"^pytestmark = .*\bWITHOUT_GPU\b", re.MULTILINE)
FILES = sorted(p.name for p in TESTS.glob("test_*.py") if MARKED.search(p.read_text()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="they run as they are")
@pytest.mark.parametrize("file", FILES)
def test_with_the_gpu_hidden(file):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS / file)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        cwd=TESTS.parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
