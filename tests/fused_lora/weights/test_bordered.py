"""Bordered weights: the buffers of fused layers, how weights get in and out, what fills them."""

import copy
import gc

import pytest
import torch
from cases.fp8_case import CONFIG, FP8
from cases.fused_case import batch
from cases.layer_case import LAYER, layer_of, operands_of, pair, peft_model
from cases.peft_models import assert_equal, base_model, logits
from torch.multiprocessing.reductions import StorageWeakRef

from fused_lora import fuse, unfuse
from fused_lora.forwards.layer import borders_of
from fused_lora.forwards.layer_reading import grouped_projections
from fused_lora.layer.filling import Adapter, adapters_of
from fused_lora.weights import borders as module

BF16 = {"dtype": torch.bfloat16}


def groups_of(layer):
    """The layer's four buffers, as its next forward has them, and the adapters that go there."""
    *row, blocks = operands_of(layer)
    return [group for block in blocks for group in block.frame.groups], adapters_of(row)


def base_layers(layer):
    return [
        [owner._modules[name].base_layer for name in names]
        for owner, names in grouped_projections(layer)
    ]


def storages(model):
    """Bytes of every storage that the model's tensors lie in, each once."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }


def assert_hold(groups, adapters):
    """The borders hold these adapters and nothing else."""
    left = iter(adapters)
    for group in groups:
        matrix, inputs, outs = group.buffer.matrix, group.in_features, group.out
        A, B = torch.zeros_like(matrix[outs:, :inputs]), torch.zeros_like(matrix[:outs, inputs:])
        row = column = 0
        for out, block, scaling in zip(
            group.out_features, group.blocks, group.scalings, strict=True
        ):
            one_A, one_B = (t.detach() for t in next(left))
            A[column : column + len(one_A)] = one_A
            B[row : row + out, column : column + len(one_A)] = one_B * scaling
            row, column = row + out, column + block
        assert A.any() and B.any()
        assert torch.equal(matrix[outs:, :inputs], A) and torch.equal(matrix[:outs, inputs:], B)
        assert group.bias is None or not group.bias[outs:].any()


# --- the buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@pytest.mark.parametrize("options", [{}, BF16, {"r": 3}], ids=("fp32", "bf16", "rank 3"))
def test_projections_that_share_an_input_share_a_buffer(family, options, device):
    model, _, _ = pair(device, family=family, **options)
    for layer in (layer_of(model), layer_of(model, 1)):
        groups, _ = groups_of(layer)
        for group, bases in zip(groups, base_layers(layer), strict=True):
            matrix, rank = group.buffer.matrix, options.get("r", 8)
            width = -(-rank * len(bases) // 8) * 8  # every row is aligned
            assert matrix.shape == (group.out + width, group.in_features + width)
            assert matrix.stride(1) == 1
            assert matrix.stride(0) * matrix.element_size() % 128 == 0  # whole lines of the L2
            for base in bases:
                for tensor, whole in ((base.weight, matrix), (base.bias, group.bias)):
                    assert tensor is None or (
                        tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                    )
            assert (group.bias is None) == (bases[0].bias is None)


def test_memory_grows_by_the_borders_alone_and_parameters_stay_the_same_objects(device):
    model = peft_model(device, **BF16)
    before, bytes_before = dict(model.named_parameters()), sum(storages(model).values())
    values = {name: p.detach().clone() for name, p in before.items()}
    fuse(model, LAYER)
    now = dict(model.named_parameters())
    assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
    assert_equal({name: p.detach() for name, p in now.items()}, values)
    expected = 0
    for group in groups_of(layer_of(model))[0]:
        row = -(-group.buffer.matrix.shape[1] // 64) * 64  # 128 bytes
        width = len(group.buffer.matrix) - group.out
        expected += len(group.buffer.matrix) * row - group.out * group.in_features
        expected += width if group.bias is not None else 0
    assert sum(storages(model).values()) - bytes_before == 2 * 2 * expected > 0
    unfuse(model)
    assert sum(storages(model).values()) == bytes_before
    assert all(p.is_contiguous() for p in model.parameters())


def test_a_buffer_lives_as_long_as_a_weight_or_a_graph_needs_it(device):
    model, _, _ = pair(device)
    first = base_layers(layer_of(model))
    old = [StorageWeakRef(base.weight.untyped_storage()) for group in first for base in group]
    output = model(**batch(model)).logits
    model.to(torch.bfloat16)
    assert not any(one.expired() for one in old)  # for the backward that may come
    del output
    gc.collect()  # a cycle around it, of whatever ran before
    assert all(one.expired() for one in old)  # before any other forward
    logits(model)
    assert not any(base.weight.is_contiguous() for group in first for base in group)


def test_weights_cannot_be_moved_while_a_graph_is_captured(device, monkeypatch):
    model, _, _ = pair(device)
    model.to(torch.bfloat16)
    monkeypatch.setattr(module, "is_capturing", lambda _: True)
    with pytest.raises(RuntimeError, match=r"have moved .* run one step eagerly, then capture"):
        logits(model)


def test_weights_moved_in_inference_mode_can_be_trained_with(device):
    model, _, _ = pair(device)
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        logits(twin)
    twin(**batch(twin)).loss.backward()
    assert not any(p.is_inference() for p in twin.parameters())


@pytest.mark.parametrize("fusion", [LAYER, FP8], ids=("bf16", "FP8"))
def test_a_bias_that_was_moved_is_read_where_it_lies(fusion, fp8_in_fp32, device):
    """Its weight lies where it lay."""
    model, plain, _ = pair(device, fusion, config=CONFIG)
    logits(model)
    for one in (model, plain):
        bias = layer_of(one).self_attn.v_proj.base_layer.bias
        bias.data = 3 * bias.data
    fuse(plain, fusion)
    assert torch.equal(logits(model), logits(plain))


# --- what is in a border --------------------------------------------------------------------------


def test_a_forward_fills_the_borders_and_backward_only_what_another_forward_changed(device):
    model, _, _ = pair(device)
    layer = layer_of(model)
    groups, adapters = groups_of(layer)
    borders = borders_of(layer)
    borders.fill(groups, adapters)
    assert_hold(groups, adapters)
    filled = []
    fill = borders._fill
    borders._fill = lambda *of: filled.append(1) or fill(*of)
    borders.refill(groups, adapters)
    assert not filled
    smaller = [Adapter(A[:3], B[:, :3]) for A, B in adapters]
    borders.fill(groups, smaller)
    assert_hold(groups, smaller)  # and nothing of the larger rank beside it
    filled.clear()
    for _ in range(2):
        borders.refill(groups, adapters)
        assert_hold(groups, adapters)
    borders._copies.is_captured = True  # a replay may have come between
    borders.fill(groups, adapters)
    borders.refill(groups, adapters)
    assert filled == [1, 1, 1, 1]
    borders._copies.is_captured = False
    *others, last = adapters
    for changed in (last, Adapter(last.A, last.B.detach().clone())):
        borders.fill(groups, adapters)
        filled.clear()
        with torch.no_grad():
            changed.B.add_(1.0)
        borders.refill(groups, [*others, changed])
        assert_hold(groups, [*others, changed])
        assert filled == [1]


def test_a_copy_that_fails_leaves_a_border_that_nobody_trusts(device):
    model, _, _ = pair(device)
    layer = layer_of(model)
    groups, adapters = groups_of(layer)
    borders = borders_of(layer)
    borders.fill(groups, adapters)
    copies, borders._copies = borders._copies, None
    with pytest.raises(AttributeError):
        borders.fill(groups, adapters)
    borders._copies = copies
    assert all(group.buffer.key is None for group in groups)


# --- PEFT goes on working -------------------------------------------------------------------------


def test_to_ask_a_peft_model_for_its_state_moves_no_weight(device):
    """Nor one of a projection without an adapter."""
    model, _, _ = pair(device, target_modules=["q_proj", "v_proj"])
    places = [p.data_ptr() for p in model.parameters()]
    model.state_dict()
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("how", ["merge_and_unload", "unload"])
def test_an_unloaded_model_is_saved_as_plain_pefts_is(how, tmp_path, device):
    model, plain, _ = pair(device, **BF16)
    for one, name in ((model, "fused"), (plain, "plain")):
        getattr(one, how)().save_pretrained(tmp_path / name)
    saved = {}
    for name in ("fused", "plain"):
        loaded = type(base_model(device)).from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        saved[name] = loaded.state_dict()
    assert_equal(saved["fused"], saved["plain"])
    sizes = {one: (tmp_path / one / "model.safetensors").stat().st_size for one in saved}
    assert sizes["fused"] == sizes["plain"]
