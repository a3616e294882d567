import gzip
import json
import os
import resource

import msgspec
import pytest
from cases import example_results as example
from cases.example_results import cells
from cases.one_line import refused

from bench import results
from bench.records import Cell
from report.statistics import summarize

# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "answered"),
    [("oom", True), ("parity_failed", True), ("unavailable", True), ("error", False)],
)
def test_an_error_is_retried_and_every_other_answer_stands(status, answered):
    document = cells(("fused_mlp", 1, status))
    assert document.is_done("fused_mlp", 64, 1) is answered
    assert not document.is_done("fused_mlp", 64, 2)
    assert cells(("fused_mlp", 1, [1.0])).is_done("fused_mlp", 64, 1)


def test_a_cell_replaces_the_one_of_the_same_round_only():
    document = cells(
        ("fused_mlp", 1, "error"), ("fused_mlp", 2, "error"), ("vanilla_peft", 1, "oom")
    )
    document.add(example.timed_cell("fused_mlp", 64, 2, [100.0]))
    found = {(cell.variant, cell.round): cell.status for cell in document.cells}
    assert found == {("fused_mlp", 1): "error", ("fused_mlp", 2): "ok", ("vanilla_peft", 1): "oom"}
    assert len(document.cells) == 3


def test_what_was_not_measured_is_null_or_empty():
    cell = msgspec.to_builtins(Cell("fused_mlp", 64, 1, "oom", error="no room"))
    known = {"variant", "seq_len", "round", "status", "error"}
    assert all(cell[name] in (None, [], {}) for name in cell.keys() - known)
    assert len(cell) == 36 and cell["error"] == "no room"


REMOVED = object()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("cells", 4, "seq_len"), REMOVED, "cells[4]: object missing required field `seq_len`"),
        (("environment", "gpu", "ecc"), REMOVED, "environment.gpu: object missing required field"),
        (("experiment",), REMOVED, "the document: object missing required field `experiment`"),
        (("experiment", "padded"), 1, "experiment.padded: expected `bool`, got `int`"),
        (("experiment", "seq_lens"), [], "experiment.seq_lens: expected `array` of length >= 1"),
        (("cells", 0, "round"), 0, "cells[0].round: expected `int` >= 1"),
        (("cells", 1, "step_ms"), [], "cells[1]: its status is ok, and it has no step_ms"),
        (("cells", 0, "status"), "fine", "cells[0].status: invalid enum value 'fine'"),
        (("cells", 0, "speed"), 1, "cells[0]: object contains unknown field `speed`"),
        (("speed",), 1, "the document: object contains unknown field `speed`"),
        (("floor", "64", "floor_ms"), 0, "floor[...].floor_ms: expected `float` > 0.0"),
        (("summary", 0, "verdict"), "much faster", "summary[0].verdict: invalid enum value"),
    ],
)
def test_a_file_that_departs_from_the_types_is_refused_with_the_place(path, value, told, tmp_path):
    run = example.run()
    run.summary = summarize(run)
    document = example.as_json(run)
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
    message = refused(results.load, file)
    assert message.startswith(f"{file}: {told}")
    assert message.endswith(": give another path, or restore it, or delete it and measure again")


# --- the file -------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_laid_out_to_be_read_and_compared(tmp_path):
    path, document = tmp_path / "results.json", cells(("fused_mlp", 1, [100.5, 101.5]))
    document.cells[0].error = 'brackets [\n 1, {"a": [ 2 ]}\n]  and  spaces'
    results.save(path, document)
    assert results.load(path) == document
    assert list(tmp_path.iterdir()) == [path]
    lines = path.read_text().splitlines()
    assert any(line.strip() == '"step_ms": [100.5,101.5],' for line in lines)
    assert max(map(len, lines)) < 200
    assert len(lines) < 150


def test_a_compressed_file_is_loaded_and_a_torn_one_refused(tmp_path):
    document = example.run()
    results.save(tmp_path / "results.json", document)
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress((tmp_path / "results.json").read_bytes()))
    assert results.load(path) == document
    whole = path.read_bytes()
    for torn in (whole[:-20], b"no gzip", whole[:40] + b"\0" * 40 + whole[80:]):
        path.write_bytes(torn)
        assert "is not whole JSON" in refused(results.load, path)


def test_a_loss_that_diverged_is_null_in_strict_json_and_can_be_loaded(tmp_path):
    document = example.empty()
    losses = [1.0, float("nan"), float("inf")]
    cell = example.timed_cell("fused_mlp", 64, 1, [1.0], losses=losses, loss_gap=float("inf"))
    document.add(cell)
    results.save(tmp_path / "results.json", document)
    text = (tmp_path / "results.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    loaded = results.load(tmp_path / "results.json").cells[0]
    assert (loaded.losses, loaded.loss_gap) == ([1.0, None, None], None)


def test_saving_through_a_link_replaces_the_file_and_not_the_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    results.save(tmp_path / "link.json", example.empty())
    assert (tmp_path / "link.json").is_symlink()
    assert results.load(tmp_path / "real.json").cells == []


def fails(call, error):
    def fail(*_):
        raise error

    return lambda document, patch: patch.setattr(os, call, fail)


def disk_without_room(document, patch):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9999, most))


def cell_that_cannot_be(document, patch):
    document.add(Cell("fused_mlp", 64, 1, "ok", step_ms=[1.0, -1.0]))


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        (fails("replace", OSError(5, "Input/output error")), OSError, "Input/output"),
        (fails("fsync", OSError(28, "No space left on device")), OSError, "No space"),
        (fails("fsync", KeyboardInterrupt()), KeyboardInterrupt, "^$"),
        (disk_without_room, OSError, "too large"),
        (cell_that_cannot_be, ValueError,
         r"^[^\n]* is not written: cells\[\d+\]\.step_ms\[1\]: expected `float` > 0\.0[^\n]*$"),
    ],
)  # fmt: skip
def test_a_failed_save_leaves_the_earlier_file_and_nothing_else(
    wrong, error, told, tmp_path, monkeypatch
):
    path, document = tmp_path / "results.json", example.run()
    results.save(path, example.empty())
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    wrong(document, monkeypatch)
    try:
        with pytest.raises(error, match=told):
            results.save(path, document)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 2, "cel', "is not whole JSON"),
        ("\xff", "is not whole JSON"),
        ("", "is not whole JSON"),
        ('{"cells": ' + "[" * 100_000, "cells"),
        ('{"tokens": 3}', "document: object contains unknown field `tokens`: give another path"),
        ('{"schema_version": 3}', "schema_version: invalid enum value 3: give another path"),
        ('{"schema_version": 2}', "document: object missing required field `rehearsal`: give"),
    ],
)
def test_a_file_that_is_no_results_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        results.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
