"""Attention with RoPE on [q | k | v] as two calls, against eager PyTorch's autograd."""

import pytest
import torch
import torch.nn.functional as F
from cases import qkv_attention_case
from cases.qkv_attention_case import SCALING, fused, rotated_heads
from cases.reference import assert_near, assert_within_budget, random
from cases.rope_case import interleaved_order
from torch.nn.attention import sdpa_kernel

from fused_lora.kernels import qkv_attention as module
from fused_lora.kernels.causal_attention import Attention
from fused_lora.kernels.qkv_attention import (
    CUDNN,
    FLASH,
    WITHOUT_CUDNN,
    AttentionSaved,
    attention_forward,
)

NAMES = ("attended", "gradient")
# batch, heads, kv_heads, positions, head_dim; sequences of cos and sin, features that are rotated
SIZES = {
    "GQA": (2, 4, 2, 9, 16),
    "MHA": (1, 2, 2, 5, 26),
    "MQA": (3, 3, 1, 7, 8),
    "one token": (2, 2, 1, 1, 16),
    "tiles": (2, 4, 2, 40, 32),
    "more than a tile": (1, 2, 1, 70, 32),
    "64 more than 128": (1, 4, 2, 192, 64),
    "heads of 256": (1, 2, 1, 70, 256),
    "a part of each head": (2, 2, 1, 9, 26, 1, 12),
    "a part of each head, tiles": (2, 2, 1, 40, 32, 2, 24),
}


def make(size, dtype, device):
    return qkv_attention_case.make(*SIZES[size], dtype=dtype, device=device)


def mask_of(size, masked, device):
    if not masked:
        return None
    batch, _, _, positions, *_ = SIZES[size]
    mask = torch.ones(batch, 1, positions, positions, dtype=torch.bool, device=device).tril()
    mask[-1, :, :, 0] = False  # as left padding does
    mask[-1, :, 0, 0] = True
    return mask


def by_hand(size, case, masked=False):
    return fused(case, *SIZES[size][1:3], mask_of(size, masked, case[0].device))


def by_autograd(size, case, masked=False):
    qkv, cos, sin, grad = case
    leaf = qkv.detach().requires_grad_()
    q, k, v = rotated_heads(leaf, cos, sin, *SIZES[size][1:3])
    mask = mask_of(size, masked, qkv.device)
    with sdpa_kernel(WITHOUT_CUDNN):
        attended = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=not masked, scale=SCALING
        )
    attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
    return attended.detach(), torch.autograd.grad(attended, leaf, grad)[0]


def check(size, case, masked=False):
    dtype = case[0].dtype
    got, eager = by_hand(size, case, masked), by_autograd(size, case, masked)
    truth = by_autograd(size, [t.double() for t in case], masked)
    for name, *row in zip(NAMES, got, eager, truth, strict=True):
        assert row[0].dtype == dtype
        assert_within_budget(name, *row)


@pytest.mark.thinned
@pytest.mark.parametrize("masked", [False, True], ids=("causal", "masked"))
@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, torch.bfloat16) for size in SIZES), ("GQA", torch.float32)]
)
def test_values_and_gradients_are_within_the_error_budget(size, dtype, masked, device):
    check(size, make(size, dtype, device), masked)


def test_gradients_are_finite_where_all_scores_are_low(device):
    """With a mask cuDNN's are not, at these positions."""
    size, dtype = "64 more than 128", torch.bfloat16
    qkv, cos, sin, grad = make(size, dtype, device)
    heads = qkv.unflatten(1, (8, 64))
    heads[:, :4, 0], heads[:, 4:6, 0] = 20.0, -20.0
    check(size, (qkv, torch.ones_like(cos), torch.zeros_like(sin), grad), masked=True)


@pytest.mark.parametrize("size", ["GQA", "tiles", "a part of each head, tiles"])
def test_interleaved_pairs_attend_as_halves_do(size, device):
    """The order of a head's features does not matter to attention if q, k and v have the same."""
    case, sizes = make(size, torch.float32, device), SIZES[size]
    qkv, cos, sin, grad = case
    order = interleaved_order(cos.shape[-1], sizes[4], device)

    def reordered(rows):
        return rows.unflatten(1, (-1, sizes[4]))[..., order].flatten(1)

    got = fused((reordered(qkv), cos, sin, reordered(grad)), *sizes[1:3], interleaved=True)
    for name, one, other in zip(NAMES, got, fused(case, *sizes[1:3]), strict=True):
        assert_near(one, reordered(other), 1e-6, name)


INT32 = {"dtype": torch.int32}


@pytest.mark.parametrize(
    ("positions", "mask", "options", "message"),
    [
        (513, None, {"sinks": torch.zeros(2)}, "is .*for 513 positions, should be up to 512"),
        (513, None, {"window": 4}, "for 513 positions, should be up to 512 positions or have"),
        (8, torch.ones(1, 1, 8, 8) > 0, {"window": 4}, "for 8 positions, with a mask, should"),
        (8, torch.zeros(2, 1, 2, 8, **INT32), {}, r"\[2, 1, 2, 8\] .* be \[1, 1, 2, 8\]"),
        (8, torch.zeros(1, 1, 8, 2, **INT32).mT, {}, "and contiguous: documents_of makes"),
    ],
)
def test_what_no_kernel_can_attend_to_is_a_value_error(positions, mask, options, message, device):
    case = qkv_attention_case.make(1, 2, 1, positions, 32, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=message):
        fused(case, 2, 1, mask if mask is None else mask.to(device), **options)


BACKENDS = {"flash": FLASH, "cuDNN": CUDNN}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backends_calls_have_their_arguments_in_order(backend, monkeypatch):
    """Call them on the meta device, where they only compute shapes."""
    monkeypatch.setattr(module, "_backend", lambda *_: BACKENDS[backend])
    monkeypatch.setattr(module, "rope_backward", lambda *_: None)
    monkeypatch.setattr(qkv_attention_case, "rope_forward", lambda *_: None)
    monkeypatch.setattr(module.causal_attention, "fits_kernels", lambda *_: False)
    case = [t.to("meta") for t in make("tiles", torch.bfloat16, "cpu")]
    attended, gradient = by_hand("tiles", case)
    assert attended.shape == case[3].shape and attended.is_contiguous()
    assert gradient.shape == case[0].shape


@pytest.mark.parametrize("size", [(2, 4, 4, 9, 16), (1, 18, 18, 9, 16), (2, 6, 3, 9, 16)])
def test_a_backend_gets_heads_with_those_that_they_share(size, device, monkeypatch):
    """By a backward that mixes all it is given."""
    given = []

    def mixed(grad, q, k, v, attended, saved):
        given.append(q.shape[1])
        shared = q.shape[1] // k.shape[1]
        k_and_v = (one.repeat_interleave(shared, 1) for one in (k, v))
        grad_k = (q + grad).unflatten(1, (-1, shared)).sum(2) + k
        return sum((grad, q, attended, saved.logsumexp, *k_and_v)), grad_k, grad_k + v

    batch, heads, kv_heads, positions, _ = size
    qkv, cos, sin, grad = qkv_attention_case.make(*size, dtype=torch.float32, device=device)
    logsumexp = random(batch, heads, positions, 1, seed=9, dtype=torch.float32, device=device)
    saved = AttentionSaved(Attention(positions, heads, kv_heads, SCALING), FLASH, logsumexp)
    monkeypatch.setattr(module.causal_attention, "fits_kernels", lambda *_: False)
    monkeypatch.setattr(module, "_backend_backward", mixed)
    gradients = []
    for rows in (10**6, 0):
        monkeypatch.setattr(module, "MANY_ROWS", rows)
        gradients.append(torch.empty_like(qkv))
        module.attention_backward(grad, qkv, cos, sin, None, grad + 1, saved, gradients[-1])
    assert given[0] == heads and len(given) == 1 + {4: 4, 18: 6, 3: 3}[kv_heads]
    assert_near(*gradients, 1e-6)


@pytest.mark.slow("tiles-False-ran0", "more than a tile-False-ran3")
@pytest.mark.parametrize(
    ("size", "masked", "ran"),
    [
        ("tiles", False, ["forward", "backward"]),
        ("tiles", True, []),
        ("GQA", False, []),
        ("more than a tile", False, ["backward"]),
        ("heads of 256", False, []),
    ],
)
def test_our_own_kernels_run_where_they_fit(size, masked, ran, device, monkeypatch):
    seen = []
    for way in ("forward", "backward"):
        function = getattr(module, f"causal_attention_{way}")

        def spy(*given, way=way, function=function):
            seen.append(way)
            return function(*given)

        monkeypatch.setattr(module, f"causal_attention_{way}", spy)
    by_hand(size, make(size, torch.bfloat16, device), masked)
    if ran == ["backward"] and device == "cpu":
        ran = []  # no forward on the CPU returns a logsumexp
    assert seen == ran


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["own", "theirs", "theirs, by heads"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", ["GQA", "MQA", "tiles", "more than a tile"])
def test_either_backend_is_within_the_error_budget(size, backend, backward, device, monkeypatch):
    monkeypatch.setattr(module, "_backend", lambda *_: BACKENDS[backend])
    monkeypatch.setattr(module.causal_attention, "FORWARD_POSITIONS", 0)
    monkeypatch.setattr(module, "MANY_ROWS", 0 if backward == "theirs, by heads" else 10**6)
    if backward != "own":
        monkeypatch.setattr(module.causal_attention, "fits_kernels", lambda *_: False)
    elif size in ("GQA", "MQA"):
        pytest.skip("too narrow for tiles")
    check(size, make(size, torch.bfloat16, device))


@pytest.mark.gpu
def test_the_backend_is_the_one_that_pytorch_would_use(device):
    def backend(size, kernel):
        with torch.nn.attention.sdpa_kernel(kernel):
            qkv, *_ = make(size, torch.bfloat16, device)
            _, heads, kv_heads, positions, *_ = SIZES[size]
            attention = Attention(positions, heads, kv_heads, SCALING)
            return attention_forward(qkv, None, attention)[1].backend

    backends = torch.nn.attention.SDPBackend
    assert backend("GQA", backends.FLASH_ATTENTION) == FLASH
    assert backend("GQA", backends.MATH) is None
    if torch.cuda.get_device_capability() in ((8, 0), (9, 0)):  # others have no backward for these
        assert backend("heads of 256", backends.FLASH_ATTENTION) == FLASH
    # cuDNN has no backward for one token
    assert backend("one token", backends.FLASH_ATTENTION) is None
