"""Draws lora.excalidraw: what PEFT launches for an MLP, and how LoRA_MLP does the same.

    python docs/draw_lora.py               write lora.excalidraw
    python docs/draw_lora.py --svg FILE    keep FILE, Excalidraw's own export of it, as lora.svg

Every call is written here once; all sizes, counts and totals in the drawing follow from that, and
tests/test_drawing.py holds it against what really runs. Memory traffic is each input of a call read
once and each output written once; addmm_ also reads what it adds to.

For the svg, open lora.excalidraw at excalidraw.com, take "Export image" as SVG, background on and
scene not embedded, and give that file to --svg, which stamps it with the drawing's sha256.
"""

import argparse
import hashlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from excalidraw import KINDS, PITCH, STYLES, Canvas

ROOT = Path(__file__).resolve().parent.parent

# --- what is drawn --------------------------------------------------------------------------------
# A card a line: calls | what they compute | what they write | what they read and no arrow brings.
# A call is "number name reads > writes", a tensor its rows and columns, then 4 if it is fp32 (else
# bf16) and * if it is saved for the backward. "3 gate_A rH" is an adapter that call 3 casts first.

DIMENSIONS = {"T": 16384, "H": 2048, "I": 11008, "r": 32}
# a projection, what it reads, its features in and out, and whether its output is saved
MLP = (("gate", "x", "H", "I", "*"), ("up", "x", "H", "I", "*"), ("down", "h", "I", "H", ""))

PEFT = """{n[0]} mm T{i} {o}{i} > T{o} | {x} W{p}' | result | {name}_weight {o}{i}
{n[1]} cast T{i} > T{i}4; {n[3]} cast T{i}4 > T{i}* | {x} to fp32 and back | {fp32}; {x} |
{n[4]} mm T{i} r{i} > Tr* | {x} A{p}' | {x} A{p}' | {n[2]} {name}_A r{i}
{n[6]} mm Tr {o}r > T{o} | ({x} A{p}') B{p}' | adapter | {n[5]} {name}_B {o}r
{n[7]} mul T{o} > T{o} | adapter * scaling | adapter, scaled |
{n[8]} add T{o} T{o} > T{o}{s} | result + adapter | {y} |"""
PEFT_BACKWARD = "37: 15 GEMMs, 12 casts, 10 passes\n13.5 GB"  # not drawn, but traced by the test

LORA = """{n[0]} mm T{i} {o}{i} > T{o} | {y} = {x} W{p}' | {y}, so far | {name}_weight {o}{i}
{n[1]} mm T{i} r{i} > Tr | {x} A{p}' | {x} A{p}' | {n[3]} {name}_A r{i}
{n[2]} addmm_ T{o} Tr {o}r > T{o}{s} | {y} += s ({x} A{p}') B{p}' | {y} | {n[4]} {name}_B {o}r"""

BACKWARD_HIDDEN = """2 mm TH HI > TI | dh = dy Wd | grad_hidden, so far | down_weight HI
3 addmm_ TI Tr rI > TI | dh += s (dy Bd) Ad | grad_hidden, dh | down_A rI"""
BACKWARD_DOWN = """5 addmm_ Tr TI > rI | dAd = s (dy Bd)' h | grad_down_A | grad_down_rank Tr
6 mm TI rI > Tr | h Ad' | h Ad' again | down_A rI
7 addmm_ TH Tr > Hr | dBd = s dy' (h Ad') | grad_down_B | grad_output TH"""
BACKWARD_X = """{n[0]} mm TI Ir > Tr | {d} B{p} | {rank} | {name}_B Ir
{n[1]} addmm_ Tr TH > rH | dA{p} = s ({d} B{p})' x | grad_{name}_A | x TH*
{n[2]} mm TH rH > Tr | x A{p}' | x A{p}' again | x TH* + {name}_A rH
{n[3]} addmm_ TI Tr > Ir | dB{p} = s {d}' (x A{p}') | grad_{name}_B |
{n[4]} {mm} TI IH > TH | {dx} {d} W{p} | grad_x, so far | {name}_weight IH
{n[5]} addmm_ TH Tr rH > TH | dx += s ({d} B{p}) A{p} | {out} | {name}_A rH + {rank} Tr"""

HOW_TO_READ = """\
One MLP of Qwen2.5-3B: {T:,} tokens, hidden size {H}, intermediate size {I}, rank {r}.
Weights and activations are bf16, adapters fp32, under bf16 autocast.
A square box is one call, numbered as executed. Below it is what it writes, beside it what it reads:
it moves both. W' is W transposed, s the scaling; dy, dh, dgate, dup and dx are gradients."""
PEFT_NOTE = """\
Every operation is a call of its own and writes what the next one reads. Autograd keeps what any
of them needs, and goes through them one by one in the backward, which is not drawn."""
JOIN_NOTE = """Memory traffic, to scale. addmm_ adds s (x Ag') Bg' to gate as it computes it, where
PEFT writes it, scales it and adds it in three calls. The kernel never writes silu(gate)."""
SAVED_NOTE = """\
Computed again in the backward: hidden in call 4, x A' in calls 6, 11 and 14. There gate
and up come back in call 4, x in calls 10, 11, 13 and 14. The adapters in bf16 are saved too."""
BACKWARD_NOTE = """Calls 6, 11 and 14 are the three
GEMMs more than in PEFT, which
saves what they compute."""


class Call(NamedTuple):
    name: str
    reads: list[str]
    writes: list[str]

    @property
    def kind(self) -> str:
        kinds = {"mm": "cuBLAS call", "addmm_": "cuBLAS call", "cast": "cast"}
        other = "Triton kernel" if "kernel" in self.name else "elementwise pass"
        return kinds.get(self.name, other)

    @property
    def moved_bytes(self) -> int:
        return sum(nbytes(tensor) for tensor in self.reads + self.writes)


def nbytes(tensor: str) -> int:
    return DIMENSIONS[tensor[0]] * DIMENSIONS[tensor[1]] * (4 if "4" in tensor else 2)


def size(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def describe(name: str, tensor: str, between: str) -> str:
    rows, columns = ("T" if letter == "T" else DIMENSIONS[letter] for letter in tensor[:2])
    saved = ", saved" * ("*" in tensor)
    return f"{name}{saved}\n[{rows}, {columns}]{between}bf16, {size(nbytes(tensor))}"


def totals(calls: dict[int, Call]) -> str:
    """As the README has them: "29: 9 GEMMs, 12 casts, 8 passes" and below it "11.4 GB"."""
    count = Counter(call.kind for call in calls.values())
    words = zip(KINDS, ("GEMMs", "casts", "passes", "Triton kernel"), strict=True)
    parts = ", ".join(f"{count[kind]} {word}" for kind, word in words if count[kind])
    return f"{len(calls)}: {parts}\n{sum(c.moved_bytes for c in calls.values()) / 1e9:.1f} GB"


def style_of(name: str, tensor: str) -> str:
    if name.startswith("grad_"):
        return "gradient"
    if name.endswith(("_A", "_B")):
        return "adapter"
    if name.endswith("_weight"):
        return "frozen weight"
    kept = "recomputed" if "again" in name else "saved" if "*" in tensor else "not saved"
    return f"activation, {kept}"


CARD, CHIP, WIDTH, HEIGHT = 220, 120, 1460, 1760


class Panel(Canvas):
    """A canvas that knows the calls its boxes stand for."""

    def __init__(self, place: int):
        super().__init__(place)
        self.calls: dict[int, Call] = {}  # by their place in the order of execution
        self.kept: list[tuple[str, int]] = []  # what is saved for the backward, and its bytes

    def tensor(self, id: str, x, y, name: str, tensor: str, width=CARD, group=None) -> None:
        if "*" in tensor:
            self.kept.append((name.split("; ")[-1], nbytes(tensor)))
        text = describe(name, tensor, " ")
        self.box(id, x, y, width, 60, style_of(name, tensor), text, group)

    def call(self, x, y, texts: str, formula: str, width=CARD, height=60, group=None) -> str:
        """One box for "7 mm TH IH > TI; 8 ..."; a small one where there is no formula."""
        calls = {}
        for text in texts.split(";"):
            (number, name, *reads), writes = (part.split() for part in text.split(">"))
            calls[int(number)] = Call(name, reads, writes)
        self.calls |= calls
        ends, between = sorted({min(calls), max(calls)}), ", " if len(calls) == 2 else " to "
        title, font_size = f"{between.join(map(str, ends))}  {formula or name}", 14
        if formula:
            moved = sum(call.moved_bytes for call in calls.values())
            title, font_size = f"{title}\n{name}, moves {size(moved)}", 16
        id, style = f"call {ends[0]}", calls[ends[0]].kind
        return self.box(id, x, y, width, height, style, title, group or id, font_size)

    def cards(self, column: int, row: int, table: str) -> None:
        """Calls downwards from there: above what one computes, below what it writes."""
        for down, line in enumerate(table.split("\n")):
            texts, formula, name, operands = (part.strip() for part in line.split("|"))
            x, y = self.at(column, row + down)
            call = self.call(x, y, texts, formula)
            out = f"out {texts.split()[0]}"
            self.tensor(out, x, y + 60, name, texts.split()[-1], CARD, call)
            for n, operand in enumerate(operands.split("+") if operands else ()):
                self.operand(call, x + CARD + 20, y + 70 * n, *operand.split())

    def operand(self, call: str, x, y, *words: str) -> None:
        """Beside a call, what it reads and no arrow brings; a second one has no arrow either."""
        *cast, name, tensor = words
        for number in cast:
            self.call(x, y, f"{number} cast {tensor}4 > {tensor}", "", CHIP, 30, call)
        id, text, y = f"{call} {name}", describe(name, tensor, "\n"), y + 30 * len(cast)
        self.box(id, x, y, CHIP, 70, style_of(name, tensor), text, call, 14)
        if y < self.elements[call]["y"] + 60:
            self.arrow(id, call)


# --- the panels -----------------------------------------------------------------------------------


def forward(panel: Panel, table: str, numbers: list) -> None:
    """Three columns: from x (or h) the base product and the adapter, until they join."""
    rows, in_place = len(table.split("\n")), "addmm_" in table
    panel.tensor("x", *panel.at(0, 0, -40), "x", "TH*" if in_place else "TH", PITCH + CARD + 40)
    panel.tensor("h", *panel.at(2, 0, -40), "hidden, h", "TI", CARD + 40)
    for column, (name, x, i, o, saved) in enumerate(MLP):
        names = dict(name=name, p=name[0], x=x, i=i, o=o, s=saved, n=numbers[column])
        fp32, y = size(nbytes(f"T{i}4")) + " fp32", name.replace("down", "output")
        lines = table.format(**names, fp32=fp32, y=y)
        panel.cards(column, 1, lines)
        base, first, *rest = [line.split()[0] for line in lines.split("\n")]
        panel.arrow(x, base)
        panel.arrow(x, first, (column, 2, -20, 30))
        panel.arrows(" ".join(map(">".join, pairwise([first, *rest]))))
        # addmm_ adds to what it writes
        end, down = (f"out {rest[-1]}", 110) if in_place else (rest[-1], 30)
        panel.arrow(base, end, (column, 1, 370, 110), (column, rows, 370, down))


def peft_forward(panel: Panel) -> None:
    forward(panel, PEFT, [range(n, n + 9) for n in (1, 11, 21)])
    panel.cards(0, 7, "10 silu TI > TI* | silu(gate) | silu(gate) |")
    panel.cards(1, 7, "20 mul TI TI > TI | silu(gate) * up | hidden, h |")
    panel.arrows("9>10 19>20")
    panel.arrow(10, 20, (0, 7, 370, 90), (0, 7, 370, 30))
    panel.arrow(20, "h", (1, 7, 390, 90), (1, 0, 390, 30))
    saved(panel, PEFT_NOTE)
    panel.text(740, 1670, "calls in a backward\nmemory traffic", 20)
    panel.text(980, 1670, PEFT_BACKWARD, 20)


def lora_forward(panel: Panel, peft: Panel) -> None:
    forward(panel, LORA, [(7, 8, 9, 1, 2), (10, 11, 12, 3, 4), (14, 15, 16, 5, 6)])
    (x, y), width = panel.at(0, 4), PITCH + CARD
    formula = "hidden = swiglu_forward(gate, up) = silu(gate) * up"
    kernel = panel.call(x, y, "13 _swiglu_forward_kernel TI TI > TI", formula, width)
    panel.tensor("out 13", x, y + 60, "hidden, h", "TI", width, kernel)
    panel.arrows("9>13 12>13")
    panel.arrow(13, "h", (1, 4, 390, 90), (1, 0, 390, 30))
    panel.text(50, 850, "Where addmm joins the adapter, and two passes become one kernel", 20)
    panel.text(50, 884, JOIN_NOTE)
    rows = (950, peft, (7, 8, 9)), (1030, panel, (9,)), (1140, peft, (10, 20)), (1220, panel, (13,))
    for down, of, numbers in rows:
        parts = []
        for number in numbers:
            call, text = of.calls[number], of.elements[f"call {number} text"]["text"]
            parts.append((call.kind, text.replace("moves ", ""), call.moved_bytes))
        panel.text(50, down + 20, "PEFT" if of is peft else "LoRA_MLP")
        end = panel.strip(150, down, 2.1e6, parts)
        panel.text(end + 20, down + 16, size(sum(count for *_, count in parts)), 20)
    saved(panel, SAVED_NOTE)


def saved(panel: Panel, note: str) -> None:
    """What is saved for the backward; the three x A' are too thin to be drawn to scale."""
    total = sum(count for _, count in panel.kept)
    thin = [count for _, count in panel.kept if count < 1e7]
    kept = [item for item in panel.kept if item[1] > 1e7]
    kept += [(f"{len(thin)} x A'", sum(thin))] if thin else []
    parts = [("activation, saved", f"{name}\n{size(count)}", count) for name, count in kept]
    panel.text(50, 1340, f"Saved for the backward: {total / 1e9:.2f} GB", 20)
    panel.strip(50, 1380, 1.35e6, parts)
    panel.text(50, 1470, note)


def lora_backward(panel: Panel) -> None:
    at = panel.at
    panel.tensor("dy", *at(0, 0, -40), "grad_output, dy", "TH", PITCH + CARD + 40)
    panel.cards(0, 1, "1 mm TH Hr > Tr | dy Bd | grad_down_rank | down_B Hr")
    panel.cards(1, 1, BACKWARD_HIDDEN)
    panel.tensor("gate", *at(2, 2, -40, 60), "gate", "TI*")
    panel.tensor("up", *at(2, 2, CARD - 20, 60), "up", "TI*")
    texts = "4 _swiglu_backward_kernel TI TI TI > TI TI TI"
    formula = "hidden, grad_gate, grad_up = swiglu_backward(grad_hidden, gate, up)"
    kernel = panel.call(*at(0, 3, -40), texts, formula, 2 * PITCH + 2 * CARD + 20)
    for column, name in enumerate(("hidden again, h", "grad_up, dup", "grad_gate, dgate")):
        panel.tensor(name.split()[-1], *at(column, 3, -40, 60), name, "TI", CARD + 40, kernel)
    panel.cards(0, 4, BACKWARD_DOWN)
    for column, name, mm, dx, out, n in (
        (1, "up", "mm", "dx =", "grad_x, so far", (8, 10, 11, 12, 16, 17)),
        (2, "gate", "addmm_ TH", "dx +=", "grad_x, dx", (9, 13, 14, 15, 18, 19)),
    ):
        names = dict(name=name, p=name[0], d=f"d{name}", rank=f"grad_{name}_rank")
        panel.cards(column, 4, BACKWARD_X.format(**names, mm=mm, dx=dx, out=out, n=n))
        panel.arrow(f"d{name}", n[3], (column, 7, -14, 30))
        panel.arrow(f"d{name}", n[4], (column, 8, -30, 20))
    panel.arrows("dy>1 dy>2 2>3 3>4 gate>4 up>4 h>5 6>7 dup>8 8>10 11>12 16>17")
    panel.arrows("dgate>9 9>13 14>15 18>19")
    panel.arrow(1, 3, (0, 2, CARD // 2, 30))
    panel.arrow("h", 6, (0, 5, -20, 30))
    panel.arrow(17, 18, (1, 9, CARD // 2, 150), (1, 9, 390, 150), (2, 8, 390 - PITCH, 40))
    adapters = "rH", "Ir", "rH", "Ir", "rI", "Hr"
    casts = "; ".join(f"{n} cast {adapter} > {adapter}4" for n, adapter in enumerate(adapters, 20))
    cast, moved = panel.call(*at(0, 9), casts, "gradients to fp32"), sum(map(nbytes, adapters)) * 2
    text = f"gradients of A and B\nfp32, {size(moved)} in all"
    panel.box("out 20", *at(0, 9, 0, 60), CARD, 60, "gradient", text, cast)
    panel.text(90, 1200, BACKWARD_NOTE)


def draw() -> tuple[list[dict], list[Panel]]:
    """Excalidraw's elements, and the three panels."""
    head = Panel(-1)
    head.text(0, -240, "How LoRA_MLP computes an MLP with LoRA adapters, beside PEFT", 36)
    head.text(0, -180, HOW_TO_READ.format(**DIMENSIONS), 20)
    for n, style in enumerate(STYLES):
        place = WIDTH + 60 + 240 * (n % 6), 80 * (n // 6) - 180
        head.box(style, *place, 220, 60, style, style)
    peft, lora, by_hand = panels = [Panel(place) for place in range(3)]
    peft_forward(peft)
    lora_forward(lora, peft)
    lora_backward(by_hand)
    elements = list(head.elements.values())
    titles = ("1  PEFT, forward", "2  LoRA_MLP, forward", "3  LoRA_MLP, backward by hand")
    for panel, title in zip(panels, titles, strict=True):
        phase = title.split()[2]
        panel.text(50, 20, title, 28)
        panel.text(50, 1670, f"calls in a {phase}\nmemory traffic", 20)
        panel.text(290, 1670, totals(panel.calls), 20)
        frame = panel.add("frame", "frame", 0, 0, WIDTH, HEIGHT, name=title)
        for element in panel.elements.values():
            element["x"] += panel.place * (WIDTH + 60)
            element["frameId"] = None if element is frame else frame["id"]
        elements += panel.elements.values()
    return elements, panels


def main() -> None:
    parser = argparse.ArgumentParser(description="Write lora.excalidraw, or keep its export.")
    parser.add_argument("--svg", type=Path, help="lora.excalidraw as Excalidraw exported it")
    svg, path = parser.parse_args().svg, ROOT / "lora.excalidraw"
    if svg:
        stamp = f"<!-- lora.excalidraw sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} -->"
        (ROOT / "lora.svg").write_text(f"{svg.read_text().rstrip()}\n{stamp}\n")
    else:
        scene = dict(type="excalidraw", version=2, source="docs/draw_lora.py", elements=draw()[0])
        scene |= dict(appState=dict(viewBackgroundColor="#ffffff", gridSize=10), files={})
        path.write_text(json.dumps(scene, indent=1) + "\n")


if __name__ == "__main__":
    main()
