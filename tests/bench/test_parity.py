"""The parity gate and its reference."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from cases.peft_models import assert_equal
from cases.rehearsal_case import measured_cells, plan_of

from batches import Batch
from bench import cells, parity
from bench.cells import Block
from bench.fp8_products import fp8_products
from bench.parity import Reference, check_parity, dequantise, judge, make_reference
from bench.preparing import prepare_run
from models import Built
from variants import Lora, Settings

LOSSES = [4.0, 5.0]


def reference(gradient_error=0.01, loss_errors=(0.002, 0.002), scale=1.0):
    return Reference(
        losses=list(LOSSES),
        gradients={"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1.0])},
        loss_errors=list(loss_errors),
        gradient_errors={"a": gradient_error, "b": gradient_error},
        gradient_scales={"a": scale, "b": scale},
    )


def judged(losses=LOSSES, a=(3.0, 4.0), b=(0.0, 1.0), **vanilla_errors):
    gradients = {"a": torch.tensor(a), "b": torch.tensor(b)}
    return judge(list(losses), gradients, reference(**vanilla_errors))


def test_errors_are_relative_to_the_norm_and_the_worst_gradient_is_named():
    truth = judged()
    assert truth.passed and truth.problem is None
    assert (truth.worst_ratio, truth.loss_errors) == (0.0, [0.0, 0.0])
    assert truth.worst_scale == pytest.approx(1.0)
    # a is off by 0.05 of norm 5: 1%. b is off by 0.014 of norm 1: 1.4%, that is 1.4 x vanilla's own
    parity = judged(a=(3.04, 3.97), b=(0.014, 1.0))
    assert parity.passed and parity.worst_gradient == "b"
    assert parity.worst_ratio == pytest.approx(1.4, rel=1e-3)
    assert parity.median_gradient_error == pytest.approx(0.01, rel=1e-3)


def off(limit, where=0):
    """Return the losses with one off by this."""
    return [loss * (1 + limit * (n == where)) for n, loss in enumerate(LOSSES)]


NOISY = {"gradient_error": 0.15}  # a gradient that is a tenth too long would hide in it
SHORT = {**NOISY, "scale": 0.98}
EXACT, UNEVEN = {"loss_errors": (0.0, 0.0)}, {"loss_errors": (0.01, 0.002)}
INSIDE, OUTSIDE = 0.99, 1.01
LIMIT, SCALE_LIMIT, LOSS_FLOOR = 1.5, 0.03, 2.0**-11  # a change of these is one of what we publish


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"b": (INSIDE * LIMIT * 0.01, 1.0)}, None),
        ({"b": (OUTSIDE * LIMIT * 0.01, 1.0)},
         f"b is {OUTSIDE * LIMIT:.2f} times as far from fp32 as vanilla PEFT's"),
        ({"b": (0.0, 0.0)}, "b is 100.00 times"),  # never computed
        ({"b": (0.0, -1.0)}, "b is 200.00 times"),
        ({"b": (1.0, 0.0)}, "b is 141.42 times"),
        ({"b": (0.0, float("nan"))}, "b is inf times"),
        ({"b": (float("inf"), 1.0)}, "b is inf times"),
        ({"b": (0.0, 1 + INSIDE * SCALE_LIMIT), **NOISY}, None),
        ({"b": (0.0, 1 + OUTSIDE * SCALE_LIMIT), **NOISY}, "b is 1.030 times as long"),
        ({"b": (0.0, 1 - INSIDE * SCALE_LIMIT), **NOISY}, None),
        ({"b": (0.0, 1 - OUTSIDE * SCALE_LIMIT), **NOISY}, "b is 0.970 times as long"),
        ({"a": (3.0 - 0.4, 4.0 + 0.3), **NOISY}, None),  # a tenth off, but across the truth
        ({"a": (3.3, 4.4), **NOISY},
         "a is 1.100 times as long as in fp32, vanilla PEFT's 1.000 times"),
        ({"b": (0.0, 0.96), **SHORT}, None),
        ({"a": (3.06, 4.08), **SHORT},
         "a is 1.020 times as long as in fp32, vanilla PEFT's 0.980 times"),
        ({"losses": off(INSIDE * LIMIT * 0.002)}, None),
        ({"losses": off(OUTSIDE * LIMIT * 0.002)}, "losses "),
        ({"losses": off(INSIDE * LIMIT * 0.002, 1)}, None),
        ({"losses": off(OUTSIDE * LIMIT * 0.002, 1)}, "losses "),
        ({"losses": off(float("nan"))}, "losses "),
        ({"losses": off(0.01), **UNEVEN}, None),  # each loss has its own budget
        ({"losses": off(0.01, 1), **UNEVEN}, "losses "),
        ({"losses": off(INSIDE * LIMIT * LOSS_FLOOR), **EXACT}, None),  # vanilla's hit by chance
        ({"losses": off(OUTSIDE * LIMIT * LOSS_FLOOR), **EXACT}, "losses "),
        ({"losses": (4.0, 4.0)}, "losses 4.0000 and 4.0000, in fp32 4.0000 and 5.0000"),  # stale
    ],
)  # fmt: skip
def test_just_inside_a_limit_passes_and_outside_is_named(found, problem):
    parity = judged(**found)
    assert parity.passed is (problem is None)
    assert parity.problem is problem or parity.problem.startswith(problem)


@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b", "c"), ()])
def test_a_missing_or_an_extra_gradient_fails(names):
    parity = judge(LOSSES, {name: torch.tensor([3.0, 4.0]) for name in names}, reference())
    assert parity.problem.startswith("it trains other parameters than vanilla PEFT")


# --- models ---------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen bf16 matrix and two fp32 adapters. Its loss is a mean square."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Parameter(torch.randn(8, 8).bfloat16(), requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.randn(2, 8))
        self.lora_B = torch.nn.Parameter(torch.randn(8, 2))

    def forward(self, input_ids, labels, attention_mask):
        x = torch.sin(input_ids[..., None] * torch.arange(1.0, 9.0))
        return SimpleNamespace(loss=(self.output(x) * labels[..., None]).float().square().mean())

    def output(self, x):
        return x.to(self.frozen.dtype) @ self.frozen.T + x @ self.lora_A.T @ self.second().T

    def second(self):
        return self.lora_B


class FirstBatchOnly(Adapted):
    """A model that gives every batch the result of the first, like a cache or a graph captured
    once."""

    first = None

    def forward(self, input_ids, labels, attention_mask):
        self.first = self.first or (input_ids, labels)
        return super().forward(*self.first, attention_mask)


class Forgetful(Adapted):
    """A model whose second adapter never gets a gradient."""

    def second(self):
        return self.lora_B.detach()


class Dropping(Adapted):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def second(self):
        return self.dropout(self.lora_B)


class Based(Adapted):
    """A model whose frozen matrix is a base layer, as under PEFT's adapters."""

    def __init__(self):
        super().__init__()
        self.base_layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)

    def output(self, x):
        hidden = x + x @ self.lora_A.T @ self.lora_B.T
        return self.base_layer(hidden.to(self.base_layer.weight.dtype))


def batch(*tokens):
    ids = torch.tensor([tokens])
    return Batch(ids, ids + 1, attention_mask=None)


ADAPTERS = ("lora_A", "lora_B")
BATCHES = (batch(1, 2, 3, 4), batch(7, 5, 6, 5))


def built(model, dtype=torch.bfloat16):
    return Built(model, autocast_dtype=dtype, settings=Settings())


@pytest.fixture(scope="module")
def vanilla():
    return make_reference(built(Adapted()), BATCHES)


def test_the_reference_is_fp32_and_its_gradients_are_of_the_second_batch(vanilla):
    model, losses = Adapted().float(), []
    for each in BATCHES:
        model.zero_grad()
        losses.append(model(each.input_ids, each.labels, None).loss)
        losses[-1].backward()
    assert vanilla.losses == [loss.item() for loss in losses]
    assert_equal(vanilla.gradients, {name: getattr(model, name).grad for name in ADAPTERS})
    # the budget is the error of bf16, which keeps 8 bits: 0.2% a rounding
    for errors in (vanilla.loss_errors, vanilla.gradient_errors.values()):
        assert all(0 < error < 0.02 for error in errors)
    assert all(0 < abs(s - 1) < 0.02 for s in vanilla.gradient_scales.values())


def test_vanilla_itself_is_as_far_off_as_its_own_budget_and_keeps_no_gradient(vanilla):
    model = Adapted()
    parity = check_parity(built(model), BATCHES, vanilla)
    assert parity.passed and parity.worst_ratio == 1.0
    assert parity.loss_errors == parity.vanilla_loss_errors == vanilla.loss_errors
    assert parity.median_gradient_error == parity.vanilla_median_gradient_error
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3


def test_a_model_that_keeps_its_first_result_fails(vanilla):
    stale = check_parity(built(FirstBatchOnly()), BATCHES, vanilla)
    assert stale.problem.startswith("losses ")
    assert check_parity(built(FirstBatchOnly()), BATCHES[1:] * 2, vanilla).loss_errors[1] < 0.01


def test_an_adapter_without_a_gradient_fails(vanilla):
    parity = check_parity(built(Forgetful().float(), None), BATCHES, vanilla)
    assert max(parity.loss_errors) < 1e-6
    assert parity.problem.startswith("lora_B is ") and parity.worst_scale == 0.0


def test_dropout_is_off_while_parity_is_checked_and_on_again_after_it(vanilla):
    """Switch dropout off for the check, because no two libraries draw the same masks."""
    model = Dropping().train()
    assert check_parity(built(model), BATCHES, vanilla).worst_ratio == 1.0
    assert make_reference(built(Dropping()), BATCHES).losses == vanilla.losses
    assert model.dropout.training


def test_a_saved_reference_comes_back_the_same(tmp_path, vanilla):
    path = tmp_path / "reference.pt"
    vanilla.save(path)
    loaded = Reference.load(path)
    assert replace(loaded, gradients={}) == replace(vanilla, gradients={})
    assert_equal(loaded.gradients, vanilla.gradients)


@pytest.mark.parametrize(
    ("seq_len", "kind", "tokens"),
    [(512, "--documents", 4 * 512), (512, "--padded", 4 * 64), (128, "--documents", 4 * 128)],
)
def test_documents_are_judged_on_a_row_that_holds_several(seq_len, kind, tokens, tmp_path):
    plan = plan_of(tmp_path, "--seq-lens", str(seq_len), kind)
    for batch in plan.parity_batches():
        assert batch.input_ids.numel() == tokens
        assert seq_len < 512 or kind == "--padded" or len(batch.lengths) > 2


@pytest.mark.parametrize(
    ("first", "second", "trains"), [(1, 2, True), (2, 1, False), (2, 0, False)]
)
def test_a_length_trains_if_the_batch_of_the_gradients_has_a_label_beyond_the_second_token(
    first, second, trains, tmp_path, monkeypatch
):
    """A first token attends to itself alone: the adapters of q and k get no gradient from it."""
    labels = -torch.full((3, 1, 4), 100)
    for place in range(3):
        labels[place, 0, place] = 7
    plan = plan_of(tmp_path, "--seq-lens", "16")
    both = [Batch(torch.ones(1, 4), labels[place]) for place in (first, second)]
    monkeypatch.setattr(type(plan), "batches", lambda *_: both)
    assert plan.trains_at(16) is trains


# --- another precision ----------------------------------------------------------------------------


def test_fp8_has_a_reference_of_its_own_with_the_same_truth():
    bf16, fp8 = (make_reference(built(Based()), BATCHES, is_fp8) for is_fp8 in (False, True))
    assert fp8.losses == bf16.losses
    assert_equal(fp8.gradients, bf16.gradients)
    assert (bf16.scale_limit, bf16.loss_floor) == (SCALE_LIMIT, LOSS_FLOOR)
    assert (fp8.scale_limit, fp8.loss_floor) == (0.15, 8 * LOSS_FLOOR)
    for name, error in fp8.gradient_errors.items():
        assert 2 * bf16.gradient_errors[name] < error < 0.2


def test_products_in_fp8_are_of_the_nearest_codes_forward_and_backward():
    torch.manual_seed(0)
    model = torch.nn.Module()
    base = model.base_layer = torch.nn.Linear(40, 24)
    x, grad = torch.randn(2, 5, 40, requires_grad=True), torch.randn(2, 5, 24)
    weight, exact = base.weight.detach(), base(x)
    scales = weight.abs().amax(1) / 448
    codes = (weight / scales[:, None]).to(torch.float8_e4m3fn).float()

    def nearest(rows):
        row_scales = rows.abs().amax(-1, keepdim=True) / 448
        return (rows / row_scales).to(torch.float8_e4m3fn).float() * row_scales

    with fp8_products(model):
        y = base(x)
    y.backward(grad)
    want = nearest(x.detach()) @ codes.T * scales + base.bias.detach()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, nearest(grad * scales) @ codes)
    assert (y - exact).norm() < 0.06 * exact.norm() and torch.equal(base(x), exact)


def test_a_run_makes_a_reference_for_each_precision_of_its_variants(tmp_path):
    plan = plan_of(tmp_path, "--variants", "fused_layer", "fp8_layer")
    assert plan.precisions() == {False, True}
    assert plan.reference_file(True) != plan.reference_file(False)
    prepare_run(lambda message: None, plan)
    assert plan.is_prepared()
    plan.reference_file(True).unlink()
    assert not plan.is_prepared()
    assert replace(plan, variants=("fused_layer",)).is_prepared()


@pytest.mark.parametrize(("variant", "is_fp8"), [("fp8_layer", True), ("fused_layer", False)])
def test_a_variant_is_held_against_the_reference_of_its_precision(variant, is_fp8, monkeypatch):
    monkeypatch.setattr(parity.Reference, "load", lambda path: path)
    monkeypatch.setattr(parity, "check_parity", lambda built, batches, reference: reference)
    plan = SimpleNamespace(
        build=lambda *_: None, parity_batches=tuple, reference_file=lambda fp8=False: fp8
    )
    assert cells._build_and_check(plan, variant, 16) == (None, is_fp8)


def test_a_reference_is_named_after_all_that_it_rests_on_and_nothing_else(tmp_path):
    plan = plan_of(tmp_path, "--seq-lens", "16", "--batch-size", "2")
    (others := tmp_path / "others.jsonl").write_text(plan.data.read_text() * 2)
    changed = [
        {"seed": 1}, {"padded": True}, {"documents": True}, {"base": "nf4"}, {"device": "cuda"},
        {"seq_lens": (24, 32)}, {"data": others}, {"lora": Lora(rank=8)},
        {"source": replace(plan.source, folder=tmp_path)},
    ]  # fmt: skip
    files = [replace(plan, **one).reference_file() for one in ({}, *changed)]
    files.append(plan.reference_file(fp8=True))
    assert len({*files}) == len(changed) + 2
    for same in ({"steps": 9}, {"batch_size": 1}, {"seq_lens": (16, 32)}, {"variants": ("a",)},
                 {"lora": msgspec.structs.replace(plan.lora, dropout=0.5)}):  # fmt: skip
        assert replace(plan, **same).reference_file() == files[0]


# --- a base in 4 bits -----------------------------------------------------------------------------


def test_on_nf4_the_truth_has_the_dequantised_weights_and_a_base_in_bf16_fails(tmp_path):
    """Quantise layers without adapters too."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    plan = plan_of(tmp_path, "--base", "nf4", "--variants", "vanilla_peft", "--seq-lens", "16",
                   "--targets", "q_proj", "v_proj")  # fmt: skip
    in_bf16 = replace(plan, base="bf16")
    assert plan.reference_file() != in_bf16.reference_file()
    prepare_run(lambda message: None, plan)
    (cell,) = measured_cells(plan, "vanilla_peft", Block(1, 16))
    assert (cell.status, cell.parity.worst_ratio) == ("ok", 1.0)

    model = plan.build("vanilla_peft", 16).model
    packed = {name.replace(".weight", ""): weight for name, weight in model.named_parameters()
              if isinstance(weight, bitsandbytes.nn.Params4bit)}  # fmt: skip
    values = {name: bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
              for name, weight in packed.items()}  # fmt: skip
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    dequantise(model)
    assert len(packed) == 2 * 7
    for name, value in values.items():
        layer = model.get_submodule(name)
        assert type(layer) is torch.nn.Linear and layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.weight, value)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen

    reference = Reference.load(plan.reference_file())
    found = check_parity(in_bf16.build("vanilla_peft", 16), plan.parity_batches(), reference)
    assert not found.passed and found.median_gradient_error > 5 * cell.parity.median_gradient_error
