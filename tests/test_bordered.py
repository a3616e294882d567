"""Bordered weights: the buffers of a model, and how they follow it."""

import copy
import io

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft_models import (
    ATTENTION,
    LAYERS,
    MLP,
    adapt,
    assert_equal,
    assert_right,
    base_model,
    logits,
    peft_model,
    set_weights,
    step,
)
from reference import relative_error

import fused_lora.bordered as module
from fused_lora import Fusion, fuse, many_copies
from fused_lora.bordered import border, unborder

PARTS = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
PRODUCTS = ("grow_k_forward", "grow_n_forward", "grow_k_backward", "grow_n_backward")


def pair(device, **options):
    """The same model bordered and not, and the buffers of the first."""
    plain = peft_model(device, **options)
    bordered = copy.deepcopy(plain)
    return bordered, plain, border(bordered)


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


def assert_border_follows(borders):
    """Every border holds its active adapter now, and nothing else."""
    for group in borders.groups:
        *adapters, bordered = borders.read(group)
        A = torch.zeros_like(bordered.matrix[bordered.out :, : bordered.in_features])
        B = torch.zeros_like(bordered.matrix[: bordered.out, bordered.in_features :])
        row = column = 0
        for i, out in enumerate(bordered.out_features):
            rank = adapters[2 * i].shape[0]
            A[column : column + rank] = adapters[2 * i].detach()
            scaling = group.projections[i].scaling[group.projections[i].active_adapters[0]]
            B[row : row + out, column : column + rank] = adapters[2 * i + 1].detach() * scaling
            row, column = row + out, column + bordered.blocks[i]
        assert A.any() and B.any()
        assert torch.equal(bordered.matrix[bordered.out :, : bordered.in_features], A)
        assert torch.equal(bordered.matrix[: bordered.out, bordered.in_features :], B)
        assert not bordered.matrix[bordered.out :, bordered.in_features :].any()


def masters(model):
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


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


# --- how the borders follow the adapters ----------------------------------------------------------


def assign(model):
    for parameter in masters(model).values():
        parameter.data = parameter.data + 0.25


def load(model):
    state = {name: tensor + 0.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def load_and_assign(model):
    state = {n: t.detach() + 0.25 for n, t in masters(model).items()}
    model.load_state_dict(state, strict=False, assign=True)


def in_place(model):
    with torch.no_grad():
        for parameter in masters(model).values():
            parameter.add_(0.25)


def optimizer_step(model, **options):
    optimizer = torch.optim.AdamW(masters(model).values(), lr=0.1, **options)
    for parameter in masters(model).values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def scale(model):
    for name, projection in model.named_modules():
        if name.endswith("_proj"):
            projection.set_scale("default", 3.0)


CHANGES = {
    "in place": in_place,
    "assigned": assign,
    "loaded": load,
    "loaded by assignment": load_and_assign,
    "scaled": scale,
    "foreach optimizer": lambda model: optimizer_step(model, foreach=True),
    "fused optimizer": lambda model: optimizer_step(model, fused=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_adapters_reaches_the_borders(change, device):
    model, _, borders = pair(device)
    before = [group.bordered.matrix.clone() for group in borders.groups]
    assert borders.refresh_stale() == 0
    CHANGES[change](model)
    assert borders.refresh_stale() == 2 * 7
    for old, group in zip(before, borders.groups, strict=True):
        assert not torch.equal(group.bordered.matrix, old)
    assert_border_follows(borders)
    assert borders.refresh_stale() == 0


@pytest.mark.parametrize("change", [*CHANGES, "nothing"])
def test_so_does_a_change_after_a_step_of_an_optimizer(change, device, monkeypatch):
    model, _, borders = pair(device)
    optimizer_step(model, foreach=True)
    CHANGES.get(change, lambda model: None)(model)
    before = [group.bordered.matrix.clone() for group in borders.groups]
    reads = []
    read = module.read_projection
    monkeypatch.setattr(module, "read_projection", lambda *a: reads.append(1) or read(*a))
    for group in borders.groups:
        borders.read(group)
    # after a step alone each is read once, by who uses it
    assert (len(reads) == 2 * 7) == (change in ("nothing", "in place", "loaded") or "opt" in change)
    for old, group in zip(before, borders.groups, strict=True):
        assert not torch.equal(group.bordered.matrix, old)
    assert_border_follows(borders)
    assert borders.refresh_stale() == 0


def test_one_adapter_that_changes_after_a_step_is_copied_and_the_next_step_copies_all(device):
    model, _, borders = pair(device)
    up = model.get_submodule(f"{LAYERS}.1.mlp.up_proj")
    for value in (1.0, 2.0):
        optimizer_step(model, foreach=True)
        up.lora_A["default"].weight.data = torch.full((8, 52), value, device=device)
        assert_border_follows(borders)
        optimizer_step(model, fused=True)
        assert_border_follows(borders)


def test_only_what_changed_is_copied_and_reading_one_group_refreshes_all(device, monkeypatch):
    model, _, borders = pair(device)
    copied = []
    copy = borders._copies.copy
    monkeypatch.setattr(
        borders._copies, "copy", lambda to, *of: copied.append(len(to)) or copy(to, *of)
    )
    with torch.no_grad():
        model.get_submodule(f"{LAYERS}.1.mlp.up_proj").lora_B["default"].weight.mul_(2)
        model.get_submodule(f"{LAYERS}.0.mlp.up_proj").lora_A["default"].weight.mul_(2)
    borders.read(borders.groups[2])
    assert copied == [4]
    assert_border_follows(borders)
    in_place(model)
    assert_border_follows(borders)  # one read for each group
    assert copied == [4, 2 * 2 * 7]


def test_the_kernel_of_a_gpu_copies_the_same_and_autograd_notices(device, monkeypatch):
    monkeypatch.setattr(many_copies, "_has_kernel", lambda *_: True)
    model, _, borders = pair(device, dtype=torch.bfloat16)
    assert_border_follows(borders)
    versions = [group.bordered.matrix._version for group in borders.groups]
    in_place(model)
    assert borders.refresh_stale() == 2 * 7
    assert_border_follows(borders)
    now = [group.bordered.matrix._version for group in borders.groups]
    assert all(new > old for new, old in zip(now, versions, strict=True))


def test_a_refresh_that_fails_is_done_again(device, monkeypatch):
    model, _, borders = pair(device)
    in_place(model)

    def out_of_memory(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(borders._copies, "copy", out_of_memory)
        borders.refresh_stale()
    assert borders.refresh_stale() == 2 * 7
    assert_border_follows(borders)


def test_a_change_through_data_is_not_noticed_and_refresh_is_there_for_it(device):
    model, _, borders = pair(device)
    for parameter in masters(model).values():
        parameter.data.mul_(2)
    assert borders.refresh_stale() == 0  # PyTorch does not count it
    assert borders.refresh() == 2 * 7
    assert_border_follows(borders)


def test_a_tensor_at_the_address_of_a_freed_one_is_noticed(device):
    """An allocator likes to give the same memory again."""
    model, _, borders = pair(device)
    A = model.get_submodule(f"{LAYERS}.0.mlp.up_proj").lora_A["default"].weight
    for value in (1.0, 2.0, 3.0):
        A.data = torch.zeros(0)
        A.data = torch.full((8, 52), value)
        assert borders.refresh_stale() == 1
    assert_border_follows(borders)


def test_the_optimizers_hook_goes_with_the_borders(device):
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = len(_global_optimizer_post_hooks)
    _, _, borders = pair(device)
    assert len(_global_optimizer_post_hooks) == before + 1
    del borders
    assert len(_global_optimizer_post_hooks) == before


def test_the_active_adapter_is_the_one_in_the_border(device):
    model = peft_model(device)
    model.add_adapter("second", LoraConfig(r=12, lora_alpha=20, target_modules=[*ATTENTION, *MLP]))
    set_weights(model, device, only=".second.")
    borders = border(model)
    assert borders.groups[0].bordered.blocks == (12, 12, 12)
    for name in ("second", "default", "second"):
        model.set_adapter(name)
        assert_border_follows(borders)
    assert borders.read(borders.groups[0])[0].shape[0] == 12


def test_an_adapter_with_a_rank_that_does_not_fit_is_a_reason(device):
    model, _, borders = pair(device)
    model.add_adapter("second", LoraConfig(r=12, target_modules=[*ATTENTION, *MLP]))
    set_weights(model, device, only=".second.")
    model.set_adapter("second")
    reason = borders.read(borders.groups[1])
    assert reason == (
        "o_proj: its adapter has rank 12 and the border was made for 8: call border(model) again"
    )
    assert_border_follows(border(model))
    model.base_model.set_adapter(["default", "second"])
    assert "2 adapters are active" in borders.read(borders.groups[1])


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
