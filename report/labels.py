"""Places for the labels of points: near, and on nothing else. All in pixels of a picture."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import NamedTuple

import numpy as np

DISTANCES = (9, 17, 27, 39, 53, 69, 87, 107, 129, 153)  # in points, where a label is tried
SIDES = (
    *((1, 0), (1, 1), (0, 1), (1, -1), (0, -1), (-1, 1), (-1, 0), (-1, -1)),
    *((0.5, 1), (1, 0.5), (-0.5, 1), (-1, 0.5), (0.5, -1), (1, -0.5), (-0.5, -1), (-1, -0.5)),
)
ORDERS = 60  # in which labels are placed: those that come later have less room
MARGIN = 6  # around a label
LINE = 3  # half of the room that a line to a label takes

Boxes = np.ndarray  # [number, 4]: left, lower, right, upper


class Place(NamedTuple):
    """A label's place. far: how far its point is, in points, to the side `side`; of none that is
    free, the furthest."""

    far: float
    side: tuple[float, float]
    box: Boxes
    leader: Boxes
    is_free: bool


def places_of(
    points: np.ndarray, sizes: np.ndarray, inside: np.ndarray, lines: Boxes, solid: Boxes,
    to_pixels: float,
) -> list[Place]:  # fmt: skip
    """Return a place for each point's label, all of them as near as any of a few orders has it.
    A label is on none of `lines` and `solid`, and the line to it crosses nothing that is solid,
    nor another label or its line.

    points: [number, 2]. sizes: of the labels, [number, 2]. inside: the box that they stay in.
    """
    best: list[Place] = []
    least, order, chance = float("inf"), list(range(len(points))), Random(0)
    for _ in range(ORDERS):
        found: dict[int, Place] = {}
        taken = solid
        for number in order:
            place = _nearest(points[number], sizes[number], inside, lines, taken, to_pixels)
            found[number] = place
            grown = place.box + MARGIN * np.array((-1, -1, 1, 1))
            taken = np.concatenate([taken, grown, place.leader])
        cost = sum(place.far + 1000 * (not place.is_free) for place in found.values())
        if cost < least:
            least, best = cost, [found[number] for number in range(len(points))]
        chance.shuffle(order)
    return best


def _nearest(
    point: np.ndarray, size: np.ndarray, inside: np.ndarray, lines: Boxes, solid: Boxes,
    to_pixels: float,
) -> Place:  # fmt: skip
    around = ((solid[:, :2] <= point) & (solid[:, 2:] >= point)).all(1)
    others, everything = solid[~around], np.concatenate([lines, solid])
    for far, side in product(DISTANCES, SIDES):
        anchor = point + to_pixels * far * np.array(side)
        low = anchor - size * (1 - np.round(0.9 * np.array(side))) / 2  # beside it is centred
        box = np.concatenate([low, low + size])[None]
        along = point + np.linspace(0.25, 1, 24)[:, None] * (anchor - point)
        leader = np.concatenate([along - LINE, along + LINE], axis=1)
        fits_in = (box[0, :2] > inside[:2]).all() and (box[0, 2:] < inside[2:]).all()
        if fits_in and not _meet(box, everything) and not _meet(leader, others):
            return Place(far, side, box, leader, True)
    return Place(far, side, box, leader, False)


def _meet(some: Boxes, others: Boxes) -> bool:
    low, high = some[:, None, :2], some[:, None, 2:]
    return bool(((low < others[None, :, 2:]) & (high > others[None, :, :2])).all(2).any())
