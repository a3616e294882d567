"""Run the library's tests as other hosts would, and rank the nearest errors.

    python dev/hosts.py                  all six settings: 30 minutes on two cores
    python dev/hosts.py --only seed      settings whose name matches this regular expression
    python dev/hosts.py tests/fused_lora/step -n 2  with these arguments of pytest instead of PYTEST

Other vector instructions add up in another order, and so do two threads. A seed draws other inputs.
A share of 0.95 is an error of 95% of what its test allows: that test is the next to fail.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "no vector units": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "two threads": {"TEST_THREADS": "2", "OMP_WAIT_POLICY": "passive"},  # no core spins
    "seed 100": {"TEST_SEED": "100"},
    "seed 200": {"TEST_SEED": "200"},
}
ROOMS = ["tests/fused_mlp", "tests/fused_lora"]
PYTEST = ["-n", "auto", "--maxprocesses", "8", "--quick", *ROOMS]
SHOWN = 20


def largest_shares(file: Path) -> list[tuple[float, str]]:
    """Return each test's largest share, and what has it, in falling order."""
    largest: dict[str, tuple[float, str]] = {}
    for line in file.read_text().splitlines():
        share, test, name = line.split("\t")
        largest[test] = max(largest.get(test, (0.0, "")), (float(share), f"{test} {name}"))
    return sorted(largest.values(), reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for a setting's name")
    asked, arguments = parser.parse_known_args()
    names = [name for name in SETTINGS if re.search(asked.only, name)]
    if not names:
        parser.error(
            f"--only {asked.only}: no setting has such a name. There are {', '.join(SETTINGS)}"
        )
    all_passed = True
    for name in names:
        print(f"\n{name}", flush=True)
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, "-m", "pytest", *(arguments or PYTEST)]
            environment = os.environ | SETTINGS[name] | {"SHARES": file.name}
            all_passed &= subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
            for share, what in largest_shares(Path(file.name))[:SHOWN]:
                print(f"{share:.2f} {what}")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
