"""Attention to documents one after the other in a row, against eager PyTorch in float64."""

import pytest
import torch
from reference import assert_within_budget, random
from rope_case import angles
from rope_case import eager as eager_rope

from fused_lora.kernels.documents import documents_of, mask_of_documents
from fused_lora.kernels.qkv_attention import Attention, attention_backward, attention_forward
from fused_lora.kernels.qkv_rope import rope_forward, split_heads

SCALING = 0.3
# lengths of the documents of each row, heads, kv_heads, head_dim
CASES = {
    "tiles begin and end anywhere": ([[37, 64, 1, 1, 1, 20, 6], [130]], 2, 1, 32),
    "one a row, and tiles": ([[64, 64], [127, 1]], 2, 2, 32),
    "of one token": ([[1] * 9], 4, 2, 32),
    "longer than our kernels take without": ([[520, 60]], 1, 1, 32),
    "heads of no kernel": ([[5, 9, 3], [1, 1, 15]], 4, 2, 16),
}


def positions_of(lengths, device="cpu"):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)


def make(case, dtype, device):
    """qkv, cos, sin, the gradient of what attention gives, and position_ids."""
    lengths, heads, kv_heads, head_dim = CASES[case]
    batch, positions = len(lengths), sum(lengths[0])
    qkv = random(batch * positions, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    cos, sin = angles(batch, positions, head_dim, dtype=dtype, device=device)
    grad = random(batch * positions, heads * head_dim, seed=1, dtype=dtype, device=device)
    return qkv, cos, sin, grad, positions_of(lengths, device)


def eager(case, given):
    """attended, and the gradient of what is turned, a document at a time."""
    qkv, cos, sin, grad, _ = given
    lengths, heads, kv_heads, _ = CASES[case]
    positions = sum(lengths[0])
    leaf = qkv.detach().requires_grad_()
    q, k, v = split_heads(leaf, positions, heads, kv_heads)
    q, k = eager_rope(q, k, cos, sin)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    attended = []
    for row, row_lengths in enumerate(lengths):
        one_row = (t[row].split(row_lengths, dim=1) for t in (q, k, v))
        for of_q, of_k, of_v in zip(*one_row, strict=True):
            scores = SCALING * (of_q @ of_k.mT)
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            attended.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ of_v)
    attended = torch.cat([one.transpose(0, 1).flatten(1) for one in attended])
    return attended.detach(), torch.autograd.grad(attended, leaf, grad)[0]


def fused(case, given):
    qkv, cos, sin, grad, position_ids = given
    _, heads, kv_heads, _ = CASES[case]
    qkv = qkv.clone()
    rope_forward(qkv, cos, sin, heads, kv_heads)
    documents = documents_of(position_ids)
    attention = Attention(position_ids.shape[1], heads, kv_heads, SCALING)
    attended, saved, attention = attention_forward(qkv, documents, attention)
    gradient = torch.full_like(qkv, 7.0)
    attention_backward(grad, qkv, cos, sin, documents, attended, saved, attention, gradient)
    return attended, gradient


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES]
    + [("tiles begin and end anywhere", torch.float32), ("heads of no kernel", torch.float32)],
)
def test_documents_attend_to_themselves(case, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("PyTorch's own kernel attends in fp32 there, whose error is not ours to bound")
    given = make(case, dtype, device)
    truth = eager(case, [t.double() for t in given])
    rows = zip(("attended", "gradient"), fused(case, given), eager(case, given), truth, strict=True)
    for row in rows:
        assert_within_budget(*row)


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [30, 250, 3000])
def test_a_models_own_sizes_are_within_the_error_budget(mean, device, monkeypatch):
    generator = torch.Generator().manual_seed(mean)
    some = torch.empty(64, dtype=torch.float64).exponential_(generator=generator)
    lengths = (mean * some).long().clamp(1, 4096)[: 20_000 // mean]  # the truth keeps every score
    monkeypatch.setitem(CASES, "model", ([lengths.tolist()], 16, 2, 128))
    given = make("model", torch.bfloat16, device)
    truth = eager("model", [t.double() for t in given])
    for row in zip(
        ("attended", "gradient"), fused("model", given), eager("model", given), truth, strict=True
    ):
        assert_within_budget(*row)


def test_a_document_of_nan_changes_no_other(device):
    case = "tiles begin and end anywhere"
    given = qkv, cos, sin, grad, position_ids = make(case, torch.bfloat16, device)
    want = fused(case, given)
    poisoned = [qkv.clone(), cos, sin, grad.clone(), position_ids]
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


def test_as_a_mask_they_are_transformers_own(device):
    from transformers import Qwen2Config
    from transformers.masking_utils import create_causal_mask

    position_ids = positions_of([[3, 1, 4], [5, 2, 1]])
    theirs = create_causal_mask(
        Qwen2Config(attn_implementation="sdpa"), torch.zeros(2, 8, 1), None, None, position_ids
    )
    assert torch.equal(mask_of_documents(documents_of(position_ids)), theirs)
