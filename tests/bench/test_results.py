import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import example_results as example
import pytest
from example_results import cells
from jsonschema import Draft202012Validator

from bench import results
from report.statistics import summarize

ROOT = Path(__file__).resolve().parents[2]


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "answered"),
    [("oom", True), ("parity_failed", True), ("unavailable", True), ("error", False)],
)
def test_an_error_is_retried_and_every_other_answer_stands(status, answered):
    document = cells(("fused_mlp", 1, status))
    assert results.done(document, "fused_mlp", 64, 1) is answered
    assert not results.done(document, "fused_mlp", 64, 2)
    assert results.done(cells(("fused_mlp", 1, [1.0])), "fused_mlp", 64, 1)


def test_a_cell_replaces_the_one_of_the_same_round_only():
    document = cells(
        ("fused_mlp", 1, "error"), ("fused_mlp", 2, "error"), ("vanilla_peft", 1, "oom")
    )
    results.add_cell(document, example.timed_cell("fused_mlp", 64, 2, [100.0]))
    found = {(cell["variant"], cell["round"]): cell["status"] for cell in document["cells"]}
    assert found == {("fused_mlp", 1): "error", ("fused_mlp", 2): "ok", ("vanilla_peft", 1): "oom"}
    assert len(document["cells"]) == 3


def test_what_was_not_measured_is_null_or_empty():
    cell = results.new_cell("fused_mlp", 64, 1, "oom", error="no room")
    lists = [name for name, value in cell.items() if value == []]
    assert lists == [
        *("fused_modules", "step_ms", "forward_ms", "backward_ms", "optimizer_ms", "wall_ms"),
        *("losses", "clock_reasons"),
    ]
    objects = [name for name, value in cell.items() if value == {}]
    assert objects == ["settings", "kernels_seen", "functions_seen", "kernel_ms"]
    nulls = [name for name, value in cell.items() if value is None]
    assert {"parity", "first_step_s", "peak_allocated_bytes", "throttled"} < set(nulls)
    assert len(cell) == len(lists) + len(objects) + len(nulls) + 5  # its key, status and error


def test_what_is_empty_is_shared_neither_with_another_part_nor_with_another_cell():
    one = results.new_cell("fused_mlp", 64, 1, "oom")
    one["step_ms"].append(1.0)
    one["kernels_seen"]["_kernel"] = 1
    other = results.new_cell("fused_mlp", 64, 2, "oom")
    for cell, name in ((one, "losses"), (one, "kernel_ms"), (other, "step_ms")):
        assert not cell[name]
    assert other["kernels_seen"] == {}


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        ({"status": "fine"}, "status: 'fine' is not one of"),
        ({"step_ms": []}, "step_ms: "),  # ok, and no time
        ({"step_ms": [1.0, -1.0]}, r"step_ms\[1\]: -1.0 "),
        ({"round": 0}, "round: 0 "),
        ({"speed": 3}, "'speed'"),
        ({"error": 3}, "error: 3 is not of type"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_in_one_line(measured, wrong):
    cell = results.new_cell("fused_mlp", 64, 1, "ok", step_ms=[1.0])
    with pytest.raises(ValueError, match="^cell of fused_mlp at 64: .*" + wrong) as caught:
        results.new_cell(**(cell | measured))
    assert "\n" not in str(caught.value)


def test_documents_that_cannot_be():
    with pytest.raises(ValueError, match="25 steps do not spread over 3 rounds"):
        example.empty(steps=25)
    whole = example.experiment()
    del whole["seed"]
    with pytest.raises(ValueError, match=r"^new results: experiment: 'seed' is a required"):
        results.new_results([], example.environment(), whole, False)


# --- the schema -----------------------------------------------------------------------------------


def test_the_schema_is_one():
    assert results.SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(results.SCHEMA)


def objects_of(schema, path="$"):
    if isinstance(schema, dict):
        if "properties" in schema and "type" in schema:
            yield path, schema
        for name, part in schema.items():
            yield from objects_of(part, f"{path}.{name}")


def test_every_object_with_named_parts_wants_them_and_no_others():
    described = dict(objects_of(results.SCHEMA))
    assert len(described) > 10
    optional = {
        (path, name)
        for path, schema in described.items()
        for name in schema["properties"].keys() - set(schema["required"])
    }
    # of a floor: of later runs, of a run on a GPU, of a merged one; turn_steps: of later runs
    again = {"recomputation_ms", "recomputation_samples_ms"}
    assert {name for _, name in optional} == {*again, "labelled_tokens", "of_round", "turn_steps"}
    assert [path for path, s in described.items() if s["additionalProperties"] is not False] == []


REMOVED = object()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("cells", 4, "losses"), REMOVED, "cells[4]: 'losses' is a required property"),
        (("environment", "gpu"), REMOVED, "environment: 'gpu' is a required property"),
        (("environment", "gpu", "ecc"), REMOVED, "environment.gpu: 'ecc' is a required property"),
        (("summary",), REMOVED, "the document: 'summary' is a required property"),
        (("experiment", "batch_size"), "32", "experiment.batch_size: '32' is not of type"),
        (("experiment", "padded"), 1, "experiment.padded: 1 is not of type 'boolean'"),
        (("experiment", "seq_lens"), [], "experiment.seq_lens: "),
        (("rehearsal",), None, "rehearsal: None is not of type 'boolean'"),
        (("cells", 0, "round"), True, "cells[0].round: True is not of type 'integer'"),
        (("cells", 0, "step_ms", 2), None, "cells[0].step_ms[2]: None is not of type 'number'"),
        (("cells", 1, "step_ms"), [], "cells[1].step_ms: "),  # its status is ok
        (("cells", 0, "status"), "fine", "cells[0].status: 'fine' is not one of ['ok', "),
        (("cells", 0, "speed"), 1, "cells[0]: Additional properties are not allowed ('speed'"),
        (("speed",), 1, "the document: Additional properties are not allowed ('speed'"),
        (("floor", "64", "floor_ms"), 0, "floor['64'].floor_ms: 0 is less than or equal to"),
        (("kernels",), {"rows": []}, "kernels: 'copy_gb_per_s' is a required property"),
        (("summary", 0, "verdict"), "much faster", "summary[0].verdict: 'much faster' is not one"),
    ],
)
def test_a_document_that_departs_from_the_schema_is_refused_with_the_place(
    path, value, told, tmp_path
):
    document = example.run()
    *parents, last = path
    part = document
    for name in parents:
        part = part[name]
    if value is REMOVED:
        del part[last]
    else:
        part[last] = value
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError) as caught:
        results.load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: {told}")
    assert message.endswith(": restore it, or delete it and measure again")
    assert "\n" not in message


# --- the file -------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_the_summary_is_fresh(tmp_path):
    document = example.run()
    document["summary"] = ["stale"]
    document["cells"][0]["error"] = 'brackets [\n 1, {"a": [ 2 ]}\n]  and  spaces'
    results.save(tmp_path / "results.json", document)
    assert document["summary"] == summarize(document)
    assert results.load(tmp_path / "results.json") == document
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_file_is_laid_out_to_be_read_and_compared(tmp_path):
    document = cells(("fused_mlp", 1, [100.5, 101.5]))
    results.save(tmp_path / "results.json", document)
    lines = (tmp_path / "results.json").read_text().splitlines()
    assert any(line.strip() == '"step_ms": [100.5,101.5],' for line in lines)
    assert max(map(len, lines)) < 200
    assert len(lines) < 150


def test_a_loss_that_diverged_is_null_in_strict_json_and_can_be_loaded(tmp_path):
    document = example.empty()
    losses = [1.0, float("nan"), float("inf")]
    cell = example.timed_cell("fused_mlp", 64, 1, [1.0], losses=losses, loss_gap=float("inf"))
    results.add_cell(document, cell)
    results.save(tmp_path / "results.json", document)
    text = (tmp_path / "results.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    loaded = results.load(tmp_path / "results.json")["cells"][0]
    assert (loaded["losses"], loaded["loss_gap"]) == ([1.0, None, None], None)


def test_saving_through_a_link_replaces_the_file_and_not_the_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    results.save(tmp_path / "link.json", example.empty())
    assert (tmp_path / "link.json").is_symlink()
    assert results.load(tmp_path / "real.json")["cells"] == []


def no_rename(monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)


def disk_full(monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


def interrupt(monkeypatch):
    def fail(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize(
    ("failure", "error"),
    [(no_rename, OSError), (disk_full, OSError), (interrupt, KeyboardInterrupt)],
)
def test_a_failed_save_leaves_the_earlier_file_and_nothing_else(
    failure, error, tmp_path, monkeypatch
):
    path = tmp_path / "results.json"
    results.save(path, example.empty())
    before = path.read_bytes()
    failure(monkeypatch)
    with pytest.raises(error):
        results.save(path, example.run())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_cut_short_by_the_system_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "results.json"
    results.save(path, example.empty())
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))  # a disk with no more room
    try:
        with pytest.raises(OSError, match="too large"):
            results.save(path, example.run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_json_cannot_hold_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "results.json"
    results.save(path, example.empty())
    before, document = path.read_bytes(), example.empty()
    document["kernels"] = object()
    with pytest.raises(TypeError):
        results.save(path, document)
    assert path.read_bytes() == before


KILLED_WHILE_SAVING = """
import os
import pathlib
import random
import signal
import sys
import time
from bench import results
path, versions = pathlib.Path(sys.argv[1]), [pathlib.Path(p).read_bytes() for p in sys.argv[2:]]
results.write_atomically(path, versions[0])
seen = set()
for _ in range(30):
    child = os.fork()
    while child == 0:
        for version in versions:
            results.write_atomically(path, version)
    time.sleep(random.uniform(0.01, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen.add(versions.index(path.read_bytes()))  # a ValueError when it is neither
print(sorted(seen))
"""


def test_kill_9_at_any_moment_leaves_one_whole_version(tmp_path):
    """A process that does nothing but save is killed 30 times, a few ms into it."""
    versions = [tmp_path / "short.json", tmp_path / "long.json"]
    for version, words in zip(versions, (1, 200_000), strict=True):
        document = example.empty()
        cell = results.new_cell("fused_mlp", 64, 1, "oom", error="word " * words)
        results.add_cell(document, cell)
        results.save(version, document)
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, tmp_path / "results.json", *versions],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[0, 1]\n"  # both were left behind: it was not killed too soon each time
    results.load(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 2, "cel', "is not whole JSON"),
        ("\xff", "is not whole JSON"),
        ("", "is not whole JSON"),
        ("[1, 2]", "has no schema_version, so it is not ours"),
        ('{"tokens": 3}', "has no schema_version, so it is not ours"),
        ('{"schema_version": 3}', "has schema 3, this version writes 2: give another --out"),
        ('{"schema_version": 1, "cells": []}', "has schema 1, this version writes 2: give another"),
        ('{"schema_version": 2}', ": the document: '.*' is a required property: restore it"),
    ],
)
def test_a_file_that_is_no_results_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        results.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
