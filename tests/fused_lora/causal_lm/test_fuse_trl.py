"""TRL's head (`add_fused_lm_head`), which its trainers call: a fused model answers with ours."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases.four_bit_case import quantised
from cases.layer_case import peft_model
from cases.log_probs_case import FIELDS as EAGER_FIELDS
from cases.log_probs_case import eager
from cases.peft_models import ATTENTION, base_model
from cases.reasons import add_active, readapt
from cases.reference import seeded
from cases.trl_case import trainer_of
from peft import LoraConfig, inject_adapter_in_model

import fused_lora.causal_lm.log_probs as module
from fused_lora import Fusion, fuse, report, unfuse
from fused_lora.foreign.trl_head import trl_head_in

utils = pytest.importorskip("trl.trainer.utils", reason="wants trl, of dev/requirements/dev.txt")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("wants trl from 1.15 on", allow_module_level=True)

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
FIELDS = (*OUTPUTS, "label_mask", "loss")
FUSION = Fusion(layer=True, rms_norm=True, cross_entropy=True)
LOSS = Fusion(cross_entropy=True)
ORDERS = ("fuse first", "TRL first")
NAME = "base_model.model"
# what each model adds to Qwen2's plain logits, and TRL to its head
MODELS = {
    "temperature, every output": ({}, {"temperature": 0.7, "outputs": OUTPUTS}),
    "softcap": (
        {
            "family": "Gemma2",
            "config": {"final_logit_softcapping": 3.0, "attn_implementation": "eager"},
        },
        {"outputs": OUTPUTS},
    ),
    "logits_scaling": (
        {"family": "Granite", "config": {"logits_scaling": 4.0}},
        {"outputs": ("log_probs", "entropy")},
    ),
    "fp32 head": ({}, {"cast_lm_head_to_fp32": True}),
    "trained head": ({"lora": {"modules_to_save": ["lm_head"]}}, {"outputs": OUTPUTS}),
}
ADAPTED = {"target_modules": [*ATTENTION, "lm_head"]}
ADAPTED_HEADS = {
    "plain": {"lora": ADAPTED},
    "tied, rsLoRA": {
        "lora": ADAPTED | {"use_rslora": True}, "config": {"tie_word_embeddings": True},
    },
    "lora_bias, softcap": {
        "lora": ADAPTED | {"lora_bias": True}, "family": "Gemma2",
        "config": {"final_logit_softcapping": 3.0, "attn_implementation": "eager"},
    },
}  # fmt: skip


@pytest.fixture
def answered(monkeypatch):
    """The calls that our head answers."""
    calls, answer = [], module.log_probs
    monkeypatch.setattr(module, "log_probs", lambda *a, **o: calls.append(o) or answer(*a, **o))
    return calls


def pair(device, order=ORDERS[0], fusion=LOSS, family="Qwen2", config=None, lora=None, **head):
    """Return a model with TRL's head, fused in this order, and the same without fusion."""
    config = {"num_hidden_layers": 1} | (config or {})
    plain = peft_model(device, family, config=config, **(lora or {}))
    fused = copy.deepcopy(plain)
    for model, is_fused in ((plain, False), (fused, True)):
        if is_fused and order == "fuse first":
            fuse(model, fusion)
        if head.get("cast_lm_head_to_fp32"):  # as GRPOTrainer does
            its = model.get_base_model().lm_head
            its.forward = lambda hidden, its=its: F.linear(hidden.float(), its.weight)
        utils.add_fused_lm_head(model.get_base_model(), **head)
        if is_fused and order == "TRL first":
            fuse(model, fusion)
    return fused, plain


def batch(device, padding="right"):
    tokens = torch.randint(3, 96, (3, 9), generator=seeded(3)).to(device)
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[:, :4] = -100
    padded = slice(7, None) if padding == "right" else slice(0, 2)
    mask[1, padded], labels[1, padded] = 0, -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def from_logits(model, temperature, **inputs):
    """Return TRL's output from plain logits. TRL's own head leaves out lm_head's adapter."""
    labels = inputs.pop("labels")[:, 1:]
    logits = model(**inputs).logits[:, :-1]
    whole = torch.eye(logits.shape[-1], device=logits.device)
    *fields, loss = eager(logits, whole, labels, temperature=temperature)
    named = dict(zip(EAGER_FIELDS, fields, strict=True))
    return utils.FusedCausalLMOutput(**named, label_mask=labels != -100, loss=loss)


def step(model, weights=(1.0, 0.3), temperature=None, **inputs):
    """Return TRL's output and the adapters' gradients of a sum of log_probs and entropy.
    temperature: take them from the logits at this temperature."""
    if temperature is None:
        output = model(**inputs, fused_lm_head=True)
    else:
        output = from_logits(model, temperature, **inputs)
    factors = torch.arange(output.log_probs.numel(), device=output.log_probs.device) % 5 - 2.0
    score = sum(
        (getattr(output, name) * factors.view(output.log_probs.shape)).sum() * weight
        for name, weight in zip(("log_probs", "entropy"), weights, strict=True)
        if getattr(output, name) is not None
    )
    score.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output, gradients


def assert_same(fused, plain, temperature=None, **inputs):
    got, got_gradients = step(fused, **inputs)
    want, gradients = step(plain, temperature=temperature, **inputs)
    assert type(got) is type(want)
    for name in FIELDS:
        one, wanted = getattr(got, name), getattr(want, name)
        assert (one is None) is (wanted is None), name
        if one is not None:
            assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), name
            torch.testing.assert_close(one, wanted, rtol=2e-5, atol=2e-5, msg=name)
    assert got_gradients.keys() == gradients.keys() and gradients
    for name, gradient in gradients.items():
        off = (got_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert off < 1e-4, name


@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize(
    ("name", "order"),
    [(name, order) for name in MODELS for order in ORDERS],
)
def test_the_fields_and_gradients_are_those_of_trls_head(name, order, answered, device):
    made, head = MODELS[name]
    fused, plain = pair(device, order, **made, **head)
    assert_same(fused, plain, **batch(device))
    assert len(answered) == 1
    assert report(fused).fused["cross_entropy"] == [NAME]


@pytest.mark.filterwarnings("error:a fused ", "ignore:Model with `tie_word")
@pytest.mark.parametrize("name", ADAPTED_HEADS)
def test_a_heads_adapter_is_in_the_fields_and_gets_gradients(name, answered, device):
    made, head = ADAPTED_HEADS[name], {"temperature": 0.7, "outputs": OUTPUTS}
    fused, plain = pair(device, "TRL first", **made, **head)
    assert_same(fused, plain, temperature=0.7, **batch(device))
    trained = {name for name in step(fused, **batch(device))[1] if "lm_head" in name}
    assert trained == {n for n, p in plain.named_parameters() if "lm_head.lora_" in n}
    with fused.disable_adapter(), plain.disable_adapter(), torch.no_grad():  # a reference pass
        got, want = (
            fused(**batch(device), fused_lm_head=True),
            from_logits(plain, 0.7, **batch(device)),
        )
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=2e-5, atol=2e-5)
    assert len(answered) == 3


@pytest.mark.filterwarnings("error:a fused ")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_left_out_and_the_fields_keep_their_places(padding, answered, device):
    head = {"outputs": OUTPUTS}
    fused, plain = pair(device, "TRL first", FUSION, config={"head_dim": 32}, **head)
    assert_same(fused, plain, **batch(device, padding))
    with torch.no_grad():  # a reference pass
        got, want = (one(**batch(device), fused_lm_head=True) for one in (fused, plain))
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=2e-5, atol=2e-5)
    assert len(answered) == 2 and not got.log_probs.requires_grad


def test_shift_labels_are_not_shifted_again_and_num_items_divides_the_loss(answered, device):
    fused, plain = pair(device)
    inputs = batch(device)
    shifted = inputs.pop("labels").roll(-1, 1)
    assert_same(fused, plain, shift_labels=shifted, num_items_in_batch=7, **inputs)
    nothing = torch.full_like(shifted, -100)
    assert fused(shift_labels=nothing, **inputs, fused_lm_head=True).loss == 0
    assert len(answered) == 2


@pytest.mark.parametrize("order", ORDERS)
def test_unfuse_gives_trls_head_back(order, answered, device):
    fused, plain = pair(device, order, temperature=0.7, outputs=("log_probs", "entropy"))
    if order == "fuse first":
        fused(**batch(device), fused_lm_head=True)
    assert unfuse(fused) == [NAME]
    got, want = (one.get_base_model().forward for one in (fused, plain))
    assert trl_head_in(got) == trl_head_in(want) is not None
    assert not fused._forward_pre_hooks
    answered.clear()
    assert_same(fused, plain, **batch(device))
    assert not answered


def test_without_a_trainer_nothing_answers_trls_call(device):
    fused = peft_model(device, config={"num_hidden_layers": 1})
    fuse(fused, LOSS)
    with pytest.raises(ValueError, match="fused_lm_head=True is a call of TRL's trainers"):
        fused(**batch(device), fused_lm_head=True)


NOT_OURS = {  # what is done to an adapted head, and why TRL's own then runs
    "dropout": (lambda head: readapt(head, lora_dropout=0.5), "lora_dropout is 0.5, set it to 0.0"),
    "DoRA": (lambda head: readapt(head, use_dora=True), "it uses DoRA"),
    "two active": (add_active, "choose one with set_adapter"),
    "hooks": (lambda head: head.register_forward_hook(lambda *_: None), "it has hooks"),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_an_adapter_that_is_not_computed_is_said_to_stay_untrained(name, answered, device):
    change, why = NOT_OURS[name]
    fused, plain = pair(device, "TRL first", lora=ADAPTED)
    for model in (fused, plain):
        change(model.get_base_model().lm_head)
    reason = f"TRL's head would not train lm_head's adapter: {why}"
    with pytest.warns(UserWarning, match=f"a fused Qwen2ForCausalLM stepped aside: {reason}"):
        assert_same(fused, plain, **batch(device))
    assert report(fused).left[NAME].startswith(reason)
    with pytest.raises(ValueError, match=f"fuses no module: {reason}"):
        fuse(plain, LOSS)
    assert not answered


def test_a_trainer_trains_a_heads_adapter_in_a_model_without_peft_around_it(
    answered, tmp_path, device
):
    """TRL's trainers refuse it in a PeftModel, and ignore it in this one."""
    model = base_model(device, attn_implementation="sdpa", num_hidden_layers=1)
    model = inject_adapter_in_model(LoraConfig(**ADAPTED), model)
    trainer = trainer_of("SFT", model, tmp_path)
    fuse(trainer.model, LOSS)
    trainer.train()
    assert answered and model.lm_head.lora_B["default"].weight.any()


def test_an_adapter_of_a_head_in_4_bits_is_refused(device):
    lora = ADAPTED | {"change": partial(quantised, only="lm_head")}
    with pytest.raises(ValueError, match="lm_head's adapter: its weight is in 4 bits, load that"):
        pair(device, "TRL first", lora=lora)


@pytest.mark.parametrize("order", ORDERS)
def test_a_head_with_hooks_runs_trls_own_and_says_so(order, answered, device):
    fused, plain = pair(device, order, outputs=("log_probs", "entropy", "is_top1"))
    for model in (fused, plain):
        model.get_base_model().lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="a fused Qwen2ForCausalLM stepped aside: lm_head: it has"):
        assert_same(fused, plain, **batch(device))
    assert not answered and NAME in report(fused).left


def test_copies_and_pickles_answer_with_their_own_weights(answered, device):
    fused, plain = pair(device, "TRL first")
    for model in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_same(model, plain, **batch(device))
    assert len(answered) == 2


def test_a_model_that_is_called_without_peft_around_it_says_who_computed(answered, device):
    fused = peft_model(device, config={"num_hidden_layers": 1}).get_base_model()
    fuse(fused, LOSS)
    utils.add_fused_lm_head(fused)
    with pytest.warns(UserWarning, match="TRL set its own head after fuse, and computed this call"):
        fused(**batch(device), fused_lm_head=True)
    assert not answered
    fused(**batch(device), fused_lm_head=True)
    assert len(answered) == 1


def test_fp8_is_not_what_trl_asks_for(device):
    plain = peft_model(device, config={"num_hidden_layers": 1})
    utils.add_fused_lm_head(plain.get_base_model())
    with pytest.raises(ValueError, match="TRL's trainers get log-probabilities, never in FP8"):
        fuse(plain, Fusion(cross_entropy=True, fp8_lm_head=True))
