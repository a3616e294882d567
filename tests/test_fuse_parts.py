"""Every fused part alone, and all together, against plain PEFT: the loss and every gradient."""

import copy
import warnings

import pytest
import torch
from peft_models import FAMILIES, LAYERS, base_model, ids, peft_model
from reference import BUDGET, assert_within_budget, relative_error

from fused_lora import Fusion, fuse, report, unfuse

BOOLEAN_PARTS = ("mlp", "attention", "rope", "rms_norm", "cross_entropy")
ALL = dict.fromkeys(BOOLEAN_PARTS, True)
FUSIONS = {
    **{part: Fusion(**{part: True}) for part in BOOLEAN_PARTS},
    "checkpoint full": Fusion(checkpoint="full"),
    "checkpoint selective": Fusion(checkpoint="selective", checkpoint_gib=50e3 / 2**30),
    "all": Fusion(**ALL),
    "all, checkpointed": Fusion(**ALL, checkpoint="full"),
}


def step(model, autocast=False, seed=3, **inputs):
    """The loss and every gradient, by name."""
    device = next(model.parameters()).device
    tokens = ids(device, seed)
    labels = tokens.clone()
    labels[0, :6] = -100
    model.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=labels, **inputs).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def steps(model, autocast=False, **inputs):
    """`step` on three batches, stacked: on one alone, how far rounding in two layers puts a small
    gradient from the truth is luck, for eager and fused alike."""
    found = [step(model, autocast, seed, **inputs) for seed in (3, 4, 5)]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def assert_right(fused, plain, autocast=False, **inputs):
    got, eager = steps(fused, autocast, **inputs), steps(plain, autocast, **inputs)
    truth = steps(copy.deepcopy(plain).double(), **inputs)
    assert got.keys() == eager.keys() == truth.keys() and len(truth) > 1
    for name in truth:
        assert got[name].dtype == eager[name].dtype, name
        if name == "loss":  # a mean over tokens, so eager's own error may cancel by chance
            error = relative_error(eager[name], truth[name])
            allowed = BUDGET * max(error, torch.finfo(torch.float32).eps)
            assert relative_error(got[name], truth[name]) <= allowed
        else:
            assert_within_budget(name, got[name], eager[name], truth[name])


def pair(device, fusion, **options):
    plain = peft_model(device, **options)
    fused = copy.deepcopy(plain)
    done = fuse(fused, fusion)
    return fused.train(), plain.train(), done


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Qwen2", name) for name in FUSIONS),
        *((family, name) for family in FAMILIES[1:] for name in ("attention", "all")),
    ],
)
def test_parts_are_right_in_every_family(family, name, device):
    fused, plain, done = pair(device, FUSIONS[name], family=family)
    assert not done.left
    assert_right(fused, plain)


@pytest.mark.parametrize("name", FUSIONS)
def test_parts_are_right_in_bf16_with_fp32_adapters_under_autocast(name, device):
    fused, plain, _ = pair(device, FUSIONS[name], dtype=torch.bfloat16)
    assert next(p for p in fused.parameters() if p.requires_grad).dtype == torch.float32
    assert_right(fused, plain, autocast=True)


@pytest.mark.parametrize("name", ["all", "all, checkpointed"])
def test_parts_are_right_in_bf16_alone(name, device):
    fused, plain, _ = pair(
        device, FUSIONS[name], dtype=torch.bfloat16, autocast_adapter_dtype=False
    )
    assert_right(fused, plain)


def test_the_report_names_every_module_of_every_part(device):
    _, _, done = pair(device, Fusion(**ALL, checkpoint="full"))
    blocks = [f"{LAYERS}.{index}" for index in range(2)]
    assert done.fused == {
        "mlp": [f"{block}.mlp" for block in blocks],
        "attention": [f"{block}.self_attn" for block in blocks]
        + [f"{block}.self_attn.o_proj" for block in blocks],
        "rope": [f"{block}.self_attn" for block in blocks],
        "rms_norm": [
            *(f"{b}.{n}" for b in blocks for n in ("input_layernorm", "post_attention_layernorm")),
            "base_model.model.model.norm",
        ],
        "cross_entropy": ["base_model.model"],
        "checkpoint": blocks,
    }


def test_every_function_runs_once_for_every_module_that_is_listed(device):
    """What the benchmark takes for proof that a part ran."""
    fused, _, done = pair(device, Fusion(**ALL))
    tokens = ids(device)
    seen: dict[str, int] = {}
    functions, todo = set(), [fused(input_ids=tokens, labels=tokens).loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in functions:
            functions.add(node)
            name = type(node).__name__
            seen[name] = seen.get(name, 0) + 1
            todo += [following for following, _ in node.next_functions]
    expected = {
        "mlp": ("LoRA_MLPBackward",),
        "attention": ("LoRA_QKVBackward", "LoRA_WBackward"),
        "rope": ("RoPEBackward",),
        "rms_norm": ("RMSNormBackward", "AddRMSNormBackward"),
        "cross_entropy": ("LinearCrossEntropyBackward",),
    }
    for part, names in expected.items():
        ran = sum(seen.get(name, 0) for name in names)
        # nothing before the first norm is trained, so it has no backward
        assert ran == len(done.fused[part]) - (part == "rms_norm"), part


def test_unfuse_gives_every_module_its_own_forward_back(device):
    fused, plain, _ = pair(device, Fusion(**ALL, checkpoint="full"))
    assert unfuse(fused)
    assert report(fused).fused == {}
    assert all("forward" not in vars(module) for module in fused.modules())
    got, want = step(fused), step(plain)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_parts_join_those_that_are_there(device):
    fused, plain, _ = pair(device, Fusion(rope=True))
    done = fuse(fused, Fusion(attention=True))
    assert done.fused.keys() == {"rope", "attention"}
    assert_right(fused, plain)


def test_a_part_that_fuses_nothing_changes_nothing(device):
    model = peft_model(device, target_modules=["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(ValueError, match=r"attention=True fuses no module.*no LoRA adapter"):
        fuse(model, Fusion(mlp=True, attention=True))
    assert report(model).fused == {}


def test_gemma_is_left_alone_with_the_reason(device):
    model = peft_model(device, family="Gemma")
    plain = copy.deepcopy(model).train()
    for part, reason in (
        ("mlp", "GemmaMLP is not an MLP class that is known to compute SwiGLU"),
        ("rms_norm", "GemmaRMSNorm is not a norm class"),
        ("rope", "GemmaAttention is not an attention class"),
        ("cross_entropy", "GemmaForCausalLM is not a class"),
    ):
        with pytest.raises(ValueError, match=reason):
            fuse(model, Fusion(**{part: True}))
    done = fuse(model, Fusion(attention=True))  # its o is a linear layer like any other
    assert "GemmaAttention is not" in done.left[f"{LAYERS}.0.self_attn"]
    assert_right(model.train(), plain)


def test_part_of_the_projections_adapted_fuses_what_it_can_and_names_the_rest(device):
    fused, plain, done = pair(device, Fusion(attention=True), target_modules=["q_proj", "o_proj"])
    assert done.fused["attention"] == [f"{LAYERS}.{i}.self_attn.o_proj" for i in range(2)]
    assert "k_proj: no LoRA adapter" in done.left[f"{LAYERS}.0.self_attn"]
    assert_right(fused, plain)


@pytest.mark.parametrize("adapters", ["disabled", "merged"])
def test_fused_modules_step_aside_for_disabled_and_merged_adapters(adapters, device):
    fused, plain, _ = pair(device, Fusion(**ALL))
    tokens = ids(device)

    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits

    if adapters == "merged":
        fused.merge_adapter()
        plain.merge_adapter()
        assert torch.allclose(logits(fused), logits(plain), atol=1e-5)
    else:
        with fused.disable_adapter(), plain.disable_adapter():
            assert torch.allclose(logits(fused), logits(plain), atol=1e-5)


def test_padding_and_hidden_states_are_as_without_fusion(device):
    mask = torch.ones_like(ids(device))
    mask[1, 9:] = 0
    fused, plain, _ = pair(device, Fusion(**ALL))
    assert_right(fused, plain, attention_mask=mask)
    tokens = ids(device)
    ours, theirs = (
        m(input_ids=tokens, labels=tokens, output_hidden_states=True) for m in (fused, plain)
    )
    for got, want in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_a_frozen_norm_gets_no_gradient_and_a_trained_one_its_own(device):
    fused, plain, _ = pair(device, Fusion(rms_norm=True))
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.requires_grad_(True)
    assert_right(fused, plain)


# --- the loss -------------------------------------------------------------------------------------


def test_the_fused_loss_has_no_logits_in_training_and_all_of_them_elsewhere(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    assert fused(input_ids=tokens, labels=tokens).logits is None
    with torch.no_grad():
        assert torch.equal(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        fused.eval(), plain.eval()
        ours, theirs = (m(input_ids=tokens, labels=tokens) for m in (fused, plain))
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)


def test_the_loss_is_fused_for_pefts_causal_lm_class_too(device):
    """Which passes more on than its base class: output_attentions, return_dict and the like."""
    fused, plain, _ = pair(device, Fusion(cross_entropy=True), task_type="CAUSAL_LM")
    tokens = ids(device)
    assert fused(input_ids=tokens, labels=tokens, attention_mask=None).logits is None
    assert_right(fused, plain)
    in_a_tuple = fused(input_ids=tokens, labels=tokens, return_dict=False)
    assert torch.equal(in_a_tuple[1], plain(input_ids=tokens).logits)


def test_num_items_in_batch_reaches_the_fused_loss(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    assert_right(fused, plain, num_items_in_batch=torch.tensor(77, device=device))


def test_a_trained_head_gets_its_gradient_tied_or_not(device):
    for tied in (False, True):
        plain = peft_model(device)
        head = plain.get_submodule("base_model.model.lm_head")
        if tied:
            head.weight = plain.get_submodule("base_model.model.model.embed_tokens").weight
        head.weight.requires_grad_(True)
        fused = copy.deepcopy(plain)
        fuse(fused, Fusion(cross_entropy=True))
        assert_right(fused.train(), plain.train())


def test_what_the_fused_loss_does_not_know_goes_to_transformers_own(device):
    fused, plain, _ = pair(device, Fusion(cross_entropy=True))
    tokens = ids(device)
    for options in ({"ignore_index": 5}, {"logits_to_keep": 3, "labels": None}):
        inputs = {"input_ids": tokens, "labels": tokens, **options}
        ours, theirs = fused(**inputs), plain(**inputs)
        assert torch.equal(ours.logits, theirs.logits)


# --- checkpointing --------------------------------------------------------------------------------


def test_checkpointing_is_set_on_the_layers_and_taken_away_again(device):
    model = peft_model(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.get_submodule(f"{LAYERS}.0")
    before = layer._gradient_checkpointing_func
    for policy in ("full", "offload"):
        fuse(model, Fusion(checkpoint=policy))
        assert layer._gradient_checkpointing_func is not before
    unfuse(model)
    assert layer._gradient_checkpointing_func is before and layer.gradient_checkpointing
    other = peft_model(device)
    fuse(other, Fusion(checkpoint="full"))
    unfuse(other)
    assert not other.get_submodule(f"{LAYERS}.0").gradient_checkpointing


def saved_between_layers(model):
    """Bytes that autograd holds after a forward, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = ids(next(model.parameters()).device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    return sum(found.values())


def test_a_larger_budget_keeps_more_layers(device):
    held = {}
    for gib in (0.0, 150e3 / 2**30, 1.0):
        fused, _, _ = pair(device, Fusion(mlp=True, checkpoint="selective", checkpoint_gib=gib))
        step(fused)  # in which the first layer is measured
        held[gib] = saved_between_layers(fused)
    none, some, everything = held.values()
    assert none < some < everything


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": "most"}, "'most' is unknown; give one of full, offload, selective"),
        ({"checkpoint": "selective"}, "selective wants checkpoint_gib"),
        ({"checkpoint": "full", "checkpoint_gib": 3.0}, "is for selective, not for full"),
        ({"checkpoint_gib": 3.0}, "'' is unknown"),
    ],
)
def test_a_policy_that_cannot_be(options, words, device):
    with pytest.raises(ValueError, match=words):
        fuse(peft_model(device), Fusion(**options))


def test_the_down_projection_does_not_run_again(device, monkeypatch):
    """A checkpointed layer runs twice, but its second forward stops before the down projection."""
    import fused_mlp.fast_lora as module

    calls, swiglu_forward = [], module.swiglu_forward
    monkeypatch.setattr(
        module, "swiglu_forward", lambda *tensors: calls.append(1) or swiglu_forward(*tensors)
    )
    counts = {}
    for name in ("full", ""):
        fused, _, _ = pair(device, Fusion(mlp=True, checkpoint=name))
        calls.clear()
        step(fused)
        counts[name] = len(calls)
    assert counts == {"full": 2, "": 2}  # two layers, once each


def test_a_second_backward_through_a_checkpointed_model_is_right(device):
    fused, _, _ = pair(device, Fusion(**ALL, checkpoint="full"))
    tokens = ids(device)
    loss = fused(input_ids=tokens, labels=tokens).loss
    trained = [p for p in fused.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    second = torch.autograd.grad(loss, trained)
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_offloaded_inputs_come_back_the_same():
    fused, plain, _ = pair("cuda", Fusion(**ALL, checkpoint="offload"))
    import fused_lora.checkpoint as module

    fused, plain = fused.bfloat16(), plain.bfloat16()
    full = copy.deepcopy(fused)
    fuse(full, Fusion(checkpoint="full"))
    small, module.OFFLOAD_BYTES = module.OFFLOAD_BYTES, 1
    try:
        for _ in range(3):
            got, want = step(fused), step(full)
            assert all(torch.equal(got[name], want[name]) for name in want)
    finally:
        module.OFFLOAD_BYTES = small


def test_base_models_without_adapters_fuse_their_norms_and_loss(device):
    plain = base_model(device).train()
    fused = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(fused, Fusion(rope=True, rms_norm=True, cross_entropy=True))
    assert_right(fused, plain)
