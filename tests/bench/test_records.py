"""The records of results.json and of its variants."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from bench import results
from report.committed import OF_NO_RUN
from variants import EXPERIMENT_ON_NF4, SUITES, VARIANTS, counterpart, title_of, variant_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs").rglob("*.json*"))
PUBLISHED = [ROOT / "results.json", *(p for p in FILES if not p.name.startswith(OF_NO_RUN))]
# fields that the first files lack
NEWER = {"accumulate": 1, "documents": False, "base": "bf16", "gpus": 1}


def bytes_of(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_every_published_run_loads_and_nothing_of_it_is_lost(path):
    data = bytes_of(path)
    again = json.loads(msgspec.json.encode(results.decode(data)))
    before = json.loads(data, object_hook=lambda found: {**newer_fields(found), **found})
    assert again == before
    for variant in before["experiment"]["variants"]:
        assert title_of(variant) != variant


def newer_fields(found):
    """Return the fields that a part of an earlier file lacks, as they are read."""
    if "kernel_ms" in found:
        return {"card": None, "gpus": []}
    if "variants" in found:
        return NEWER
    if "dropout" in found:
        return {"dora": False}
    return {"stages_s": None, "other_floors": {}} if "schema_version" in found else {}


def test_the_published_runs_are_found():
    assert {"results.json", "suite.json.gz"} <= {path.name for path in PUBLISHED}


def test_a_variant_of_another_version_has_a_title_and_a_baseline():
    retired, newer = variant_of("fused_bordered_no_checkpointing"), variant_of("fused_more")
    assert retired.title == "fused bordered without checkpointing"
    assert retired.baseline.id == "vanilla_peft_no_checkpointing"
    assert (newer.title, newer.baseline.id, newer.recipe) == ("fused more", "vanilla_peft", None)


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
