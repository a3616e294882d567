"""The records of results.json and of its variants."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from bench import results
from bench.records import Cell
from report.committed import OF_NO_RUN
from variants import (
    EXPERIMENT_ON_NF4,
    OLD_IDS,
    RETIRED,
    SUITES,
    VARIANTS,
    counterpart,
    title_of,
    variant_of,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs").rglob("*.json*"))
PUBLISHED = [ROOT / "results.json", *(p for p in FILES if not p.name.startswith(OF_NO_RUN))]


NEWER = {
    "accumulate": 1,
    "documents": False,
    "base": "bf16",
    "gpus": 1,
}  # fields that the first files lack


def bytes_of(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_every_published_run_loads_and_nothing_of_it_is_lost(path):
    data = bytes_of(path)
    again = json.loads(msgspec.json.encode(results.decode(data)))
    before = json.loads(data, object_hook=lambda found: {**found, **with_todays_id(found)})
    assert again == before
    for variant in before["experiment"]["variants"]:
        assert title_of(variant) != variant


def with_todays_id(found):
    """Return the ids of a part of a file as of today, and the fields that the file lacks."""
    if isinstance(found.get("variant"), str):
        usual = {"card": None, "gpus": []} if "kernel_ms" in found else {}
        newer = {name: found.get(name, value) for name, value in usual.items()}
        return {"variant": OLD_IDS.get(found["variant"], found["variant"]), **newer}
    if "variants" in found:
        ids = [OLD_IDS.get(id, id) for id in found["variants"]]
        newer = {name: found.get(name, usual) for name, usual in NEWER.items()}
        return {"variants": ids, **newer}
    if "schema_version" in found:
        return {"stages_s": found.get("stages_s"), "other_floors": found.get("other_floors", {})}
    return {}


def test_the_published_runs_are_found():
    assert {"results.json", "suite.json.gz"} <= {path.name for path in PUBLISHED}


def test_an_id_of_an_earlier_version_is_read_as_todays():
    assert Cell("unsloth_full", 64, 1, "oom").variant == "unsloth_plain_checkpointing"
    assert set(OLD_IDS.values()) <= set(VARIANTS)
    assert not {*OLD_IDS, *RETIRED} & set(VARIANTS)


def test_a_retired_variant_and_one_of_a_newer_version_have_a_title_and_a_baseline():
    retired, newer = variant_of("fused_bordered_no_checkpointing"), variant_of("fused_more")
    assert retired.title == "bordered weights without checkpointing"
    assert retired.baseline.id == "vanilla_peft_no_checkpointing"
    assert VARIANTS[retired.instead]
    assert (newer.title, newer.baseline.id, newer.recipe) == ("fused_more", "vanilla_peft", None)


def test_every_variant_says_what_it_is():
    titles = [variant.title for variant in VARIANTS.values()]
    assert len(set(titles)) == len(titles)
    for id, variant in VARIANTS.items():
        assert variant.id == id and variant.recipe.look == variant.look
        assert (variant.recipe.checkpointing != "none") is variant.checkpoints
        assert variant.baseline.checkpoints is variant.again.checkpoints is variant.checkpoints
        assert counterpart(id, variant.checkpoints) is variant
    assert {id for id, variant in VARIANTS.items() if variant.is_baseline} == {
        f"vanilla_peft{again}{end}" for again in ("", "_again") for end in ("", "_no_checkpointing")
    }


def test_the_noise_is_measured_last_in_every_block():
    suites = [SUITES[name] for name in SUITES.keys() - {"published"}]  # one round, no noise
    for suite in (*suites, EXPERIMENT_ON_NF4):
        for checkpoints in {VARIANTS[id].checkpoints for id in suite}:
            block = [id for id in suite if VARIANTS[id].checkpoints is checkpoints]
            assert VARIANTS[block[0]].baseline.id == block[0]
            assert VARIANTS[block[0]].again.id == block[-1]
