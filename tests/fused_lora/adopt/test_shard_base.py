"""`shard_base`: models with sharded base weights compute what whole ones do."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from cases.families_case import QWEN_3_5
from cases.four_bit_case import quantised
from cases.fused_case import ALL, SHORT
from cases.layer_case import layer_of, peft_model
from cases.peft_models import ids, set_weights
from cases.ranks import on_ranks
from cases.reference import relative_error
from peft import LoraConfig
from safetensors.torch import save as safe

from fused_lora import Fusion, fuse, shard_base, unfuse
from fused_lora.layer.shards import Gathering

EVERYTHING = Fusion(**ALL, layer=True)
CHECKPOINTED = Fusion(**ALL, layer=True, checkpoint="full")
EVEN = {"intermediate_size": 140}
MORE = EVEN | {"num_hidden_layers": 4}


# --- training -------------------------------------------------------------------------------------

FIVE = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
DELTA = QWEN_3_5 | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


def layers_in_4_bits(base):
    return quantised(quantised(base, "layers.2."), "layers.3.")


# ranks, what to fuse, and how the model is made
MODELS = {
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
    "four ranks": (4, EVERYTHING, {"config": EVEN | {"head_dim": 28}}),
}  # fmt: skip


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
    names = shard_base(model)
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
    "some layers in 4 bits", "dropout",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has hooks")
@pytest.mark.parametrize("how", MODELS)
def test_a_sharded_model_trains_as_a_whole_one_does(how):
    for error, (left, left_of_whole), count in on_ranks(MODELS[how][0], trained, how):
        assert error < 1e-5 and left == left_of_whole and count


# --- one weight -----------------------------------------------------------------------------------


READS = {
    "linear": lambda weight: F.linear(torch.ones(2, weight.shape[1]), weight),
    "transposed": lambda weight: weight.t() * 2,
    "rows": lambda weight: weight[3:5],
    "split": lambda weight: torch.stack([one.sum() for one in weight.split([40, 100])]),
    "cast": lambda weight: weight.to(torch.float64) + 0,
    "copied": lambda weight: copy.deepcopy(weight) + 0,
    "inference": torch.inference_mode()(lambda weight: weight.detach().abs()),
}


def read(rank, device):
    """Read a sharded weight as it is made, and once it lies as a layer wants it."""
    model = peft_model("cpu", config=EVEN)
    whole = layer_of(model).mlp.gate_proj.base_layer.weight
    shard_base(model)
    found = []
    for _ in range(2):
        sharded = layer_of(model).mlp.gate_proj.base_layer.weight
        found += [one(sharded) for one in READS.values()]
        with pytest.raises(RuntimeError, match="mul_: this weight is sharded"):
            sharded.mul_(2)
        with pytest.raises(RuntimeError, match="load and merge before shard_base"):
            sharded.data = whole
        for save in (lambda one: torch.save(one, io.BytesIO()), lambda one: safe({"one": one})):
            with pytest.raises(RuntimeError, match="save the adapters alone"):
                save(sharded)
        fuse(model, EVERYTHING)
        gradients(model, 0)
    wanted = [one(whole) for one in READS.values()]
    return [torch.equal(*pair) for pair in zip(found, wanted * 2, strict=True)]


def test_a_sharded_weight_reads_as_the_whole_and_cannot_be_written():
    for equal in on_ranks(2, read):
        assert len(equal) == 2 * len(READS) and all(equal)


def moved(rank, device):
    """Cast a model after a step and `unfuse`."""
    model = peft_model(device, config=EVEN)
    shard_base(model)
    fuse(model, EVERYTHING)
    gradients(model, 0)
    unfuse(model)
    twin = peft_model(device, config=EVEN).double()
    model.double()
    found, wanted = gradients(model, 1), gradients(twin, 1)
    error = max(relative_error(found[name], wanted[name]) for name in wanted)
    shard = layer_of(model).mlp.up_proj.base_layer.weight.shard
    return error, shard.rows.dtype, shard.rows.shape


def test_a_sharded_model_can_be_cast_and_unfused():
    for error, dtype, shape in on_ranks(2, moved):
        assert error < 1e-12 and dtype == torch.float64 and shape == (70, 52)


# --- what is gathered when ------------------------------------------------------------------------


class Noted(Gathering):
    """Notes which layers would be gathered."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def _start(self, buffers):
        self.noted.append(buffers[0].layer)
        self._pending = buffers, []


class Held:
    """A buffer of a layer's first function, or of its second."""

    def __init__(self, layer, group=0):
        self.layer, self.group = layer, group


HELD = {(layer, group): [Held(layer, group)] for layer in range(4) for group in range(2)}


def step(gathering, trained=0, is_checkpointed=False, layers=(0, 1, 2, 3)):
    """Run a step's calls: a forward, and the backward of layers from `trained` on. Return what was
    gathered in each call."""

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
        gathering.bring(index, HELD[index, 0])

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
