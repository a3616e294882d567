"""Orders and mixtures of `fuse` with PyTorch's wrappers on two ranks: training is right, or one
line says what to call instead."""

import copy
import re
import warnings
from functools import partial

import pytest
import torch
from cases import fp8_case
from cases.four_bit_case import quantised
from cases.fp8_case import FP8
from cases.fused_case import ALL, SHORT, assert_close, step
from cases.layer_case import LAYER, peft_model
from cases.peft_models import LAYERS, ids
from cases.ranks import on_ranks
from cases.reference import relative_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fused_lora import Fusion, fuse, host_base, report, shard_base, unfuse
from fused_lora.reading.projection import Projection
from fused_lora.weights.default_border import places_of_gathered

RANKS = 2
EVERYTHING = Fusion(**ALL, layer=True)
RIGHT = ""
ONE_LAYER = {"num_hidden_layers": 1}
MODELS = {  # that differ
    "4 bits, cast": {
        "change": partial(quantised, quant_storage=torch.float32),
        "config": ONE_LAYER | {"intermediate_size": 140},
    },
    "shard_base, then fully_shard": {"config": ONE_LAYER | {"intermediate_size": 140}},
    "shard_base, then host_base": {"config": ONE_LAYER | {"intermediate_size": 140}},
    "a trained head and its norm": {"config": ONE_LAYER, "modules_to_save": ["lm_head"]},
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def layers_of(model):
    return [*model.get_submodule(LAYERS)]


def shard(model, **options):
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def frozen(model):
    return {p for p in model.parameters() if not p.requires_grad}


def nothing(model):
    return model


def then_fully_shard(model):
    shard_base(model)
    return after_fuse(shard)(model)


def then_host_base(model):
    shard_base(model)
    host_base(model)


def shard_base_after(wrap):
    def wrapped(model):
        wrap(model)
        shard_base(model)

    return wrapped


def after_a_forward(wrap):
    def wrapped(model):
        fuse(model, EVERYTHING)
        loss_of(model, 0).backward()
        model.zero_grad()
        return wrap(model)

    return wrapped


def after_fuse(wrap, fusion=EVERYTHING):
    return lambda model: fuse(model, fusion) and wrap(model)


def by_itself(*names):
    """Shard modules of each layer, and then as usual."""

    def wrap(model):
        for layer in layers_of(model):
            for name in names:
                fully_shard(layer.get_submodule(name))
        return shard(model)

    return wrap


def the_model_first(model):
    fully_shard(model)
    return shard(model)


def the_tail_together(model):  # as accelerate does
    fully_shard([model.get_base_model().model.norm, model.get_base_model().lm_head])
    return shard(model)


def fsdp1(model):
    device = next(model.parameters()).device
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)


def tensor_parallel(model):
    mesh = init_device_mesh(next(model.parameters()).device.type, (RANKS,))
    names = "self_attn.q_proj.base_layer", "mlp.gate_proj.base_layer"  # of both blocks
    for layer in layers_of(model):
        parallelize_module(layer, mesh, {name: ColwiseParallel() for name in names})
    fuse(model, LAYER)


# how a model is wrapped -> what an error or a warning says, or RIGHT
WRAPPED = {
    "after a forward": (after_a_forward(shard), RIGHT),
    "after a forward, the base on each rank": (
        after_a_forward(lambda model: fully_shard(model, ignored_params=frozen(model))),
        RIGHT,
    ),
    "the model alone": (after_a_forward(fully_shard), RIGHT),
    "the head and its norm": (after_fuse(the_tail_together), RIGHT),
    "a trained head and its norm": (after_fuse(the_tail_together), RIGHT),
    "the model first": (
        after_fuse(the_model_first),
        r"sharded already: call fully_shard\(layer\) for each layer first",
    ),
    "an MLP by itself": (
        after_fuse(by_itself("mlp")),
        r"mlp: fully_shard shards it by itself: call fully_shard\(layer\) on whole layers",
    ),
    "an MLP by itself, after a forward": (
        after_a_forward(by_itself("mlp")),
        r"mlp: fully_shard shards it by itself: call fully_shard\(layer\) on whole layers",
    ),
    "a projection by itself": (
        after_fuse(by_itself("mlp.gate_proj")),
        r"gate_proj: fully_shard shards it by itself: call fully_shard\(layer\) on whole",
    ),
    "a norm by itself": (
        after_fuse(by_itself("input_layernorm")),
        r"input_layernorm: its weight is sharded by itself: call fully_shard\(layer\) on whole",
    ),
    "FSDP1, layers": (after_fuse(fsdp1), r"mixes up .*: load the model anew and call fully_shard"),
    "FSDP1, parts": (
        after_fuse(fsdp1, Fusion(**ALL)),
        r"joins it with trained weights: call fully_shard",
    ),
    "tensor parallel": (
        tensor_parallel,
        r"no fully_shard manages: load the model without tensor parallelism \(tp_plan\)",
    ),
    "FSDP1, saved": (
        after_fuse(lambda model: fsdp1(model).state_dict()),
        r"cannot be saved: .*mixes up base weights",
    ),
    "FP8": (
        lambda model: fuse(shard(model), FP8),
        "fully_shard shards its weights: leave fp8 out",
    ),
    "shard_base after fuse": (shard_base_after(after_fuse(nothing)), "call shard_base before fuse"),
    "shard_base after fully_shard": (shard_base_after(shard), "shards the model already"),
    "shard_base of odd sizes": (shard_base, "gate_proj.base_layer has 139 rows, which 2 ranks"),
    "shard_base, then fully_shard": (then_fully_shard, RIGHT),
    "shard_base, then host_base": (then_host_base, "the base is sharded over ranks already"),
    "4 bits, cast": (
        after_fuse(partial(shard, mp_policy=BF16)),
        r"cast packed 4-bit .*: load the model with bnb_4bit_quant_storage=torch.bfloat16",
    ),
}


def loss_of(model, rank):
    tokens = ids(next(model.parameters()).device, rank)[:, :SHORT]
    return model(input_ids=tokens, labels=tokens).loss


def tried(rank, device, how):
    """Take two steps on this rank's batch, and a plain twin's on those of all. Return the errors of
    the last gradients, what stays on PEFT's path, and what was raised or warned."""
    model = peft_model(device, **MODELS.get(how, {"config": ONE_LAYER}))
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrapped = WRAPPED[how][0](model)
            for _ in range(2):
                wrapped.zero_grad()
                loss_of(wrapped, rank).backward()
        except (ValueError, RuntimeError) as error:
            return {}, {}, [str(error)]
    for other in range(RANKS):
        (loss_of(plain, other) / RANKS).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if name in wanted}
    errors = {
        name: relative_error(gradient.full_tensor(), wanted[name])
        for name, gradient in found.items()
        if how != "FSDP1, parts"  # flat
    }
    told = [str(one.message) for one in caught if "Conversion of an array" not in str(one.message)]
    return errors, report(model).left, told


@pytest.mark.slow(
    "after a forward", "the head and its norm", "the model first", "an MLP by itself",
    "a norm by itself", "the model alone", "FSDP1, saved", "FP8",
)  # fmt: skip
@pytest.mark.parametrize("how", WRAPPED)
def test_an_order_or_a_mixture_trains_right_or_names_the_call(how):
    words = WRAPPED[how][1]
    for errors, left, told in on_ranks(RANKS, tried, how):
        if words == RIGHT:
            assert max(errors.values()) < 1e-4 and not left and not told
        else:
            assert re.search(words, " ".join(told)), told
            assert "\n" not in told[0]
            assert not errors or max(errors.values()) < 1e-4


def test_a_parameter_is_not_taken_for_a_dead_one_with_its_id():
    def places():
        weight = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        reads = [Projection(weight, None, weight, weight, 1.0)]
        found = places_of_gathered(reads)
        assert found == places_of_gathered(reads)
        return id(weight), found

    before = {}
    for _ in range(100):
        identity, found = places()
        assert before.get(identity) != found
        before[identity] = found
    assert len(before) < 100


def called_by_itself(rank, device):
    """Call a layer of a sharded model."""
    model = shard(peft_model(device))
    fuse(model, LAYER)
    hidden = torch.zeros(1, 2, 52, device=device, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="is sharded .* call the model"),
        pytest.raises(RuntimeError, match="and DTensor"),
    ):
        layers_of(model)[0].forward(hidden, position_embeddings=(hidden, hidden))


def test_a_layer_that_is_called_without_its_model_names_the_call():
    on_ranks(1, called_by_itself)


def in_fp8(rank, device):
    """Wrap a model in FP8, which has to compute what it did and to keep its originals."""
    model, plain, _ = fp8_case.pair(device, dtype=torch.bfloat16)
    want = step(model, length=SHORT)
    got = step(DistributedDataParallel(model), length=SHORT)
    assert got.functions == want.functions == {"DecoderLayer": 1}
    assert_close({name.removeprefix("module."): one for name, one in got.items()}, want, 0.0)
    unfuse(model)
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 0.0)


@pytest.mark.slow
def test_layers_in_fp8_compute_what_they_did_and_keep_their_originals():
    on_ranks(1, in_fp8)
