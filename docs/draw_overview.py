"""The first panel of lora.excalidraw: how many kernels PEFT and LoRA_MLP launch, and what that
buys.

It lies around the origin, where Excalidraw opens a drawing, and fits a laptop's screen at 100%.
"""

from call_panel import DIMENSIONS, SIZES, Panel
from draw_unsloth import BACKWARD, FORWARD
from excalidraw import CALL_KINDS, GRAY, Canvas
from lora_times import SEQ_LEN, SUITE

WIDTH, HEIGHT, LEFT = 1160, 612, 24
SQUARE, PITCH, FIRST = 21, 24, 236  # a launch, the next one, and where the first stands
PX_PER_MS = 165
MAP = (
    ("1  PEFT, forward\npeft/tuners/lora/layer.py", "2  LoRA_MLP, forward\nfused_mlp/fast_lora.py",
     "3  A Triton kernel\nfused_mlp/swiglu.py"),
    ("4  PEFT, backward\nderived by autograd", "5  LoRA_MLP, backward\nfused_mlp/fast_lora.py",
     "6  Unsloth, and what differs\nunsloth/kernels/fast_lora.py"),
)  # fmt: skip
UNSLOTH = tuple(totals.split(":")[0] for totals in (FORWARD, BACKWARD))
SAVINGS = (
    ("cast, fp32 and bf16", "casts", "casts_ms"),
    ("pass, elementwise", "scaling and adding", "scale_ms"),
    ("pass, elementwise", "silu, mul", "silu_ms"),
)


def draw_overview(peft: Panel, lora: Panel, autograd: Panel, by_hand: Panel) -> list[dict]:
    canvas = Canvas(0)
    counts = [len(panel.calls) for panel in (peft, lora, autograd, by_hand)]
    title = f"One MLP with LoRA: PEFT {counts[0]} launches, LoRA_MLP {counts[1]} launches"
    canvas.text(LEFT, 14, title, 32)
    subtitle = (
        f"That is the forward, of Qwen2.5-3B and {DIMENSIONS['T']:,} tokens. In the backward "
        f"{counts[2]} launches become {counts[3]}. PEFT runs the MLP as modules,\n"
        "each blind to the next. LoRA_MLP is one autograd function, and so is Unsloth's, with "
        f"{UNSLOTH[0]} and {UNSLOTH[1]} launches where it is not compiled."
    )
    canvas.text(LEFT, 62, subtitle)
    rows = [("PEFT, forward", peft), ("LoRA_MLP, forward", lora)]
    rows += [("PEFT, backward", autograd), ("LoRA_MLP, backward", by_hand)]
    for n, (whose, panel) in enumerate(rows):
        draw_launches(canvas, 120 + 34 * n + 12 * (n // 2), whose, panel)
    for n, kind in enumerate(CALL_KINDS):
        canvas.box(f"legend {kind}", FIRST + 225 * n, 272, 213, 30, kind, kind, None, 14)
    draw_savings(canvas, 324)
    for n, row in enumerate(MAP):
        for m, text in enumerate(row):
            place = LEFT + 374 * m, 492 + 56 * n, 364, 50
            canvas.box(f"panel {text[0]}", *place, "plain", text, None, 14)
    return canvas.frame("Overview", -WIDTH // 2, -HEIGHT // 2, WIDTH, HEIGHT)


def draw_launches(canvas: Canvas, y: int, whose: str, panel: Panel) -> None:
    canvas.text(LEFT, y, f"{whose}: {len(panel.calls)}")
    for number, call in sorted(panel.calls.items()):
        x = FIRST + PITCH * (number - 1)
        canvas.box(f"launch {whose} {number}", x, y, SQUARE, SQUARE, call.kind, "")


def draw_savings(canvas: Canvas, y: int) -> None:
    """Draw, to scale, the time that LoRA_MLP saves in a layer, forward and backward."""
    finding = (
        "On an H200 that saves {less_ms} ms of GPU time a layer, forward and backward together"
    )
    canvas.text(LEFT, y, finding.format_map(SIZES), 20)
    canvas.text(LEFT, y + 42, "PEFT spends more on")
    x: float = FIRST
    for style, name, key in SAVINGS:
        width = max(round(float(SIZES[key]) * PX_PER_MS, -1), 80)
        canvas.box(
            f"saved {name}", x, y + 34, width, 50, style, f"{name}\n{SIZES[key]} ms", None, 14
        )
        x += width
    canvas.text(x + 22, y + 50, "less on")
    spent = round(float(SIZES["gemms_ms"]) * PX_PER_MS, -1)
    text = f"GEMMs\n{SIZES['gemms_ms']} ms"
    canvas.box("spent", x + 90, y + 34, spent, 50, CALL_KINDS[0], text, None, 14)
    source = (
        "A step with the MLP fused takes the GPU {lora_step_ms} ms, with PEFT {peft_step_ms}: "
        f"32 rows of {SEQ_LEN} tokens, 36 layers, no checkpointing, docs/runs/h200/{SUITE}."
    )
    count = (
        "A square is one kernel launch, in the order in which they run. The profile of that run "
        "agrees, but for what cuBLAS adds to some GEMMs: a reduction or a memset."
    )
    canvas.text(LEFT, y + 96, f"{source.format_map(SIZES)}\n{count}", 14, color=GRAY)
    canvas.text(LEFT, y + 142, "Below, a panel each:")
