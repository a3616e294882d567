"""Can newer releases of the peers be installed beside the published environment?

``python -m bench.peers`` (`make resolve-peers`) installs nothing. It prints a line for each peer
with a newer release and fails if the pins do not fit requirements.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

HERE = Path(__file__).resolve().parent.parent
PUBLISHED, PINS = HERE / "requirements.txt", HERE / "dev" / "requirements" / "peers.txt"
WHERE_PINNED = PINS.relative_to(HERE)


class DoesNotResolve(Exception):
    """Pip found no versions that fit together. Its message names the conflict in one line."""


def pins(path: Path = PINS) -> dict[str, str]:
    """Return the version of each pinned package by its import name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE)
    return {name.replace("-", "_"): pin for name, pin in found}


def resolved(names: Iterable[str], *requirements: str) -> dict[str, str]:
    """Return the newest versions of `names` with which pip could install the requirements.

    Installs nothing. Raises DoesNotResolve if no versions fit together.
    """
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--progress-bar", "off"]
    with NamedTemporaryFile() as report:
        asked = [*pip, "--upgrade", "--report", report.name, *requirements]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            raise DoesNotResolve(_conflict(done.stdout + done.stderr))
        found = [one["metadata"] for one in json.load(report)["install"]]
    versions = {one["name"].replace("-", "_"): one["version"] for one in found}
    return {name: versions.get(name) or version(name) for name in names}  # or installed already


def _conflict(said: str) -> str:
    """Return pip's reason in one line: the conflicting requirements, else its first error."""
    lines = [line.strip() for line in said.splitlines()]
    if "The conflict is caused by:" in lines:
        after = lines[lines.index("The conflict is caused by:") + 1 :]
        reasons = after[: after.index("")] if "" in after else after
        return "; ".join(dict.fromkeys(reasons))
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[0] if errors else "pip gave no reason"


def look(pinned: dict[str, str]) -> list[str]:
    """Return a line for each newer release of a peer, or one that says there is none.

    Raises DoesNotResolve if the pins themselves do not fit requirements.txt.
    """
    beside = ("-r", str(PUBLISHED))
    newest = resolved(pinned, "--no-deps", *pinned)
    try:
        would = resolved(pinned, *beside, *(f"{name}>={pin}" for name, pin in pinned.items()))
    except DoesNotResolve:
        would = {}
    if would != pinned:
        resolved(pinned, *beside, *(f"{name}=={pin}" for name, pin in pinned.items()))
    lines = []
    for name, pin in pinned.items():
        if newest[name] == pin:
            continue
        newer = f"{name} {newest[name]} is newer than the pinned {pin}"
        if would.get(name) == newest[name]:
            lines.append(f"{newer} and would resolve: pin it in {WHERE_PINNED} and measure it")
            continue
        try:
            resolved([name], *beside, f"{name}=={newest[name]}")
            why = "does not resolve beside the other peers"
        except DoesNotResolve as conflict:
            why = f"does not resolve: {conflict}"
        instead = f"; {would[name]} would" if would.get(name, pin) != pin else ""
        lines.append(f"{newer} but {why}{instead}")
    words = ", ".join(f"{name} {pin}" for name, pin in pinned.items())
    return lines or [f"No peer has a newer release than its pin: {words}"]


def main() -> int:
    pinned = pins()
    try:
        print("\n".join(look(pinned)))
    except DoesNotResolve as conflict:
        print(
            f"{WHERE_PINNED} does not resolve beside {PUBLISHED.name}: {conflict}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
