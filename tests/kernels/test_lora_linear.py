"""LoRA_QKV's outputs in no loss, a bias that is missing, and LoRA_W on more than 2^31 elements."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from contract import BF16, OPERATIONS, Case, assert_right, run, truth_of
from reference import assert_within_budget, random, use_poisoned_memory

from fused_lora.lora_linear import FrozenLinear

W, QKV = OPERATIONS["LoRA_W"], OPERATIONS["LoRA_QKV"]


@pytest.mark.parametrize("missing", ["q_bias", "k_bias", "v_bias"])
def test_one_projection_without_a_bias_is_right(missing, device):
    case = QKV.case(device)
    frozen = case.inputs["frozen"]._replace(**{missing: None})
    assert_right(QKV, replace(case, inputs=case.inputs | {"frozen": frozen}))


@pytest.mark.parametrize("used", list(product((False, True), repeat=3))[1:-1], ids=str)
def test_an_output_in_no_loss_gives_its_adapter_no_gradient_as_eager_does(
    used, monkeypatch, device
):
    """Nor does it matter then what new memory holds."""

    def of_used(function):
        return lambda *inputs: tuple(
            output for output, use in zip(function(*inputs), used, strict=True) if use
        )

    case = QKV.case(device)
    gradients = [grad for grad, use in zip(case.gradients, used, strict=True) if use]
    case = replace(case, gradients=gradients)
    eager = run(QKV, case, of_used(QKV.eager))
    use_poisoned_memory(monkeypatch)
    got = run(QKV, case, of_used(QKV.function))
    without = [name for name in eager if eager[name] is None]
    assert len(without) == 2 * used.count(False)
    for name in without:
        assert got.pop(name) is eager.pop(name) is None
    assert_right(QKV, case, got, eager, of=of_used(QKV.eager))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """A few rows over and over, so that eager PyTorch on those few says what is right. Adapters in
    fp32, for sums over so many rows that are not rounded on their way."""
    rows, features, pattern = 1_050_000, 2048, 250
    assert rows * features > 2**31 and rows % pattern == 0
    # x twice, the output, its gradient, that of x, and room
    if torch.cuda.mem_get_info()[0] < 8 * 2 * rows * features:
        pytest.skip("needs 35 GB of free GPU memory")
    options = {"dtype": BF16, "device": device}
    x, grad = (random(pattern, features, seed=seed, **options) for seed in (1, 2))
    weight = random(features, features, seed=3, scale=features**-0.5, **options)
    of_layer = {
        "A": random(8, features, seed=5, scale=features**-0.5, device=device),
        "B": random(features, 8, seed=6, scale=8**-0.5, device=device),
        "frozen": FrozenLinear(weight, random(features, seed=4, **options), 2.0),
    }

    def in_dtype_of_x(x, A, B, frozen):
        """PEFT would compute the part of an adapter of another dtype in that."""
        return W.eager(x, A.to(x.dtype), B.to(x.dtype), frozen)

    which = torch.arange(rows, device=device) % pattern
    many = run(W, Case({"x": x[which], **of_layer}, [grad[which]]))
    few = Case({"x": x, **of_layer}, [grad])
    eager, truth = run(W, few, in_dtype_of_x), truth_of(W, few)
    over = 2**31 // features
    for name in ("output 0", "gradient of x"):
        for window in (slice(0, 250), slice(over - 250, over + 250), slice(-250, None)):
            at = which[window]
            assert_within_budget(name, many[name][window], eager[name][at], truth[name][at])
    for name in ("gradient of A", "gradient of B"):
        assert_within_budget(name, many[name] / (rows // pattern), eager[name], truth[name])
