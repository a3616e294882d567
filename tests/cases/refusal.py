"""Arguments that do not fit: a call's arguments by name, some of them changed."""

import pytest


def narrow(t):
    """Return t without its first column."""
    return t[..., 1:]


def short(t):
    """Return t without its first row."""
    return t[1:]


def apart(t):
    """Return a copy of t whose rows are not contiguous: it is column-major."""
    return t.t().contiguous().t()


def on_meta(t):
    return t.to("meta")


def trained(t):
    return t.requires_grad_()


def changed(value, fields, change):
    """Return a tensor, or tuples around one, with this change. A field is a name or a place."""
    if not fields:
        return change(value)
    first, *others = fields
    if first.isdigit():
        place = int(first)
        return *value[:place], changed(value[place], others, change), *value[place + 1 :]
    return value._replace(**{first: changed(getattr(value, first), others, change)})


def assert_refused(function, arguments, changes, message):
    """Check that these changes to the arguments raise a ValueError.

    `changes` is {"factor" or "gate_product.factor": function}. None instead of a function leaves
    that argument out.
    """
    arguments = dict(arguments)
    for path, change in changes.items():
        name, *fields = path.split(".")
        if change is None:
            del arguments[name]
        else:
            arguments[name] = changed(arguments[name], fields, change)
    with pytest.raises(ValueError, match=message):
        function(*arguments.values())
