"""The paragraph of the pinned peers and of the runs that hold another release, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from bench.records import Run
from report.looks import PEERS
from variants import variant_of


def releases_section(pinned: Mapping[str, str], runs: Mapping[str, Run]) -> str:
    """Write the pins, and the runs with a peer of another release, until somebody measures them
    again. runs: by the path that the page links to."""
    now = " and ".join(f"{peer} {pinned[package]}" for peer, package in PEERS.values())
    others: dict[str, list[str]] = {}
    for path, run in runs.items():
        libraries = {recipe.library for id in run.experiment.variants
                     if (recipe := variant_of(id).recipe)}  # fmt: skip
        for library in libraries & PEERS.keys():
            peer, package = PEERS[library]
            release = run.environment.packages.get(package)
            if release and release != pinned[package]:
                name = path.rsplit("runs/")[-1].removesuffix(".json.gz")
                name = name.removeprefix("../").removesuffix(".json")
                others.setdefault(f"{peer} {release}", []).append(f"[{name}]({path})")
    said = f"We pin the newest releases that install: {now}."
    for release, links in others.items():
        said += f" These runs are of {release}: {', '.join(links)}."
    return said if others else f"{said} Every run holds them."
