"""Pairwise testing: by default we test enough combinations that any two values of different
parameters meet at least once. `-m exhaustive` tests the others."""

from itertools import combinations, product

import pytest


def pairwise(**values) -> list:
    """Return every combination as a pytest parameter that is a dict. It is marked `exhaustive` if
    others cover its pairs.

    We keep choosing the combination with the most new pairs, and the first of equals, which makes
    the choice the same everywhere.
    """
    everything = list(product(*(range(len(choices)) for choices in values.values())))
    pairs = {one: set(combinations(enumerate(one), 2)) or {one} for one in everything}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(everything, key=lambda one: len(pairs[one] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [
        pytest.param(
            {name: values[name][index] for name, index in zip(values, one, strict=True)},
            marks=() if one in chosen else pytest.mark.exhaustive,
            id="-".join(
                str(values[name][index]).removeprefix("torch.")
                for name, index in zip(values, one, strict=True)
            ),
        )
        for one in everything
    ]
