"""dev/check_family.py on families that we know, and on one that we do not."""

import copy
import re
import sys
from pathlib import Path

import pytest
import test_families
import test_support_table
from cases import families_case
from transformers import HeliumConfig

from fused_lora.reading import families
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


@pytest.fixture
def tables_of_its_own(monkeypatch):
    """The command adds a family to the tables, and known.py remembers what it looked up."""
    for name in ("FORMS", "WHY_NOT_WHOLE"):
        table = copy.deepcopy(getattr(families, name))
        for module in (families, check_family.known):
            monkeypatch.setattr(module, name, table)
    yield
    check_family.known._form_of.cache_clear()


@pytest.mark.slow("config.json")
@pytest.mark.parametrize("given", ["helium", "config.json", "glm4"])
def test_what_the_command_prints_passes_its_tests_as_pasted(
    given, capsys, monkeypatch, tmp_path, device, tables_of_its_own
):
    if is_file := given == "config.json":
        HeliumConfig(attention_bias=True).save_pretrained(tmp_path)
        given = str(tmp_path / given)
    check_family.main(given)
    said = capsys.readouterr().out
    family, case, page, command = re.split(r"\n\n(?=fused_lora|tests|Then)", said)[-4:]
    assert max(len(line) for one in (family, case) for line in one.splitlines()) <= 100
    if given != "glm4":
        assert "HeliumMLP runs the code of LlamaMLP: MLPForm()" in said
        assert "HeliumRMSNorm is not known" in said
        assert 'Family(module="helium", prefix="Helium", attention=None, norm=None)' in family
    ((name, row),) = eval(f"{{{case.partition(':')[2]}}}", vars(families_case)).items()
    assert ("attention_bias" in row.config) is is_file
    assert f'-k "{name} or lines"' in command
    row_of_page = page.splitlines()[-1]
    lines = [row_of_page, f"**Families that fuse completely:** Llama{row_of_page}"]
    monkeypatch.setattr(test_support_table, "page_lines", lambda: lines)
    monkeypatch.setitem(test_support_table.CASES, name, row.peft_model)
    test_support_table.test_the_table_of_what_works_with_what(name, device)
    monkeypatch.setitem(test_families.FAMILIES, name, row)
    test_families.test_layers_run_whole_and_right_or_say_what_they_are(name, device)
    test_families.test_each_part_fuses_its_modules_and_trains_and_generates_as_plain_peft_does(
        name, device
    )


def test_what_names_no_model_is_refused():
    with pytest.raises(SystemExit, match="names no causal language model"):
        check_family.main("no_such_model")
