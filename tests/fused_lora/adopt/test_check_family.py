"""dev/check_family.py on families that we know, and on one that we do not."""

import sys
from pathlib import Path

import pytest
from transformers import HeliumConfig

from fused_lora.reading.families import FAMILIES, KINDS

sys.path.append(str(Path(__file__).resolve().parents[3] / "dev"))
import check_family

# One of each form that two families share; each is compared with the others' classes only.
KNOWN = ("llama", "mistral", "qwen3", "olmo3", "gemma", "phi3", "mixtral")


@pytest.mark.parametrize("module", KNOWN)
def test_code_that_we_know_from_another_family_has_its_form(module):
    row = next(one for one in FAMILIES if one.module == module)
    found = {kind: check_family.compare(row.class_of(kind), kind) for kind in KINDS}
    same = {kind: one.form for kind, one in found.items() if one and not one.difference}
    assert same == {kind: getattr(row, KINDS[kind][0]) for kind in same}
    assert {"RMSNorm", "ForCausalLM"} <= same.keys()


def test_a_familys_own_lines_are_shown():
    found = check_family.compare(
        "transformers.models.ministral3.modeling_ministral3.Ministral3Attention", "Attention"
    )
    assert any("get_llama_4_attn_scale" in line for line in found.difference)


@pytest.mark.parametrize("given", ["helium", "config.json"])
def test_the_command_prints_the_kinds_that_we_know_and_the_familys_row(given, capsys, tmp_path):
    if given == "config.json":
        HeliumConfig(attention_bias=True).save_pretrained(tmp_path)
        given = str(tmp_path / given)
    check_family.main(given)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert "HeliumMLP runs the code of LlamaMLP: MLPForm()" in said
    assert "HeliumRMSNorm is not known" in said
    assert 'Family(module="helium", prefix="Helium", attention=None, norm=None)' in said
    assert '-k "Helium or lines"' in said


def test_what_names_no_model_is_refused():
    with pytest.raises(SystemExit, match="names no causal language model"):
        check_family.main("no_such_model")
