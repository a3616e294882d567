"""Speed of model families in GPU time: plain PEFT, Unsloth and fused.

    python -m dev.measure.families qwen3_5_text --layers 8
    python -m dev.measure.families gpt_oss --layers 2 --set num_local_experts=32
    python -m dev.measure.families configs/qwen3-8b.json --layers 24
    python -m dev.measure.families lfm2 --layers 2 --set 'layer_types=["conv", "full_attention"]'

A family is a model_type of transformers, in its default sizes, or a config.json. --layers keeps
only the first ones, because plain PEFT needs the memory. All runs have the same random weights and
tokens: a base in bf16, fp32 adapters with rank 16 on all linear layers, and 8 rows of 512 tokens,
without checkpointing. PEFT counts the experts of some mixtures as linear layers, and adapts their
gate_up_proj with twice the rank and their router. --experts adapts the experts of all mixtures with
one rank and no router, as Unsloth does. GPU time is how long kernels run in a step, the mean of
three.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.options import HERE, Parser
from bench.profiler import profile_step
from bench.weights import Source, linear_names, read_config, resolve

from .table import ON_GPU, add_sizes, draw_weights, print_rows, result_of

PLAIN, UNSLOTH, FUSED = RUNS = "plain PEFT", "Unsloth", "fused"
RANK, ALPHA = 16, 32
WARM_UP, PROFILED = 6, 3
MOST_WORDS = 32_000  # of the vocabulary
SIZES = {"--batch-size": 8, "--tokens": 512}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
COLUMNS = "family", "run", "GPU ms", "speedup", "ms a step", "peak GiB", "adapters, M", "loss"


class StepTime(NamedTuple):
    gpu_ms: float  # nan without a GPU
    wall_ms: float  # the median after the first half of the warm-up, which compiles kernels
    peak_gib: float  # allocated
    adapters: int  # trained values
    loss: float  # of the first step


def write_config(asked: argparse.Namespace, family: str) -> Source:
    """Write the configuration of a family's first layers. Return the model that has it.

    Raises ValueError if transformers has no such causal language model, or a value to change.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    cache, given = asked.cache.resolve(), {"model_type": family}
    if family.endswith(".json"):
        given = read_config(resolve(family, cache, seed=0))
    kind = given["model_type"]
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{family}: transformers has no such causal language model; give a decoder"
        )
    config = AutoConfig.for_model(**given)
    values = config.to_dict() if asked.layers is None else first_layers(config, asked.layers)
    for name, _, value in (pair.partition("=") for pair in asked.pairs):
        if name not in values:
            raise ValueError(f"--set {name}: the configuration of {family} has no such value")
        values[name] = json.loads(value)
    values.pop("quantization_config", None)
    text = json.dumps(values)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = cache / "families" / f"{Path(family).stem}-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return resolve(str(path), cache, seed=0)


def first_layers(config: Any, layers: int) -> dict[str, Any]:
    """Return a configuration's values for its first layers."""
    values: dict[str, Any] = config.to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values[name] = value[:layers]
        if name == "per_layer_config":
            values[name] = {key: one for key, one in value.items() if int(key) < layers}
    return values | {"num_hidden_layers": layers}


def family_model(run: str, checkpoint: Path, asked: argparse.Namespace) -> Any:
    """Return the model with new adapters, in training mode."""
    model: Any
    if run == UNSLOTH:
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            str(checkpoint), max_seq_length=asked.tokens, dtype=torch.bfloat16,
            load_in_4bit=bool(asked.quantize), local_files_only=True, use_exact_model_name=True,
            use_gradient_checkpointing=False,
        )  # fmt: skip
        model = FastLanguageModel.get_peft_model(
            model, r=RANK, lora_alpha=ALPHA, max_seq_length=asked.tokens,
            target_modules=linear_names(model) + adapted_experts(checkpoint, asked.experts),
            use_gradient_checkpointing=False,
        )  # fmt: skip
    else:
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16 if ON_GPU else torch.float32,
            device_map={"": 0} if ON_GPU and not asked.quantize else None,
            attn_implementation=asked.attention,
        )  # fmt: skip
        if asked.quantize:
            from fused_lora import quantize_experts

            device = "cuda" if ON_GPU else "cpu"
            quantize_experts(model, asked.quantize, device=device)
            model.to(device)
        model = get_peft_model(model, lora_config(model, asked.experts))
    model.config.use_cache = False
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:  # PEFT's zeros in B would give A no gradient
                parameter.normal_(std=0.02)
    return model.train()


def lora_config(model: Any, experts: bool) -> Any:
    """Return adapters on all linear layers, or on the model's and on all its experts. Where
    "all-linear" means experts, PEFT also adapts routers, and doubles the rank of gate_up_proj."""
    from peft import LoraConfig

    if not experts:
        return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=linear_names(model), target_parameters=[*EXPERTS]
    )


def adapted_experts(checkpoint: Path, experts: bool) -> list[str]:
    """Return the names of the experts' weights that PEFT adapts: "all-linear" may mean some."""
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
        adapted: Any = get_peft_model(model, lora_config(model, experts))
    names = adapted.peft_config["default"].target_parameters or ()
    names = {name.removeprefix("experts.") for name in names}
    return sorted(name for name in names if "." not in name)  # others are routers


def time_family(send: Any, run: str, checkpoint: Path, asked: argparse.Namespace) -> None:
    """Train, and send what `fuse` reports, then the step."""
    if run == UNSLOTH:
        import unsloth  # noqa: F401
    model = family_model(run, checkpoint, asked)
    if run == FUSED:
        from fused_lora import fuse

        send(str(fuse(model)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=ON_GPU)
    words = min(model.config.get_text_config().vocab_size, MOST_WORDS)
    torch.manual_seed(0)
    rows = torch.randint(words, (asked.batch_size, asked.tokens), device=device)

    def step() -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPU):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the GPU

    losses, seconds = [], []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    # all in one profile, because a process gets no kernels in a second one
    profile = profile_step(lambda: [step() for _ in range(PROFILED)], (), mark_modules=False)
    busy_ms = float("nan") if profile.gpu_busy_ms is None else profile.gpu_busy_ms
    send(
        StepTime(
            gpu_ms=busy_ms / PROFILED,
            wall_ms=1e3 * statistics.median(seconds[WARM_UP // 2 :]),
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0,
            adapters=sum(one.numel() for one in trained),
            loss=losses[0],
        )
    )


def timed_rows(asked: argparse.Namespace, sources: dict[str, Source]) -> Iterator[list[str]]:
    for family, source in sources.items():
        plain_ms = None
        for run in (one for one in RUNS if one in asked.runs):
            step = result_of(StepTime, time_family, run, source.folder, asked)
            if isinstance(step, str):
                yield [family, run, step]
                continue
            plain_ms = step.gpu_ms if run == PLAIN else plain_ms
            speedup = f"{plain_ms / step.gpu_ms:.2f}" if plain_ms else "-"
            yield [
                family, run, f"{step.gpu_ms:.1f}", speedup, f"{step.wall_ms:.1f}",
                f"{step.peak_gib:.1f}", f"{step.adapters / 1e6:.1f}", f"{step.loss:.4f}",
            ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="families", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("families", nargs="+", metavar="FAMILY", help="a model_type, or a file")
    parser.add_argument("--layers", type=int, metavar="N",
                        help="take the first N, 4 or more of Qwen3.5")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="pairs",
                        help="change a value, in JSON; may be given again")  # fmt: skip
    parser.add_argument("--experts", action="store_true",
                        help="adapt linear layers and experts with one rank")  # fmt: skip
    parser.add_argument("--quantize", choices=("nf4", "fp4", "mxfp4"),
                        help="keep experts in 4 bits, and Unsloth's attention")  # fmt: skip
    parser.add_argument("--attention", choices=("eager", "sdpa"),
                        help="of plain PEFT and fused (default: transformers chooses)")  # fmt: skip
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="(default: all)")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", metavar="FOLDER",
                        help="folder for the weights (default: .cache)")  # fmt: skip
    add_sizes(parser, SIZES)
    asked = parser.parse_args(argv)
    if asked.quantize in ("fp4", "mxfp4") and UNSLOTH in asked.runs:
        parser.error(
            f"--quantize {asked.quantize}: {UNSLOTH} has nf4 alone: leave it out of --runs"
        )
    try:
        sources = {family: write_config(asked, family) for family in asked.families}
        draw_weights(sources.values())
    except (ValueError, OSError) as error:
        print(f"families: {error}", file=sys.stderr)
        return 2
    return print_rows(COLUMNS, timed_rows(asked, sources))


if __name__ == "__main__":
    sys.exit(main())
