"""Draws lora.excalidraw: what PEFT launches for an MLP, and how LoRA_MLP does the same.

    python docs/draw_lora.py               write lora.excalidraw
    python docs/draw_lora.py --svg FILE    keep FILE, its export, as docs/figures/lora.svg

Every call is written here once; all sizes, counts and totals in the drawing follow from that, and
tests/test_drawing.py holds it against what really runs. Memory traffic is each input of a call read
once and each output written once; addmm_ also reads what it adds to (calls 1, 8 and 9 of the
backward add to nothing: beta = 0).

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

from excalidraw import CALL_KINDS, PITCH, STYLES, Canvas

ROOT = Path(__file__).resolve().parent.parent

# --- what is drawn --------------------------------------------------------------------------------
# A card a line: calls | what they compute | what they write | what they read and no arrow brings.
# A call is "number name reads > writes", a tensor its rows and columns, then 4 if it is fp32 (else
# bf16) and * if it is saved for the backward. "3 gate_A rH" is an adapter that call 3 casts first.

# R is the rank of gate and up together
DIMENSIONS = {"T": 16384, "H": 2048, "I": 11008, "r": 32, "R": 64}
# a projection, what it reads, its features in and out, and whether its output is saved
MLP = (("gate", "x", "H", "I", "*"), ("up", "x", "H", "I", "*"), ("down", "h", "I", "H", ""))

PEFT = """{n[0]} mm T{i} {o}{i} > T{o} | {x} W{p}' | result | {name}_weight {o}{i}
{n[1]} cast T{i} > T{i}4; {n[3]} cast T{i}4 > T{i}* | {x} to fp32 and back | {fp32}; {x} |
{n[4]} mm T{i} r{i} > Tr* | {x} A{p}' | {x} A{p}' | {n[2]} {name}_A r{i}
{n[6]} mm Tr {o}r > T{o} | ({x} A{p}') B{p}' | adapter | {n[5]} {name}_B {o}r
{n[7]} mul T{o} > T{o} | adapter * scaling | adapter, scaled |
{n[8]} add T{o} T{o} > T{o}{s} | result + adapter | {y} |"""
PEFT_BACKWARD = "37: 15 GEMMs, 12 casts, 10 passes\n13.5 GB"  # not drawn, but traced by the test

# LoRA_MLP's cards, by column and row
LORA = {
    (1, 1): "3 mm TH RH > TR* | z = x [Ag; Au]' | z |",
    (0, 2): "4 mm TH IH > TI | gate = x Wg' | gate, so far | gate_weight IH",
    (0, 3): "5 addmm_ TI Tr Ir > TI* | gate += s zg Bg' | gate | gate_B Ir",
    (1, 2): "6 mm TH IH > TI | up = x Wu' | up, so far | up_weight IH",
    (1, 3): "7 addmm_ TI Tr Ir > TI* | up += s zu Bu' | up | up_B Ir",
    (2, 2): "9 mm TI rI > Tr | h Ad' | h Ad' |",
    (2, 3): "10 mm TI HI > TH | output = h Wd' | output, so far | down_weight HI",
    (2, 4): "11 addmm_ TH Tr Hr > TH | output += s (h Ad') Bd' | output | down_B Hr",
}
BACKWARD_CARDS = {
    (0, 1): "1 addmm_ TH Hr > Tr | p = s dy Bd | grad_z, p | down_B Hr",
    (0, 2): "2 mm Tr rI > TI | dh = p Ad | grad_hidden, so far | down_A rI",
    (1, 2): "3 addmm_ TI TH HI > TI | dh += dy Wd | grad_hidden, dh | down_weight HI",
    (0, 4): "5 mm TI rI > Tr | h Ad' | h Ad' again | down_A rI",
    (0, 5): "6 addmm Tr TI > rI4 | dAd = p' h | grad_down_A | grad_z, p Tr",
    (0, 6): "7 addmm TH Tr > Hr4 | dBd = s dy' (h Ad') | grad_down_B | grad_output TH",
    (1, 5): "10 mm TR RH > TH | dx = dz A | grad_x, so far | A RH",
    (1, 6): "11 addmm_ TH TI IH > TH | dx += dgate Wg | grad_x, so far | gate_weight IH",
    (2, 6): "12 addmm_ TH TI IH > TH | dx += dup Wu | grad_x, dx | up_weight IH",
    (2, 5): "13 addmm TR TH > RH4 | [dAg; dAu] = dz' x | grad_gate_A, grad_up_A | x TH*",
    (1, 7): "14 addmm TI Tr > Ir4 | dBg = s dgate' zg | grad_gate_B | z TR*",
    (2, 7): "15 addmm TI Tr > Ir4 | dBu = s dup' zu | grad_up_B | z TR*",
}

DRAWING_LEGEND = """\
One MLP of Qwen2.5-3B: {T:,} tokens, hidden size {H}, intermediate size {I}, rank {r}.
Weights and activations are bf16, adapters fp32, under bf16 autocast.
A square box is one call, numbered as executed. Below it is what it writes, beside it what it reads:
it moves both. W' is W transposed, s the scaling; dy, dh, dgate, dup and dx are gradients."""
PEFT_NOTE = """\
Every operation is a call of its own and writes what the next one reads. Autograd keeps what any
of them needs, and goes through them one by one in the backward, which is not drawn."""
JOIN_NOTE = """Memory traffic, to scale. addmm_ adds s zg Bg' to gate as it computes it, where
PEFT writes it, scales it and adds it in three calls. The kernel never writes silu(gate)."""
SAVED_NOTE = """\
z = [zg, zu] is x Ag' beside x Au': with Ag on top of Au as one A, x is read once for both.
Computed again in the backward: hidden in call 4, h Ad' in call 5. There gate and up come back in
call 4, x in call 13, z in calls 14 and 15. The adapters in bf16 are saved too."""
BACKWARD_NOTE = """\
PEFT has 9 GEMMs forward and 15 backward, here it is 8 and 14. Gate and up share x, so what PEFT
does for each is done once for both: z in the forward, dx from dz in call 10, dA in call 13.
One product runs again, h Ad' in call 5. addmm stores the gradients of A and B in fp32, as it sums
them, so that nothing is cast."""


class Call(NamedTuple):
    name: str
    reads: list[str]
    writes: list[str]

    @property
    def kind(self) -> str:
        kinds = dict.fromkeys(("mm", "addmm", "addmm_"), "cuBLAS call")
        kinds |= dict.fromkeys(("cast", "_foreach_copy_"), "cast")
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


def describe_tensor(name: str, tensor: str, between: str) -> str:
    rows, columns = ("T" if letter == "T" else DIMENSIONS[letter] for letter in tensor[:2])
    saved = ", saved" * ("*" in tensor)
    dtype = "fp32" if "4" in tensor else "bf16"
    return f"{name}{saved}\n[{rows}, {columns}]{between}{dtype}, {size(nbytes(tensor))}"


def totals(calls: dict[int, Call]) -> str:
    """As the README has them: "29: 9 GEMMs, 12 casts, 8 passes" and below it "11.4 GB"."""
    count = Counter(call.kind for call in calls.values())
    words = zip(CALL_KINDS, ("GEMMs", "casts", "passes", "Triton kernel"), strict=True)
    parts = ", ".join(f"{count[kind]} {word}" for kind, word in words if count[kind])
    return f"{len(calls)}: {parts}\n{sum(c.moved_bytes for c in calls.values()) / 1e9:.1f} GB"


def style_of(name: str, tensor: str) -> str:
    if name.startswith("grad_"):
        return "gradient"
    if name == "A" or name.endswith(("_A", "_B")):
        return "adapter"
    if name.endswith("_weight"):
        return "frozen weight"
    kept = "recomputed" if "again" in name else "saved" if "*" in tensor else "not saved"
    return f"activation, {kept}"


CARD, CHIP, WIDTH, HEIGHT = 220, 120, 1460, 1760


class Panel(Canvas):
    """A canvas that knows the calls its boxes stand for."""

    def __init__(self, place: int, drop=0):
        super().__init__(place)
        self.drop = drop  # how far down beside a call its operand stands
        self.calls: dict[int, Call] = {}  # by their place in the order of execution
        self.kept: list[tuple[str, int]] = []  # what is saved for the backward, and its bytes

    def tensor(self, id: str, x, y, name: str, tensor: str, width=CARD, group=None) -> None:
        if "*" in tensor:
            self.kept.append((name.split("; ")[-1], nbytes(tensor)))
        text = describe_tensor(name, tensor, " ")
        self.box(id, x, y, width, 60, style_of(name, tensor), text, group)

    def call(self, x, y, texts: str, formula: str, width=CARD, height=60, group=None) -> str:
        """One box for "7 mm TH IH > TI; 8 ..."; a small one where there is no formula."""
        calls = {}
        for text in texts.split(";"):
            (number, name, *reads), writes = (part.split() for part in text.split(">"))
            calls[int(number)] = Call(name, reads, writes)
        self.calls |= calls
        title, font_size = f"{', '.join(map(str, calls))}  {formula or name}", 14
        if formula:
            moved = sum(call.moved_bytes for call in calls.values())
            again = "" if formula.startswith(f"{name} ") else f"{name}, "
            title, font_size = f"{title}\n{again}moves {size(moved)}", 16
        id, style = f"call {min(calls)}", calls[min(calls)].kind
        return self.box(id, x, y, width, height, style, title, group or id, font_size)

    def cards(self, column: int, row: int, table: str, down=0) -> None:
        """Calls downwards from there: above what one computes, below what it writes."""
        for n, line in enumerate(table.split("\n")):
            texts, formula, name, operands = (part.strip() for part in line.split("|"))
            x, y = self.at(column, row + n, 0, down)
            call = self.call(x, y, texts, formula)
            out = f"out {texts.split()[0]}"
            self.tensor(out, x, y + 60, name, texts.split()[-1], CARD, call)
            if operands:
                self.operand(call, x + CARD + 20, y + self.drop, *operands.split())

    def operand(self, call: str, x, y, *words: str) -> None:
        """Beside a call, what it reads and no arrow brings."""
        cast, tensor = [word for word in words if word.isdigit()], words[-1]
        name = " ".join(words[len(cast) : -1])
        for number in cast:
            self.call(x, y, f"{number} cast {tensor}4 > {tensor}", "", CHIP, 30, call)
        id, text, y = f"{call} {name}", describe_tensor(name, tensor, "\n"), y + 30 * len(cast)
        self.box(id, x, y, CHIP, 70, style_of(name, tensor), text, call, 14)
        self.arrow(id, call)

    def cast(self, column: int, row: int, number: int, tensors: str, read: str, written: str):
        """One call that casts all adapters of a group."""
        (x, y), fp32 = self.at(column, row), [f"{tensor}4" for tensor in tensors.split()]
        texts = f"{number} _foreach_copy_ {' '.join(fp32)} > {tensors}"
        call = self.call(x, y, texts, "_foreach_copy_ to bf16")
        moved = sum(map(nbytes, fp32))
        text = f"{written}\nbf16, {size(moved // 2)} in all"
        self.box(f"out {number}", x, y + 60, CARD, 60, "adapter", text, call)
        id, text, x = f"in {number}", f"{read}\nfp32, {size(moved)}", x + CARD + 20
        self.arrow(self.box(id, x, y + self.drop, CHIP, 70, "adapter", text, call, 14), call)


# --- the panels -----------------------------------------------------------------------------------


def peft_forward(panel: Panel) -> None:
    """Three columns: from x (or h) the base product and the adapter, until they join."""
    panel.tensor("x", *panel.at(0, 0, -40), "x", "TH", PITCH + CARD + 40)
    panel.tensor("h", *panel.at(2, 0, -40), "hidden, h", "TI", CARD + 40)
    for column, (name, x, i, o, star) in enumerate(MLP):
        names = dict(name=name, p=name[0], x=x, i=i, o=o, s=star)
        numbers, y = range(1 + 10 * column, 10 + 10 * column), name.replace("down", "output")
        lines = PEFT.format(**names, n=numbers, fp32=size(nbytes(f"T{i}4")) + " fp32", y=y)
        panel.cards(column, 1, lines)
        base, first, *rest = [line.split()[0] for line in lines.split("\n")]
        panel.arrow(x, base)
        panel.arrow(x, first, (column, 2, -20, 30))
        panel.arrows(" ".join(map(">".join, pairwise([first, *rest]))))
        panel.arrow(base, rest[-1], (column, 1, 370, 110), (column, 6, 370, 30))
    panel.cards(0, 7, "10 silu TI > TI* | silu(gate) | silu(gate) |")
    panel.cards(1, 7, "20 mul TI TI > TI | silu(gate) * up | hidden, h |")
    panel.arrows("9>10 19>20")
    panel.arrow(10, 20, (0, 7, 370, 90), (0, 7, 370, 30))
    panel.arrow(20, "h", (1, 7, 390, 90), (1, 0, 390, 30))
    saved(panel, PEFT_NOTE)
    panel.text(740, 1670, "calls in a backward\nmemory traffic", 20)
    panel.text(980, 1670, PEFT_BACKWARD, 20)


def lora_forward(panel: Panel, peft: Panel) -> None:
    """Columns as in PEFT's; x enters gate and up from outside, z between them."""
    at = panel.at
    panel.tensor("x", *at(0, 0, -40), "x", "TH*", PITCH + CARD + 200)
    panel.tensor("h", *at(2, 0, -40), "hidden, h", "TI", CARD + 200)
    panel.cast(0, 1, 1, "Ir Ir rH rH", "gate_A, up_A,\ngate_B, up_B", "A, gate_B, up_B")
    panel.cast(2, 1, 2, "Hr rI", "down_A,\ndown_B", "down_A, down_B")
    for place, line in LORA.items():
        panel.cards(*place, line)
    (x, y), width = at(0, 4), PITCH + CARD
    formula = "hidden = swiglu_forward(gate, up) = silu(gate) * up"
    kernel = panel.call(x, y, "8 _swiglu_forward_kernel TI TI > TI", formula, width)
    panel.tensor("out 8", x, y + 60, "hidden, h", "TI", width, kernel)
    panel.arrows("x>3 2>9 4>5 6>7 5>8 7>8 10>11")
    panel.arrow(1, 3, (0, 1, 370, 110), (0, 1, 370, 30))
    panel.arrow("x", 4, (0, 2, -20, 30))
    panel.arrow("x", 6, (1, 2, 370, 15))
    panel.arrow(3, 5, (1, 1, -50, 80), (1, 3, -50, 15))
    panel.arrow(3, 7, (1, 1, -25, 100), (1, 3, -25, 30))
    panel.arrow(8, "h", (1, 4, 390, 90), (1, 0, 390, 30))
    panel.arrow("h", 9, (2, 2, -20, 30))
    panel.arrow("h", 10, (2, 3, 370, 15))
    panel.arrow(9, 11, (2, 2, -20, 90), (2, 4, -20, 30))
    panel.text(50, 850, "Where addmm joins the adapter, and two passes become one kernel", 20)
    panel.text(50, 884, JOIN_NOTE)
    rows = (950, peft, (7, 8, 9)), (1030, panel, (5,)), (1140, peft, (10, 20)), (1220, panel, (8,))
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
    """Draw the tensors saved for the backward; the three x A', or z, are too thin to be drawn to
    scale."""
    total = sum(count for _, count in panel.kept)
    thin = [item for item in panel.kept if item[1] < 1e7]
    kept = [item for item in panel.kept if item[1] > 1e7]
    kept += [("3 x A'", sum(count for _, count in thin))] if len(thin) == 3 else thin
    parts = [("activation, saved", f"{name}\n{size(count)}", count) for name, count in kept]
    panel.text(50, 1340, f"Saved for the backward: {total / 1e9:.2f} GB", 20)
    panel.strip(50, 1380, 1.35e6, parts)
    panel.text(50, 1470, note)


def lora_backward(panel: Panel) -> None:
    """Columns down, gate, up; between calls 8 and 9 and the rest the one dz of gate and up."""
    at = panel.at
    panel.tensor("dy", *at(0, 0, -40), "grad_output, dy", "TH", PITCH + CARD + 40)
    panel.tensor("gate", *at(2, 2, -40, 60), "gate", "TI*")
    panel.tensor("up", *at(2, 2, CARD - 20, 60), "up", "TI*")
    texts = "4 _swiglu_backward_kernel TI TI TI > TI TI TI"
    formula = "hidden, grad_gate, grad_up = swiglu_backward(grad_hidden, gate, up)"
    kernel = panel.call(*at(0, 3, -40), texts, formula, 2 * PITCH + 2 * CARD + 20)
    for column, name in enumerate(("hidden again, h", "grad_gate, dgate", "grad_up, dup")):
        id, right = name.split()[-1], 40 + 200 * (column == 2)
        panel.tensor(id, *at(column, 3, -40, 60), name, "TI", CARD + right, kernel)
    for (column, row), line in BACKWARD_CARDS.items():
        panel.cards(column, row, line, 60 if column and row > 4 else 0)
    for column, name in ((1, "gate"), (2, "up")):
        (x, y), p = at(column, 4), name[0]
        call = panel.call(x, y, f"{7 + column} addmm_ TI Ir > Tr", f"dz{p} = s d{name} B{p}")
        panel.operand(call, x + CARD + 20, y + panel.drop, f"{name}_B", "Ir")
    panel.tensor("dz", *at(1, 4, 0, 120), "grad_z, dz = [dzg, dzu]", "TR", PITCH + CARD)
    panel.arrow("call 8", "dz")
    panel.arrow("call 9", "dz")
    panel.arrows("dy>1 1>2 dy>3 3>4 gate>4 up>4 h>5 dgate>8 dup>9 dz>10 dz>13 10>11")
    panel.arrow(2, 3, (0, 2, 390, 110), (0, 2, 390, 30))
    panel.arrow("h", 6, (0, 5, -20, 30))
    panel.arrow(5, 7, (0, 4, 390, 110), (0, 6, 390, -20), (0, 6, CARD // 2, -20))
    panel.arrow("dgate", 11, (1, 6, -14, 90))
    panel.arrow("dgate", 14, (1, 7, -30, 90))
    panel.arrow(11, 12, (1, 6, 390, 170), (1, 6, 390, 90))
    panel.arrow("dup", 12, (2, 6, 370, 75))
    panel.arrow("dup", 15, (2, 7, 386, 75))
    panel.text(50, 1400, BACKWARD_NOTE)


def draw_panels() -> tuple[list[dict], list[Panel]]:
    """Excalidraw's elements, and the three panels."""
    head = Panel(-1)
    head.text(0, -240, "How LoRA_MLP computes an MLP with LoRA adapters, beside PEFT", 36)
    head.text(0, -180, DRAWING_LEGEND.format(**DIMENSIONS), 20)
    for n, style in enumerate(STYLES):
        place = WIDTH + 60 + 240 * (n % 6), 80 * (n // 6) - 180
        head.box(style, *place, 220, 60, style, style)
    peft, lora, by_hand = panels = [Panel(0), Panel(1, 30), Panel(2, 30)]
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


def write_drawing() -> None:
    parser = argparse.ArgumentParser(description="Write lora.excalidraw, or keep its export.")
    parser.add_argument("--svg", type=Path, help="lora.excalidraw as Excalidraw exported it")
    svg, path = parser.parse_args().svg, ROOT / "lora.excalidraw"
    if svg:
        stamp = f"<!-- lora.excalidraw sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} -->"
        (ROOT / "docs" / "figures" / "lora.svg").write_text(
            f"{svg.read_text().rstrip()}\n{stamp}\n"
        )
    else:
        scene = dict(
            type="excalidraw", version=2, source="docs/draw_lora.py", elements=draw_panels()[0]
        )
        scene |= dict(appState=dict(viewBackgroundColor="#ffffff", gridSize=10), files={})
        path.write_text(json.dumps(scene, indent=1) + "\n")


if __name__ == "__main__":
    write_drawing()
