"""The longest row that trains on a card: fused, and Unsloth in each of its modes.

    python -m dev.measure.long_rows --model configs/llama3-8b.json --runs fused --cards 16 24
    python -m dev.measure.long_rows --model configs/qwen3-4b.json --runs unsloth --cards 80
    python -m dev.measure.long_rows --base bf16 --host-layers 31 --runs fused unsloth accelerate \
        --cards 24 --lengths 4096 16384 --limit 0

A base with random weights, adapters on all linear layers, one row a step. A run first trains two
rows that take seconds. From what they reserve it works out the longest row of each card, and trains
that one too, with torch held to the card's size less 0.6 GiB for CUDA's context. If it trains we
try a longer row, up to what allocated memory alone would allow, otherwise a shorter one. Where a
step would take longer than --limit seconds the length is only "predicted". Rows of the table are
appended to long_rows.txt in --out as soon as they are there. Needs bitsandbytes, and a GPU.
`PYTORCH_ALLOC_CONF` is yours to set; Unsloth sets its own.

--host-layers N keeps the base of N layers in host memory: fused with `host_base`, Unsloth with
its offload_layers, which leaves it at least one, and PEFT, with checkpointing, with accelerate's
cpu_offload. --limit 0 trains the two rows alone. --rows N cuts each into N equal ones.

unsloth_tiled is its unsloth_tiled_mlp=True; it writes into its tiles, which torch may refuse.
unsloth_tiled_norms keeps the norms' outputs, for which it writes elsewhere.
"""

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import processes
from bench.options import HERE, Parser
from bench.weights import read_config, resolve
from models import Built, build
from report.fits import CONTEXT_GIB
from report.table import thousands
from variants import BASELINE, BASES, BF16, NF4, WITHOUT, Lora

from .families import write_config
from .table import ON_GPU, add_sizes, draw_weights

FUSED, ACCELERATE = "fused", "accelerate"
TILED = {"UNSLOTH_TILED_MLP": "arctic"}  # what unsloth_tiled_mlp=True means
ENVIRONMENT: dict[str, dict[str, str]] = {
    FUSED: {},
    "unsloth_tiled": TILED,
    "unsloth_tiled_norms": TILED | {"UNSLOTH_RMSNORM_SAVE_OUTPUT": "1"},
    "unsloth_target": {"UNSLOTH_TILED_MLP": "target"},
    "unsloth": {},
    ACCELERATE: {},
}
VARIANTS = {FUSED: BASELINE + WITHOUT, ACCELERATE: BASELINE}  # or Unsloth
POSITIONS = 2**20  # long enough that nothing scales RoPE
# Multiples of "grid", as many rows for each card as "tries", each step of at most "limit" seconds
SIZES = {"--grid": 4096, "--tries": 2, "--limit": 120, "--rank": 32, "--host-layers": 0,
         "--rows": 1}  # fmt: skip
CLOSE = 0.03  # of a length: nearer we do not look
COLUMNS = (
    "model", "run", "card, GiB", "tokens", "how", "s a step", "tokens/s", "allocated, GiB",
    "reserved, GiB", "pinned, GiB", "process, GiB", "loss",
)  # fmt: skip


class Step(NamedTuple):
    """A step on a row, and the memory at its peak.

    pinned_gib: host memory that torch has pinned. process_gib: how much the process grew.
    """

    tokens: int
    seconds: float
    allocated_gib: float
    reserved_gib: float
    pinned_gib: float
    process_gib: float
    loss: float


class Found(NamedTuple):
    """A line of the table. card_gib: None for the rows from which others are worked out."""

    card_gib: float | None
    tokens: int
    how: str
    step: Step | None = None


def longest_in(room: float, two: Sequence[Step], memory: str, grid: int) -> int:
    """Return the longest row that fits the room in GiB, by the line through what two steps took.
    memory: "allocated_gib" or "reserved_gib"."""
    short, long = two
    low, high = getattr(short, memory), getattr(long, memory)
    gib_per_token = (high - low) / (long.tokens - short.tokens)
    if gib_per_token <= 0:
        raise ValueError(f"--lengths: {long.tokens} tokens take no more memory; give longer rows")
    return int((long.tokens + (room - high) / gib_per_token) // grid) * grid


def seconds_of(tokens: int, two: Sequence[Step]) -> float:
    """Return how long a step should take, as two steps say: with the row a token takes longer."""
    short, long = two
    low, high = short.seconds / short.tokens, long.seconds / long.tokens
    grows = max(0.0, (high - low) / (long.tokens - short.tokens))
    return tokens * (high + grows * (tokens - long.tokens))


def search(
    train: Callable[[int, float, int], Step | None], asked: argparse.Namespace
) -> Iterator[Found]:
    """Yield the two short rows, then the rows that were tried for each card.

    ``train(tokens, card_gib, steps)`` returns None if the memory of that card does not suffice.
    """
    steps: dict[int, Step] = {}
    for tokens in asked.lengths:
        step = train(tokens, max(asked.cards), 3)
        yield Found(None, tokens, "out of memory" if step is None else "trained", step)
        if step is None:
            return
        steps[tokens] = step
    if not asked.limit:
        return
    first_two = [*steps.values()]
    for card_gib in sorted(asked.cards):
        room = card_gib - CONTEXT_GIB
        longest_two = [steps[tokens] for tokens in sorted(steps)[-2:]]
        # held to a card, torch keeps whatever fits: reserved memory tells only in the first two
        tokens = longest_in(room, first_two, "reserved_gib", asked.grid)
        too_long = max(tokens, longest_in(room, longest_two, "allocated_gib", asked.grid))
        trained = 0
        for _ in range(asked.tries):
            seconds = seconds_of(tokens, longest_two)
            if tokens < asked.grid or seconds > asked.limit:
                how = "nothing fits" if tokens < asked.grid else f"predicted: {seconds:,.0f} s"
                if not trained:
                    yield Found(card_gib, max(0, tokens), how)
                break
            count = 2 if 2 * seconds <= asked.limit else 1
            step = train(tokens, card_gib, count)
            how = "out of memory" if step is None else f"trained, steps: {count}"
            yield Found(card_gib, tokens, how, step)
            if step is None:
                too_long = tokens
            else:
                trained, steps[tokens] = tokens, step
            shortest = trained or (1 - 4 * CLOSE) * too_long
            tokens = int((shortest + too_long) / 2 // asked.grid) * asked.grid
            if tokens < (1 + CLOSE) * trained:
                break


def hold_to(card_gib: float) -> None:
    """Let torch reserve what a card of this size has room for, and answer as it who asks."""
    room = int((card_gib - CONTEXT_GIB) * 2**30)
    card = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / card))
    torch.cuda.mem_get_info = lambda device=None: (room - torch.cuda.memory_reserved(), room)


def memory_gib() -> tuple[float, float, float]:
    """Return the peaks of allocated and reserved GPU memory, and pinned memory."""
    if not ON_GPU:
        return 0.0, 0.0, 0.0
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return allocated / 2**30, reserved / 2**30, pinned / 2**30


def process_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def start_anew(model: Any, tokens: int, card_gib: float) -> None:
    """Prepare for rows of another length on another card."""
    for module in model.modules():
        if hasattr(module, "max_seq_length"):  # where Unsloth cuts rows off
            module.max_seq_length = tokens
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_memory_stats()
        hold_to(card_gib)


def measure(send: Any, run: str, checkpoint: Path, asked: argparse.Namespace) -> None:
    """Build the model, search, and send each line that was found."""
    os.environ |= ENVIRONMENT[run]
    device = "cuda" if ON_GPU else "cpu"
    built = build(
        VARIANTS.get(run, "full_unsloth"), checkpoint, Lora(rank=asked.rank, alpha=2 * asked.rank),
        asked.lengths[-1], device, 0, asked.base if ON_GPU else BF16,
        0 if run == ACCELERATE else asked.host_layers,
    )  # fmt: skip
    model: Any = built.model
    if run == ACCELERATE:
        offload_base(model, asked.host_layers, device)
    if run == FUSED:
        from fused_lora import Fusion, fuse, report

        fusion = Fusion(
            layer=True, rms_norm=True, cross_entropy=True, checkpoint=asked.checkpoint,
            host_gib=asked.host_gib,
        )  # fmt: skip
        send(str(fuse(model, fusion)))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=ON_GPU)
    words = model.config.get_text_config().vocab_size
    send(f"{run}: allocator {built.settings.allocator or 'with its defaults'}")

    def train(tokens: int, card_gib: float, steps: int) -> Step | None:
        start_anew(model, tokens, card_gib)
        torch.manual_seed(0)
        rows = torch.randint(words, (asked.rows, tokens // asked.rows), device=trained[0].device)
        process, seconds, loss = process_gib(), [], 0.0
        try:
            for _ in range(steps):
                began = time.perf_counter()
                loss = one_step(built, optimizer, rows)
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            return None
        if run == FUSED and (waits := report(model).host_memory):
            send(f"host memory: {waits}")
        step = Step(tokens, min(seconds), *memory_gib(), process_gib() - process, loss)
        # the limit may not hold where segments expand
        return step if step.reserved_gib <= card_gib - CONTEXT_GIB else None

    for found in search(train, asked):
        send(found)


def offload_base(model: Any, layers: int, device: str) -> None:
    """Have accelerate bring the base weights of the first layers for each use."""
    from accelerate import cpu_offload

    for layer in model.get_submodule("base_model.model.model.layers")[:layers]:
        for module in layer.modules():
            if hasattr(module, "base_layer"):
                cpu_offload(module.base_layer, device)


def one_step(built: Built, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    with built.autocast():
        loss = built.model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # waits for the GPU


def row_of(model: str, run: str, found: Found) -> str:
    card = "-" if found.card_gib is None else f"{found.card_gib:g}"
    cells = [model, run, card, thousands(found.tokens) or "-", found.how]
    if step := found.step:
        memory = (step.allocated_gib, step.reserved_gib, step.pinned_gib, step.process_gib)
        cells += [f"{step.seconds:.2f}", thousands(step.tokens / step.seconds) or "-"]
        cells += [*(f"{gib:.2f}" for gib in memory), f"{step.loss:.4f}"]
    return f"| {' | '.join(cells + ['-'] * (len(COLUMNS) - len(cells)))} |"


def reason_in(output: str) -> str:
    """Return the first line of the error that ended a process."""
    lines = output.splitlines() or [""]
    errors = (line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line))
    return next(errors, lines[-1])


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="long_rows", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    usual_model = "llama3-8b.json" if ON_GPU else "tiny.json"
    parser.add_argument("--model", default=str(HERE / "configs" / usual_model))
    parser.add_argument("--runs", nargs="+", choices=ENVIRONMENT,
                        default=[one for one in ENVIRONMENT if one != ACCELERATE],
                        help=f"(default: all but {ACCELERATE})")  # fmt: skip
    parser.add_argument("--cards", nargs="+", type=float, default=[16.0, 24.0, 48.0, 80.0],
                        metavar="GIB")  # fmt: skip
    parser.add_argument("--lengths", nargs=2, type=int, default=[32768, 65536], metavar="N",
                        help="tokens of the two short rows (default: 32768 65536), more than "
                             "16384: with fewer, fused keeps its last layer whole")  # fmt: skip
    add_sizes(parser, SIZES)
    parser.add_argument("--base", choices=BASES, default=NF4, help="(default: nf4)")
    parser.add_argument("--checkpoint", default="offload", help="of fused (default: offload)")
    parser.add_argument("--host-gib", type=float, metavar="GIB",
                        help="host memory of fused (default: its own choice)")  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N", help="take the first N")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER")
    asked = parser.parse_args(argv)
    asked.lengths.sort()
    if ACCELERATE in asked.runs and not (asked.host_layers and asked.base == BF16):
        parser.error(f"--runs {ACCELERATE}: it needs --host-layers and --base {BF16}")
    asked.pairs = [f"max_position_embeddings={POSITIONS}"]
    try:
        read_config(resolve(asked.model, asked.cache.resolve(), seed=0))
        source = write_config(asked, asked.model)
        draw_weights([source])
    except (ValueError, OSError) as error:
        print(f"long_rows: {error}", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "long_rows.txt").open("a") as record:

        def write(line: str) -> None:
            print(line, flush=True)
            print(line, file=record, flush=True)

        return measure_all(asked, source.folder, write)


def measure_all(asked: argparse.Namespace, checkpoint: Path, write: Callable[[str], None]) -> int:
    """Write what is planned, then the rows of each run. Return the exit code."""
    model = Path(asked.model).stem + (f", {asked.layers} layers" if asked.layers else "")
    cards, lengths = (", ".join(f"{n:,g}" for n in some) for some in (asked.cards, asked.lengths))
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    where = f", {asked.host_layers} layers in host memory" if asked.host_layers else ""
    write(f"{model}, {asked.base}{where}, rank {asked.rank}, {device}, torch {torch.__version__}")
    write(f"rows of {lengths} tokens, then the longest of cards of {cards} GiB, if a step takes "
          f"less than {asked.limit:g} s")  # fmt: skip
    write(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    failed = False
    for run in asked.runs:

        def hear(said: Any, run: str = run) -> None:
            write(row_of(model, run, said) if isinstance(said, Found) else said)

        ended = processes.run(measure, run, checkpoint, asked, on_message=hear)
        if ended.error:
            failed = True
            print(ended.output_tail)
            write(f"{run}: {ended.error}: {reason_in(ended.output_tail)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
