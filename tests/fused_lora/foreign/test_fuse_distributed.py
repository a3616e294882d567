"""Fused models in PyTorch's two ways of training on several GPUs, in a group of one, and in
accelerate's loop."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import codes_case as checkpoint_case
from cases import fp8_case
from cases.four_bit_case import quantised
from cases.fused_case import ALL, SHORT, assert_close, functions_of, step
from cases.layer_case import LAYER, peft_model
from cases.layer_case import pair as layer_pair
from cases.peft_models import LAYERS, base_model, ids
from cases.reference import relative_error
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.forwards.layer import borders_of

FUSIONS = {
    "attention": Fusion(attention=True),  # with rope it is another function
    "all": Fusion(**ALL),
    "all, full": Fusion(**ALL, checkpoint="full"),
}


@pytest.fixture
def group(device):
    backend = "nccl" if device == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(model, device):
    """As a user does it: layer by layer, and then the rest."""
    mesh = init_device_mesh(device, (1,))
    for layer in model.get_submodule(LAYERS):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_of(model):
    """As of a model that is not wrapped."""
    found = step(model, length=SHORT)
    values = {
        name.removeprefix("module."): tensor.full_tensor() if is_dtensor(tensor) else tensor
        for name, tensor in found.items()
    }
    return found.functions, values


def is_dtensor(tensor):
    return isinstance(tensor, DTensor)


def assert_runs_and_is_right(wrap, fusion, device, **options):
    """A model that is fused and then wrapped runs what it ran before, and has plain gradients."""
    model = peft_model(device, **options)
    _, want = step_of(model)
    fuse(model, fusion)
    functions, _ = step_of(model)
    functions_wrapped, got = step_of(wrap(model))
    assert functions and functions_wrapped == functions
    assert_close(got, want)


IN_4_BITS = {"change": quantised}


@pytest.mark.slow("layer", "4 bits")
@pytest.mark.parametrize(
    ("fusion", "options"),
    [
        *((one, {}) for one in (*FUSIONS.values(), LAYER)),
        *((one, IN_4_BITS) for one in (LAYER, FUSIONS["all"])),
    ],
    ids=[*FUSIONS, "layer", "4 bits", "all parts in 4 bits"],
)
def test_distributed_data_parallel_is_right(fusion, options, group, device):
    assert_runs_and_is_right(DistributedDataParallel, fusion, device, **options)


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_layers_in_fp8_compute_what_they_did_and_keep_their_originals(
    is_checkpoint, group, fp8_in_fp32, device
):
    if is_checkpoint:
        model, plain = checkpoint_case.models(device, checkpoint_case.BLOCKS)
        fuse(model, fp8_case.FP8)
    else:
        model, plain, _ = fp8_case.pair(device)
    (functions, want), (wrapped, got) = step_of(model), step_of(DistributedDataParallel(model))
    assert functions == wrapped == {"DecoderLayer": 1}
    assert_close(got, want, 0.0)
    if not is_checkpoint:
        unfuse(model)
        assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fusion",
    [pytest.param(FUSIONS["all"], marks=pytest.mark.exhaustive), LAYER],
    ids=["all", "layer"],
)
def test_a_rank_drops_what_its_own_seed_says(fusion, group, device):
    model = peft_model(device, lora_dropout=0.3)
    assert not fuse(model, fusion).left

    def seeded(model, rank):
        torch.manual_seed(rank)
        return step_of(model)[1]

    want, other = seeded(model, 0), seeded(model, 1)
    wrapped = DistributedDataParallel(model)
    assert not torch.equal(want["loss"], other["loss"])
    assert_close(seeded(wrapped, 0), want)
    assert_close(seeded(wrapped, 1), other)


@pytest.mark.slow("all")
@pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
def test_fully_sharded_is_right(fusion, group, device):
    assert_runs_and_is_right(lambda model: shard(model, device), fusion, device)


@pytest.mark.parametrize("fusion", [FUSIONS["all"], LAYER], ids=["all", "layer"])
def test_the_report_of_a_sharded_model_says_what_its_next_forward_runs(fusion, group, device):
    model = shard(peft_model(device), device)
    found = fuse(model, fusion)
    assert found.counts == fuse(peft_model(device), fusion).counts
    step_of(model)  # the root keeps what it has gathered; a layer's weights are freed
    for layer in model.get_submodule(LAYERS):
        for border in getattr(borders_of(layer), "borders", ()):
            assert not any(one.untyped_storage().nbytes() for one, _ in border.buffer()._plain)
    assert report(model) == fuse(model, fusion) == found
    assert not found.left


def test_fp8_takes_no_sharded_layers(group, device):
    model = shard(peft_model(device), device)
    with pytest.raises(ValueError, match=r"fully_shard shards its weights: leave fp8 out"):
        fuse(model, fp8_case.FP8)


def test_weights_in_buffers_that_the_older_fsdp_mixes_up_are_neither_used_nor_saved(group, device):
    model, tokens = peft_model(device), ids(device)
    fuse(model, LAYER)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device(device))
    for use in (lambda: wrapped(input_ids=tokens), wrapped.state_dict):
        with pytest.raises(RuntimeError, match=r"mixes up base weights .* leave layer out"):
            use()


WRAPPED = {
    "DDP": (LAYER, lambda model, device: DistributedDataParallel(model)),
    "FSDP1": (
        FUSIONS["all"],
        lambda model, device: FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device(device)
        ),
    ),
    "FSDP2": (FUSIONS["all"], shard),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WRAPPED)
def test_the_state_of_a_wrapped_model_is_saved_and_loaded(how, group, tmp_path, device):
    model, (fusion, wrap) = peft_model(device), WRAPPED[how]
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    fuse(model, fusion)
    model = wrap(model, device)
    for full in (True, False):
        options = StateDictOptions(full_state_dict=full)
        state = get_model_state_dict(model, options=options)
        dcp.save(state, checkpoint_id=tmp_path / str(full))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(state, checkpoint_id=tmp_path / str(full))
        set_model_state_dict(model, state, options=options)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_close(found, want, 0.0)


# --- accelerate -----------------------------------------------------------------------------------


def accelerated(model, folder, device):
    """Two updates of two batches each in accelerate's own loop; what was saved, and the functions
    that ran."""
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer may have left bf16 there
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=device == "cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    batches = [ids("cpu", seed)[:, :7] for seed in range(4)]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(trained, lr=0.1), torch.utils.data.DataLoader(batches, None)
    )
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            functions = functions_of(loss)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(folder)
    return functions


@pytest.mark.slow
def test_accelerate_prepares_accumulates_and_saves_a_fused_model(device, tmp_path):
    fused, plain, _ = layer_pair(device, Fusion(layer=True, rms_norm=True, cross_entropy=True))
    start = copy.deepcopy(plain)
    assert accelerated(fused, tmp_path / "fused", device)["DecoderLayer"] == 2
    assert not accelerated(plain, tmp_path / "plain", device)
    loaded, wanted = (
        dict(PeftModel.from_pretrained(base_model(device), tmp_path / name).named_parameters())
        for name in ("fused", "plain")
    )
    for name, parameter in start.named_parameters():
        if parameter.requires_grad:
            moved = wanted[name] - parameter
            assert moved.any() and relative_error(loaded[name] - parameter, moved) < 1e-4, name
