"""Of all combinations of a few parameters those that are tried by default: every two values of
different parameters together at least once. The others are tried under `-m exhaustive`."""

from itertools import combinations, product

import pytest


def pairwise(**values) -> list:
    """Every combination as a dict, a parameter for pytest, marked `exhaustive` where others cover
    its pairs.

    Each combination is chosen that brings the most new pairs, the first of equals: the choice is
    the same everywhere.
    """
    everything = list(product(*(range(len(of_one)) for of_one in values.values())))
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
