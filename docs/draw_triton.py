"""The panel of lora.excalidraw that shows one Triton kernel at work: swiglu_forward."""

from call_panel import DIMENSIONS, RIGHT, SPAN, Panel
from excalidraw import Canvas

TILE = 2048  # numbers; tests/kernels/test_drawing.py holds it against the kernel
PROGRAMS = DIMENSIONS["T"] * DIMENSIONS["I"] // TILE
INTRO = f"""A kernel is a function that runs on the GPU. Triton is a language to write one in,
close to Python: the function says what happens to one tile, here a piece of {TILE:,} numbers, and
the GPU runs it for every tile, many at once. Each such run is called a program; here there are
{PROGRAMS:,}, and none waits for another. Memory is large and slow; registers are small, fast and
inside the processor."""
STEPS = (
    (
        "gate = tl.load(gate_ptr + offsets)\nup = tl.load(up_ptr + offsets)",
        "1. Load. This program takes tile 1 of gate and tile 1 of up from memory into registers. "
        "Its number says which: offsets are the places of that tile. (Not shown: a mask for "
        "the end of the tensor, and the casts.)",
    ),
    (
        "hidden = gate * tl.sigmoid(gate) * up",
        "2. Compute. silu(gate) and its product with up are made in registers, in fp32. What is "
        "in between costs no memory traffic.",
    ),
    (
        "tl.store(hidden_ptr + offsets, hidden)",
        "3. Store. Only the result goes back to memory, rounded to bf16, once.",
    ),
)
PASSES = """What it spares: PyTorch has one kernel for silu and one for the product. The first
stores silu(gate), the second loads it again, {two_TI} in all. Nearly all of the time of such
calls goes into moving, not into computing."""


def draw_tiles(panel: Canvas, name: str, x, y, count: str, caption=-26) -> str:
    """A tensor in memory, cut into tiles; returns the id of the one that this program has."""
    panel.text(x, y + caption, f"{name} in memory, {count}")
    for n, label in enumerate(("tile 0", "tile 1", "tile 2", f"... {PROGRAMS - 1:,}")):
        style = "activation, saved" if n == 1 else "activation, not saved"
        panel.box(f"{name} tile {n}", x + 80 * n, y, 80, 44, style, label, None, 14)
    return f"{name} tile 1"


def draw_triton_panel(panel: Panel, bytes_of_each: str) -> None:
    """Three bands, load, compute and store, from two tensors in memory to the third."""
    panel.meanings = {
        "activation, not saved": "in memory,\nof other programs",
        "activation, saved": "in memory,\nthis program's tile",
        "activation, recomputed": "in this program's\nregisters",
        "Triton kernel": "computed by\nthe Triton kernel",
        "pass, elementwise": "two kernels\nof PyTorch",
    }
    y = panel.words(*STEPS[0])
    tiles = [draw_tiles(panel, "gate", RIGHT, y + 26, bytes_of_each)]
    tiles += [draw_tiles(panel, "up", RIGHT + SPAN - 320, y + 26, bytes_of_each)]
    panel.end(y + 70)
    y = panel.words(*STEPS[1])
    formula = "silu(gate) * up"
    compute = panel.box("compute", RIGHT + 240, y, 200, 60, "Triton kernel", formula)
    for name, tile, x in zip(("gate", "up"), tiles, (RIGHT, RIGHT + SPAN - 190), strict=True):
        text = f"{name}, tile 1\n{TILE:,} numbers, fp32"
        loaded = panel.box(f"{name} loaded", x, y, 190, 60, "activation, recomputed", text)
        panel.arrow(tile, loaded)
        panel.arrow(loaded, compute)
        arrow = panel.elements[f"{tile} > {loaded}"]
        panel.text(arrow["x"] + 12, y - 44, "load")
    panel.end(y + 60)
    y = panel.words(*STEPS[2])
    stored = draw_tiles(panel, "hidden", RIGHT + 180, y, bytes_of_each, caption=48)
    panel.arrow(compute, stored)
    panel.text(panel.elements[f"{compute} > {stored}"]["x"] + 12, y - 34, "store")
    panel.end(y + 70)
