"""Checks that we know a module's class (`families.py`) and that nobody has patched it."""

from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..foreign.originals import why_patched, why_replaced
from ..foreign.ownership import why_not_own_forward
from ..foreign.parallel import own_class
from .families import CALLED, FORMS, KNOWN_TO, METHODS, WHY_NOT_WHOLE
from .forms import LayerForm


def known_form(module: nn.Module, kind: str) -> Any:
    """Return the form of a module's class (`families.py`), None if we do not know it as `kind`."""
    return FORMS[kind].get(_full_name(own_class(module)))


def layer_form(module: nn.Module) -> LayerForm:
    """Return the form of a layer with the names of its modules; in an unknown class, Llama's."""
    return known_form(module, "Layer") or LayerForm()


def why_not_whole(layer: nn.Module) -> str:
    """Return the reason why a layer of a known class does not run as one, "" if it does."""
    return WHY_NOT_WHOLE[_full_name(own_class(layer))]


def inner_norm(layer: nn.Module) -> Any:
    """Return a norm that every layer has, in front of its MLP or behind attention; None for a
    module that is no layer."""
    form = layer_form(layer)
    return getattr(layer, form.before_mlp or form.after_attention, None)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def why_not_class(module: nn.Module, kind: str) -> str | None:
    """Return the reason if calling the module does not run the original forward of a class that we
    know as `kind`."""
    if (reason := why_not_own_forward(module)) is not None:
        return reason
    cls = own_class(module)
    if cls is ModulesToSaveWrapper:
        return "it is trained whole: leave it out of modules_to_save"
    if known_form(module, kind) is None:
        return f"{cls.__name__} is not {KNOWN_TO[kind]} (see fused_lora/docs/support.md)"
    method = METHODS.get(kind, "forward")
    return (
        why_patched(cls)
        or (why_patched(cls, method) if hasattr(cls, method) else None)
        or why_replaced(cls.__module__, *CALLED.get(kind, ()))
    )
