"""What every picture must hold to: its texts can be read, and its labels leave its points free."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

SPARE = 10  # pixels to the edge: another machine's letters may be a little wider


def assert_readable(picture: Figure) -> None:
    """Places every text of a picture: none is cut off, and none covers another."""
    picture.draw_without_rendering()
    texts = {t for t in picture.findobj(Text) if t.get_text().strip() and t.get_visible()}
    texts = [*(texts - _beyond_the_axes(picture))]
    # padded by -1: letters do not touch where boxes do
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    low, high = (np.array([getattr(box, end) for box in boxes]) for end in ("min", "max"))
    outside = (low < SPARE).any(1) | (high > picture.bbox.max - SPARE).any(1)
    assert not [texts[i].get_text() for i in np.flatnonzero(outside)], "cut off"
    covers = ((low[:, None] < high) & (high[:, None] > low)).all(2)
    pairs = [(texts[i], texts[j]) for i, j in np.argwhere(np.triu(covers, 1))]
    solid = [pair for pair in pairs if not any(text.get_alpha() for text in pair)]
    assert not [(one.get_text(), other.get_text()) for one, other in solid], "one on another"


def _beyond_the_axes(picture: Figure) -> set[Text]:
    """The labels of ticks that matplotlib keeps for values that a panel does not reach."""
    found = set()
    for axis in (axis for axes in picture.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = axis.get_major_ticks()
        found |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    return found


def assert_no_label_on(places, axes: Axes) -> None:
    """No label of a panel stands on one of these places; `places` are in its own units."""
    on_screen = axes.transData.transform(list(places))
    for text in axes.texts:
        if text.get_text() and not text.get_rotation():
            box = text.get_window_extent()
            assert not [place for place in on_screen if box.contains(*place)], text.get_text()
