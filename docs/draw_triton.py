"""The panel of lora.excalidraw that shows one Triton kernel at work: swiglu_forward."""

from call_panel import DIMENSIONS, RIGHT, SPAN, Panel

TILE = 2048  # numbers; tests/kernels/test_drawing.py compares it with the kernel
PROGRAMS = DIMENSIONS["T"] * DIMENSIONS["I"] // TILE
INTRO = f"""A kernel is a function that runs on the GPU. Triton is a language to write one in,
close to Python: the function says what happens to one tile, here {TILE:,} numbers in a row in
memory, and the GPU runs it for every tile, many at once. Each such run is called a program;
[T, 11008] is {PROGRAMS:,} tiles, so that many run, and none waits for another. Memory is large and
slow; registers are small, fast and inside the processor."""
LAUNCH = f"_swiglu_forward_kernel[({PROGRAMS},)](\n    gate, up, hidden, ...)"
WHERE = "fused_mlp/swiglu.py: _swiglu_forward_kernel\n{swiglu_forward_ms} ms on an H200"
STEPS = (
    (
        "offsets = (tl.program_id(0) * 2048\n    + tl.arange(0, 2048))\n"
        "gate = tl.load(gate_ptr + offsets)\nup = tl.load(up_ptr + offsets)",
        "1. Load. Each program has a number, which says what it works on: program 1 has the places "
        "2048 to 4095, tile 1 of gate and of up. gate_ptr is where gate begins in memory. (Not "
        "shown: a mask for the end of the tensor, and the casts.)",
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
OURS, OTHERS, REGISTERS = (
    "in memory, this program's tile",
    "in memory, other programs' tiles",
    "in registers, this program's",
)
FRAME, INNER = 216, 16  # the height of the processor, and the room around what is in it


def draw_tiles(panel: Panel, name: str, x, y, count: str, caption=-26) -> str:
    """Draw a tensor in memory, cut into tiles. Return the id of this program's tile."""
    panel.text(x, y + caption, f"GPU memory: {name}, {count}")
    for n, label in enumerate(("tile 0", "tile 1", "tile 2", f"... {PROGRAMS - 1:,}")):
        style = OURS if n == 1 else OTHERS
        panel.box(f"{name} tile {n}", x + 80 * n, y, 80, 44, style, label, None, 14)
    return f"{name} tile 1"


def draw_registers(panel: Panel, name: str, x, y) -> str:
    text = f"{name}, tile 1\n{TILE:,} numbers, fp32"
    return panel.box(f"{name} in registers", x, y, 190, 60, REGISTERS, text)


def draw_triton_panel(panel: Panel, bytes_of_each: str) -> None:
    """Draw the launch and three bands: load, compute and store, from two tensors to the third."""
    panel.meanings = {
        "Triton kernel": "computed by\nthe Triton kernel",
        "pass, elementwise": "two kernels\nof PyTorch",
    }
    left, right, middle = RIGHT + INNER, RIGHT + SPAN - INNER - 190, RIGHT + SPAN / 2
    top = panel.down
    panel.words(LAUNCH, "0. Launch, from Python, once; in brackets, the number of programs.", WHERE)
    panel.end(panel.down - 20)
    panel.words(*STEPS[0])
    tiles = [draw_tiles(panel, "gate", RIGHT, top + 26, bytes_of_each)]
    tiles += [draw_tiles(panel, "up", RIGHT + SPAN - 320, top + 26, bytes_of_each)]
    panel.end(panel.down)
    y = panel.words(*STEPS[1])
    frame = panel.box("program", RIGHT, y - 40, SPAN, FRAME, "a program", "")
    panel.label(frame, "inside the processor: program 1", is_title=True)
    compute = panel.box("compute", middle - 95, y, 190, 60, "Triton kernel", "silu(gate) * up")
    for name, tile, x in zip(("gate", "up"), tiles, (left, right), strict=True):
        loaded = draw_registers(panel, name, x, y)
        panel.arrow(tile, loaded)
        panel.arrow(loaded, compute)
        panel.text(panel.elements[f"{tile} > {loaded}"]["x"] + 12, y - 70, "load")
    result = draw_registers(panel, "hidden", middle - 95, y + 100)
    panel.arrow(compute, result)
    panel.end(y - 40 + FRAME)
    y = panel.words(*STEPS[2])
    stored = draw_tiles(panel, "hidden", middle - 120, y, bytes_of_each, caption=48)
    panel.arrow(result, stored)
    panel.text(panel.elements[f"{result} > {stored}"]["x"] + 12, y - 34, "store")
    panel.end(y + 70)
