"""Bordered weights: how the borders follow the adapters."""

import pytest
import torch
from bordered_case import assert_border_follows, in_place, masters, pair, scale
from peft import LoraConfig
from peft_models import ATTENTION, LAYERS, MLP, peft_model, set_weights

from fused_lora import many_copies
from fused_lora.adopt import borders as module
from fused_lora.adopt.borders import border


def assign(model):
    for parameter in masters(model).values():
        parameter.data = parameter.data + 0.25


def load(model):
    state = {name: tensor + 0.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def load_and_assign(model):
    state = {n: t.detach() + 0.25 for n, t in masters(model).items()}
    model.load_state_dict(state, strict=False, assign=True)


def optimizer_step(model, **options):
    optimizer = torch.optim.AdamW(masters(model).values(), lr=0.1, **options)
    for parameter in masters(model).values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


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
