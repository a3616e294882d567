"""The fused loss in a model: when it leaves the work to the model's own loss, and heads that PEFT
trains."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_to_fp32, pad_across_processes
from cases import layer_case
from cases.fused_case import (
    SHORT,
    assert_close,
    assert_right,
    assert_same,
    batch,
    pair,
    step,
    values_of,
)
from cases.peft_models import (
    ATTENTION,
    adapt,
    assert_equal,
    base_model,
    ids,
    set_weights,
)
from cases.reasons import MODELS
from cases.reference import random
from peft import CPTConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_pt_utils import nested_detach

from fused_lora import Fusion, fuse, report
from fused_lora.causal_lm import cross_entropy as loss_site

LOSS = Fusion(cross_entropy=True)
MODEL = "base_model.model"


@pytest.fixture
def losses(monkeypatch):
    """Record the loss of every call of the fused loss."""
    seen = []
    function = loss_site.linear_cross_entropy

    def spy(*tensors, **options):
        seen.append(function(*tensors, **options))
        return seen[-1]

    monkeypatch.setattr(loss_site, "linear_cross_entropy", spy)
    return seen


# --- where it is fused ----------------------------------------------------------------------------


def test_a_model_in_eval_mode_trains_fused(device):
    """As from_pretrained leaves it, with the cache that its config asks for."""
    fused, plain, _ = layer_case.pair(device, Fusion(layer=True, cross_entropy=True))
    for model in (fused, plain):
        model.eval().config.use_cache = True
        model.training = True  # get_peft_model's own module
    assert set(report(fused).fused) == {"layer", "cross_entropy"} and not report(fused).left
    functions = assert_same(fused, plain)
    assert {"DecoderLayer": 2, "LinearCrossEntropy": 1}.items() <= functions.items()


def test_there_are_no_logits_in_training_and_all_of_them_elsewhere(losses, device):
    fused, plain, _ = pair(device, LOSS)
    tokens = ids(device)
    assert "logits" not in fused(input_ids=tokens, labels=tokens) and len(losses) == 1
    with torch.no_grad():
        assert torch.equal(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        # the class's own forward has no such option as the last one
        inputs = {"input_ids": tokens, "labels": tokens, "max_labelled_tokens": 5}
        ours, theirs = (model.eval()(**inputs) for model in (fused, plain))
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)
    assert len(losses) == 1


def test_it_fills_a_cache_only_if_it_is_asked_to(device):
    """With a cache, no layer runs whole, and packed documents see each other."""
    fused, plain, _ = layer_case.pair(device, Fusion(layer=True, cross_entropy=True))
    for model in (fused, plain):
        model.config.use_cache = True
    with pytest.warns(UserWarning, match="fills no cache in training: set model.config"):
        got = step(fused, length=SHORT)
    assert got.functions["DecoderLayer"] == 2
    assert_close(got, step(plain, length=SHORT))
    tokens = ids(device)[:, :SHORT]
    for options, is_filled in (({}, False), ({"use_cache": True}, True)):
        one, other = (model(input_ids=tokens, labels=tokens, **options) for model in (fused, plain))
        torch.testing.assert_close(one.loss, other.loss)
        assert (one.past_key_values is not None) is is_filled
    packed = {"position_ids": torch.arange(SHORT, device=device)[None] % 3}
    want = plain(tokens, labels=tokens, use_cache=False, **packed)
    fused_layers = copy.deepcopy(plain)
    fuse(fused_layers, Fusion(layer=True))
    for model in (fused, fused_layers):
        with pytest.warns(UserWarning, match="fills? no cache"):
            got = model(tokens, labels=tokens, **packed)
        assert got.past_key_values is None
        torch.testing.assert_close(got.loss, want.loss)


def test_the_loss_is_fused_for_pefts_causal_lm_class_too(losses, device):
    """It passes on more than its base class: output_attentions, return_dict and the like."""
    fused, plain, _ = pair(device, LOSS, task_type="CAUSAL_LM")
    inputs = {"input_ids": ids(device), "labels": ids(device)}
    got, want = (model(**inputs, attention_mask=None) for model in (fused, plain))
    torch.testing.assert_close(got.loss, want.loss)
    assert "logits" not in got and len(losses) == 1
    with pytest.warns(UserWarning, match=r"given return_dict=False, for a tuple with logits"):
        assert torch.equal(fused(**inputs, return_dict=False)[1], want.logits)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_num_items_in_batch_reaches_it(as_tensor, losses, device):
    fused, plain, _ = pair(device, LOSS)
    items = torch.tensor(77, device=device) if as_tensor else 77
    assert assert_right(fused, plain, num_items_in_batch=items) == len(losses)


@pytest.mark.parametrize("label", [96, -1, -101])
def test_a_label_outside_the_vocabulary_is_named_before_the_model_runs(label, losses, device):
    fused, plain, _ = layer_case.pair(device, Fusion(layer=True, cross_entropy=True))
    tokens = ids(device)[:, :SHORT]
    labels = tokens.clone()
    labels[1, 3] = label
    ran = []
    fused.get_submodule(f"{MODEL}.model").register_forward_pre_hook(lambda *_: ran.append(1))
    said = rf"^a label is {label}, outside the vocabulary of 96 words \(0 to 95, or -100 .*$"
    with pytest.raises(ValueError, match=said):
        fused(input_ids=tokens, labels=labels)
    assert not losses and not ran
    labels[1, 3], labels[:, 0] = -100, label  # a row's first is predicted by nothing
    got, want = (model(input_ids=tokens, labels=labels).loss for model in (fused, plain))
    torch.testing.assert_close(got, want)


# --- the logits that it does not compute ----------------------------------------------------------

COMPUTED = {
    "indexed": lambda logits, labels: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels),
    "given to torch": lambda logits, labels: torch.argmax(logits, -1),
    "added to": lambda logits, labels: labels + logits,
    "divided": lambda logits, labels: logits / 2,
    "a method": lambda logits, labels: logits.float(),
    "its shape": lambda logits, labels: logits.shape[-1],
    "unpacked": lambda logits, labels: [*logits],
    "taken for true": lambda logits, labels: logits or labels,
}


@pytest.fixture(scope="module")
def output():
    fused, _, _ = pair("cuda" if torch.cuda.is_available() else "cpu", LOSS)
    found = fused(**batch(fused), output_hidden_states=True)
    # without a graph, which cannot be copied
    return replace(found, loss=found.loss.detach(), hidden_states=(torch.ones(2),))


@pytest.mark.parametrize("use", COMPUTED.values(), ids=COMPUTED)
def test_computing_with_logits_names_the_switch(use, output):
    for one in (output, convert_to_fp32(output)):  # as accelerate has it under bf16=True
        with pytest.raises((TypeError, AttributeError), match="leave cross_entropy out") as error:
            use(one.logits, one.loss)
        with pytest.raises(KeyError, match="leave cross_entropy out"):
            one["logits"]
        assert "\n" not in str(error.value)


def test_whoever_walks_over_the_output_finds_no_logits(output):
    names = ["loss", "hidden_states"]
    assert isinstance(output, CausalLMOutputWithPast) and repr(output.logits).startswith("<outputs")
    walked = (
        output, convert_to_fp32(output), tree_map(lambda one: one, output), replace(output),
        copy.deepcopy(output), pickle.loads(pickle.dumps(output)), pad_across_processes(output),
    )  # fmt: skip
    for one in walked:
        assert [*one] == names and "logits" not in one and one.get("logits") is None
        assert len(one.to_tuple()) == 2 and one[1] is one.hidden_states
        assert torch.equal(one.loss, output.loss)
    assert nested_detach({"logits": output.logits})["logits"] is output.logits
    assert copy.deepcopy(output.logits) is pickle.loads(pickle.dumps(output.logits))
    changed = convert_to_fp32(output)
    changed.logits = torch.ones(1)
    assert changed["logits"] is changed.logits is changed[-1]


# --- what is left to the model's own --------------------------------------------------------------


def smoothed(logits, labels, vocab_size, label_smoothing=0.0, **_):
    logits = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=label_smoothing)


# transformers' own loss, with its own attention, reads the last four.
ASKED = {
    "label_smoothing": 0.1, "z_loss": 0.1, "position_bias": torch.zeros(()), "is_causal": False,
    "ignore_index": ids("cpu")[0, 1].item(), "logits_to_keep": 3, "shift_labels": ids("cpu", 4),
}  # fmt: skip


@pytest.mark.parametrize("option", ASKED)
def test_options_that_the_fused_loss_does_not_know_are_and_it_says_so_once(option, losses, device):
    fused, plain, _ = pair(device, LOSS)
    tokens, value = ids(device), ASKED[option]
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    labels = tokens[:, -3:] if option == "logits_to_keep" else tokens
    inputs = {"input_ids": tokens, "labels": labels, option: value}
    with pytest.warns(
        UserWarning, match=f"a fused Qwen2ForCausalLM stepped aside: .* given {option}[,:]"
    ) as w:
        _, got = (fused(**inputs) for _ in range(2))
    want = plain(**inputs)
    assert len([one for one in w if "a fused" in str(one.message)]) == 1
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    is_read = not torch.equal(want.loss, plain(input_ids=tokens, labels=tokens).loss)
    assert is_read == (option not in ("label_smoothing", "z_loss", "position_bias")) and not losses


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
    """Return a model with modules_to_save, fused and not, whose copy differs from its original."""
    plain = adapt(head_base(kind, device), device, **HEADS[kind][1]).train()
    with torch.no_grad():
        for parameter in plain.get_submodule(COPY).parameters():
            parameter += random(*parameter.shape, seed=9, scale=0.1, device=device)
    fused = copy.deepcopy(plain)
    assert fuse(fused, LOSS).fused == {"cross_entropy": [MODEL]}
    return fused, plain


@pytest.mark.slow("untied")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("kind", HEADS)
def test_the_copy_of_the_head_is_trained_and_saved_and_disabled(kind, losses, tmp_path, device):
    fused, plain = with_trained_head(kind, device)
    draws = assert_right(fused, plain)
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
    assert len(losses) == draws + 4


def test_the_head_is_the_active_adapters(losses, device):
    """An adapter uses its own copy of the head, or the base's if it has none."""
    fused, plain = with_trained_head("untied", device)
    for name, modules in (("second", ["lm_head"]), ("third", None)):
        for model in (fused, plain):
            config = LoraConfig(r=4, target_modules=[*ATTENTION], modules_to_save=modules)
            model.add_adapter(name, config)
            set_weights(model, device, only=f".{name}.")
            model.set_adapter(name)
        draws = assert_right(fused, plain)
        assert (f"{MODEL}.lm_head.modules_to_save.{name}.weight" in step(fused)) == bool(modules)
        assert len(losses) == draws + 1
        losses.clear()


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
    fused, plain, _ = pair(device, LOSS)
    for model in (fused, plain):
        model.add_adapter("second", LoraConfig(r=4, **targets))
        set_weights(model, device, only=".second.")
        model.set_adapter("second")
    assert report(fused).left == {MODEL: MODELS["an adapter on lm_head"].says}
    assert_equal(step(fused), step(plain))
    assert not losses


def test_cpt_which_makes_a_loss_of_logits_gets_them(losses, device):
    config = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4],
        tokenizer_name_or_path="none",
    )  # fmt: skip
    plain = get_peft_model(base_model(device), config)
    fused, plain = copy.deepcopy(plain), copy.deepcopy(plain)  # neither copy has CPT's hooks
    assert "(CPT)" in fuse(fused).left["cross_entropy"]
    inputs = {"input_ids": ids(device), "labels": ids(device)}
    got, want = (values_of(model, model(**inputs).loss) for model in (fused, plain))
    assert_close(got, want)
    assert got.functions["LoRA_MLP"] == 2 and not losses
