"""Check a model family that reading/families.py may not know: `python dev/check_family.py glm4`.

Takes a model type, a class of transformers or a config.json. Works offline. For each kind of class
it compares the code that runs, names of classes and annotations aside, with the code of the classes
that we know. It prints the kinds whose code we know, the lines by which each other one differs
from the nearest, and a row of reading/families.py.

Equal code is a strong hint, and no proof: read the forwards before you add the row. Its test
compares losses and gradients with plain PEFT's.
"""

import ast
import difflib
import inspect
import json
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fused_lora.reading import families

ENDS = ("ForCausalLM", "ForConditionalGeneration")
MOST_LINES = 24  # of a difference
THEN = """Add a row to tests/cases/families_case.py, a line to fused_lora/docs/support.md, and run:

python -m pytest tests/fused_lora/adopt/test_families.py \\
    tests/fused_lora/adopt/test_support_table.py -k "{name} or lines\""""


class Found(NamedTuple):
    """A class of the family, and its form if we know its code."""

    name: str
    nearest: str  # the class that we know with this code, or with the code most like it
    difference: list[str]  # lines of a diff from its code; empty: it is the same
    form: Any


def find_class(given: str) -> type:
    """Return the model class of a model type, a class's name or a config.json."""
    config = json.loads(Path(given).read_text()) if given.endswith(".json") else {}
    name = (config.get("architectures") or [config.get("model_type", given)])[0]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, name)
    if not name.endswith(ENDS) or not hasattr(transformers, name):
        raise SystemExit(
            f"{given} names no causal language model of transformers {transformers.__version__}: "
            "give a model type (glm4), a class (Glm4ForCausalLM) or a path to a config.json"
        )
    return getattr(transformers, name)


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


def written(row: Any) -> str:
    """Return a NamedTuple as one writes it: without what its defaults say."""
    given = [
        f"{name}={written(one) if hasattr(one, '_fields') else repr(one)}"
        for name, one in zip(row._fields, row, strict=True)
        if one != type(row)._field_defaults.get(name)
    ]
    return f"{type(row).__name__}({', '.join(given)})"


def main(given: str) -> None:
    cls = find_class(given)
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
    said = textwrap.fill(
        written(row).replace("'", '"') + ",", 100, initial_indent=" " * 4,
        subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    print(
        f"\nfused_lora/reading/families.py:\n\n{said}\n\n{THEN.format(name=cls.__name__.removesuffix(ENDS[0]))}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
