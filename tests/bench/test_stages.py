"""The stages of a run and their wall time."""

import pytest
from cases import example_results as example

from bench import results, stages
from bench.stages import Stopwatch, stage_of, stages_line


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    return now


def test_time_is_booked_when_a_stage_ends_and_adds_up_over_commands(clock, tmp_path):
    run = example.empty()
    for command in (1, 2):
        watch = Stopwatch(run)
        for message, seconds in (({"did": "start"}, 60.0), ({"did": "warm_up"}, 6.0),
                                 ({"step": 1}, 30.0), ({"step": 2}, 30.0), ({"cell": None}, 0.5),
                                 ({"does_not_fit": 64}, 0.25)):  # fmt: skip
            clock[0] += seconds
            watch.book(stage_of(message))
        assert run.stages_s.start == command * 60.0
    found = run.stages_s
    assert (found.warm_up, found.steps, found.profile, found.other) == (12.0, 120.0, 1.0, 0.5)
    assert (found.weights, found.floor) == (0.0, 0.0)
    assert stages_line(run) == (
        "4.2 minutes: processes starting 2.0, timed steps 2.0, warm-up 0.2."
    )
    results.save(tmp_path / "results.json", run)
    assert results.load(tmp_path / "results.json").stages_s == found


def test_a_run_of_an_earlier_version_has_none():
    assert example.empty().stages_s is None and stages_line(example.empty()) == ""
