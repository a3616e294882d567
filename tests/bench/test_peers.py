"""The output of `make resolve-peers` on newer releases, with a fake pip."""

import json
import re
import subprocess
from types import SimpleNamespace

import pytest

from bench import peers

PINNED = {"unsloth": "2", "unsloth_zoo": "2", "liger_kernel": "8"}
CONFLICT = """INFO: pip is looking at multiple versions of unsloth to determine which version fits
The conflict is caused by:
    unsloth 3 depends on torch<2.11
    The user requested torch==2.11.0

To fix this you could try to:
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io
"""


class Pip:
    """A pip that resolves `fits` beside requirements.txt; `newest` are the latest releases."""

    def __init__(self, newest, fits):
        self.newest, self.fits, self.calls = newest, fits, 0

    def __call__(self, command, **options):
        self.calls += 1
        asked = command[command.index("--report") + 2 :]
        found = self.newest if "--no-deps" in asked else self.fits
        pins = [one.split("==") for one in asked if "==" in one]
        too_new = any(int(version) > int(self.fits.get(name, 0)) for name, version in pins)
        if too_new or not found:
            return SimpleNamespace(returncode=1, stdout=CONFLICT, stderr="ERROR: Cannot install")
        install = [
            {"metadata": {"name": n.replace("_", "-"), "version": v}} for n, v in found.items()
        ]
        with open(command[command.index("--report") + 1], "w") as report:
            json.dump({"install": install}, report)
        return SimpleNamespace(returncode=0)


@pytest.mark.parametrize(
    ("newest", "fits", "said", "calls"),
    [
        ({}, {}, "No peer has a newer release than its pin: unsloth 2, unsloth_zoo 2, liger_", 2),
        ({"liger_kernel": "9"}, {"liger_kernel": "9"}, "9 is newer .* 8 and would resolve: pin", 3),
        (
            {"unsloth": "3"}, {},
            "unsloth 3 is newer than the pinned 2 but does not resolve: unsloth 3 depends on "
            "torch<2.11; The user requested torch==2.11.0$", 3,
        ),
        ({"unsloth": "4"}, {"unsloth": "3"}, "unsloth 4 .* does not resolve: .*; 3 would$", 4),
    ],
    ids=("none", "it would", "it would not", "one between"),
)  # fmt: skip
def test_a_newer_release_is_told_in_a_line_and_is_no_failure(
    newest, fits, said, calls, monkeypatch, capsys
):
    pip = Pip(PINNED | newest, PINNED | fits)
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(peers, "pins", lambda: PINNED)
    assert peers.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(said, line) and pip.calls == calls


def test_pins_that_do_not_resolve_fail(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", Pip(PINNED, {}))
    monkeypatch.setattr(peers, "pins", lambda: PINNED)
    assert peers.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dev/requirements/peers.txt does not resolve beside requirements.txt: ")


def test_the_pins_are_those_of_the_file():
    assert {"unsloth", "unsloth_zoo", "liger_kernel"} == peers.pins().keys()
