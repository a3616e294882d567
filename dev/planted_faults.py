"""Plant faults in a copy of the code, one at a time, and see whether the tests catch them.

    python dev/planted_faults.py                     what `make test` catches
    python dev/planted_faults.py --all-tests         what `make test-all` catches
    python dev/planted_faults.py --only rope         faults whose file or text matches

`faults.py` lists them. Each fault runs the tests of its room until one fails. A caught fault takes
20 seconds, a missed one as long as the whole room.

On 28 November 2026 somebody who had not looked at the tests planted 24 faults. `make test` caught
19 of them, and all with a row more for each of the others. We leave one alone that only
`make test-all` catches (`documents.py`, "> 2").
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - .*)?$", re.MULTILINE)


def with_fault(text: str, fault: Fault) -> str:
    """Return a file's text with the fault in it.

    Raises ValueError unless the text it replaces is in the file exactly once.
    """
    if (found := text.count(fault.text)) != 1:
        raise ValueError(f"{fault.file} has {fault.text!r} {found} times, should have it once")
    return text.replace(fault.text, fault.instead)


def misplaced(faults: tuple[Fault, ...]) -> list[str]:
    """Return one line for each fault that cannot be planted or tried."""
    problems = []
    for fault in faults:
        try:
            with_fault((ROOT / fault.file).read_text(), fault)
        except (OSError, ValueError) as error:
            problems.append(str(error))
        names = fault.first.split()
        if len(first_tests(fault)) != len(names):
            problems.append(f"{fault.file}: tests/ has not each of {names} once")
    return problems


def first_tests(fault: Fault) -> list[str]:
    """Return the test files that run first."""
    found = [path for one in fault.first.split() for path in ROOT.glob(f"tests/**/test_{one}.py")]
    return [str(path.relative_to(ROOT)) for path in found]


def rooms_of(fault: Fault) -> list[str]:
    """Return the folders of tests in which the fault should be noticed."""
    if fault.file.startswith(("fused_", "docs/")):
        return ["tests/fused_mlp", "tests/fused_lora"]
    return ["tests/report" if fault.file.startswith("report/") else "tests/bench"]


def copy_of_the_tree(folder: Path) -> Path:
    """Copy every file that git tracks or would add."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def caught_by(fault: Fault, tree: Path, options: list[str]) -> str | None:
    """Return the test that fails with this fault in `tree`, or the signal that ends pytest.

    None means that they all pass.
    """
    path = tree / fault.file
    text = path.read_text()
    path.write_text(with_fault(text, fault))
    try:
        return failing_test(tree, [*options, *first_tests(fault)]) or failing_test(
            tree, [*options, *rooms_of(fault)]
        )
    finally:
        path.write_text(text)


def failing_test(tree: Path, arguments: list[str]) -> str | None:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    if (failed := FAILED.search(done.stdout)) is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression for file or text")
    parser.add_argument("--all-tests", action="store_true", help="as `make test-all`")
    parser.add_argument("--processes", default="0", help="pytest's -n")
    asked = parser.parse_args()
    faults = tuple(one for one in FAULTS if re.search(asked.only, f"{one.file} {one.text}"))
    if problems := misplaced(faults):
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    options = ["-n", asked.processes, "-p", "no:cacheprovider"]
    options += [] if asked.all_tests else ["--quick"]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        for fault in faults:
            test = caught_by(fault, tree, options)
            missed += test is None
            told = f"missed: {fault.instead!r}" if test is None else f"caught by {test}"
            print(f"{fault.file}: {told}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
