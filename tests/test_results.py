import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import example_results as example
import pytest

import results

ROOT = Path(results.__file__).parent


def cells(*rows):
    """A document with one length: (variant, round, step_ms) or (variant, round, status) a cell."""
    document = example.empty(seq_lens=[64], variants=list(dict.fromkeys(row[0] for row in rows)))
    for variant, round, outcome in rows:
        if isinstance(outcome, str):
            cell = results.new_cell(variant, 64, round, outcome)
        else:
            cell = example.timed_cell(variant, 64, round, outcome)
        results.add_cell(document, cell)
    return document


def rounds(**step_ms):
    """One timed step a round: rounds(vanilla_peft=[200, 210], fused_mlp=[100, 100])."""
    return cells(*((v, n, [ms]) for v, all_ms in step_ms.items() for n, ms in enumerate(all_ms)))


def summary(document, variant="fused_mlp"):
    return next(row for row in results.summarize(document) if row["variant"] == variant)


# --- summing up -----------------------------------------------------------------------------------


def test_a_row_of_the_summary_by_hand():
    document = cells(
        ("vanilla_peft", 0, [190.0, 200.0, 260.0]),
        ("vanilla_peft", 1, [210.0, 205.0, 280.0]),
        ("vanilla_peft", 2, [220.0, 220.0, 220.0]),
        ("fused_mlp", 0, [100.0, 90.0, 300.0]),
        ("fused_mlp", 1, [100.0, 100.0, 100.0]),
        ("fused_mlp", 2, [110.0, 110.0, 90.0]),
    )
    document["floor"] = {"64": {"floor_ms": 40.0, "samples_ms": [40.0]}}
    for cell, gib in zip(document["cells"], (9, 9, 9, 7, 8.5, 7), strict=True):
        cell["peak_allocated_bytes"] = int(gib * 2**30)
    row = summary(document)
    assert row == {
        "variant": "fused_mlp",
        "seq_len": 64,
        "status": "ok",
        "rounds": 3,
        "steps": 9,
        "median_step_ms": 100.0,  # of 100, 100, 110
        "step_ms_ci95": [100.0, 110.0],
        "tokens_per_s": 20480.0,  # 32 * 64 / 0.1 s
        "speedup": 2.0,  # paired: of 2.0, 2.1, 2.0. The ratio of the medians would be 2.1
        "speedup_ci95": [2.0, 2.1],
        "ratio_to_floor": 2.5,
        "forward_ms": 38.0,
        "backward_ms": 61.0,
        "optimizer_ms": 1.0,
        "peak_gib": 8.5,
        "verdict": None,
    }
    baseline = summary(document, "vanilla_peft")
    assert (baseline["speedup"], baseline["speedup_ci95"]) == (1.0, None)


def test_only_rounds_with_both_are_paired():
    document = cells(
        ("vanilla_peft", 0, [200.0]),
        ("vanilla_peft", 1, "error"),
        ("vanilla_peft", 2, [300.0]),
        ("fused_mlp", 0, [100.0]),
        ("fused_mlp", 1, [1.0]),
        ("fused_mlp", 2, "oom"),
    )
    row = summary(document)
    assert (row["speedup"], row["speedup_ci95"], row["rounds"]) == (2.0, None, 2)


def test_without_floor_peak_or_baseline_the_row_says_null():
    row = summary(rounds(fused_mlp=[100.0, 100.0]))
    empty = ("ratio_to_floor", "peak_gib", "speedup", "speedup_ci95", "verdict")
    assert [row[name] for name in empty] == [None] * 5
    document = rounds(fused_mlp=[100.0])
    del document["floor"]
    assert summary(document)["ratio_to_floor"] is None


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["oom", [100.0], "error"], "ok"),
        (["error", "oom", "unavailable"], "oom"),
        (["oom", "parity_failed"], "parity_failed"),
        (["unavailable", "error"], "error"),
        (["unavailable"], "unavailable"),
    ],
)
def test_the_most_telling_status_stands(outcomes, status):
    row = summary(cells(*(("fused_mlp", n, outcome) for n, outcome in enumerate(outcomes))))
    assert row["status"] == status
    assert (row["median_step_ms"] is None) == (status != "ok")


def test_the_noise_band_goes_both_ways():
    document = rounds(vanilla_peft=[102.0, 99.0], vanilla_peft_again=[100.0, 100.0])
    low, high = results.noise_band(document, 64)
    assert (low, high) == pytest.approx((1 / 1.02, 1.02))
    assert results.noise_band(document, 128) is None


@pytest.mark.parametrize(
    ("fused_ms", "verdict"),
    [
        ([80.0, 81.0, 80.0], "faster"),
        ([125.0, 126.0, 125.0], "slower"),
        ([99.0, 99.0, 99.0], "not distinguishable"),  # 1.010: the A/A twin came as far as 1.02
        ([60.0, 80.0, 101.0], "not distinguishable"),  # 1.25, but one round was slower
    ],
)
def test_a_verdict_takes_the_noise_into_account(fused_ms, verdict):
    vanilla, again = [100.0, 100.0, 100.0], [102.0, 100.0, 99.0]
    document = rounds(vanilla_peft=vanilla, vanilla_peft_again=again, fused_mlp=fused_ms)
    assert summary(document)["verdict"] == verdict
    assert summary(document, "vanilla_peft")["verdict"] is None
    assert summary(document, "vanilla_peft_again")["verdict"] is None
    assert summary(rounds(vanilla_peft=vanilla, fused_mlp=fused_ms))["verdict"] is None


def test_intervals_of_nothing_of_one_and_of_equal_values():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert results.interval95([]) is None
        assert results.interval95([1.5]) is None
        assert results.interval95([1.5, 1.5, 1.5]) == [1.5, 1.5]
    spread = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    low, high = results.interval95(spread)
    assert 1.0 <= low < 1.3 < high <= 1.6
    assert results.interval95(spread) == [low, high]  # seeded


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "answered"),
    [("oom", True), ("parity_failed", True), ("unavailable", True), ("error", False)],
)
def test_an_error_is_retried_and_every_other_answer_stands(status, answered):
    document = cells(("fused_mlp", 0, status))
    assert results.done(document, "fused_mlp", 64, 0) is answered
    assert not results.done(document, "fused_mlp", 64, 1)
    assert results.done(cells(("fused_mlp", 0, [1.0])), "fused_mlp", 64, 0)


def test_a_cell_replaces_the_one_of_the_same_round_only():
    document = cells(
        ("fused_mlp", 0, "error"), ("fused_mlp", 1, "error"), ("vanilla_peft", 0, "oom")
    )
    results.add_cell(document, example.timed_cell("fused_mlp", 64, 1, [100.0]))
    found = {(cell["variant"], cell["round"]): cell["status"] for cell in document["cells"]}
    assert found == {("fused_mlp", 0): "error", ("fused_mlp", 1): "ok", ("vanilla_peft", 0): "oom"}
    assert len(document["cells"]) == 3


def test_cells_and_documents_that_cannot_be():
    with pytest.raises(ValueError, match="'fine' of fused_mlp: give one of ok"):
        results.new_cell("fused_mlp", 64, 0, "fine")
    with pytest.raises(ValueError, match="no step_ms"):
        results.new_cell("fused_mlp", 64, 0, "ok")
    with pytest.raises(ValueError, match="25 steps do not spread over 3 rounds"):
        example.empty(steps=25)
    with pytest.raises(ValueError, match=r"lack experiment\.seed"):
        whole = example.experiment()
        del whole["seed"]
        results.new_results([], example.environment(), whole, False)


# --- the file -------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_the_summary_is_fresh(tmp_path):
    document = example.run()
    document["summary"] = ["stale"]
    document["cells"][0]["error"] = 'brackets [\n 1, {"a": [ 2 ]}\n]  and  spaces'
    results.save(tmp_path / "results.json", document)
    assert document["summary"] == results.summarize(document)
    assert results.load(tmp_path / "results.json") == document
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_file_is_laid_out_to_be_read_and_compared(tmp_path):
    document = cells(("fused_mlp", 0, [100.5, 101.5]))
    results.save(tmp_path / "results.json", document)
    lines = (tmp_path / "results.json").read_text().splitlines()
    assert any(line.strip() == '"step_ms": [100.5,101.5],' for line in lines)
    assert max(map(len, lines)) < 200
    assert len(lines) < 150


def test_a_loss_that_diverged_is_null_in_strict_json(tmp_path):
    document = example.empty()
    cell = example.timed_cell("fused_mlp", 64, 0, [1.0])
    results.add_cell(document, {**cell, "losses": [1.0, float("nan"), float("inf")]})
    results.save(tmp_path / "results.json", document)
    text = (tmp_path / "results.json").read_text()
    saved = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert saved["cells"][0]["losses"] == [1.0, None, None]


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
import os, pathlib, random, signal, sys, time
import results
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
    for version, losses in zip(versions, ([2.5], [2.5] * 200_000), strict=True):
        document = example.empty()
        results.add_cell(document, results.new_cell("fused_mlp", 64, 0, "oom", losses=losses))
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
        ('{"schema_version": 1, "cel', "is not whole JSON"),
        ("", "is not whole JSON"),
        ("[1, 2]", "has no schema_version, so it is not ours"),
        ('{"tokens": 3}', "has no schema_version, so it is not ours"),
        ('{"schema_version": 3}', "has schema 3, this version writes 1: give another --out"),
        ('{"schema_version": 1}', "lacks rehearsal; argv; started_utc; and"),
    ],
)
def test_a_file_that_is_no_results_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        results.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_part_is_named_wherever_it_is(tmp_path):
    document = example.run()
    del document["cells"][4]["losses"], document["experiment"]["seed"]
    del document["environment"]["gpu"]
    (tmp_path / "results.json").write_text(json.dumps(document))
    named = r"environment\.gpu; experiment\.seed; cells\[4\]\.losses"
    with pytest.raises(ValueError, match=named):
        results.load(tmp_path / "results.json")


# --- going on with an earlier run -----------------------------------------------------------------


def saved(tmp_path, document):
    results.save(tmp_path / "results.json", document)
    return tmp_path / "results.json"


def test_without_a_file_the_run_is_fresh(tmp_path):
    fresh = example.empty()
    assert results.continue_from(tmp_path / "results.json", fresh) is fresh


def test_the_same_run_goes_on_wider(tmp_path):
    tokens = example.experiment()["tokens"]
    earlier = example.run(("vanilla_peft", "fused_mlp"), (64, 128))
    earlier["experiment"]["tokens"] = {n: tokens[n] for n in ("64", "128")}
    path = saved(tmp_path, earlier)
    fresh = example.empty(
        variants=["full_unsloth", "vanilla_peft"], seq_lens=[512, 64], rounds=4, steps=32
    )
    fresh["experiment"]["tokens"] = {n: tokens[n] for n in ("512", "64")}
    fresh["argv"] = ["lora_bench.py", "--again"]
    document = results.continue_from(path, fresh)
    experiment = document["experiment"]
    assert experiment["variants"] == ["vanilla_peft", "fused_mlp", "full_unsloth"]
    assert experiment["seq_lens"] == [64, 128, 512]
    assert experiment["tokens"] == {n: tokens[n] for n in ("64", "128", "512")}
    assert (experiment["rounds"], experiment["steps"]) == (4, 32)
    assert (document["argv"], document["finished_utc"]) == (["lora_bench.py", "--again"], None)
    assert results.done(document, "fused_mlp", 128, 2)
    assert not results.done(document, "fused_mlp", 128, 3)
    results.save(path, document)
    fewer = example.empty(seq_lens=[64], rounds=1, steps=8, tokens={"64": tokens["64"]})
    narrower = results.continue_from(path, fewer)
    assert narrower["experiment"] == experiment
    assert narrower["cells"] == document["cells"]


def other(part, **changed):
    """A fresh run that differs in one part from example.empty()."""
    if part == "experiment":
        return example.empty(**changed)
    document = example.empty()
    if part == "packages":
        document["environment"]["packages"].update(changed)
    elif part == "gpu":
        document["environment"]["gpu"].update(changed)
    else:
        document.update(changed)
    return document


@pytest.mark.parametrize(
    ("fresh", "difference"),
    [
        (other("experiment", batch_size=16), "batch_size 32 there, 16 here"),
        (other("experiment", dtype="float32"), "dtype bfloat16 there, float32 here"),
        (other("experiment", checkpointing="off"), "checkpointing on there, off here"),
        (other("experiment", padded=True), "padded False there, True here"),
        (other("experiment", model="tiny"), "model Qwen2.5-3B there, tiny here"),
        (other("experiment", weights="random, seed 1"), "weights random, seed 0 there"),
        (other("experiment", seed=1), "seed 0 there, 1 here"),
        (other("experiment", data_sha256="f" * 64), "data_sha256 0{64} there, f{64} here"),
        (other("experiment", lora={"rank": 8, "alpha": 64}), r"lora\.rank 32 there, 8 here"),
        (other("experiment", optimizer={"name": "SGD"}), r"optimizer\.name AdamW there, SGD here"),
        (other("experiment", steps=30), "steps a round 8 there, 10 here"),
        (other("experiment", rounds=6), "steps a round 8 there, 4 here"),
        (other("experiment", tokens={"64": {"padding": 9}}), "tokens at 64 .* there"),
        (other("gpu", name="NVIDIA H100"), "gpu NVIDIA H200 there, NVIDIA H100 here"),
        (other("gpu", power_limit_w=350), "power_limit_w 700 there, 350 here"),
        (other("document", rehearsal=True), "rehearsal False there, True here"),
        (other("packages", torch="2.13.0"), r"torch 2\.11\.0\+cu130 there, 2\.13\.0 here"),
        (other("packages", triton="9"), r"triton 3\.6\.0 there, 9 here"),
        (other("packages", transformers="9"), "transformers .* 9 here"),
        (other("packages", peft="9"), "peft .* 9 here"),
        (other("packages", unsloth="9"), "unsloth .* 9 here"),
    ],
)
def test_another_run_is_refused_in_one_line_that_names_what_differs(fresh, difference, tmp_path):
    path = saved(tmp_path, example.empty())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=difference) as caught:
        results.continue_from(path, fresh)
    message = str(caught.value)
    assert message.startswith(f"{path} holds another run: ")
    assert message.endswith("Give another --out, or delete that file.")
    assert "\n" not in message
    assert path.read_bytes() == before


def test_many_differences_are_not_all_listed(tmp_path):
    path = saved(tmp_path, example.empty())
    fresh = example.empty(batch_size=16, seed=1, padded=True, dtype="float32", model="tiny")
    with pytest.raises(ValueError, match="and 2 more") as caught:
        results.continue_from(path, fresh)
    assert str(caught.value).count(" there, ") == 3


def test_a_package_installed_since_is_no_difference_and_is_tried(tmp_path):
    statuses = {("full_unsloth", 64): "unavailable", ("fused_mlp", 64): "oom"}
    before = example.run(seq_lens=(64,), status=statuses)
    before["environment"]["packages"]["unsloth"] = None
    path = saved(tmp_path, before)
    document = results.continue_from(path, example.empty(seq_lens=[64]))
    assert document["environment"]["packages"]["unsloth"] == "2026.10.9"
    assert not results.done(document, "full_unsloth", 64, 0)
    assert results.done(document, "fused_mlp", 64, 0)
    # The other way round, what was measured with the package stays, and its version with it.
    gone = other("packages", unsloth=None)
    document = results.continue_from(saved(tmp_path, example.run()), gone)
    assert results.done(document, "full_unsloth", 64, 0)
    assert document["environment"]["packages"]["unsloth"] == "2026.10.9"


def test_another_commit_may_go_on_but_both_are_named(tmp_path):
    path = saved(tmp_path, example.empty())
    fresh = example.empty()
    fresh["environment"]["git"] = {"commit": "def5678", "dirty": True}
    for _ in range(2):
        document = results.continue_from(path, fresh)
        results.save(path, document)
        git = {"commit": "abc1234 then def5678", "dirty": True}
        assert document["environment"]["git"] == git
