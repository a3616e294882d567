"""Made-up runs of every fused part, to test how much step time each part saves."""

from cases import example_results as example

from report.ablation import AblationBlock
from variants import ALONE, SUITES, VARIANTS

WITHOUT = "_no_checkpointing"
STATUS = {
    ("fused_attention", 512): "oom",
    ("fused_all_but_rope", 512): "error",
    ("fused_all", 128): "parity_failed",
    ("vanilla_peft", 256): "oom",
    ("vanilla_peft" + WITHOUT, 256): "oom",
    **{(id, 512): "oom" for id, variant in VARIANTS.items() if not variant.checkpoints},
}
WITH_CHECKPOINTING = [id for id in SUITES["all"] if VARIANTS[id].checkpoints]
RUNS = {
    "all": example.run(example.ALL),
    "with gaps": example.run(example.ALL, seq_lens=(128, 256, 512), status=STATUS),
    "one block, one round": example.run(WITH_CHECKPOINTING, (512,), rounds=1),
    "two variants": example.run(("vanilla_peft", "fused_mlp"), (512,)),
    "a length without any time": example.run(
        ("vanilla_peft", "fused_mlp", "fused_all"),
        (256, 512),
        status={(v, 512): "oom" for v in ("vanilla_peft", "fused_mlp", "fused_all")},
    ),
    "rehearsal": example.run(example.ALL, seq_lens=(64,), rehearsal=True, gpu=False),
}
HAND_MADE = dict.fromkeys(ALONE.values(), (200, 210, 220)) | {  # a part saves nothing, but for:
    "vanilla_peft": (200, 210, 220),
    "vanilla_peft_again": (201, 210, 221),
    "fused_mlp": (180, 190, 190),
    "fused_attention": (190, 200, 220),
    "fused_rope": (199, 211, 219),
    "fused_rms_norm": (195, 205, 215),
    "fused_cross_entropy": (198, 207, 216),
    "fused_checkpoint": (204, 214, 224),
    "fused_all": (120, 130, 140),
    "fused_all_but_mlp": (150, 160, 160),
    "fused_all_but_rope": (120, 131, 140),
}


def row(rows, part):
    return next(row for row in rows if row.part == part)


def gains(*block, **time):
    return AblationBlock(*block, **time).gains()
