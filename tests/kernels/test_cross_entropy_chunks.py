"""linear_cross_entropy in chunks of tokens: its results, what it saves and holds, when it waits."""

import pytest
import torch
from cases.counting import Watch, saved_tensors
from cases.cross_entropy_case import (
    HIDDEN,
    IGNORED,
    NAMES,
    VOCABULARY,
    assert_matches,
    case,
    inputs,
    run,
    small_blocks,
)
from cases.reference import random

import fused_lora.cross_entropy as module
import fused_lora.head as head_module
from fused_lora.cross_entropy import linear_cross_entropy

fixtures = case, small_blocks  # pytest finds them in this module


@pytest.mark.parametrize(
    ("mode", "trained", "in_forward"),
    [
        (torch.enable_grad, (), 2),
        (torch.enable_grad, ("hidden",), 4),
        (torch.enable_grad, ("weight",), 4),
        (torch.enable_grad, ("bias",), 2),
        (torch.enable_grad, ("hidden", "weight"), 6),
        (torch.no_grad, ("hidden", "weight"), 2),
        (torch.inference_mode, ("hidden", "weight"), 2),
    ],
)
def test_forward_has_only_the_products_that_are_needed_and_backward_none(
    mode, trained, in_forward, case
):
    *tensors, labels = case
    leaves = dict(zip(NAMES[1:], tensors, strict=True))
    for name in trained:
        leaves[name].requires_grad_()
    with mode(), Watch() as forward:
        loss = linear_cross_entropy(**leaves, labels=labels, chunk_tokens=7)  # 14 are labelled
    assert forward.products() == in_forward
    if loss.requires_grad:
        with Watch() as backward:
            loss.backward()
        assert backward.products() == 0


def test_saved_are_the_gradients_of_labelled_tokens_and_of_what_is_trained(case):
    hidden, weight, bias, labels = case
    for trained in ((hidden,), (hidden, weight, bias)):
        for tensor in trained:
            tensor.requires_grad_()
        with saved_tensors() as saved:
            loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        want = [((14, HIDDEN), torch.bfloat16), ((14,), torch.int64), ((), torch.int64)]
        if weight.requires_grad:
            want[1:1] = [((VOCABULARY, HIDDEN), torch.float32), ((VOCABULARY,), torch.float32)]
        assert [(tuple(t.shape), t.dtype) for t in saved] == want
        del loss  # it held them


@pytest.mark.slow("True")
@pytest.mark.parametrize("drop_ignored", [True, False])
def test_no_more_logits_than_a_chunks_are_ever_held(drop_ignored, device):
    hidden, weight, bias, labels = inputs(60, 2, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    options = {"bias": bias, "chunk_tokens": 50, "drop_ignored": drop_ignored}
    with Watch() as watch:
        linear_cross_entropy(*leaves[:2], labels, **options).backward()
    # once for all chunks; the weight's gradient, 139 x 20 in fp32, is smaller
    assert [size for size in watch.sizes if size >= 50 * VOCABULARY * 2] == [50 * 192 * 2]


def test_a_chunk_is_4096_tokens_or_as_many_as_its_bytes_allow(monkeypatch, case):
    hidden, weight, _, labels = case
    seen, launch = [], head_module.cross_entropy_

    def spy(logits, *others, **settings):
        seen.append(logits.shape[0])
        return launch(logits, *others, **settings)

    monkeypatch.setattr(head_module, "cross_entropy_", spy)
    assert module.CHUNK_TOKENS == 4096 and module.CHUNK_BYTES == 4096 * 262_144 * 2
    linear_cross_entropy(hidden, weight, labels)
    monkeypatch.setattr(module, "CHUNK_BYTES", 6 * 2 * VOCABULARY)
    linear_cross_entropy(hidden, weight, labels)
    monkeypatch.setattr(module, "CHUNK_TOKENS", 5)
    linear_cross_entropy(hidden, weight, labels)
    monkeypatch.setattr(module, "CHUNK_BYTES", 10)  # a row at least
    linear_cross_entropy(hidden[0, 2:5], weight, labels[0, 2:5])
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=9)
    assert seen == [14, 6, 6, 2, 5, 5, 4, 1, 1, 9, 5]


SYNCHRONISING = {"nonzero", "_local_scalar_dense", "item", "masked_select", "is_nonzero"}


@pytest.mark.parametrize("num_items", [None, 7, "tensor"])
@pytest.mark.parametrize("drop_ignored", [True, False])
def test_the_host_waits_once_or_with_all_tokens_never(drop_ignored, num_items, case):
    leaves = [t.requires_grad_() for t in case[:3]]
    if num_items == "tensor":
        num_items = torch.tensor(7, device=leaves[0].device)
    options = {"num_items_in_batch": num_items, "drop_ignored": drop_ignored, "chunk_tokens": 4}
    with Watch() as watch:
        linear_cross_entropy(*leaves[:2], case[3], bias=leaves[2], **options).backward()
    waits = [name for name in watch.names if name in SYNCHRONISING]
    assert waits == (["nonzero"] if drop_ignored else [])


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_to_the_31_logits_in_a_chunk(monkeypatch, device):
    """Repeat a few tokens: eager PyTorch on just those gives the reference."""
    monkeypatch.undo()  # the block of real vocabularies
    count, vocabulary, pattern = 14_200, 151_936, 100
    assert count * vocabulary > 2**31
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB of free GPU memory")
    few = inputs(pattern, dtype=torch.bfloat16, device=device, vocabulary=vocabulary)
    few[3][few[3] == IGNORED] = 11
    which = torch.arange(count, device=device) % pattern
    options = {"num_items_in_batch": count, "drop_ignored": False, "chunk_tokens": count}
    got = run(linear_cross_entropy, few[0][which], *few[1:3], few[3][which], **options)
    assert got["hidden"].isfinite().all()
    # count is a multiple of the pattern: each of its tokens occurs equally often
    assert_matches({name: got[name] for name in ("loss", "weight", "bias")}, few)
    for start in (0, 7100, count - pattern):
        tokens = got["hidden"][start : start + pattern]
        assert_matches({"hidden": tokens}, few, num_items_in_batch=count)


@pytest.mark.gpu
def test_peak_memory_is_that_of_a_chunk(monkeypatch, device):
    monkeypatch.undo()
    tokens, features, vocabulary = 8192, 512, 151_936
    hidden = random(tokens, features, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = random(vocabulary, features, dtype=torch.bfloat16, device=device)
    labels = torch.arange(tokens, device=device)
    linear_cross_entropy(hidden[:8], weight, labels[:8])  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=1024).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk, gradient = 2 * 1024 * vocabulary, 2 * tokens * features
    assert peak <= 1.01 * (chunk + 3 * gradient) + 2**24
    assert peak < 2 * tokens * vocabulary / 6


@pytest.mark.gpu
def test_the_host_does_not_wait(case):
    leaves = [t.requires_grad_() for t in case[:3]]
    for number in (9, torch.tensor(9, device=leaves[0].device), torch.tensor(9), None):
        options = {"num_items_in_batch": number, "drop_ignored": False}
        linear_cross_entropy(*leaves[:2], case[3], bias=leaves[2], **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(*leaves[:2], case[3], bias=leaves[2], **options).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
