"""What does not fit: a call's arguments by name, of which some are changed."""

import pytest


def narrow(t):
    """Without its first column."""
    return t[..., 1:]


def short(t):
    """Without its first row."""
    return t[1:]


def apart(t):
    """A matrix whose rows' elements do not lie side by side."""
    return t.t().contiguous().t()


def on_meta(t):
    return t.to("meta")


def trained(t):
    return t.requires_grad_()


def changed(value, fields, change):
    """A tensor, or named tuples around one, with this change."""
    if not fields:
        return change(value)
    first, *others = fields
    return value._replace(**{first: changed(getattr(value, first), others, change)})


def assert_refused(function, arguments, changes, message):
    """A ValueError, if the arguments have these changes: {"factor" or "of_gate.factor": function}.
    None for a function leaves that argument out."""
    arguments = dict(arguments)
    for path, change in changes.items():
        name, *fields = path.split(".")
        if change is None:
            del arguments[name]
        else:
            arguments[name] = changed(arguments[name], fields, change)
    with pytest.raises(ValueError, match=message):
        function(*arguments.values())
