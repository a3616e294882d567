"""Bordered weights: the buffers of a model, and how they follow it."""

import copy
import io

import pytest
import torch
from bordered_case import PARTS, assert_border_follows, in_place, masters, pair
from peft import PeftModel
from peft_models import (
    LAYERS,
    adapt,
    assert_equal,
    assert_right,
    base_model,
    logits,
    peft_model,
    step,
)
from reference import relative_error

from fused_lora import Fusion, fuse
from fused_lora.adopt.borders import border, unborder


def assert_alike(got, want):
    """The same in fp32, up to the order in which a GEMM sums for another leading dimension."""
    assert got.keys() == want.keys()
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-4, name


def storages(model):
    """Bytes of every storage that the model's tensors lie in, each once."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }


# --- the buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_that_share_an_input_share_a_buffer(family, dtype, device):
    model, plain, borders = pair(device, family=family, dtype=dtype)
    assert [[name.split(".")[-1] for name in group.names] for group in borders.groups] == 2 * PARTS
    assert borders.groups[0].names[0] == f"{LAYERS}.0.self_attn.q_proj" and not borders.left
    assert_border_follows(borders)
    assert next(iter(masters(model).values())).dtype == torch.float32
    for group in borders.groups:
        matrix = group.bordered.matrix
        assert matrix.dtype == dtype and matrix.stride(1) == 1
        assert matrix.stride(0) * matrix.element_size() % 128 == 0  # whole lines of the L2 cache
        for projection in group.projections:
            weight = projection.base_layer.weight
            storage = weight.untyped_storage().data_ptr()
            assert storage == matrix.untyped_storage().data_ptr()
    if dtype == torch.bfloat16:
        assert_right(model, plain, autocast=True)
    else:
        assert_alike(step(model), step(plain))


def test_memory_grows_by_the_borders_alone(device):
    plain = peft_model(device, dtype=torch.bfloat16)
    before = sum(storages(plain).values())
    borders = border(plain)
    expected = 0
    for group in borders.groups:
        of = group.bordered
        width = -(-8 * len(group.names) // 8) * 8
        assert of.matrix.shape == (of.out + width, of.in_features + width)
        row = -(-(of.in_features + width) // 64) * 64  # 128 bytes
        expected += (of.out + width) * row - of.out * of.in_features
        expected += width if of.bias is not None else 0
    assert sum(storages(plain).values()) - before == 2 * expected > 0
    unborder(plain)
    assert sum(storages(plain).values()) == before


def test_rows_stay_aligned_where_ranks_are_odd(device):
    _, _, borders = pair(device, r=3)
    widths = {g.bordered.matrix.shape[1] - g.bordered.in_features for g in borders.groups}
    assert widths == {16, 8}  # three times 3, twice 3 and 3
    assert_border_follows(borders)


def test_parameters_stay_the_same_objects(device):
    model = peft_model(device)
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    border(model)
    now = dict(model.named_parameters())
    assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
    assert_equal({name: p.detach() for name, p in now.items()}, values)


def test_what_cannot_be_bordered_is_named_and_nothing_at_all_is_an_error(device):
    with pytest.raises(ValueError, match=r"border: .*no LoRA layers of PEFT"):
        border(base_model(device))
    with pytest.raises(ValueError, match=r"border: .*lora_dropout is 0.5"):
        border(peft_model(device, lora_dropout=0.5))
    model = peft_model(device)
    model.get_submodule(f"{LAYERS}.1.self_attn.k_proj").base_layer.weight.requires_grad_(True)
    borders = border(model)
    assert borders.left == {f"{LAYERS}.1.self_attn.k_proj": "its base weight is trainable"}
    assert [name.split(".")[-1] for name in borders.groups[4].names] == ["q_proj", "v_proj"]
    assert "its base weight is trainable" in str(borders)


def test_only_some_projections_may_have_adapters(device):
    model = adapt(base_model(device), device, target_modules=["q_proj", "v_proj", "down_proj"])
    borders = border(model)
    assert [len(group.names) for group in borders.groups] == [2, 1, 2, 1]
    assert_border_follows(borders)


# --- PEFT goes on working -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_and_unmerging_are_as_in_peft(dtype, device):
    model, plain, borders = pair(device, dtype=dtype)
    for one in (model, plain):
        one.merge_adapter()
    assert_equal(model.state_dict(), plain.state_dict())
    assert borders.read(borders.groups[1]) == "o_proj: adapters are merged into the weight"
    in_place(model), in_place(plain)
    assert borders.refresh_stale() == 0  # nothing to read while merged
    for one in (model, plain):
        one.unmerge_adapter()
    assert_equal(model.state_dict(), plain.state_dict())
    assert_border_follows(borders)


def test_a_safe_merge_replaces_the_weight_which_is_noticed(device):
    model, _, borders = pair(device)
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    for group in borders.groups:
        assert "replaced and lies no longer in the buffer" in borders.read(group)
    assert_border_follows(border(model))


def test_a_merged_and_unloaded_model_can_be_unbordered(device):
    model, plain, _ = pair(device)
    merged, want = model.merge_and_unload(), plain.merge_and_unload()
    assert len(unborder(merged)) == 2 * (7 + 3)
    assert all(weight.is_contiguous() for weight in merged.parameters())
    assert_equal(merged.state_dict(), want.state_dict())


def test_disabled_adapters_are_a_reason_and_come_back(device):
    model, _, borders = pair(device)
    with model.disable_adapter():
        assert borders.read(borders.groups[3]) == "down_proj: adapters are disabled"
        assert torch.allclose(logits(model), logits(base_model(device)), atol=1e-6)
    assert_border_follows(borders)


def test_state_dict_is_unchanged_and_goes_round(device):
    model, plain, borders = pair(device)
    assert_equal(model.state_dict(), plain.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    # each storage once: no tensor brings the whole buffer along again
    assert file.tell() < sum(storages(model).values()) + 64_000
    file.seek(0)
    state = torch.load(file)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())
    assert_border_follows(borders)


def test_a_saved_adapter_and_a_saved_base_model_load_anywhere(tmp_path, device):
    model, plain, _ = pair(device, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        base_model(device, dtype=torch.bfloat16), tmp_path / "adapter"
    )
    assert_equal(
        {n: p.detach() for n, p in masters(loaded).items()},
        {n: p.detach() for n, p in masters(plain).items()},
    )
    with pytest.raises(RuntimeError):  # transformers' own, and no file of wrong weights
        model.unload().save_pretrained(tmp_path / "not written")
    unborder(model)
    for one, name in ((model, "bordered"), (plain, "plain")):
        one.unload().save_pretrained(tmp_path / name)
    ours, theirs = (
        type(base_model(device)).from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        for name in ("bordered", "plain")
    )
    assert_equal(ours.state_dict(), theirs.state_dict())
    size = {
        name: (tmp_path / name / "model.safetensors").stat().st_size
        for name in ("bordered", "plain")
    }
    assert size["bordered"] == size["plain"]


def test_a_copy_has_weights_of_its_own(device):
    model, plain, _ = pair(device)
    twin = copy.deepcopy(model)
    assert not unborder(twin) and not storages(twin).keys() & storages(model).keys()
    assert sum(storages(twin).values()) == sum(storages(plain).values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(step(twin), step(plain))
    assert_border_follows(border(twin))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        unborder,
    ],
)
def test_a_weight_that_left_the_buffer_is_noticed(move, device):
    model, _, borders = pair(device)
    model.to(torch.float32)  # which moves nothing
    assert_border_follows(borders)
    move(model)
    for group in borders.groups:
        first = group.names[0].split(".")[-1]
        assert borders.read(group) == (
            f"{first}: its base weight has been moved, cast or replaced and lies no longer in the "
            "buffer: call border(model) again"
        )
    assert borders.refresh() == 0


@pytest.mark.gpu
def test_a_model_moved_to_another_device_is_noticed():
    model, _, borders = pair("cpu")
    model.to("cuda")
    assert all("has been moved" in borders.read(group) for group in borders.groups)
    assert_border_follows(border(model))


def test_unbordered_it_is_the_model_it_was(device):
    model, plain, _ = pair(device)
    names = unborder(model)
    assert len(names) == 2 * (7 + 3) and f"{LAYERS}.0.self_attn.q_proj.base_layer.bias" in names
    for parameter in model.parameters():
        assert parameter.is_contiguous() and not hasattr(parameter, "bordered")
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert_equal(model.state_dict(), plain.state_dict())
    assert torch.equal(logits(model), logits(plain)) and not unborder(model)


def test_bordering_twice_makes_the_first_buffers_invalid_and_not_wrong(device):
    model, plain, first = pair(device)
    second = border(model)
    assert all("replaced" in first.read(group) for group in first.groups)
    assert_border_follows(second)
    assert_equal(model.state_dict(), plain.state_dict())


def test_the_fused_parts_run_on_bordered_weights(device):
    model, plain, borders = pair(device)
    for one in (model, plain):
        assert not fuse(one, Fusion(mlp=True, attention=True)).left
    assert_alike(step(model), step(plain))
    in_place(model)
    assert borders.refresh_stale() == 2 * 7  # o_proj too, though its forward is a fused one
    assert borders.read(borders.groups[1]).startswith("o_proj: its forward has been replaced")
    assert not isinstance(borders.read(borders.groups[1], own_forward=False), str)
