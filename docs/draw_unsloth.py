"""The panel of lora.excalidraw that shows how Unsloth's LoRA_MLP differs.

We count Unsloth's totals like ours, from a trace of its LoRA_MLP on tensors of the drawing's size,
not compiled, with fp32 adapters.
"""

from call_panel import LANE, LEFT, RIGHT, SIZES, SPAN, Panel

VERSION = "2026.10.9"
FORWARD = "16: 9 GEMMs, 6 casts, 1 Triton kernel\n4.6 GB"
BACKWARD = "32: 19 GEMMs, 12 casts, 1 Triton kernel\n7.3 GB"
UNSLOTH_INTRO = f"""Unsloth first published a LoRA MLP as one autograd function. We wrote ours from
the equations. Both run the same frozen GEMMs, add the adapters with addmm_ and have a Triton kernel
in each direction. This panel shows where they differ, read in Unsloth {VERSION}, with adapters in
fp32. Boxes with square corners are launches, boxes with round corners are tensors."""
GEMM, CAST, TRITON = "matrix product, or GEMM", "cast, fp32 and bf16", "Triton kernel"
SAVED = "activation, saved"
# topic, files and times, reason, and the boxes of Unsloth and of LoRA_MLP
DIFFERENCES = (
    (
        "x A' for gate and up",
        "unsloth/kernels/utils.py: matmul_lora\nfused_mlp/utils.py: matmul_A",
        "Unsloth multiplies x by the A of gate and by the A of up. We put Ag on top of Au and read "
        "x once.",
        ((GEMM, "zg = x Ag'"), (GEMM, "zu = x Au'")),
        ((GEMM, "z = x A'"),),
    ),
    (
        "The adapters' dtype",
        "unsloth/kernels/fast_lora.py: LoRA_MLP\nfused_mlp/utils.py: cast_adapters",
        "Unsloth casts each adapter in the forward and once more in the backward, and autograd "
        "casts the six gradients. We cast several in one call, keep the copies, and let GEMMs "
        "write the gradients in fp32.",
        (
            (CAST, "6 casts,\nforward"),
            (CAST, "6 casts,\nbackward"),
            (CAST, "6 casts of\ngradients"),
        ),
        ((CAST, "2 calls of\n_foreach_copy_"),),
    ),
    (
        "x A' in the backward",
        "unsloth/kernels/fast_lora.py: LoRA_MLP.backward\n"
        "fused_mlp/fast_lora.py: LoRA_MLP.backward",
        "Unsloth saves x, gate and up, and recomputes all three products with A. We save z as "
        "well, {TR}, and recompute one. That spares {x_A} of traffic.",
        ((GEMM, "x Ag',\nagain"), (GEMM, "x Au',\nagain"), (GEMM, "hidden Ad',\nagain")),
        ((SAVED, "z, saved\n{TR}"), (GEMM, "hidden Ad',\nagain")),
    ),
    (
        "dy Bd in the backward",
        "unsloth/kernels/fast_lora.py: LoRA_MLP.backward\nfused_mlp/utils.py: input_gradient",
        "Both the gradient of hidden and that of Ad need it. Unsloth computes it for each, we "
        "compute it once.",
        ((GEMM, "dy Bd"), (GEMM, "dy Bd,\nagain")),
        ((GEMM, "p = s dy Bd"),),
    ),
    (
        "Gradients of gate's and up's adapters",
        "unsloth/kernels/fast_lora.py: LoRA_MLP.backward\nfused_mlp/utils.py: adapter_gradients",
        "With both halves of dz in one tensor, one GEMM gives dAg and dAu, and one gives dx "
        "through both adapters. Unsloth runs two of each.",
        ((GEMM, "dAg"), (GEMM, "dAu"), (GEMM, "dx +=,\ngate's"), (GEMM, "dx +=,\nup's")),
        ((GEMM, "dAg and dAu"), (GEMM, "dx, of both")),
    ),
    (
        "Writing in place",
        "unsloth/kernels/swiglu.py: swiglu_DWf_DW_dfg_kernel\nfused_mlp/swiglu.py: swiglu_backward",
        "Unsloth writes hidden, dup and dgate over dh, gate and up, and dx over x. That spares "
        "{three_TI} for a moment. We overwrite nothing: hooks and a second backward read the right "
        "numbers.",
        ((TRITON, "over dh,\ngate and up"), (GEMM, "dx,\nover x")),
        ((TRITON, "to three\nnew tensors"), (GEMM, "dx, to a\nnew tensor")),
    ),
    (
        "Rounding of silu(gate)",
        "unsloth/kernels/swiglu.py: swiglu_fg_kernel\nfused_mlp/swiglu.py: swiglu_forward\n"
        "Activation, forward and backward: {unsloth_silu_ms} ms in Unsloth, {lora_silu_ms} in "
        "LoRA_MLP, on an H200",
        "Unsloth rounds silu(gate) to bf16 before it multiplies by up, as transformers does. We "
        "round once, when hidden is stored.",
        ((TRITON, "bf16(silu(gate)) * up"),),
        ((TRITON, "silu(gate) * up, in fp32"),),
    ),
    (
        "Base weights in 4 bits",
        "unsloth/kernels/utils.py: fast_dequantize\nfused_mlp/fast_lora.py: LoRA_MLP",
        "Unsloth's function dequantizes such weights in the call. Ours takes bf16, fp16 and fp32.",
        (("frozen weight", "4 bits, FP8 or bf16"),),
        (("frozen weight", "bf16, fp16 or fp32"),),
    ),
)
SIDE = (SPAN - LANE) // 2
FOOTER = 210, 470, 780
SIDES = (RIGHT, RIGHT + SIDE + LANE)


def draw_unsloth_panel(panel: Panel, forward: tuple[str, str], backward: tuple[str, str]) -> None:
    for name, x in zip(("Unsloth", "LoRA_MLP"), SIDES, strict=True):
        panel.text(x, panel.down, name, 20)
    panel.down += 40
    for subject, where, why, *both in DIFFERENCES:
        panel.text(LEFT, panel.down, subject, 18)
        y, panel.down = panel.down, panel.down + 28
        panel.words("", why, where)
        for boxes, x in zip(both, SIDES, strict=True):
            width = SIDE // len(boxes)
            for n, (style, text) in enumerate(boxes):
                id = f"{subject} {x} {n}"
                panel.box(id, x + n * width, y, width, 56, style, text.format_map(SIZES), None, 14)
        panel.end(y + 56)
    for phase, unsloth, (peft, lora_mlp) in (
        ("forward", FORWARD, forward),
        ("backward", BACKWARD, backward),
    ):
        panel.text(LEFT, panel.down, f"\nlaunches in a {phase}\nmemory traffic", 14)
        whose = f"PEFT\n{peft}", f"Unsloth, not compiled\n{unsloth}", f"LoRA_MLP\n{lora_mlp}"
        for x, total in zip(FOOTER, whose, strict=True):
            panel.text(x, panel.down, total, 14)
        panel.down += 76
    panel.source()
