"""`shard_base` and `host_base`: models whose base lies elsewhere compute what others do."""

import copy
import io
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases.families_case import QWEN_3_5
from cases.four_bit_case import quantised
from cases.fused_case import ALL, SHORT
from cases.layer_case import layer_of, peft_model
from cases.peft_models import adapt, base_model, ids, set_weights
from cases.ranks import on_ranks
from cases.reference import relative_error, seeded
from cases.streams import Gpu, Later, Stream, on_stream
from peft import LoraConfig
from safetensors.torch import save as safe
from transformers import AutoModelForCausalLM

from fused_lora import Fusion, fuse, host_base, shard_base, unfuse
from fused_lora.adopt import where_base_lies
from fused_lora.layer.gathering import Gathering
from fused_lora.step import host_memory
from fused_lora.step.host_memory import HostMemory
from fused_lora.weights import host_rows
from fused_lora.weights.borders import borders_of
from fused_lora.weights.host_rows import HostRows

EVERYTHING = Fusion(**ALL, layer=True)
CHECKPOINTED = Fusion(**ALL, layer=True, checkpoint="full")
IN_4_BITS = Fusion(rms_norm=True, cross_entropy=True, layer=True)
IN_4_BITS_AGAIN = replace(IN_4_BITS, checkpoint="full")
EVEN = {"intermediate_size": 140}
MORE = EVEN | {"num_hidden_layers": 4}


HERE = None  # in place of a rank


def elsewhere(rank, model, layers_on_gpu=0):
    """Shard a model's base, or move it into host memory."""
    return host_base(model, layers_on_gpu) if rank is HERE else shard_base(model)


def results_of(ranks, body, device, *arguments):
    """Return those of body(rank, device, *arguments) on ranks, or of HERE if there are none."""
    return on_ranks(ranks, body, *arguments) if ranks else [body(HERE, device, *arguments)]


somewhere = pytest.mark.parametrize("ranks", [2, 0], ids=["ranks", "host"])


# --- training -------------------------------------------------------------------------------------

FIVE = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
DELTA = QWEN_3_5 | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MIXTURE = {
    "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def layers_in_4_bits(base):
    return quantised(quantised(base, "layers.2."), "layers.3.")


def in_bf16(base):
    return quantised(base, quant_storage=torch.bfloat16)


# ranks, what to fuse, and how the model is made
SHARDED = {
    "four layers": (2, EVERYTHING, {"config": MORE}),
    "four layers, full": (2, CHECKPOINTED, {"config": MORE}),
    "the last layers": (2, EVERYTHING, {"config": MORE, "layers_to_transform": [2, 3]}),
    "attention alone": (2, EVERYTHING, {"config": EVEN, "target_modules": ["q_proj", "v_proj"]}),
    "parts": (2, Fusion(**ALL), {"config": EVEN}),
    "dropout": (2, CHECKPOINTED, {"config": EVEN, "lora_dropout": 0.5}),
    "joined projections": (1, EVERYTHING, {"family": "Phi3", "config": {"pad_token_id": 0},
                           "target_modules": "all-linear"}),
    "a layer that steps aside": (2, EVERYTHING, {"config": MORE}),
    "a larger rank later": (2, EVERYTHING, {"config": MORE}),
    "o and down alike": (2, EVERYTHING, {"config": MORE | {"intermediate_size": 52}}),
    "some layers in 4 bits": (1, EVERYTHING, {"config": FIVE, "change": layers_in_4_bits}),
    "gated delta nets": (1, EVERYTHING, {"family": "Qwen3_5Text", "config": DELTA}),
    "experts that stay": (2, EVERYTHING, {"family": "Qwen3Moe", "config": MIXTURE,
                          "target_modules": ["q_proj", "o_proj"]}),
    "four ranks": (4, EVERYTHING, {"config": EVEN | {"head_dim": 28}}),
}  # fmt: skip
ON_HOST = {f"{how}, host": (0, *row[1:]) for how, row in SHARDED.items() if row[0] < 4} | {
    "4 bits, host": (0, IN_4_BITS, {"config": FIVE, "change": quantised}),
    "4 bits, full, host": (0, IN_4_BITS_AGAIN, {"config": FIVE, "change": quantised}),
    "4 bits, two layers stay, host": (0, IN_4_BITS_AGAIN, {"config": MORE, "change": quantised}),
    "two layers stay, host": (0, EVERYTHING, {"config": FIVE}),
    "selective, host": (0, Fusion(**ALL, layer=True, checkpoint="selective", checkpoint_gib=1e-4),
                        {"config": MORE}),
    "offload, host": (0, Fusion(**ALL, layer=True, checkpoint="offload"), {"config": MORE}),
    "odd sizes, host": (0, CHECKPOINTED, {}),
    "stored as bf16, host": (0, IN_4_BITS, {"dtype": torch.bfloat16, "change": in_bf16}),
}  # fmt: skip
MODELS = SHARDED | ON_HOST
ON_HOST_QUICKLY = "four layers, full, host", "4 bits, two layers stay, host"


def gradients(model, seed):
    model.zero_grad()
    torch.manual_seed(seed)  # of dropout
    tokens = ids(next(model.parameters()).device, seed)[:1, :SHORT]
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def trained(rank, device, how):
    """Compare with a model that is fused, and not sharded, step by step. Between two steps evaluate
    and generate, which takes PEFT's own path."""
    _, fusion, options = MODELS[how]
    model = peft_model(device, **options)
    twin = copy.deepcopy(model)
    names = elsewhere(rank, model, 2 if "two layers stay" in how else 0)
    left = fuse(model, fusion).left, fuse(twin, fusion).left
    errors = []
    for one in (model, twin) if how == "a layer that steps aside" else ():
        layer_of(one, 1).mlp.gate_proj.register_forward_hook(lambda *_: None)
    for seed in range(3):
        for one in (model, twin) if how == "a larger rank later" and seed == 2 else ():
            one.add_adapter("larger", LoraConfig(r=40, target_modules="all-linear"))
            one.set_adapter("larger")
            set_weights(one, device, only=".larger.")  # B was zero
        found, wanted = gradients(model, seed), gradients(twin, seed)
        assert found.keys() == wanted.keys()
        errors += [relative_error(found[name], wanted[name]) for name in wanted]
        prompt = ids(device, seed)[:1, :3]
        both = [one.eval().generate(prompt, max_new_tokens=2, do_sample=False) for one in
                (model, twin)]  # fmt: skip
        assert torch.equal(*both)
        with torch.no_grad():
            errors.append(relative_error(*(one(input_ids=prompt).logits for one in (model, twin))))
        model.train(), twin.train()
    return max(errors), left, len(names)


@pytest.mark.slow(
    "the last layers", "attention alone", "four ranks", "four layers", "joined projections",
    "some layers in 4 bits", "dropout", "experts that stay", *ON_HOST_QUICKLY,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has hooks")
@pytest.mark.parametrize("how", MODELS)
def test_a_model_trains_the_same_wherever_its_base_lies(how, device):
    results = results_of(MODELS[how][0], trained, device, how)
    for error, (left, left_of_whole), count in results:
        assert error < 1e-5 and left == left_of_whole and count


# --- one weight -----------------------------------------------------------------------------------


READS = {
    "linear": lambda weight: F.linear(weight[:2] + 1, weight),
    "transposed": lambda weight: weight.t() * 2,
    "rows": lambda weight: weight[3:5],
    "split": lambda weight: torch.stack([one.sum() for one in weight.split([40, 100])]),
    "cast": lambda weight: weight.to(torch.float64) + 0,
    "copied": lambda weight: copy.deepcopy(weight) + 0,
    "inference": torch.inference_mode()(lambda weight: weight.detach().abs()),
}


def read(rank, device):
    """Read a weight as it is made, and once it lies as a layer wants it."""
    model = peft_model(device, config=EVEN)
    whole = layer_of(model).mlp.gate_proj.base_layer.weight
    elsewhere(rank, model)
    where, call = ("in host", "host_base") if rank is HERE else ("sharded over", "shard_base")
    found = []
    for _ in range(2):
        sharded = layer_of(model).mlp.gate_proj.base_layer.weight
        found += [one(sharded) for one in READS.values()]
        with pytest.raises(RuntimeError, match=f"mul_: this weight is {where}"):
            sharded.mul_(2)
        with pytest.raises(RuntimeError, match=f"load and merge before {call}"):
            sharded.data = whole
        for save in (lambda one: torch.save(one, io.BytesIO()), lambda one: safe({"one": one})):
            with pytest.raises(RuntimeError, match="save the adapters alone"):
                save(sharded)
        fuse(model, EVERYTHING)
        gradients(model, 0)
    wanted = [one(whole) for one in READS.values()]
    return [torch.equal(*pair) for pair in zip(found, wanted * 2, strict=True)]


@somewhere
def test_a_weight_elsewhere_reads_as_a_whole_one_and_cannot_be_written(ranks, device):
    for equal in results_of(ranks, read, device):
        assert len(equal) == 2 * len(READS) and all(equal)


def moved(rank, device):
    """Cast a model after a step and `unfuse`."""
    model = peft_model(device, config=EVEN)
    elsewhere(rank, model)
    fuse(model, EVERYTHING)
    gradients(model, 0)
    unfuse(model)
    twin = peft_model(device, config=EVEN).double()
    model.double()
    found, wanted = gradients(model, 1), gradients(twin, 1)
    error = max(relative_error(found[name], wanted[name]) for name in wanted)
    source = layer_of(model).mlp.up_proj.base_layer.weight.source
    rows = source.rows if rank is not HERE else source.whole()
    return error, rows.dtype, rows.shape, 140 if rank is HERE else 70


@somewhere
def test_a_model_whose_base_lies_elsewhere_can_be_cast_and_unfused(ranks, device):
    for error, dtype, shape, rows in results_of(ranks, moved, device):
        assert error < 1e-12 and dtype == torch.float64 and shape == (rows, 52)


# --- in host memory -------------------------------------------------------------------------------


def test_codes_in_host_memory_are_read_and_cannot_be_merged(device):
    model = peft_model(device, change=quantised)
    projection = layer_of(model).mlp.gate_proj
    x = torch.ones(3, 52, device=device)
    wanted = projection(x)
    plain = copy.deepcopy(projection.base_layer.weight)
    host_base(model, 0)
    codes = projection.base_layer.weight
    assert torch.equal(projection(x), wanted)
    assert torch.equal(codes + 0, plain + 0) and torch.equal(copy.deepcopy(codes) + 0, plain + 0)
    with pytest.raises(RuntimeError, match=r"host memory, so .* dequantised: merge"):
        model.merge_adapter()
    with pytest.raises(RuntimeError, match="save the adapters alone"):
        torch.save(codes, io.BytesIO())
    host_base(model, 0)  # nothing more to move
    assert projection.base_layer.weight is codes


def test_adapters_of_a_base_in_host_memory_are_saved_and_switched(device, tmp_path):
    model = peft_model(device)
    wanted = gradients(model, 0)
    host_base(model, 0)
    fuse(model, CHECKPOINTED)
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "again", is_trainable=True)
    model.set_adapter("again")
    found = gradients(model, 0)
    assert len(found) == len(wanted)
    for name, gradient in wanted.items():
        assert relative_error(found[name.replace("default", "again")], gradient) < 1e-5


@pytest.fixture
def zeros_here(monkeypatch):
    """A GPU's zeros are made on the CPU."""
    made = lambda like, *size, device: torch.zeros(size, dtype=like.dtype)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_zeros", made)


def test_a_weight_is_pinned_in_pieces_where_its_layer_reads_it(monkeypatch, zeros_here):
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 1024)
    monkeypatch.setattr(host_memory, "_pinned", partial(torch.zeros, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = HostMemory(8 * 1024)
    weights = [torch.randn(30, 10, generator=seeded(seed)) for seed in range(2)]
    sources = [HostRows(weight, torch.device("cuda", 0), memory) for weight in weights]
    for stride in (16, 16, 17):  # other adapters, later
        rows = [torch.full((30, stride), -1.0) for _ in sources]
        for source in sources:
            source.space(stride)
        for source, matrix in zip(sources, rows, strict=True):
            source._copy_to(matrix)
        for found, weight in zip(rows, weights, strict=True):
            assert torch.equal(found[:, :10], weight) and not found[:, 10:].any()
    assert memory.pinned_bytes == 6 * 1024  # what is too small now was used again
    assert sources[0].moved(torch.device("cpu"), torch.float32).address == sources[0].address
    with pytest.raises(RuntimeError, match=r"pins no more than .* of host memory: raise"):
        sources[0].space(70)
    del source, sources
    assert memory.room(in_capture=False) == 8 * 1024


def test_a_base_that_host_memory_cannot_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    base_model("cpu").save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = adapt(base, "cpu")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 150_000)
    with pytest.raises(ValueError, match=r"GiB of weights do not fit in the .* GiB of host memory"):
        host_base(model, 0)
    host_base(model, layers_on_gpu=1)  # half of them do


@pytest.mark.parametrize("in_4_bits", [False, True])
def test_layers_stay_on_the_gpu_as_many_as_fit_evenly(in_4_bits, monkeypatch):
    model = peft_model("cpu", config=FIVE, **({"change": quantised} if in_4_bits else {}))
    linear = [one.base_layer for one in layer_of(model).modules() if hasattr(one, "base_layer")]
    per_layer = sum(one.weight.nbytes for one in linear)
    per_token = 4 * sum(one.in_features + one.out_features for one in linear)
    monkeypatch.setattr(where_base_lies, "_device_of", lambda weight: torch.device("cuda", 0))
    others = [p for name, p in model.named_parameters() if ".base_layer.weight" not in name]
    fixed = sum(one.nbytes * (4 if one.requires_grad else 1) for one in others)
    fixed += 16448 * per_token + (6 + 5 / 32 if in_4_bits else 2) * per_layer  # buffers, scales
    for layers, free in (
        (0, 0),
        (1, fixed + per_layer),
        (2, fixed + 3 * per_layer - 1),
        (5, 100 * fixed),
    ):
        monkeypatch.setattr(where_base_lies, "_free_bytes", lambda device, free=free: int(free))
        bases = where_base_lies._bases_of_layers(model, HostRows)
        assert where_base_lies._layers_that_fit(model, bases) == layers
    kept = [[bases not in where_base_lies._all_but(n, [*range(5)]) for bases in range(5)]
            for n in range(6)]  # fmt: skip
    assert kept[2] == [False, False, True, False, True] and [*map(sum, kept)] == [*range(6)]


def test_the_report_says_where_the_base_lies(device):
    model = peft_model(device, config=FIVE)
    host_base(model, layers_on_gpu=2)
    assert "base: 3 of 5 layers in host memory, 0.0 GiB" in str(fuse(model, EVERYTHING))
    # those in host memory take turns in two sets of memory, whatever lies between them
    borders = [borders_of(layer_of(model, index)) for index in (0, 1, 3)]
    assert [one.index for one in borders] == [0, 1, 2]
    assert borders[0].ahead is borders[2].ahead is not borders[1].ahead


@pytest.mark.slow
def test_parts_that_would_need_4_bits_from_host_memory_are_left(device):
    model = peft_model(device, change=quantised, config={"num_hidden_layers": 1})
    wanted = gradients(copy.deepcopy(model), 0)
    host_base(model, 0)
    with pytest.raises(ValueError, match=r"mlp=True fuses no .* only whole layers fetch it"):
        fuse(model, Fusion(mlp=True))
    left = fuse(model, Fusion(**ALL), strict=False).left
    assert any("in host memory, where only whole" in reason for reason in left.values())
    for name, gradient in gradients(model, 0).items():
        assert relative_error(gradient, wanted[name]) < 1e-5


REFUSED = {
    "fused": (lambda model: (fuse(model, EVERYTHING), host_base(model, 0)),
              "call host_base before fuse"),
    "a number": (lambda model: host_base(model, -1), "layers_on_gpu as a number from 0"),
    "trained": (lambda model: host_base(model.requires_grad_(), 0), r"to move: .* is trained"),
    "FP8": (lambda model: (host_base(model, 0), fuse(model, Fusion(layer=True, fp8=True))),
            "is in host memory: leave fp8 out, or host_base"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_base_that_cannot_move_is_refused_in_words(how, device):
    calls, words = REFUSED[how]
    with pytest.raises(ValueError, match=words):
        calls(peft_model(device))


# --- what is gathered when ------------------------------------------------------------------------


class Noted(Gathering):
    """Notes which layers would be gathered."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def _start(self, buffers):
        self.noted.append(buffers[0].layer)
        super()._start(buffers)


class Held:
    """A buffer of a layer's first function, or of its second."""

    def __init__(self, layer, group=0):
        self.layer, self.group = layer, group
        source = HostRows(torch.zeros(1, 1), torch.device("cpu"), HostMemory(0))
        self.sources = [(source, torch.zeros(1, 1))]


HELD = {(layer, group): [Held(layer, group)] for layer in range(4) for group in range(2)}


def step(
    gathering, trained=0, is_checkpointed=False, layers=(0, 1, 2, 3), held=HELD,
    read=lambda index: None,
):  # fmt: skip
    """Run a step's calls: a forward, and the backward of layers from `trained` on. Return what was
    gathered in each call. read: what a call does then."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, index):
            ctx.index = index
            called(index)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(1 + is_checkpointed):
                called(ctx.index)
            return grad, None

    def called(index):
        gathering.noted.append("|")
        gathering.bring(index, held[index, 0])
        read(index)

    gathering.noted.clear()
    x = torch.ones(1)
    for index in layers:
        x = Layer.apply(x.requires_grad_() if index == trained else x, index)
    gathering.noted.append("backward")
    x.backward()
    return " ".join(map(str, gathering.noted))


def test_a_layers_weights_are_gathered_while_the_one_before_it_runs():
    gathering = Noted()
    assert step(gathering) == "| 0 | 1 | 2 | 3 backward | 3 | 2 | 1 | 0"
    for _ in range(2):
        assert step(gathering) == "| 0 1 | 2 | 3 | backward | 3 2 | 1 | 0 |"
    checkpointed = step(gathering, is_checkpointed=True)
    assert checkpointed == "| 0 1 | 2 | 3 | backward | 3 2 | | 1 | | 0 | | |"
    # layer 2 has the matrices that layer 0 reads
    for _ in range(2):
        skipped = step(gathering, layers=(0, 2, 3))
    assert skipped == "| 0 | 2 3 | backward | 3 2 | | 0"
    step(gathering)
    # a backward that ends earlier: nothing is on its way at the end, from the second time on
    assert step(gathering, trained=1).endswith("backward | 3 2 | 1 | 0")
    step(gathering, trained=1)
    assert step(gathering, trained=1) == "| 0 1 | 2 | 3 | backward | 3 2 | 1 |"


def test_what_a_failed_capture_has_started_is_brought_again(monkeypatch):
    gathering = Noted()
    for _ in range(2):
        step(gathering)
    with monkeypatch.context() as capture:
        capture.setattr("fused_lora.layer.gathering.is_capturing", lambda _: True)
        gathering.bring(0, HELD[0, 0])
    gathering.noted.clear()
    gathering.bring(1, HELD[1, 0])
    assert gathering.noted == [1, 2]


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
def test_a_layer_reads_its_own_weights_whenever_the_copies_run(is_early, monkeypatch, zeros_here):
    user, copies = Stream(), Stream()
    Gpu.current = user
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(host_rows, "_stream_on", lambda device: copies)
    gpu, memory = torch.device("cuda", 0), HostMemory(0)
    monkeypatch.setattr(HostRows, "_pinned", lambda _, flat: host_rows._Held([flat], lambda: None))
    sets = [torch.zeros(3, 16).as_subclass(Later) for _ in range(2)]
    held = {}
    for layer in range(4):
        held[layer, 0] = [one] = [Held(layer)]
        one.sources = [(HostRows(torch.full((3, 10), layer + 1.0), gpu, memory), sets[layer % 2])]
    seen = []

    def read(index):
        memory = sets[index % 2].as_subclass(torch.Tensor)
        user.queue.append(lambda: seen.append((index + 1.0, memory[2, 9].item())))
        if is_early:
            copies.run()

    gathering = Noted()
    for _ in range(3):
        step(gathering, is_checkpointed=True, held=held, read=read)
    user.run()
    assert len(seen) == 3 * (4 + 8) and all(found == wanted for wanted, found in seen)
