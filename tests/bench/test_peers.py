"""The output of `make resolve-peers` on newer releases, with a fake pip."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from bench import peers

PINNED = {"unsloth": "2", "liger_kernel": "8"}
CONFLICT = """INFO: pip is looking at multiple versions of unsloth to determine which version fits
The conflict is caused by:
    unsloth 3 depends on torch<2.11
    The user requested torch==2.11.0

To fix this you could try to:
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io
"""


@pytest.mark.parametrize(
    ("newest", "refused", "code", "said"),
    [
        ({}, (), 0, "No peer has a newer release than its pin: unsloth 2, liger_kernel 8"),
        ({"liger_kernel": "9"}, (), 0,
         "liger_kernel 9 is newer than the pinned 8 and would resolve: pin it in "
         "dev/requirements/peers.txt and measure it"),
        ({"unsloth": "3"}, ("unsloth==3",), 0,
         "unsloth 3 is newer than the pinned 2 but does not resolve: unsloth 3 depends on "
         "torch<2.11; The user requested torch==2.11.0"),
        ({}, ("unsloth==2",), 1,
         "dev/requirements/peers.txt does not resolve beside requirements.txt: unsloth 3 depends "
         "on torch<2.11; The user requested torch==2.11.0"),
    ],
)  # fmt: skip
def test_a_newer_release_is_told_in_a_line_and_pins_that_do_not_fit_fail(
    newest, refused, code, said, monkeypatch, capsys
):
    def pip(command, **options):
        if {*refused} & {*command}:
            return SimpleNamespace(returncode=1, stdout=CONFLICT, stderr="ERROR: Cannot install")
        found = [{"name": n.replace("_", "-"), "version": v} for n, v in (PINNED | newest).items()]
        with open(command[command.index("--report") + 1], "w") as report:
            json.dump({"install": [{"metadata": one} for one in found]}, report)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(peers, "pins", lambda: PINNED)
    assert peers.main() == code
    printed = capsys.readouterr()
    assert (printed.err if code else printed.out) == f"{said}\n"


def test_the_pins_are_those_of_the_file():
    assert {"unsloth", "unsloth_zoo", "liger_kernel"} == peers.pins().keys()
