"""Errors for users, which are one line."""

import pytest


def refused(call, *arguments, **options) -> str:
    """Return the message of the ValueError that a call must raise."""
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert message and "\n" not in message, message
    return message
