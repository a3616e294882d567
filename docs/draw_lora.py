"""Draws lora.excalidraw: what PEFT launches for an MLP, and what LoRA_MLP and Unsloth launch.

    python docs/draw_lora.py                    write lora.excalidraw
    python docs/draw_lora.py --panels FOLDER    write each of its panels there, alone
    python docs/draw_lora.py --svg FOLDER       keep the panels' exports as docs/figures/*.svg

Every call is written here once, and all sizes, counts and totals in the drawing follow from it.
test_drawing.py compares the calls with a trace of the real code. We count memory traffic as reading
each input of a call once and writing each output once. addmm_ also reads the tensor it adds to,
except in calls 1, 8 and 9 of the backward, where beta = 0.

For the figures, open each panel's file at excalidraw.com and take "Export image" as SVG, background
on and scene not embedded. Save it beside the file as NAME.svg and give the folder to --svg, which
stamps the figures with the sha256 of lora.excalidraw.

Excalidraw opens a drawing at 100%, around the element nearest to its origin. So we put the overview
there.
"""

import argparse
import hashlib
import json
from pathlib import Path

from call_panel import LANE, RIGHT, SIZES, SPAN, WIDTH, Panel, totals
from draw_overview import HEIGHT, draw_overview
from draw_triton import INTRO, PASSES, draw_triton_panel
from draw_unsloth import UNSLOTH_INTRO, draw_unsloth_panel

ROOT = Path(__file__).resolve().parent.parent
FIGURES = (  # a panel each
    "lora_overview", "lora_peft", "lora_forward", "lora_triton",
    "lora_peft_backward", "lora_backward", "lora_unsloth",
)  # fmt: skip
GUTTER = 60  # between panels

# --- what is drawn: bands of code, files and times, why, and rows of cards (see call_panel.py) ----

# a projection, what it reads, its features in and out, what comes out, and whether that is saved
MLP = (
    ("gate", "x", "H", "I", "gate", "*"),
    ("up", "x", "H", "I", "up", "*"),
    ("down", "hidden", "I", "H", "output", ""),
)
X = "x TH"
WEIGHTS = "Wg, gate_weight IH; Wu, up_weight IH; Wd, down_weight HI"
ADAPTERS = "Ag, gate_A rH4; Au, up_A rH4; Bg, gate_B Ir4; Bu, up_B Ir4"
DOWN_ADAPTERS = "Ad, down_A rI4; Bd, down_B Hr4"

HOW_TO_READ = """One MLP of Qwen2.5-3B with LoRA adapters, T = {tokens} tokens. A box with square
corners is one call, which launches one kernel on the GPU, numbered in the order in which it runs:
above it stands what it reads, below it what it writes, and in it how many bytes that moves. The
last line of a result says which calls read it; an arrow leads to those that are near. W' is W
transposed, s the scaling of an adapter"""
ADDMM = """. mm multiplies two matrices. addmm also scales their product by a number; where its box
says +=, it adds the product to a tensor, in place."""
EQUATIONS = " The code is written as equations: an s in it is an addmm's scale, no call of its own."
PEFT_STARTS = """The weights W are frozen; the adapters A and B, of rank 32, are trained and kept
in fp32."""
LORA_LAYER = "peft/tuners/lora/layer.py: Linear.forward"
PEFT = (
    (
        "result = x @ W.T",
        LORA_LAYER,
        "The frozen GEMM, as without an adapter. hidden, which down reads, is made in the last "
        "band: down runs after it.",
        "{n[0]} mm T{i} {o}{i} > T{o} | {x} W{p}' | {x}, W{p} | result",
    ),
    (
        "x = x.float()",
        "peft/tuners/tuners_utils.py: _cast_input_dtype\n{casts_ms} ms for all casts of this panel "
        "and of panel 4, on an H200",
        "The adapter is fp32, so PEFT casts its input to fp32. Autocast multiplies in bf16 "
        "and casts it back. The copy is kept for the backward.",
        "{n[1]} cast T{i} > T{i}4; {n[3]} cast T{i}4 > T{i}* | to fp32 / to bf16"
        " | {x}, - | {x} copy",
    ),
    (
        "a = x @ A.T",
        LORA_LAYER,
        "Down to 32 columns. A is cast to bf16 first, in every step anew.",
        "{n[2]} cast r{i}4 > r{i}; {n[4]} mm T{i} r{i} > Tr* | cast / {x} A{p}'"
        " | A{p}, {x} copy, - | a",
    ),
    (
        "adapter = a @ B.T",
        LORA_LAYER,
        "Up again: the adapter's part is as large as the result, and is written to memory.",
        "{n[5]} cast {o}r4 > {o}r; {n[6]} mm Tr {o}r > T{o} | cast / a B{p}' | B{p}, a, -"
        " | adapter",
    ),
    (
        "scaled = adapter * s",
        f"{LORA_LAYER}\n{{scale_ms}} ms for all scaling and adding of this panel and of panel 4, "
        "on an H200",
        "A call only to multiply by one number: it reads and writes all of it, {two_TI} for gate.",
        "{n[7]} mul T{o} > T{o} | adapter * s | adapter | scaled",
    ),
    (
        "result = result + scaled",
        LORA_LAYER,
        "And a call only to add. Its result is gate, up or output.",
        "{n[8]} add T{o} T{o} > T{o}{s} | result + scaled | result, scaled | {y}",
    ),
)
SILU = (
    "hidden = silu(gate) * up",
    "transformers/models/qwen2/modeling_qwen2.py: Qwen2MLP.forward\n{peft_silu_ms} ms with the "
    "backward's three passes, on an H200",
    "Two more passes. silu(gate) is written, read at once, and kept for the backward. hidden "
    "goes to down, the third column, at the top.",
    """10 silu TI > TI* | silu(gate) | gate | silu(gate)
20 mul TI TI > TI | silu(gate) * up | silu(gate), up | hidden""",
)
PEFT_SAVED = """Every operation keeps what its own backward reads, whatever the others keep: x
twice, and silu(gate) and hidden beside gate and up, from which they could be computed. (a: the
three x A'.)"""

PEFT_BACKWARD_STARTS = """Nobody wrote this backward: autograd derives it, one step for each
operation of panel 1, last first. A d before a name is its gradient. dy is the gradient of the
output; the rest is what the forward saved. a is x A', one for each projection."""
# a projection in the order of its backward, its input, features in and out, the gradient that
# comes in, the numbers of its calls, and what adds up the gradient of its input
PEFT_MLP = (
    ("d", "hidden", "I", "H", "dy", (1, 2, 4, 3, 5, 8, 6, 7, 9, 10), "11 add TI TI > TI | "
     "dh rest + dh part | dh rest, dh part | dh"),
    ("u", "x", "H", "I", "dup", (14, 15, 17, 16, 18, 21, 19, 20, 22, 23), "24 add TH TH > TH | "
     "dx rest + dx part | dx rest, dx part | dx, so far"),
    ("g", "x", "H", "I", "dgate", (26, 27, 29, 28, 30, 33, 31, 32, 34, 36), "35 add TH TH > TH; "
     "37 add TH TH > TH | + dx part / + dx rest | dx, dx part, dx rest | dx"),
)  # fmt: skip
AUTOGRAD = "derived by autograd from\n" + LORA_LAYER
PEFT_BACKWARD = (
    (
        "dadapter = dresult * s",
        f"{AUTOGRAD}\n{{scale_ms}} ms for all scaling and adding of this panel and of panel 1, "
        "on an H200",
        "A pass to scale the gradient, {two_TI} for gate and for up. LoRA_MLP leaves the scaling "
        "to its GEMMs.",
        "{n[0]} mul T{o} > T{o} | {dy} * s | {dy} | dadapter",
    ),
    (
        "dB = dadapter.T @ a",
        AUTOGRAD,
        "The gradient of B, in bf16, and a cast to fp32, the adapter's own dtype. LoRA_MLP's GEMM "
        "writes fp32.",
        "{n[1]} mm T{o} Tr > {o}r; {n[2]} cast {o}r > {o}r4 | dadapter' a / cast | dadapter, a"
        " | dB{p}",
    ),
    (
        "da = dadapter @ B",
        AUTOGRAD,
        "Back through B, to 32 columns.",
        "{n[3]} mm T{o} {o}r > Tr | dadapter B{p} | dadapter, B{p} | da",
    ),
    (
        "dA = da.T @ x",
        AUTOGRAD,
        "gate and up have an A each, so PEFT reads x for both. LoRA_MLP reads it once.",
        "{n[4]} mm Tr T{i} > r{i}; {n[5]} cast r{i} > r{i}4 | da' {x} / cast | da, {x} copy"
        " | dA{p}",
    ),
    (
        "dx = da @ A",
        AUTOGRAD,
        "Back through A. The adapter's part of the gradient is as large as x, or as hidden.",
        "{n[6]} mm Tr r{i} > T{i} | da A{p} | da, A{p} | {dx} part",
    ),
    (
        "dx = dx.float().bfloat16()",
        "derived by autograd from\npeft/tuners/tuners_utils.py: _cast_input_dtype\n{casts_ms} ms "
        "for all casts of this panel and of panel 1, on an H200",
        "The forward cast its input to fp32 and back, so autograd does the same to the gradient: "
        "{six_TI} for hidden's, and the numbers stay as they were.",
        "{n[7]} cast T{i} > T{i}4; {n[8]} cast T{i}4 > T{i} | to fp32 / to bf16 | {dx} part, -"
        " | {dx} part",
    ),
    (
        "dx = dx + dresult @ W",
        AUTOGRAD,
        "The other part of the gradient comes through the frozen weight. Adding it is a pass. For "
        "x, gate and up give two parts each: three passes. LoRA_MLP's addmm_ adds by itself.",
        "{n[9]} mm T{o} {o}{i} > T{i} | {dy} W{p} | {dy}, W{p} | {dx} rest",
        "{add}",
    ),
)
SILU_BACKWARD = (
    "hidden = silu(gate) * up, backwards",
    "derived by autograd from transformers/models/qwen2/modeling_qwen2.py: Qwen2MLP.forward\n"
    "{peft_silu_ms} ms with the forward's two passes, on an H200",
    "Three passes, {nine_TI}, that LoRA_MLP does in one kernel. dh comes from the first column. "
    "dup and dgate go to the other two, at the top.",
    """12 mul TI TI > TI | dsilu, = dh * up | dh, up | dsilu
13 mul TI TI > TI | dup, = dh * silu(gate) | dh, silu(gate) | dup
25 silu_backward TI TI > TI | dgate, = dsilu * silu'(gate) | dsilu, gate | dgate""",
)

FORWARD = (
    (
        "A, (Bg, Bu) = cast_adapters(\n    (Ag, Bg, Au, Bu), x.dtype)\n"
        "Ad, (Bd,) = cast_adapters(\n    (Ad, Bd), x.dtype)\nz = x @ A.T",
        "fused_mlp/utils.py: cast_adapters, matmul_A",
        "Calls 1 and 2 copy the fp32 adapters to bf16: _foreach_copy_ copies several tensors in "
        "one call. Ag on top of Au is one A, so x is read once for both. z = [zg, zu] is x "
        "Ag' beside x Au', {TR}, and is kept.",
        """1 _foreach_copy_ Ir4 Ir4 rH4 rH4 > Ir Ir rH rH | _foreach_copy_ | Bg, Bu, Ag, Au | \
A, Bg, Bu
2 _foreach_copy_ Hr4 rI4 > Hr rI | _foreach_copy_ | Bd, Ad | Ad, Bd
3 mm TH RH > TR* | z = x A' | x, A | z""",
    ),
    (
        "gate = (x @ Wg.T).addmm_(\n    z[:, :r], Bg.T, alpha=s)\n"
        "up = (x @ Wu.T).addmm_(\n    z[:, r:], Bu.T, alpha=s)",
        "fused_mlp/utils.py: matmul_lora\nWith the backward: {scale_ms} ms less than PEFT for "
        "scaling and adding, {gemms_ms} more for GEMMs, on an H200",
        "First the frozen GEMM, then the adapter: addmm_ multiplies, scales and adds in place, "
        "in one call, where PEFT writes the adapter's part, scales it and adds it in three. No "
        "second [T, 11008] is made. gate and up are kept for the backward.",
        """4 mm TH IH > TI | gate = x Wg' | x, Wg | gate, so far
6 mm TH IH > TI | up = x Wu' | x, Wu | up, so far""",
        """5 addmm_ TI Tr Ir > TI* | gate += s zg Bg' | gate, zg, Bg | gate
7 addmm_ TI Tr Ir > TI* | up += s zu Bu' | up, zu, Bu | up""",
    ),
    (
        "hidden = swiglu_forward(gate, up)",
        "fused_mlp/swiglu.py: swiglu_forward\n{swiglu_forward_ms} ms on an H200",
        "One Triton kernel reads gate and up once. silu(gate) never gets to memory. hidden is not "
        "kept: the backward recomputes it.",
        "8 _swiglu_forward_kernel TI TI > TI | hidden = silu(gate) * up | gate, up | hidden",
    ),
    (
        "zd = hidden @ Ad.T\noutput = (hidden @ Wd.T).addmm_(\n    zd, Bd.T, alpha=s)",
        "fused_mlp/utils.py: matmul_A, matmul_lora",
        "down in the same way: no call only to scale, none only to add. zd is not kept either.",
        """9 mm TI rI > Tr | zd = hidden Ad' | hidden, Ad | zd
10 mm TI HI > TH | output = hidden Wd' | hidden, Wd | output, so far
11 addmm_ TH Tr Hr > TH | output += s zd Bd' | output, zd, Bd | output""",
    ),
)
JOIN = """What the adapter of gate costs after x A', as memory traffic to scale. addmm_ adds it to
gate as it computes it, PEFT goes through [T, 11008] three times."""
SAVED = """The backward recomputes hidden from gate and up, which it needs in any case. The adapters
in bf16 are kept as well, {adapters}."""

BACKWARD_STARTS = """It begins with dy, the gradient of the output. A d before a name is its
gradient: dx of x, dh of hidden, dAd of Ad. The rest is what the forward had or kept. A is Ag on
top of Au, and z = [zg, zu] is x A'. It computes dx and the gradients of all A and B; the weights W
get none."""
BACKWARD = (
    (
        "p = s * dy @ Bd\ndh = (p @ Ad).addmm_(dy, Wd)",
        "fused_mlp/utils.py: input_gradient",
        "dh, the gradient of hidden, has two parts: through down's adapter (B, then A; p is the "
        "gradient between) and through Wd. addmm_ adds the second to the first in place; PEFT "
        "casts the first to fp32 and back and then adds, {nine_TI}.",
        """1 addmm_ TH Hr > Tr | p = s dy Bd | dy, Bd | p
2 mm Tr rI > TI | dh = p Ad | p, Ad | dh, so far
3 addmm_ TI TH HI > TI | dh += dy Wd | dh, dy, Wd | dh""",
    ),
    (
        "hidden, dgate, dup =\n    swiglu_backward(dh, gate, up)",
        "fused_mlp/swiglu.py: swiglu_backward\n{swiglu_backward_ms} ms on an H200",
        "Back through silu(gate) * up, in one Triton kernel as in panel 3, but with three loads "
        "and three stores; PEFT has three passes, {nine_TI}. silu' is the derivative of silu, "
        "sig(gate) + silu(gate) * (1 - sig(gate)) with sig the sigmoid. hidden is recomputed "
        "here, so it need not be kept: {TI} a layer less.",
        """4 _swiglu_backward_kernel TI TI TI > TI TI TI | hidden = silu(gate) * up, \
dup = dh * silu(gate), dgate = dh * up * silu'(gate) | gate, up, dh |
= hidden, again TI; dgate TI; dup TI""",
    ),
    (
        "zd = hidden @ Ad.T\ndAd, dBd = p.T @ hidden, s * dy.T @ zd",
        "fused_mlp/fast_lora.py: LoRA_MLP.backward\nfused_mlp/utils.py: adapter_gradients",
        "zd is for down what z is for gate and up. The gradients of down's A and B are stored in "
        "fp32, the adapters' own dtype: PEFT casts the gradients of all six adapters afterwards, "
        "{adapter_casts}. zd was not saved, so call 5 recomputes it, {hidden_Ad} of traffic. "
        "Then hidden's {TI} are freed, as dh's were after call 4.",
        """5 mm TI rI > Tr | zd = hidden Ad' | hidden, Ad | zd, again
6 addmm Tr TI > rI4 | dAd = p' hidden | p, hidden | dAd, grad_down_A
7 addmm TH Tr > Hr4 | dBd = s dy' zd | dy, zd | dBd, grad_down_B""",
    ),
    (
        "dz = torch.cat(\n    [s * dgate @ Bg, s * dup @ Bu], 1)",
        "fused_mlp/utils.py: input_gradient",
        "Back through the B of gate and of up, into the two halves of one dz. From here one GEMM "
        "serves both. PEFT multiplies by s first, in a pass of {two_TI} each.",
        """8 addmm_ TI Ir > Tr | dzg = s dgate Bg | dgate, Bg |
9 addmm_ TI Ir > Tr | dzu = s dup Bu | dup, Bu |
= dz, which is [dzg, dzu] TR""",
    ),
    (
        "dx = (dz @ A).addmm_(dgate, Wg)\ndx.addmm_(dup, Wu)",
        "fused_mlp/utils.py: input_gradient",
        "The gradient of x: through both adapters at once, then through each frozen weight, added "
        "in place. PEFT makes four such gradients and adds them in three passes, "
        "{three_TH} each.",
        """10 mm TR RH > TH | dx = dz A | dz, A | dx, so far
11 addmm_ TH TI IH > TH | dx += dgate Wg | dx, dgate, Wg | dx, so far
12 addmm_ TH TI IH > TH | dx += dup Wu | dx, dup, Wu | dx""",
    ),
    (
        "dAg, dAu = (dz.T @ x).split(r)\ndBg, dBu = s * dgate.T @ z[:, :r],\n"
        "    s * dup.T @ z[:, r:]",
        "fused_mlp/utils.py: adapter_gradients",
        "The gradients of the A and B of gate and up, in fp32. One GEMM with dz gives dAg and "
        "dAu, so x is read once: {TH} less. z was kept, {TR}, so x A' is not recomputed: {x_A} "
        "less.",
        """13 addmm TR TH > RH4 | [dAg; dAu] = dz' x | dz, x | dAg, dAu
14 addmm TI Tr > Ir4 | dBg = s dgate' zg | dgate, zg | dBg, grad_gate_B
15 addmm TI Tr > Ir4 | dBu = s dup' zu | dup, zu | dBu, grad_up_B""",
    ),
)


# --- the panels -----------------------------------------------------------------------------------


def peft_forward(panel: Panel) -> None:
    """Draw one column per projection, read downwards, and below them the calls that join gate and
    up."""
    panel.starts(PEFT_STARTS, f"{X}; {WEIGHTS}", f"{ADAPTERS}; {DOWN_ADAPTERS}")
    for column, (name, *_) in enumerate(MLP):
        panel.text(RIGHT + column * (SPAN + LANE) / 3, panel.down, f"{name}_proj", 20)
    panel.down += 36
    for code, where, why, card in PEFT:
        cards = []
        for column, (name, x, i, o, y, star) in enumerate(MLP):
            numbers = range(1 + 10 * column, 10 + 10 * column)
            cards.append(card.format(n=numbers, p=name[0], x=x, i=i, o=o, y=y, s=star))
        panel.band(code, where, why, "\n".join(cards))
    panel.band(*SILU)
    panel.saved(PEFT_SAVED, [("PEFT", panel)])


def peft_backward(panel: Panel) -> None:
    """Draw a column per projection, in execution order, and below them the activation's passes."""
    saved = "x copy TH*; hidden copy TI*; a Tr*", "gate TI*; up TI*; silu(gate) TI*"
    adapters = "Ag rH; Au rH; Bg Ir; Bu Ir; Ad rI; Bd Hr"
    panel.starts(PEFT_BACKWARD_STARTS, f"dy TH; {WEIGHTS}", *saved, adapters)
    for column, name in enumerate(("down_proj", "up_proj", "gate_proj")):
        panel.text(RIGHT + column * (SPAN + LANE) / 3, panel.down, name, 20)
    panel.down += 36
    for code, where, why, *templates in PEFT_BACKWARD:
        rows = []
        for template in templates:
            cards = [
                template.format(p=p, x=x, i=i, o=o, dy=dy, n=n, add=add, dx="d" + x[0])
                for p, x, i, o, dy, n, add in PEFT_MLP
            ]
            rows.append("\n".join(cards))
        panel.band(code, where, why, *rows)
    panel.band(*SILU_BACKWARD)


def lora_forward(panel: Panel, peft: Panel) -> None:
    panel.starts(
        "x and the frozen weights are bf16. The adapters, of rank 32, are trained and kept in "
        "fp32.",
        f"{X}*; {WEIGHTS}",
        f"{ADAPTERS}; {DOWN_ADAPTERS}",
    )
    for band in FORWARD:
        panel.band(*band)
    parts = [[(n, of.calls[n]) for n in ns] for of, ns in ((peft, (7, 8, 9)), (panel, (5,)))]
    panel.compare(JOIN, list(zip(("PEFT", "LoRA_MLP"), parts, strict=True)))
    panel.saved(SAVED, [("PEFT", peft), ("LoRA_MLP", panel)])


def lora_backward(panel: Panel) -> None:
    adapters = "A RH; Bg, gate_B Ir; Bu, up_B Ir; Ad, down_A rI; Bd, down_B Hr"
    panel.starts(BACKWARD_STARTS, "dy TH; x TH*; gate TI*; up TI*; z TR*", WEIGHTS, adapters)
    for band in BACKWARD:
        panel.band(*band)


def draw_panels() -> tuple[list[dict], list[Panel]]:
    """Return Excalidraw's elements, and the four panels that have calls."""
    peft = Panel(1, "1  PEFT, forward", HOW_TO_READ + ", a is x A'.")
    lora = Panel(2, "2  LoRA_MLP, forward", HOW_TO_READ + ADDMM)
    triton = Panel(3, "3  What a Triton kernel does: swiglu_forward", INTRO)
    autograd = Panel(4, "4  PEFT, backward", HOW_TO_READ + ".")
    by_hand = Panel(5, "5  LoRA_MLP, backward by hand", HOW_TO_READ + ADDMM + EQUATIONS)
    peft_forward(peft)
    lora_forward(lora, peft)
    peft_backward(autograd)
    lora_backward(by_hand)
    unsloth = Panel(6, "6  Unsloth, and what differs", UNSLOTH_INTRO)
    draw_triton_panel(triton, SIZES["TI"])
    passes = [[(n, of.calls[n]) for n in ns] for of, ns in ((peft, (10, 20)), (lora, (8,)))]
    triton.compare(PASSES, list(zip(("PEFT", "LoRA_MLP"), passes, strict=True)))
    triton.source()
    forward = totals(peft.calls), totals(lora.calls)
    backward = totals(autograd.calls), totals(by_hand.calls)
    for panels, phase, both in (
        ((peft, lora), "forward", forward),
        ((autograd, by_hand), "backward", backward),
    ):
        for panel in panels:
            panel.totals(phase, *both)
    draw_unsloth_panel(unsloth, forward, backward)
    elements = draw_overview(peft, lora, autograd, by_hand)
    x, y = -(3 * WIDTH + 2 * GUTTER) // 2, HEIGHT // 2 + 2 * GUTTER
    for row in ((peft, lora, triton), (autograd, by_hand, unsloth)):
        for column, panel in enumerate(row):
            elements += panel.framed(x + column * (WIDTH + GUTTER), y)
        y += max(panel.down for panel in row) + 2 * GUTTER
    return elements, [peft, lora, autograd, by_hand]


# --- the files ------------------------------------------------------------------------------------


def write_scene(path: Path, elements: list[dict]) -> None:
    scene = dict(type="excalidraw", version=2, source="docs/draw_lora.py", elements=elements)
    scene |= dict(appState=dict(viewBackgroundColor="#ffffff", gridSize=10), files={})
    path.write_text(json.dumps(scene, indent=1) + "\n")


def write_drawing() -> None:
    parser = argparse.ArgumentParser(
        description="Write lora.excalidraw, or its panels and figures."
    )
    parser.add_argument("--panels", type=Path, help="a folder for a file of each panel alone")
    parser.add_argument("--svg", type=Path, help="the folder with what Excalidraw made of those")
    options, path = parser.parse_args(), ROOT / "lora.excalidraw"
    if not (options.panels or options.svg):
        return write_scene(path, draw_panels()[0])
    drawing = path.read_bytes()
    elements = json.loads(drawing)["elements"]
    frames = [element["id"] for element in elements if element["type"] == "frame"]
    for figure, frame in zip(FIGURES, frames, strict=True):
        if options.panels:
            panel = [e | {"frameId": None} for e in elements if e["frameId"] == frame]
            write_scene(options.panels / f"{figure}.excalidraw", panel)
        if options.svg:
            svg = (options.svg / f"{figure}.svg").read_text().rstrip()
            stamp = f"<!-- lora.excalidraw sha256 {hashlib.sha256(drawing).hexdigest()} -->"
            (ROOT / "docs" / "figures" / f"{figure}.svg").write_text(f"{svg}\n{stamp}\n")


if __name__ == "__main__":
    write_drawing()
