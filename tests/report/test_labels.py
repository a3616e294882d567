"""Places for labels, worked out by hand on a sheet of 100 by 100 pixels."""

import numpy as np

from report.labels import DISTANCES, places_of

SHEET, NONE = np.array([0, 0, 100, 100]), np.empty((0, 4))


def places(points, *solid, lines=NONE):
    sizes = np.full((len(points), 2), 20)
    return places_of(np.array(points), sizes, SHEET, np.array(lines), np.array([*solid]), 1.0)


def test_a_label_stands_right_of_its_point_or_where_there_is_room():
    def mark(x, y):
        return (x - 2, y - 2, x + 2, y + 2)

    (free,) = places([(50, 50)], mark(50, 50))
    assert (free.far, free.side, free.box.tolist()) == (DISTANCES[0], (1, 0), [[59, 40, 79, 60]])
    (at_the_edge,) = places([(85, 50)], mark(85, 50))
    assert at_the_edge.side == (0, 1) and at_the_edge.is_free is True
    (beside_a_line,) = places([(50, 50)], mark(50, 50), lines=[(60, 0, 62, 100)])
    assert beside_a_line.box[0, 2] <= 60
    # a wall around it, which no line to a label may cross
    walls = [(30, 30, 33, 70), (67, 30, 70, 70), (30, 30, 70, 33), (30, 67, 70, 70)]
    assert places([(50, 50)], mark(50, 50), *walls)[0].is_free is False


def test_labels_of_neighbours_leave_each_other_free():
    points = [(40, 50), (46, 50), (52, 50)]
    found = places(points, *((x - 2, 48, x + 2, 52) for x, _ in points))
    assert all(place.is_free for place in found)
    boxes = [place.box[0] for place in found]
    for n, one in enumerate(boxes):
        for other in boxes[:n]:
            assert (one[:2] >= other[2:]).any() or (one[2:] <= other[:2]).any()
