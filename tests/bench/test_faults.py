"""What goes wrong around a measurement: the run goes on or ends, and what was saved stays."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import example_results as example
import pytest

from bench import experiment, machine, options
from bench import plan as planning
from bench import processes as isolated
from bench import results as store
from bench.records import Cell, Floor
from report import commands

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ["vanilla_peft", "fused_mlp"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    arguments = options.parse(
        ["--device", "cpu", "--seq-lens", "16", "32", "--steps", "2",
         "--cache", str(folder / "cache"), "--out", str(folder)], ""
    )  # fmt: skip
    with planning.planned(arguments, []) as (plan, *_):
        return plan


@pytest.fixture
def run_cells(plan, tmp_path, monkeypatch):
    """run_experiment, in which `worker` stands for the processes that measure cells."""

    def run(worker, rounds=1, **changed):
        def stand_in(function, plan, *rest, on_message, silence_limit_s=None):
            if function is experiment.measure_cells:
                return worker(*rest, on_message) or isolated.Ended(None, "")
            if function is experiment.measure_floor:
                on_message({"floor": {n: Floor(1.0, []) for n in rest[0]}})
            return isolated.Ended(None, "")

        monkeypatch.setattr(isolated, "run", stand_in)
        path = tmp_path / "results.json"
        fresh = example.empty(rehearsal=True, gpu=False, variants=VARIANTS, seq_lens=[16, 32],
                              rounds=rounds, steps=2 * rounds,
                              tokens={})  # fmt: skip
        results = store.continue_from(path, fresh)
        asked = dataclasses.replace(plan, variants=tuple(VARIANTS), rounds=rounds, **changed)
        experiment.run_experiment(
            asked, results, partial(commands.save_with_summary, path, results)
        )
        return store.load(path)

    return run


def measured(variant, seq_len, round_number, **known):
    return example.timed_cell(variant, seq_len, round_number, [2.0, 2.1], **known)


def statuses(results):
    return {(c.variant, c.seq_len): c.status for c in results.cells}


# --- workers that end badly -----------------------------------------------------------------------


def test_out_of_memory_at_one_length_goes_on_with_the_next_in_a_fresh_process(run_cells):
    started = []

    def worker(variant, round_number, seq_lens, on_message):
        started.append((variant, seq_lens))
        for seq_len in seq_lens:
            if (variant, seq_len) == ("fused_mlp", 16):
                on_message({"cell": Cell(variant, 16, 1, "oom", error="no memory")})
                return
            on_message({"cell": measured(variant, seq_len, round_number)})

    results = run_cells(worker)
    assert started == [("vanilla_peft", (16, 32)), ("fused_mlp", (16, 32)), ("fused_mlp", (32,))]
    assert statuses(results) == {
        ("vanilla_peft", 16): "ok",
        ("vanilla_peft", 32): "ok",
        ("fused_mlp", 16): "oom",
        ("fused_mlp", 32): "ok",
    }


def test_a_worker_that_hangs_is_an_error_with_its_last_words_and_the_rest_goes_on(run_cells):
    def worker(variant, round_number, seq_lens, on_message):
        if (variant, seq_lens[0]) == ("fused_mlp", 16):
            return isolated.Ended("nothing was heard of it for 60 s", "compiling ...")
        for seq_len in seq_lens:
            on_message({"cell": measured(variant, seq_len, round_number)})
        return None

    results = run_cells(worker)
    (hung,) = (c for c in results.cells if c.status != "ok")
    assert (hung.variant, hung.seq_len, hung.status) == ("fused_mlp", 16, "error")
    assert hung.error == "nothing was heard of it for 60 s\ncompiling ..."
    assert len(results.cells) == 4


def test_the_cell_timeout_reaches_the_process(plan, tmp_path, monkeypatch):
    limits = []

    def run(function, *_, on_message, silence_limit_s=None):
        limits.append(silence_limit_s)
        return isolated.Ended("it died", "")

    monkeypatch.setattr(isolated, "run", run)
    results = example.empty(rehearsal=True, gpu=False, variants=VARIANTS)
    save = partial(store.save, tmp_path / "results.json", results)
    asked = dataclasses.replace(plan, cell_timeout_s=17.0)
    experiment.Runner(asked, results, save, print, print).alone([(1, "vanilla_peft", 64)])
    assert limits == [17.0]


# --- a GPU that is not ours alone -----------------------------------------------------------------


def test_another_process_on_the_gpu_stops_the_run_before_it_begins(monkeypatch):
    monkeypatch.setattr(machine, "other_processes", lambda own: 2 - own)
    said = options.others_on_gpu("cuda", False)
    assert said.startswith("2 other processes ") and said.endswith(" --allow-shared-gpu")
    assert options.others_on_gpu("cuda", True) is None
    assert options.others_on_gpu("cpu", False) is None
    monkeypatch.setattr(machine, "other_processes", lambda own: None)
    assert options.others_on_gpu("cuda", False) is None  # a driver that does not say


@pytest.mark.parametrize("allowed", [False, True])
def test_a_cell_that_was_disturbed_is_kept_only_if_sharing_is_allowed(run_cells, allowed, tmp_path):
    def worker(variant, round_number, seq_lens, on_message):
        for seq_len in seq_lens:
            others = int((variant, seq_len) == ("fused_mlp", 32))
            on_message({"cell": measured(variant, seq_len, round_number,
                                         other_gpu_processes=others)})  # fmt: skip

    if allowed:
        assert len(run_cells(worker, allow_shared_gpu=True).cells) == 4
        return
    with pytest.raises(RuntimeError, match="while fused_mlp at 32 tokens was measured"):
        run_cells(worker)
    assert len(store.load(tmp_path / "results.json").cells) == 3


# --- disks ----------------------------------------------------------------------------------------


def honest(variant, round_number, seq_lens, on_message):
    for seq_len in seq_lens:
        on_message({"cell": measured(variant, seq_len, round_number)})


@pytest.mark.parametrize(
    ("call", "error"),
    [("fsync", (28, "No space left on device")), ("replace", (30, "Read-only file system"))],
)
def test_a_disk_that_fails_leaves_what_was_saved(run_cells, tmp_path, monkeypatch, call, error):
    calls, works = [], getattr(os, call)

    def fails_at_last(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise OSError(*error)
        works(*arguments)

    monkeypatch.setattr(os, call, fails_at_last)
    with pytest.raises(OSError, match=error[1]):
        run_cells(honest)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    before = store.load(tmp_path / "results.json").cells
    assert len(before) == 2

    monkeypatch.setattr(os, call, works)
    after = run_cells(honest).cells
    assert after[:2] == before
    assert len(after) == 4


# --- kill -9 --------------------------------------------------------------------------------------

KILLED_WHILE_RUNNING = """
import dataclasses
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
import example_results as example
import scipy.stats  # once, and not in every process below
from report import commands
from bench import experiment
from bench import processes as isolated
from bench import options
from bench import plan as planning
from bench import results as store

left = 0  # moments that the process still lives

def moment():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def mortal(works):
    def between_two_moments(*arguments):
        moment()
        works(*arguments)
        moment()
    return between_two_moments

def worker(function, plan, *rest, on_message, **_):
    if function is experiment.measure_cells:
        variant, round_number, seq_lens = rest
        for seq_len in seq_lens:
            ms = [random.uniform(1, 2) for _ in range(plan.steps)]
            cell = example.timed_cell(variant, seq_len, round_number, ms)
            moment()
            on_message({"cell": cell})
    return isolated.Ended(None, "")

isolated.run = worker
path, cache, rounds = Path(sys.argv[1]), sys.argv[2], 9
names = ["vanilla_peft", "fused_mlp"]
arguments = options.parse(["--device", "cpu", "--seq-lens", "16", "32", "--steps", "2",
                           "--cache", cache, "--out", str(path.parent)], "")
with planning.planned(arguments, []) as (plan, *_):
    pass
fresh = example.empty(rehearsal=True, gpu=False, variants=names, seq_lens=[16, 32],
                      rounds=rounds, steps=2 * rounds, tokens={})
plan = dataclasses.replace(plan, variants=tuple(names), rounds=rounds)
total, kept, cut_short, seed = 2 * 2 * rounds, [], 0, 0
while len(kept) < total:
    seed += 1
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        random.seed(seed)
        left = random.randint(1, 20)  # five of them a cell
        os.fsync, os.replace = mortal(os.fsync), mortal(os.replace)
        try:
            run = store.continue_from(path, fresh)
            experiment.run_experiment(plan, run, partial(commands.save_with_summary, path, run))
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
    ended = os.waitpid(child, 0)[1]
    assert ended in (0, signal.SIGKILL), ended
    cut_short += ended == signal.SIGKILL
    if path.exists():
        now = store.load(path).cells  # whole, and every cell as the schema wants it
        assert now[:len(kept)] == kept, "a saved cell was lost or changed"
        kept = now
keys = [(c.variant, c.seq_len, c.round) for c in kept]
assert len(set(keys)) == total, "a cell was measured twice"
print(cut_short)
"""


def test_kill_9_at_many_moments_loses_nothing_that_was_saved(tmp_path):
    """A run of 36 cells is killed again and again, and each time the same command goes on."""
    out = tmp_path / "out"
    out.mkdir()
    before = os.environ.get("PYTHONPATH", "")
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_RUNNING, out / "results.json", tmp_path / "cache"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, (ROOT, ROOT / "tests")), before]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 10
