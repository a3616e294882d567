"""The wall time of a run's stages: where its minutes go."""

import time
from typing import Any

from msgspec.structs import asdict

from bench.records import Run, Stages

WORDS = {
    "weights": "weights and reference",
    "floor": "floor",
    "start": "processes starting",
    "warm_up": "warm-up",
    "steps": "timed steps",
    "profile": "profiles and checks",
    "other": "the rest",
}


class Stopwatch:
    """Books wall time to the stages of a run, each when it ends.

    Processes side by side compute one at a time but start together. The first one ready books the
    start of all.
    """

    def __init__(self, run: Run):
        self.run = run
        self.since = time.perf_counter()

    def book(self, stage: str) -> None:
        """Book the time since the last call to a field of Stages."""
        now = time.perf_counter()
        stages = self.run.stages_s = self.run.stages_s or Stages()
        setattr(stages, stage, round(getattr(stages, stage) + now - self.since, 3))
        self.since = now


def stage_of(message: dict[str, Any]) -> str:
    """Return the stage that ends with this message from a process that measures cells."""
    if "did" in message:
        return message["did"]
    return "steps" if "step" in message else "profile" if "cell" in message else "other"


def stages_line(run: Run) -> str:
    """Say how many minutes a run took and where they went, the longest stage first."""
    if run.stages_s is None:
        return ""
    minutes = {WORDS[name]: seconds / 60 for name, seconds in asdict(run.stages_s).items()}
    shown = sorted(minutes.items(), key=lambda one: -one[1])
    parts = ", ".join(f"{words} {value:.1f}" for words, value in shown if value >= 0.05)
    return f"{sum(minutes.values()):.1f} minutes" + (f": {parts}." if parts else ".")
