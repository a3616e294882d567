"""Excalidraw's elements: text in boxes, and arrows bound to them at both ends."""

import hashlib
from typing import Any

# fill, line, its style and width; tensors have round corners, calls have not
STYLES = {
    "frozen weight": ("#dee2e6", "#495057", "solid", 1),
    "adapter": ("#ffe3a3", "#8f5b00", "solid", 1),
    "activation, saved": ("#b9d9f3", "#0b4f8a", "solid", 2),
    "activation, not saved": ("#ffffff", "#0b4f8a", "dashed", 1),
    "activation, recomputed": ("#e4f1fb", "#0b4f8a", "dashed", 1),
    "gradient": ("#f3d3e6", "#8a2c6a", "solid", 1),
    "in memory, this program's tile": ("#d8f5a2", "#3f6212", "solid", 2),
    "in memory, other programs' tiles": ("#ffffff", "#868e96", "solid", 1),
    "in registers, this program's": ("#f1fad9", "#3f6212", "dashed", 1),
    "a program": ("#fafafa", "#868e96", "dashed", 1),
    "plain": ("#f8f9fa", "#343a40", "solid", 1),
    "matrix product, or GEMM": ("#c4e8dc", "#00664f", "solid", 1),
    "cast, fp32 and bf16": ("#e5dbff", "#5f3dc4", "solid", 1),
    "pass, elementwise": ("#f1f3f5", "#495057", "solid", 1),
    "Triton kernel": ("#ffc2a1", "#b33a00", "solid", 4),
}
CALL_KINDS = list(STYLES)[-4:]  # of calls
AXES = (("x", "width"), ("y", "height"))
INK, GRAY, NUNITO, CASCADIA, LINE_HEIGHT, GAP = "#1e1e1e", "#495057", 6, 3, 1.35, 2
LOOK = dict(angle=0, strokeColor=INK, backgroundColor="transparent", fillStyle="solid")
LOOK |= dict(strokeWidth=1, strokeStyle="solid", roughness=0, roundness=None, opacity=100)
STATE = dict(version=1, updated=1, isDeleted=False, locked=False, link=None, frameId=None)


def line_width(line: str) -> float:
    """Return the width in font sizes, a little more than Nunito takes."""
    widths = dict.fromkeys(" .,:;'()[]fijlrt", 0.34) | dict.fromkeys("mwMW", 0.9)
    widths |= dict.fromkeys("0123456789", 0.6)
    return sum(widths.get(c, 0.75 if c.isupper() else 0.57) for c in line)


def wrap(text: str, width: float, font_size=16) -> str:
    """Break a text into lines of at most that width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font_size * line_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


class Canvas:
    """Excalidraw's elements by id, relative to the canvas's corner. `place` makes ids unique."""

    def __init__(self, place: int):
        self.place = place
        self.elements: dict[str, dict] = {}

    def add(self, id: str, type: str, x, y, width, height, **more) -> dict:
        assert id not in self.elements, id
        full_id = f"{self.place} {id}"
        seed = int(hashlib.sha256(full_id.encode()).hexdigest()[:7], 16)
        place = dict(x=x, y=y, width=width, height=height, seed=seed, versionNonce=seed)
        links: dict[str, Any] = dict(groupIds=[], boundElements=[])
        self.elements[id] = dict(id=full_id, type=type) | place | LOOK | STATE | links | more
        return self.elements[id]

    def text(self, x, y, text: str, font_size=16, id="", **more) -> dict:
        lines = text.split("\n")
        is_code = more.pop("is_code", False)  # each letter is as wide as the next
        color = more.pop("color", INK)
        width = font_size * max(map(len if is_code else line_width, lines))
        width *= 0.6 if is_code else 1
        height = font_size * LINE_HEIGHT * len(lines)
        align = dict(textAlign="left", verticalAlign="top", containerId=None)
        if more:
            x, y = x - width / 2, y - height / 2
            align = dict(textAlign="center", verticalAlign="middle")
        family = CASCADIA if is_code else NUNITO
        font = dict(fontSize=font_size, fontFamily=family, lineHeight=LINE_HEIGHT)
        more |= dict(text=text, originalText=text, strokeColor=color, **align, **font)
        return self.add(id or f"text {x} {y}", "text", x, y, width, height, **more)

    def box(self, id: str, x, y, width, height, style, text: str, group=None, font_size=16) -> str:
        fill, stroke, dash, thickness = STYLES[style]
        more: dict[str, Any] = dict(groupIds=[f"{self.place} {group}"] if group else [])
        more |= dict(backgroundColor=fill, strokeColor=stroke, strokeStyle=dash)
        more |= dict(strokeWidth=thickness, roundness=None if style in CALL_KINDS else {"type": 3})
        self.add(id, "rectangle", x, y, width, height, **more)
        if text:
            self.label(id, text, font_size)
        return id

    def label(self, id: str, text: str, font_size=16, *, is_title=False) -> None:
        """Write in the middle of a box, or at its top, and bind the text to it."""
        box = self.elements[id]
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        if is_title:
            middle = middle[0], box["y"] + 6 + font_size * LINE_HEIGHT / 2
        inside = dict(containerId=box["id"], groupIds=box["groupIds"])
        label = self.text(*middle, text, font_size, f"{id} text", **inside)
        label["verticalAlign"] = "top" if is_title else "middle"
        box["boundElements"].append({"id": label["id"], "type": "text"})

    def arrow(self, start, end, *corners) -> None:
        """Draw an arrow from box to box: straight if they face each other, else along the axes with
        corners."""
        a, b = self.elements[start], self.elements[end]
        middle = [(max(a[p], b[p]) + min(a[p] + a[q], b[p] + b[q])) / 2 for p, q in AXES]
        via: list[Any] = list(corners) or [middle]
        first, last = edge_point(a, *via[0]), edge_point(b, *via[-1])
        points = [first, *(via if corners else ()), last]
        spans = [max(axis) - min(axis) for axis in zip(*points, strict=True)]
        path = dict(points=[[x - first[0], y - first[1]] for x, y in points], elbowed=False)
        path |= dict(startArrowhead=None, endArrowhead="triangle", lastCommittedPoint=None)
        path |= dict(startBinding=bind(a, points[1], first), endBinding=bind(b, points[-2], last))
        arrow = self.add(f"{start} > {end}", "arrow", *first, *spans, **path)
        for box in (a, b):
            box["boundElements"].append({"id": arrow["id"], "type": "arrow"})

    def strip(self, right: int, down: int, bytes_per_px: float, parts: list) -> int:
        """Draw boxes side by side, as wide as their bytes. Return where they end."""
        for n, (style, text, count) in enumerate(parts):
            width = max(round(count / bytes_per_px, -1), 60)
            self.box(f"strip {down} {n}", right, down, width, 60, style, text, None, 14)
            right += width
        return right

    def frame(self, name: str, x, y, width, height) -> list[dict]:
        """Put everything drawn so far into a frame with its corner at (x, y)."""
        frame = self.add("frame", "frame", 0, 0, width, height, name=name)
        for element in self.elements.values():
            element["x"] += x
            element["y"] += y
            element["frameId"] = None if element is frame else frame["id"]
        return list(self.elements.values())


def edge_point(box: dict, x: float, y: float) -> tuple[float, float]:
    """Return the point at which the line along an axis from (x, y) meets the box."""
    right, bottom = box["x"] + box["width"], box["y"] + box["height"]
    if box["x"] <= x <= right:
        return x, (box["y"] - GAP if y < bottom else bottom + GAP)
    return (box["x"] - GAP if x < right else right + GAP), y


def bind(box: dict, before: tuple[float, float], edge: tuple[float, float]) -> dict:
    """Return an arrow's binding. Focus is how far off the box's centre it aims, in Excalidraw's
    units."""
    across = 2 * (edge[0] - box["x"]) / box["width"] - 1
    down = 2 * (edge[1] - box["y"]) / box["height"] - 1
    focus = across if edge[0] == before[0] else -down
    return dict(elementId=box["id"], focus=focus * (1 if edge > before else -1), gap=GAP)
