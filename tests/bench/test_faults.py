"""Faults during a measurement: the run continues or ends, and saved cells stay."""

import contextlib
import dataclasses
import os
import random
import signal
import sys
import time
from functools import partial

import pytest
from cases import example_results as example
from cases.rehearsal_case import plan_of

from bench import cells, experiment, folders, machine, options, preparing
from bench import processes as isolated
from bench import results as store
from bench.records import Cell, Floor
from report import commands

VARIANTS = ["vanilla_peft", "fused_mlp"]
TIMEOUT_S = 17.0


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("faults"), "--seq-lens", "16", "32", "--steps", "2")


@pytest.fixture
def run_cells(plan, tmp_path, monkeypatch):
    """Return run_experiment with `worker` in place of the processes that measure cells."""

    def run(worker, rounds=1, **changed):
        def stand_in(function, plan, *rest, on_message, silence_limit_s=None):
            if function is cells.measure_cells:
                assert silence_limit_s == TIMEOUT_S
                return worker(*rest, on_message) or isolated.Ended(None, "")
            if function is preparing.measure_floor:
                on_message({"floor": {n: Floor(1.0, []) for n in rest[1]}})
            return isolated.Ended(None, "")

        monkeypatch.setattr(isolated, "run", stand_in)
        path = tmp_path / "results.json"
        fresh = example.empty(rehearsal=True, gpu=False, variants=VARIANTS, seq_lens=[16, 32],
                              rounds=rounds, steps=2 * rounds)  # fmt: skip
        results = store.continue_from(path, fresh)
        changed = {"variants": tuple(VARIANTS), "cell_timeout_s": TIMEOUT_S} | changed
        asked = dataclasses.replace(plan, rounds=rounds, **changed)
        save = partial(commands.save_with_summary, path, results)
        experiment.run_experiment(asked, results, save)
        return store.load(path)

    return run


def measured(variant, seq_len, round_number, **known):
    step_ms = [random.uniform(1, 2) for _ in range(2)]
    return example.timed_cell(variant, seq_len, round_number, step_ms, **known)


def honest(variant, todo, on_message):
    for round_number, seq_len in todo:
        on_message({"cell": measured(variant, seq_len, round_number)})


def test_out_of_memory_at_one_length_goes_on_with_the_next_in_a_fresh_process(run_cells):
    started = []

    def worker(variant, todo, on_message):
        started.append((variant, todo))
        if (variant, todo[0]) == ("fused_mlp", (1, 16)):
            on_message({"cell": Cell(variant, 16, 1, "oom", error="no memory")})
        else:
            honest(variant, todo, on_message)

    results = run_cells(worker)
    both = [(1, 16), (1, 32)]
    assert started == [("vanilla_peft", both), ("fused_mlp", both), ("fused_mlp", [(1, 32)])]
    found = [(cell.variant, cell.seq_len, cell.status) for cell in results.cells]
    assert found == [("vanilla_peft", 16, "ok"), ("vanilla_peft", 32, "ok"),
                     ("fused_mlp", 16, "oom"), ("fused_mlp", 32, "ok")]  # fmt: skip


# --- a GPU that is not ours alone -----------------------------------------------------------------


def test_another_process_on_the_gpu_stops_the_run_before_it_begins(monkeypatch):
    monkeypatch.setattr(machine, "other_processes", lambda own, gpus=1: 2 - own)
    said = options.others_on_gpu("cuda", False)
    assert said.startswith("2 other processes ") and said.endswith(" --allow-shared-gpu")
    assert options.others_on_gpu("cuda", True) is None
    assert options.others_on_gpu("cpu", False) is None
    monkeypatch.setattr(machine, "other_processes", lambda own, gpus=1: None)
    assert options.others_on_gpu("cuda", False) is None  # a driver that does not say


@pytest.mark.parametrize("allowed", [False, True])
def test_a_cell_that_was_disturbed_is_kept_only_if_sharing_is_allowed(run_cells, allowed, tmp_path):
    def worker(variant, todo, on_message):
        for round_number, seq_len in todo:
            others = int((variant, seq_len) == ("fused_mlp", 32))
            cell = measured(variant, seq_len, round_number, other_gpu_processes=others)
            on_message({"cell": cell})

    if allowed:
        assert len(run_cells(worker, allow_shared_gpu=True).cells) == 4
        return
    with pytest.raises(RuntimeError, match="while fused_mlp at 32 tokens was measured"):
        run_cells(worker)
    assert len(store.load(tmp_path / "results.json").cells) == 3


# --- disks and kills ------------------------------------------------------------------------------


def test_a_start_a_day_later_removes_what_a_killed_run_left_and_nothing_that_is_written(tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    places = [(cache / "models" / "tiny", True), (cache / "parity" / "a.pt", False),
              (cache / "data" / "a.jsonl", False), (out / "results.json", False)]  # fmt: skip
    if (child := os.fork()) == 0:
        with contextlib.ExitStack() as held:
            for path, is_folder in places:
                unfinished = held.enter_context(folders.unfinished_beside(path, is_folder))
                (unfinished / "part" if is_folder else unfinished).write_text("half of it")
                os.utime(unfinished, (0, time.time() - 25 * 3600))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    other = cache / "models" / "other"
    with folders.unfinished_beside(other, True) as written:
        os.utime(written, (0, time.time() - 23 * 3600))
        assert len(list(tmp_path.rglob("*.tmp"))) == 5
        folders.remove_unfinished(out, cache)
        assert list(tmp_path.rglob("*.tmp")) == [written]
    assert [path.name for path in (cache / "models").iterdir()] == ["other"]


def test_a_run_is_finished_once_its_last_cell_is_in_and_stays_so(run_cells, tmp_path):
    """Kill it right afterwards."""
    seen = []

    def cut_off(variant, todo, on_message):
        honest(variant, todo, on_message)
        seen.append(store.load(tmp_path / "results.json").finished_utc)
        if variant == VARIANTS[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(cut_off)
    assert seen[0] is None and seen[1] is not None
    saved = store.load(tmp_path / "results.json")
    saved.finished_utc = "2026-01-01T00:00:00+00:00"
    store.save(tmp_path / "results.json", saved)
    assert run_cells(honest).finished_utc == saved.finished_utc
    assert run_cells(honest, rounds=2).finished_utc > saved.finished_utc


def test_what_cannot_run_and_what_starts_slowly_is_said_once(run_cells, capsys, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    asked = ("vanilla_peft", "full_unsloth", "liger_peft", "fused_layer_graph", "fused_all_graph")
    results = run_cells(honest, rounds=3, variants=asked)
    statuses = [cell.status for cell in results.cells]
    assert (statuses.count("unavailable"), statuses.count("ok")) == (4 * 6, 6)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "NVIDIA GPU" in line]
    assert len(lines) == 3 and "unavailable" not in said
    assert said.count("PYTHONDONTWRITEBYTECODE") == 1
    graphs = "whole layers, CUDA graph, all parts, CUDA graph"
    assert lines[2].startswith(f"{graphs}: a CUDA graph needs")


def run_and_be_killed(run_cells, rounds, seed):
    """Run in a process that is killed around a save, or before a cell is handed on."""
    random.seed(seed)
    left = random.randint(1, 20)  # five such moments a cell

    def moment():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def mortal(works):
        def between_two_moments(*arguments):
            moment()
            works(*arguments)
            moment()

        return between_two_moments

    def worker(variant, todo, on_message):
        for round_number, seq_len in todo:
            moment()
            on_message({"cell": measured(variant, seq_len, round_number)})

    os.fsync, os.replace = mortal(os.fsync), mortal(os.replace)
    run_cells(worker, rounds)


def test_kill_9_at_many_moments_loses_nothing_that_was_saved(run_cells, tmp_path):
    """Kill a run of 24 cells again and again. Each time the same command continues it."""
    rounds, path = 6, tmp_path / "results.json"
    kept, kills, ended = [], 0, signal.SIGKILL
    while ended:
        if (child := os.fork()) == 0:
            try:
                run_and_be_killed(run_cells, rounds, seed=kills)
                os._exit(0)
            except BaseException as error:
                sys.stderr.write(repr(error))
                os._exit(1)
        ended = os.waitpid(child, 0)[1]
        assert ended in (0, signal.SIGKILL), ended
        kills += ended == signal.SIGKILL
        assert kills < 60, "it does not get on"
        if path.exists():
            now = store.load(path).cells  # the whole file, and every cell valid by the schema
            assert now[: len(kept)] == kept, "a saved cell was lost or changed"
            kept = now
    assert kills >= 7
    assert len({(cell.variant, cell.seq_len, cell.round) for cell in kept}) == len(kept) == 24
