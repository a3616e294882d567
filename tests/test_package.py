"""The installed package: what is in it, and that `fuse` runs from it, outside this tree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

USE_IT = """
import fused_lora, peft, torch, transformers
from fused_lora import Fusion, fuse

config = transformers.Qwen2Config(vocab_size=32, hidden_size=32, intermediate_size=48,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
model = peft.get_peft_model(transformers.Qwen2ForCausalLM(config),
    peft.LoraConfig(r=4, target_modules="all-linear"))
print(fused_lora.__version__, fuse(model, Fusion(mlp=True)), sep="\\n")
"""


@pytest.mark.slow
def test_the_wheel_holds_the_two_packages_and_runs_outside_the_tree(tmp_path):
    tree = tmp_path / "tree"  # a build writes into it
    for name in ("fused_mlp", "fused_lora"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"  # as pip calls it
    subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, check=True)
    checks = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["mypy"]["exclude"]
    left = {path.relative_to(tree).as_posix() for path in tree.glob("build/lib/*/*.py")}
    assert left and all(any(re.match(check, path) for check in checks) for path in left)
    assert "/build/" in (ROOT / ".gitignore").read_text().splitlines()
    (wheel,) = tmp_path.glob("fused_lora-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        files.extractall(site)
    code = {name for name in names if ".dist-info/" not in name}
    assert {"fused_lora/py.typed", "fused_mlp/py.typed", "fused_lora/forwards/mlp.py"} <= code
    assert {name.split("/")[0] for name in code} == {"fused_lora", "fused_mlp"}
    command = [sys.executable, "-W", "ignore", "-c", USE_IT]
    ran = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    version, *said = ran.stdout.splitlines()
    assert wheel.name.startswith(f"fused_lora-{version}-")
    assert said[0] == "nothing is fused" and "its weights are on the CPU" in said[1]


def test_the_cpu_build_that_the_readme_and_make_install_is_the_one_that_is_required():
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    torch = next(line for line in pins if line.startswith("torch=="))
    wanted = f"pip install {torch} --index-url https://download.pytorch.org/whl/cpu"
    assert wanted in (ROOT / "README.md").read_text()
    # without what `make test CPU=1` gives to the tests that it runs
    env = {k: v for k, v in os.environ.items() if k != "CPU" and not k.startswith("MAKE")}
    dry = ["make", "--always-make", "--dry-run", "test"]
    said = subprocess.check_output([*dry, "CPU=1"], cwd=ROOT, env=env, text=True)
    assert wanted.replace("install", "install --quiet") in said and "CUDA" not in said
    said = subprocess.check_output(dry, cwd=ROOT, env=env, text=True)
    assert "5.4 GB, most of it CUDA. make test CPU=1" in said and "--index-url" not in said
