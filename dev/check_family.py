"""Check a model family that adopt/families.py may not know yet: `python dev/check_family.py glm4`.

Takes a model type, a class of transformers or a config.json. Works offline. For each kind of class
it compares the code that runs, names of classes and annotations aside, with the code of the classes
that we know. Then it adds the forms it found to the table, for this process only, fuses a tiny
model and prints

    the kinds whose code we know, and the lines by which each other one differs from the nearest
    a row of adopt/families.py
    a row of tests/cases/families_case.py
    a row of docs/support.md, as the tiny model answers

Equal code is a strong hint, and no proof: read the forwards before you add the row. Its test
compares losses and gradients with plain PEFT's.
"""

import ast
import difflib
import inspect
import json
import os
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["TRITON_INTERPRET"] = "1"  # `fuse` asks whether kernels can run; none does here

from cases import families_case as cases  # noqa: E402

from fused_lora import Fusion, fuse, unfuse  # noqa: E402
from fused_lora.adopt import families, known  # noqa: E402

PARTS = ("mlp", "attention", "rope", "rms_norm", "cross_entropy", "layer")
ENDS = ("ForCausalLM", "ForConditionalGeneration")
MOST_LINES = 24  # of a difference


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
    called = [getattr(module, name, None) for name in known.CALLED.get(kind, ())]
    functions = [cls.forward, getattr(cls, known.METHODS.get(kind, "_"), None), *called]
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


def cells(model: Any) -> list[str]:
    """Return how much of a model each part fuses, as docs/support.md says it."""
    found = []
    for part in PARTS:
        try:
            left = fuse(model, _only(part)).left
        except ValueError:
            found.append("–")
        else:
            unfuse(model)
            found.append("some" if left else "fused")
    return found


def written(row: Any) -> str:
    """Return a NamedTuple as one writes it: without what its defaults say."""
    given = [
        f"{name}={written(one) if hasattr(one, '_fields') else repr(one)}"
        for name, one in zip(row._fields, row, strict=True)
        if one != type(row)._field_defaults.get(name)
    ]
    return f"{type(row).__name__}({', '.join(given)})"


def case_of(name: str, prefix: str, config: dict, model: Any) -> str:
    """Return a row of tests/cases/families_case.py."""
    start = "base_model.model.model.layers."
    done = fuse(model, _only(*PARTS[:-1]), strict=False)
    unfuse(model)
    fused = {}
    for part, usual in cases.USUAL.items():
        found = [one.removeprefix(start) for one in done.fused.get(part, ())]
        by_layer = [[one[2:] for one in found if one.startswith(f"{n}.")] for n in (0, 1)]
        both = [one for one in by_layer[0] if one in by_layer[1]]
        own = [f"{n}:{one}" for n in (0, 1) for one in by_layer[n] if one not in both]
        if sorted(both) != sorted(usual) or own:
            fused[part] = (*both, *own)
    why_not = ""
    try:
        fuse(model, Fusion(layer=True))
        unfuse(model)
    except ValueError as error:
        why_not = str(error).removeprefix("fuse: layer=True fuses no module: ")
        why_not = why_not.removesuffix("; leave layer out")
    lines = [f'"{name}": Family(', f'    "{prefix}",']
    lines += [f"    {config},"] if config else []
    lines += [f"    fused={fused},"] if fused else []
    lines += ["    left={", *(f'        "{k}": "{v}",' for k, v in done.left.items()), "    },"]
    lines += [f'    not_whole="{why_not}",'] if why_not else []
    return "\n".join([*lines, "),"])


def main(given: str) -> None:
    cls, config = find_class(given)
    row, found = check(cls)
    print(f"{cls.__name__}, {cls.__module__} of transformers {transformers.__version__}\n")
    if any(one.module == row.module for one in families.FAMILIES):
        print("adopt/families.py has this family. Here it is compared with all others.\n")
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
    if "layer_types" in settings:
        settings["layer_types"] = [*dict.fromkeys(settings["layer_types"])] * 2
        settings["layer_types"] = settings["layer_types"][:2]
    prefix = cls.__name__.removesuffix(ENDS[0])
    print(f"\nadopt/families.py:\n\n    {written(row)},\n")
    try:
        model = cases.Family(prefix, settings).peft_model("cpu")
    except Exception as error:
        print(f"A tiny model of these sizes cannot be built ({error}): find the settings it needs.")
        return
    print("tests/cases/families_case.py, to be checked:\n")
    print(textwrap.indent(case_of(cls.__name__, prefix, settings, model), "    "))
    print(f"\ndocs/support.md:\n\n| {prefix} | {' | '.join(cells(model))} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
