"""The fused loss in a model: what it leaves to the model's own, and heads that PEFT trains."""

import copy

import layer_case
import pytest
import torch
import torch.nn.functional as F
from fused_case import SHORT, assert_close, assert_right, pair, step, values_of
from peft import CPTConfig, LoraConfig, PeftModel, get_peft_model
from peft_models import ATTENTION, adapt, assert_equal, base_model, ids, peft_model, set_weights
from reference import random
from torch import nn

from fused_lora import Fusion, fuse, report
from fused_lora.adopt import cross_entropy as loss_site

LOSS = Fusion(cross_entropy=True)
MODEL = "base_model.model"


@pytest.fixture
def losses(monkeypatch):
    """The loss of every call of the fused one."""
    seen = []
    function = loss_site.linear_cross_entropy

    def spy(*tensors, **options):
        seen.append(function(*tensors, **options))
        return seen[-1]

    monkeypatch.setattr(loss_site, "linear_cross_entropy", spy)
    return seen


# --- where it is fused ----------------------------------------------------------------------------


def test_there_are_no_logits_in_training_and_all_of_them_elsewhere(losses, device):
    fused, plain, _ = pair(device, LOSS)
    tokens = ids(device)
    assert fused(input_ids=tokens, labels=tokens).logits is None and len(losses) == 1
    with torch.no_grad():
        assert torch.equal(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        # the class's own forward has no such option as the last one
        inputs = {"input_ids": tokens, "labels": tokens, "max_labelled_tokens": 5}
        ours, theirs = (model.eval()(**inputs) for model in (fused, plain))
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)
    assert len(losses) == 1


def test_it_fills_a_cache_only_if_it_is_asked_to(device):
    """With one no layer runs whole. Packed documents, which a cache lets see each other, keep what
    the configuration asks for."""
    fused, plain, _ = layer_case.pair(device, Fusion(layer=True, cross_entropy=True))
    for model in (fused, plain):
        model.config.use_cache = True
    with pytest.warns(UserWarning, match="fills no cache in training, which model.config"):
        got = step(fused, length=SHORT)
    assert got.functions["DecoderLayer"] == 2
    assert_close(got, step(plain, length=SHORT))
    packed = {"position_ids": torch.arange(SHORT, device=device)[None] % 3}
    for options, is_filled in (({}, False), ({"use_cache": True}, True), (packed, True)):
        tokens = ids(device)[:, :SHORT]
        one, other = (model(input_ids=tokens, labels=tokens, **options) for model in (fused, plain))
        torch.testing.assert_close(one.loss, other.loss)
        assert (one.past_key_values is not None) is is_filled


def test_the_loss_is_fused_for_pefts_causal_lm_class_too(losses, device):
    """Which passes more on than its base class: output_attentions, return_dict and the like."""
    fused, plain, _ = pair(device, LOSS, task_type="CAUSAL_LM")
    inputs = {"input_ids": ids(device), "labels": ids(device)}
    got, want = (model(**inputs, attention_mask=None) for model in (fused, plain))
    torch.testing.assert_close(got.loss, want.loss)
    assert got.logits is None and len(losses) == 1
    assert torch.equal(fused(**inputs, return_dict=False)[1], want.logits)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_num_items_in_batch_reaches_it(as_tensor, losses, device):
    fused, plain, _ = pair(device, LOSS)
    items = torch.tensor(77, device=device) if as_tensor else 77
    assert_right(fused, plain, num_items_in_batch=items)
    assert len(losses) == 3


# --- what is left to the model's own --------------------------------------------------------------


def smoothed(logits, labels, vocab_size, label_smoothing=0.0, **_):
    logits = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=label_smoothing)


@pytest.mark.parametrize("option", ["label_smoothing", "z_loss", "ignore_index", "logits_to_keep"])
def test_options_that_the_fused_loss_does_not_know_are(option, losses, device):
    """Of which transformers' own reads the last two."""
    fused, plain, _ = pair(device, LOSS)
    tokens = ids(device)
    labels = tokens[:, -3:] if option == "logits_to_keep" else tokens
    value = 0.1 if option in ("label_smoothing", "z_loss") else 3
    got, want = (
        model(input_ids=tokens, labels=labels, **{option: value}) for model in (fused, plain)
    )
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    is_read = not torch.equal(want.loss, plain(input_ids=tokens, labels=tokens).loss)
    assert is_read == (value == 3) and not losses


def test_a_loss_function_of_ones_own_is_reported_and_run_with_its_options(losses, device):
    fused, plain, _ = pair(device, LOSS)
    for model in (fused, plain):
        model.get_submodule(MODEL).loss_function = smoothed
    reason = "its loss_function is not transformers' own: do not set model.loss_function"
    assert report(fused).left == {MODEL: reason}
    assert_equal(step(fused), step(plain))
    want = step(plain, label_smoothing=0.1)
    assert_equal(step(fused, label_smoothing=0.1), want)
    assert not torch.equal(want["loss"], step(plain)["loss"]) and not losses


# --- heads that PEFT trains -----------------------------------------------------------------------

TIED = {"tie_word_embeddings": True}
HEADS = {
    "untied": ({}, {"modules_to_save": ["lm_head"]}),
    "tied in the base": (TIED, {"modules_to_save": ["lm_head"]}),
    "copies tied": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "with a bias": ({}, {"modules_to_save": ["lm_head"]}),
}
COPY = f"{MODEL}.lm_head.modules_to_save.default"


def head_base(kind, device):
    base = base_model(device, **HEADS[kind][0])
    if kind == "with a bias":
        base.lm_head = nn.Linear(52, 96, device=device)
        set_weights(base, device, only="lm_head")
    return base


def with_trained_head(kind, device):
    """modules_to_save, fused and not, of which the copy is no longer what it is a copy of."""
    plain = adapt(head_base(kind, device), device, **HEADS[kind][1]).train()
    with torch.no_grad():
        for parameter in plain.get_submodule(COPY).parameters():
            parameter += random(*parameter.shape, seed=9, scale=0.1, device=device)
    fused = copy.deepcopy(plain)
    assert fuse(fused, LOSS).fused == {"cross_entropy": [MODEL]}
    return fused, plain


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("kind", HEADS)
def test_the_copy_of_the_head_is_trained_and_saved_and_disabled(kind, losses, tmp_path, device):
    fused, plain = with_trained_head(kind, device)
    assert_right(fused, plain)
    head, embedding = fused.get_submodule(COPY), fused.get_input_embeddings()
    assert all(parameter.grad.any() for parameter in head.parameters())
    assert (head.bias is not None) == (kind == "with a bias")
    assert (head.weight is embedding.weight) == (kind == "copies tied")

    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(head_base(kind, device), tmp_path, is_trainable=True).train()
    fuse(loaded, LOSS)
    want = step(fused)
    assert_equal(step(loaded), want)

    tokens, base = ids(device), head_base(kind, device).train()
    with fused.disable_adapter():
        got = fused(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(got, base(input_ids=tokens, labels=tokens).loss)
    assert_equal(step(fused), want)  # the copy is back
    assert len(losses) == 3 + 4


def test_the_head_is_the_active_adapters(losses, device):
    """Its own copy, or the base's where it has none."""
    fused, plain = with_trained_head("untied", device)
    for name, modules in (("second", ["lm_head"]), ("third", None)):
        for model in (fused, plain):
            config = LoraConfig(r=4, target_modules=[*ATTENTION], modules_to_save=modules)
            model.add_adapter(name, config)
            set_weights(model, device, only=f".{name}.")
            model.set_adapter(name)
        assert_right(fused, plain)
        assert (f"{MODEL}.lm_head.modules_to_save.{name}.weight" in step(fused)) == bool(modules)
    assert len(losses) == 8


@pytest.mark.parametrize("where", [f"{MODEL}.lm_head", COPY])
def test_a_hook_on_a_trained_head_is_called(where, losses, device):
    fused, plain = with_trained_head("untied", device)
    called = []
    fused.get_submodule(where).register_forward_hook(lambda *_: called.append(1))
    assert "lm_head: it has hooks" in report(fused).left[MODEL]
    assert_equal(step(fused), step(plain))
    assert called == [1] and not losses


def test_lora_on_the_head_is_left_to_peft(losses, device):
    targets = {"target_modules": [*ATTENTION, "lm_head"]}
    reason = "its lm_head has an adapter: name it in modules_to_save, not in target_modules"
    with pytest.raises(ValueError, match=f"cross_entropy=True fuses no module.*{reason}"):
        fuse(peft_model(device, **targets), LOSS)
    fused, plain, _ = pair(device, LOSS)
    for model in (fused, plain):
        model.add_adapter("second", LoraConfig(r=4, **targets))
        set_weights(model, device, only=".second.")
        model.set_adapter("second")
    assert report(fused).left == {MODEL: reason}
    assert_equal(step(fused), step(plain))
    assert not losses


def test_cpt_which_makes_a_loss_of_logits_gets_them(losses, device):
    config = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4],
        tokenizer_name_or_path="none",
    )  # fmt: skip
    plain = get_peft_model(base_model(device), config)
    fused, plain = copy.deepcopy(plain), copy.deepcopy(plain)  # of which neither has CPT's hooks
    assert "(CPT)" in fuse(fused).left["cross_entropy"]
    inputs = {"input_ids": ids(device), "labels": ids(device)}
    got, want = (values_of(model, model(**inputs).loss) for model in (fused, plain))
    assert_close(got, want)
    assert got.functions["LoRA_MLP"] == 2 and not losses
