"""A batch with a new number of tokens compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_fifty_lengths_ask_for_the_kernels_of_the_first():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{HERE.parent}:{HERE}"
    program = [sys.executable, str(HERE / "cases" / "lengths_case.py")]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    others = json.loads(done.stdout)
    assert len(others) == 50
    assert not any(others.values()), others
