"""Can newer releases of the peers be installed beside the published environment?

``python -m bench.peers`` (`make resolve-peers`) installs nothing. It prints a line for each peer
with a newer release and fails if the pins do not fit requirements.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

HERE = Path(__file__).resolve().parent.parent
PUBLISHED, PINS = HERE / "requirements.txt", HERE / "dev" / "requirements" / "peers.txt"
WHERE_PINNED = PINS.relative_to(HERE)


class DoesNotResolve(Exception):
    """Pip found no versions that fit together. Its message is pip's reason in one line."""


def pins(path: Path = PINS) -> dict[str, str]:
    """Return the version of each pinned package by its import name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE)
    return {name.replace("-", "_"): pin for name, pin in found}


def resolved(*requirements: str) -> dict[str, str]:
    """Return the versions that pip would install, by import name, or raise DoesNotResolve."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--upgrade",
        "--progress-bar",
        "off",
    ]
    with NamedTemporaryFile() as report:
        asked = [*pip, "--report", report.name, *requirements]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            said = done.stdout + done.stderr
            caused = re.search(r"conflict is caused by:\n(.*?)(?:\n\n|\Z)", said, re.DOTALL)
            lines = caused[1].splitlines() if caused else re.findall(r"^ERROR: (.*)$", said, re.M)
            raise DoesNotResolve("; ".join(dict.fromkeys(map(str.strip, lines))) or "pip says no")
        found = [one["metadata"] for one in json.load(report)["install"]]
    return {one["name"].replace("-", "_"): one["version"] for one in found}


def newer_releases(pinned: dict[str, str]) -> list[str]:
    """Return a line for each newer release of a peer: would it fit requirements.txt?"""
    lines = []
    for name, newest in resolved("--no-deps", *pinned).items():
        if newest != pinned[name]:
            newer = f"{name} {newest} is newer than the pinned {pinned[name]}"
            try:
                resolved("-r", str(PUBLISHED), f"{name}=={newest}")
                lines.append(f"{newer} and would resolve: pin it in {WHERE_PINNED} and measure it")
            except DoesNotResolve as conflict:
                lines.append(f"{newer} but does not resolve: {conflict}")
    return lines


def main() -> int:
    pinned = pins()
    words = ", ".join(f"{name} {pin}" for name, pin in pinned.items())
    try:
        resolved("-r", str(PUBLISHED), *(f"{name}=={pin}" for name, pin in pinned.items()))
        lines = newer_releases(pinned)
    except DoesNotResolve as conflict:
        print(
            f"{WHERE_PINNED} does not resolve beside {PUBLISHED.name}: {conflict}", file=sys.stderr
        )
        return 1
    print("\n".join(lines or [f"No peer has a newer release than its pin: {words}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
