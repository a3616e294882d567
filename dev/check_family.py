"""Check a model family that reading/families.py may not know: `python dev/check_family.py glm4`.

Takes a model type, a class of transformers or a config.json. Works offline. For each kind of class
it compares the code that runs, names of classes and annotations aside, with the code of the classes
that we know. Then it adds the forms it found to the table, for this process only, fuses a tiny
model and prints

    the kinds whose code we know, and the lines by which each other one differs from the nearest
    a row of reading/families.py
    a row of tests/cases/families_case.py
    a row of fused_lora/docs/support.md, as the tiny model answers
    the tests to run with them

Equal code is a strong hint, and no proof: read the forwards before you add the row. Its test
compares losses and gradients with plain PEFT's.
"""

import ast
import difflib
import inspect
import json
import os
import pprint
import re
import sys
import textwrap
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import families_case as cases  # noqa: E402
from cases.fused_case import step  # noqa: E402

from fused_lora import Fusion, fuse, unfuse  # noqa: E402
from fused_lora.reading import families, known  # noqa: E402

ENDS = ("ForCausalLM", "ForConditionalGeneration")
MOST_LINES = 24  # of a difference
WIDTH = 76  # of a value in families_case.py


class Found(NamedTuple):
    """A class of the family, and its form if we know its code."""

    name: str
    nearest: str  # the class that we know with this code, or with the code most like it
    difference: list[str]  # lines of a diff from its code; empty: it is the same
    form: Any


def find_class(given: str) -> tuple[type, dict]:
    """Return a model class, and the settings of its config.json, if that was given."""
    config = json.loads(Path(given).read_text()) if given.endswith(".json") else {}
    name = (config.get("architectures") or [config.get("model_type", given)])[0]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, name)
    if not name.endswith(ENDS) or not hasattr(transformers, name):
        raise SystemExit(
            f"{given} names no causal language model of transformers {transformers.__version__}: "
            "give a model type (glm4), a class (Glm4ForCausalLM) or a path to a config.json"
        )
    return getattr(transformers, name), config


def code_of(cls: Any, kind: str) -> list[str]:
    """Return the lines of what runs when the class is called, with its family's name taken out."""
    module = sys.modules[cls.__module__]
    called = [getattr(module, name, None) for name in families.CALLED.get(kind, ())]
    functions = [cls.forward, getattr(cls, families.METHODS.get(kind, "_"), None), *called]
    lines = []
    for function in functions:
        if function is not None:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
            lines += ast.unparse(_Bare().visit(tree)).splitlines()
    return lines


class _Bare(ast.NodeTransformer):
    """Removes decorators, annotations and docstrings, and what names a class."""

    def visit_FunctionDef(self, node):
        node.decorator_list, node.returns = [], None
        if ast.get_docstring(node):
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=node.lineno))

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id.endswith(("Past", "PastAndAux")):
            node.func.id = "Output"
        return self.generic_visit(node)


def class_named(name: str) -> Any:
    """Return a class by its full name, None if this transformers has no such class."""
    module, _, name = name.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def compare(name: str, kind: str) -> Found | None:
    """Compare a class with those that we know as `kind`, but not with itself."""
    if (cls := class_named(name)) is None:
        return None
    code, best = code_of(cls, kind), None
    for other, form in families.FORMS[kind].items():
        like = class_named(other)
        if like is None or like is cls or (kind == "ForCausalLM" and not other.endswith(ENDS[0])):
            continue
        difference = [
            line for line in difflib.unified_diff(code_of(like, kind), code, lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]  # fmt: skip
        if best is None or len(difference) < len(best.difference):
            best = Found(name.rpartition(".")[2], like.__name__, difference, form)
        if not difference:
            break
    return best


def check(cls: type) -> tuple[families.Family, dict[str, Found]]:
    """Return a row for the class's family, with the forms whose code we know, and what was found.

    A kind that the family does not have is missing from what was found.
    """
    module = cls.__module__.split(".")[-2]
    prefix = cls.__name__.removesuffix(ENDS[0]).removesuffix(ENDS[1])
    row = families.Family(module, prefix)
    modeling = sys.modules[cls.__module__]
    if not hasattr(modeling, f"{prefix}DecoderLayer") and hasattr(
        modeling, f"{prefix}TextDecoderLayer"
    ):
        row = row._replace(prefix=f"{prefix}Text")
    names = {} if cls.__name__ == f"{row.prefix}ForCausalLM" else {"ForCausalLM": cls.__name__}
    if not hasattr(modeling, f"{row.prefix}RMSNorm") and hasattr(modeling, f"{prefix}RMSNorm"):
        names["RMSNorm"] = f"{prefix}RMSNorm"
    row = row._replace(names=names)
    found = {}
    for kind, (field, _) in families.KINDS.items():
        one = compare(row.class_of(kind), kind)
        if one is not None:
            found[kind] = one
        row = _with(row, field, one.form if one and not one.difference else None)
    # whole layers take Llama's kinds of classes, and no others
    default = families.Family._field_defaults
    usual = [field for field, _ in families.KINDS.values() if default[field] is not None]
    whole = all(getattr(row, field) for field in usual) and len(found) == len(usual)
    return row._replace(whole=whole), found


def _with(row: families.Family, field: str, form: Any) -> families.Family:
    return families.Family(**(row._asdict() | {field: form}))


def _only(*parts: str) -> Fusion:
    switches: dict[str, Any] = dict.fromkeys(parts, True)
    return Fusion(**switches)


def add(row: families.Family) -> None:
    """Add a family to the table, in this process."""
    forms = families.FORMS
    for kind, (field, _) in families.KINDS.items():
        if (form := getattr(row, field)) is not None:
            forms[kind][row.class_of(kind)] = form
    if row.layer is not None:
        families.WHY_NOT_WHOLE[row.class_of("Layer")] = row.why_not_whole()
        if row.layer.before_mlp:
            forms["NormedLayer"][row.class_of("Layer")] = row.layer
    known._form_of.cache_clear()


def case_of(prefix: str, config: dict, model: Any) -> cases.Family:
    """Return the row of tests/cases/families_case.py that this tiny model passes."""
    done = fuse(model, _only(*cases.PARTS[:-1]), strict=False)
    functions = step(model.train(), length=6).functions
    unfuse(model)
    start = "base_model.model.model."
    fused, others = {}, {}
    for part, usual in cases.USUAL.items():
        found = [one.removeprefix(start) for one in done.fused.get(part, ())]
        by_layer = [
            [one.removeprefix(own) for one in found if one.startswith(own)]
            for own in ("layers.0.", "layers.1.")
        ]
        both = [one for one in by_layer[0] if one in by_layer[1]]
        own = [f"{n}:{one}" for n in (0, 1) for one in by_layer[n] if one not in both]
        if sorted(both) != sorted(usual) or own:
            fused[part] = (*both, *own)
        others[part] = [one for one in found if not one.startswith("layers.")]
    last_norm = others["rms_norm"].pop() if others["rms_norm"] else "norm"
    row = cases.Family(
        prefix, config, fused=fused, last_norm=last_norm, left=done.left,
        others={part: tuple(f"model.{one}" for one in found) for part, found in others.items()
                if found},
        functions={one: functions[one] for one in cases.OF_ATTENTION if one in functions},
    )  # fmt: skip
    try:
        left = fuse(model, Fusion(layer=True)).left
    except ValueError as error:
        why_not = str(error).removeprefix("fuse: layer=True fuses no module: ")
        return replace(row, not_whole=why_not.removesuffix("; leave layer out"))
    functions = step(model, length=6).functions
    unfuse(model)
    return replace(
        row,
        in_layers={one: functions[one] for one in functions if one != "DecoderLayer"},
        in_parts="".join(left[where] for where in left.keys() - row.left.keys()),
    )


def written(row: Any) -> str:
    """Return a NamedTuple as one writes it: without what its defaults say."""
    given = [
        f"{name}={written(one) if hasattr(one, '_fields') else repr(one)}"
        for name, one in zip(row._fields, row, strict=True)
        if one != type(row)._field_defaults.get(name)
    ]
    return f"{type(row).__name__}({', '.join(given)})"


def written_case(name: str, row: cases.Family) -> str:
    """Return a row of tests/cases/families_case.py, in lines that fit."""
    lines = []
    for each in fields(row)[1:]:
        given = getattr(row, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name == "left" and given:
            lines += ["left={", *(f'    "{k}":\n        "{first_words(v)}",'
                                  for k, v in given.items()), "},"]  # fmt: skip
        elif isinstance(given, str) and given != usual:
            lines.append(f'{each.name}="{first_words(given)}",')
        elif given != usual:
            said = pprint.pformat(given, width=WIDTH, sort_dicts=False).replace("'", '"')
            lines += f"{each.name}={said},".splitlines()
    row_of = [f'"{name}": Family(', f'    "{row.classes}",']
    return "\n".join([*row_of, *textwrap.indent("\n".join(lines), " " * 4).splitlines(), "),"])


def first_words(reason: str) -> str:
    """Return the beginning of a reason, which fits on a line: tests look for it in what is said."""
    return textwrap.wrap(re.split(r", | \(", reason)[0], WIDTH)[0]


def main(given: str) -> None:
    cls, config = find_class(given)
    row, found = check(cls)
    print(f"{cls.__name__}, {cls.__module__} of transformers {transformers.__version__}\n")
    if any(one.module == row.module for one in families.FAMILIES):
        print("reading/families.py has this family. Here it is compared with all others.\n")
    for kind in families.KINDS:
        one = found.get(kind)
        if one is None:
            print(f"{kind:14}no class {row.class_of(kind).rpartition('.')[2]}")
        elif not one.difference:
            print(f"{kind:14}{one.name} runs the code of {one.nearest}: {written(one.form)}")
        else:
            print(f"{kind:14}{one.name} is not known. {one.nearest} is nearest:")
            print(textwrap.indent("\n".join(one.difference[:MOST_LINES]), " " * 16))
            if (more := len(one.difference) - MOST_LINES) > 0:
                print(f"{'':16}and {more} more lines")
    add(row)
    settings = {
        key: one for key, one in config.items()
        if key not in cases.TEXT and key not in ("architectures", "torch_dtype", "dtype")
    }  # fmt: skip
    name = cls.__name__.removesuffix(ENDS[0])
    said = textwrap.fill(
        written(row).replace("'", '"') + ",", 100, initial_indent=" " * 4,
        subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    print(f"\nfused_lora/reading/families.py:\n\n{said}\n")
    config_class: Any = cls.config_class  # type: ignore[attr-defined]
    usual = config_class().to_dict() | settings
    settings |= {key: 0.0 for key, one in usual.items() if key.endswith("dropout") and one}
    kinds = [*dict.fromkeys(usual.get("layer_types") or ())]
    if len(kinds) > 1 or "layer_types" in settings:
        settings["layer_types"] = (kinds * 2)[:2]
    try:
        model = cases.Family(name, settings).peft_model(DEVICE)
        case = case_of(name, settings, model)
    except Exception as error:
        said = textwrap.shorten(f"A tiny model of these sizes does not run ({error}", 300)
        print(f"{said}): find the settings it needs.")
        return
    print("tests/cases/families_case.py, to be checked:\n")
    print(textwrap.indent(written_case(name, case), " " * 4))
    outcomes = [cases.outcome(model, part) for part in cases.PARTS]
    if set(outcomes) == {"fused"}:
        print("\nfused_lora/docs/support.md, in the line of families that fuse completely:")
        print(f"\n · {name}")
    else:
        print(f"\nfused_lora/docs/support.md:\n\n| {name} | {' | '.join(outcomes)} |")
    files = "tests/fused_lora/adopt/test_families.py tests/fused_lora/adopt/test_support_table.py"
    print(f'\nThen run:\n\npython -m pytest {files} -k "{name} or lines"')


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
