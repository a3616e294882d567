"""Attention to documents one after the other in a row, against eager PyTorch in float64."""

import pytest
import torch
from cases import qkv_attention_case
from cases.reference import assert_within_budget, random

from fused_lora.kernels.document_bounds import documents_of

# lengths of the documents of each row, heads, kv_heads, head_dim
CASES = {
    "tiles begin and end anywhere": ([[37, 64, 1, 1, 1, 20, 6], [130]], 2, 1, 32),
    "one a row, and tiles": ([[64, 64], [127, 1]], 2, 2, 32),
    "of one token": ([[1] * 9], 4, 2, 32),
    "longer than our kernels take without": ([[520, 60]], 1, 1, 32),
    "heads of no kernel": ([[5, 9, 3], [1, 1, 15]], 4, 2, 16),
    "sinks": ([[37, 64, 29]], 2, 1, 32),
    "sinks and a window": ([[5, 1, 124], [130]], 2, 1, 32),
    "a window": ([[70, 60]], 2, 1, 32),
    "a window of one": ([[3, 66]], 2, 1, 32),
    "heads of no kernel and a window": ([[5, 9, 3]], 4, 2, 16),
    "heads of 256": ([[38, 1, 31]], 2, 1, 256),
    "heads of 256 and a window": ([[3, 67]], 2, 1, 256),
}
WINDOWS = {"sinks and a window": 40, "a window": 65, "a window of one": 1,
           "heads of no kernel and a window": 4, "heads of 256 and a window": 20}  # fmt: skip


def positions_of(lengths, device="cpu"):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)


def make(case, dtype, device):
    """qkv, cos, sin, and the gradient of what attention gives."""
    lengths, heads, kv_heads, head_dim = CASES[case]
    sizes = len(lengths), heads, kv_heads, sum(lengths[0]), head_dim, len(lengths)
    return qkv_attention_case.make(*sizes, dtype=dtype, device=device)


def sinks_of(case, given):
    """A sink for each head, None if the case has none."""
    if not case.startswith("sinks"):
        return None
    sinks = random(CASES[case][1], seed=5, scale=2.0, dtype=torch.bfloat16, device=given[0].device)
    return sinks.to(given[0].dtype)


def eager(case, given):
    """attended, and the gradient of what is rotated, a document at a time."""
    lengths, heads, kv_heads, _ = CASES[case]
    qkv, cos, sin, grad = given
    counts, found = [n for row in lengths for n in row], []
    others = sinks_of(case, given), WINDOWS.get(case)
    by_token = (t.split(counts) for t in (qkv, cos.flatten(0, 1), sin.flatten(0, 1), grad))
    for rows, one_cos, one_sin, gradient in zip(*by_token, strict=True):
        one = rows, one_cos[None], one_sin[None], gradient
        found.append(qkv_attention_case.eager(one, heads, kv_heads, *others))
    attended, _, gradients = zip(*found, strict=True)
    return torch.cat(attended), torch.cat(gradients)


def fused(case, given):
    lengths, heads, kv_heads, _ = CASES[case]
    documents = documents_of(positions_of(lengths, given[0].device))
    seen = {"sinks": sinks_of(case, given), "window": WINDOWS.get(case)}
    return qkv_attention_case.fused(given, heads, kv_heads, documents, **seen)


def assert_right(case, given):
    truth = eager(case, [t.double() for t in given])
    rows = zip(("attended", "gradient"), fused(case, given), eager(case, given), truth, strict=True)
    for row in rows:
        assert_within_budget(*row)


@pytest.mark.slow(
    "tiles begin and end anywhere-dtype12",
    "of one token",
    "heads of no kernel",
    "sinks and a window-dtype14",
)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES]
    + [
        (case, torch.float32)
        for case in ("tiles begin and end anywhere", "heads of no kernel", "sinks and a window")
    ],
)
def test_documents_attend_to_themselves(case, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("PyTorch's own kernel attends in fp32 there, whose error is not ours to bound")
    assert_right(case, make(case, dtype, device))


@pytest.mark.slow("sinks")
@pytest.mark.parametrize("case", ["sinks", "sinks and a window"])
def test_sinks_and_windows_need_no_documents(case, device, monkeypatch):
    _, *sizes = CASES[case]
    monkeypatch.setitem(CASES, case, ([[70], [70]], *sizes))
    given = make(case, torch.bfloat16, device)
    seen = {"sinks": sinks_of(case, given), "window": WINDOWS.get(case)}
    got = qkv_attention_case.fused(given, *sizes[:2], None, **seen)
    want = eager(case, given), eager(case, [t.double() for t in given])
    for row in zip(("attended", "gradient"), got, *want, strict=True):
        assert_within_budget(*row)


REAL_SIZES = {  # the lengths, heads, head size and window of gpt-oss and Gemma 3
    "sinks": ([[512], [300, 212]], 64, 8, 64, None),
    "sinks and a window": ([[512], [300, 212]], 64, 8, 64, 128),
    "heads of 256": ([[2000, 1, 500, 499], [3000]], 8, 4, 256, None),
    "heads of 256 and a window": ([[2000, 1, 500, 499], [3000]], 8, 4, 256, 1024),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL_SIZES)
def test_a_models_own_sizes_are_within_the_error_budget(name, device, monkeypatch):
    *sizes, window = REAL_SIZES[name]
    monkeypatch.setitem(CASES, name, tuple(sizes))
    monkeypatch.setitem(WINDOWS, name, window)
    assert_right(name, make(name, torch.bfloat16, device))


def test_a_document_of_nan_changes_no_other(device):
    case = "tiles begin and end anywhere"
    given = qkv, cos, sin, grad = make(case, torch.bfloat16, device)
    want = fused(case, given)
    poisoned = [qkv.clone(), cos, sin, grad.clone()]
    for one in (0, 3):
        poisoned[one][37:101] = float("nan")
    for got, wanted in zip(fused(case, poisoned), want, strict=True):
        assert got[37:101].isnan().any()
        assert torch.equal(got[:37], wanted[:37]) and torch.equal(got[101:], wanted[101:])


def test_bounds():
    position_ids = torch.tensor([[0, 1, 2, 0, 0, 1], [4, 5, 6, 7, 8, 9], [0, 1, 1, 2, 0, 0]])
    firsts = [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 0, 2, 2, 4, 5]]
    ends = [[3, 3, 3, 4, 6, 6], [6] * 6, [2, 2, 4, 4, 5, 6]]
    documents = documents_of(position_ids)
    assert documents.dtype == torch.int32
    assert documents[:, 0, 0].tolist() == firsts and documents[:, 0, 1].tolist() == ends
