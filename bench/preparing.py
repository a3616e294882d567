"""Functions that run in child processes beside the cells': weights, parity references, the floor,
and the kernels alone.

Every public function takes `send` first and sends its findings to the parent with it.
"""

from math import ceil
from typing import Any

from bench.cells import Send
from bench.folders import unfinished_beside
from bench.plan import Plan
from bench.weights import materialize


def prepare_run(send: Send, plan: Plan) -> None:
    """Make the base weights and the parity references that are missing.

    Sends {"doing": words} for each.
    """
    from bench.parity import make_reference

    send({"doing": f"base weights of {plan.source.name}"})
    materialize(plan.source, plan.seed, plan.device)
    for fp8 in sorted(plan.precisions()):
        path = plan.reference_file(fp8)
        if path.exists():
            continue
        send({"doing": "parity reference (vanilla PEFT in fp32)"})
        vanilla = plan.build("vanilla_peft", min(plan.seq_lens))
        reference = make_reference(vanilla, plan.parity_batches(), fp8)
        with unfinished_beside(path) as unfinished:  # runs may share a cache
            reference.save(unfinished)
        del vanilla


def measure_floor(send: Send, plan: Plan, precision: str, seq_lens: tuple[int, ...]) -> None:
    """Send the floor of each length in a precision as {"floor": {seq_len: ...}}.

    A step can skip padding, so the floor has none. Rows or documents of different lengths become as
    many of their mean length, which is the least work for attention.
    """
    from bench.floor import FrozenOperations, Shape, is_possible, time_floor

    shape = Shape.of(_config(plan))
    if not is_possible(precision, shape, plan.device):
        return  # `fuse` says why, and its variants have no time
    operations = FrozenOperations(shape, plan.device, precision)
    for seq_len in seq_lens:
        batches = plan.timed_batches(seq_len)
        labelled = round(sum(batch.labelled for batch in batches) / len(batches))
        rows = ceil(sum(batch.sequences for batch in batches) / len(batches))
        tokens = sum(batch.input_ids.numel() - batch.padding for batch in batches) / len(batches)
        result = time_floor(
            operations, rows, int(tokens / rows), labelled, plan.clock(), plan.accumulate
        )
        send({"floor": {seq_len: result}})


def measure_kernels(send: Send, plan: Plan) -> None:
    """Send the kernel table at the model's own shapes as {"kernels": ...}."""
    from bench.kernels import time_kernels

    tokens, config = [plan.batch_size * seq_len for seq_len in plan.seq_lens], _config(plan)
    send({"kernels": time_kernels(config.hidden_size, config.intermediate_size, tokens)})


def _config(plan: Plan) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(plan.source.folder, local_files_only=True)
