"""Each family in the table of `families_case.py`: which modules each part fuses, whether its layers
run whole, and that it trains and generates as vanilla PEFT does."""

import copy
from dataclasses import replace

import pytest
import torch
from cases.families_case import (
    FAMILIES,
    OF_ATTENTION,
    UNKNOWN,
    USUAL,
    WINDOW,
)
from cases.fused_case import ALL, assert_close, assert_same, beside, values_of
from cases.layer_case import operands_of
from cases.peft_models import ids
from cases.reference import (
    assert_as_one_within_budget,
    assert_near,
    over_draws,
    random,
    relative_error,
)

from fused_lora import Fusion, fuse, unfuse
from fused_lora.forwards.attend import mask_for_attention, window_of
from fused_lora.kernels.document_bounds import documents_of
from fused_lora.layer.decoder_layer import DecoderLayer

EVERY = pytest.mark.parametrize("name", FAMILIES)
WITH_DORA = [  # but mixtures: PEFT has none for experts
    name for name, one in FAMILIES.items()
    if not one.not_whole and "LoRA_Experts" not in one.in_layers
]  # fmt: skip
LAYER = Fusion(layer=True)


def pair(name, device, **options):
    return beside(FAMILIES[name].peft_model(device, **options).train(), Fusion(**ALL), strict=False)


def inputs_of(model, name, seed=3):
    """Return six tokens, which is more than any family's window; four of them are labelled."""
    tokens = ids(next(model.parameters()).device, seed)[:1, :6]
    labels = tokens.clone()
    labels[0, :2] = -100
    others: dict[str, torch.Tensor] = {}
    if "mrope_section" in FAMILIES[name].config.get("rope_parameters", {}):  # as of an image
        rows = torch.tensor([[0, 1, 2, 2, 2, 5], [0, 1, 2, 2, 3, 5], [0, 1, 2, 3, 2, 5]])
        others["position_ids"] = rows[:, None].to(tokens.device)
    if (token := FAMILIES[name].image_token) is not None:
        tokens[0, 1:5] = token
        others["pixel_values"] = random(1, 3, 28, 28, dtype=model.dtype, device=tokens.device)
    return {"input_ids": tokens, "labels": labels, **others}


def step(model, name, seed=3):
    return values_of(model, model(**inputs_of(model, name, seed)).loss)


def assert_reported(done, family):
    told = (*USUAL, "cross_entropy")  # test_support_table.py tries each part
    fused = {part: sorted(names) for part in told if (names := done.fused.get(part))}
    assert fused == family.fused_modules()
    assert done.left.keys() == family.left.keys()
    assert all(reason in done.left[where] for where, reason in family.left.items())


@pytest.mark.slow("SmolLM3", "Gemma 3", "Qwen2-MoE", "Phi-4-mini", "LFM2")
@EVERY
@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")  # which we do not pass on
def test_each_part_fuses_its_modules_and_trains_and_generates_as_plain_peft_does(name, device):
    fused, plain, done = pair(name, device)
    family = FAMILIES[name]
    assert_reported(done, family)
    got, want = (step(model, name) for model in (fused, plain))
    seen = got.functions
    assert {f: seen[f] for f in OF_ATTENTION if f in seen} == family.functions
    assert_close(got, want, 2e-4)
    tokens = ids(device)[:1, :6]
    with torch.no_grad():
        logits = [model.eval()(input_ids=tokens).logits for model in (fused, plain)]
        written = [
            m.generate(input_ids=tokens, max_new_tokens=2, do_sample=False, use_cache=True)
            for m in (fused, plain)
        ]
    assert_near(*logits, 5e-6)
    assert torch.equal(*written)


@pytest.mark.slow(
    "SmolLM3",
    "Gemma 3",
    "Phi-3",
    "Gemma 2",
    "Gemma 4",
    "Qwen3.5",
    "Mixtral",
    "Phi-4-mini",
    "Qwen2-VL",
    "LFM2, DoRA",
)
@pytest.mark.parametrize(
    ("name", "lora"),
    [*((name, {}) for name in FAMILIES), *((name, {"use_dora": True}) for name in WITH_DORA)],
    ids=[*FAMILIES, *(f"{name}, DoRA" for name in WITH_DORA)],
)
def test_layers_run_whole_and_right_or_say_what_they_are(name, lora, device):
    """`test_decoder_layer.py` tests layers in bf16, one at a time."""
    plain = FAMILIES[name].peft_model(device, **lora).train()
    fused = copy.deepcopy(plain)
    if reason := FAMILIES[name].not_whole:
        wanted = f"layer=True fuses no module: {reason}"
        with pytest.raises(ValueError, match=wanted):
            fuse(fused, LAYER)
        return
    done, reason = fuse(fused, LAYER), FAMILIES[name].in_parts
    running = 1 if reason and "Vision" not in reason else 2
    others = {where: why for where, why in done.left.items() if where not in FAMILIES[name].left}
    assert len(done.fused["layer"]) == running
    assert len(others) == (reason != "") and all(reason in why for why in others.values())
    functions = {"DecoderLayer": running, **FAMILIES[name].in_layers}
    assert assert_same(fused, plain, 6, 2e-4) == {f: n for f, n in functions.items() if n}


# Families that need more than a row of the table. Some leave q and k unrotated, scale or normalise
# what is added, or join q, k and v. Gemma 4 has GELU, norms on both sides, and more after the MLP.
@pytest.mark.slow("offload-SmolLM3")
@pytest.mark.thinned
@pytest.mark.parametrize("name", ["SmolLM3", "Granite", "OLMo 2", "Gemma 4", "Phi-3", "Qwen3-MoE"])
@pytest.mark.parametrize("policy", ["offload", "full"])
def test_layers_that_run_whole_join_the_loss_where_they_run_again(policy, name, device):
    fused, plain, _ = beside(
        FAMILIES[name].peft_model(device).train(),
        Fusion(layer=True, rms_norm=True, cross_entropy=True, checkpoint=policy),
    )
    assert_same(fused, plain, 6)
    unfuse(fused)
    assert_same(fused, plain, 6, 0.0)


# Families whose layers compute what another family's do, cast for cast.
LIKE_OTHERS = ("Mistral", "Ministral", "Ministral 3", "CWM", "OLMo 3", "Qwen3-MoE", "Mixtral",
               "LFM2-MoE", "Gemma 3, multimodal", "Llava")  # fmt: skip


@pytest.mark.slow("SmolLM3")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LIKE_OTHERS])
def test_it_is_within_the_error_budget_in_bf16(name, device):
    """Compare the loss and all gradients as one: of six tokens, each alone is luck."""
    fused, plain, _ = pair(name, device, dtype=torch.bfloat16)
    models = fused, plain, copy.deepcopy(plain).double()
    over_draws(lambda: assert_as_one_within_budget(*(step(model, name) for model in models)))


def test_a_layer_scales_q_alone_where_q_proj_gives_gates_as_well(device):
    """No family does both yet. To scale q is to scale the scores."""
    model = FAMILIES["Qwen3.5"].peft_model(device).train()
    fuse(model, LAYER)
    *trained, (attention, mlp) = operands_of(model.get_submodule("base_model.model.model.layers.1"))
    hidden = random(1, 6, 32, device=device).requires_grad_()

    def run(**changes):
        blocks = attention._replace(positions=6, **changes), mlp
        output = DecoderLayer.apply(hidden, None, None, *trained, blocks)
        return torch.autograd.grad(output.square().sum(), (hidden, trained[0], trained[4]))

    got = run(q_scale=torch.full((1, 6), 2.0, device=device))
    wanted, unscaled = run(scaling=2.0 * attention.scaling), run()
    for one, want, other in zip(got, wanted, unscaled, strict=True):
        assert_near(one, want, 1e-5)
        assert relative_error(other, want) > 1e-3


@pytest.mark.parametrize("name", ["OLMo 2", "Gemma 3", "Qwen2-MoE"])
def test_an_mlp_runs_again_whole_where_its_output_is_more_than_added(name, device):
    """A norm or a factor follows, and its backward needs the MLP's output."""
    _, plain, _ = pair(name, device)
    fused = copy.deepcopy(plain)
    fuse(fused, Fusion(mlp=True, checkpoint="full"))
    assert_close(step(fused, name), step(plain, name), 1e-4)


def test_a_family_in_no_list_is_refused_by_name(device):
    model = UNKNOWN.peft_model(device)
    plain = copy.deepcopy(model)
    done = fuse(model, Fusion(**ALL), strict=False)
    assert_reported(done, UNKNOWN)
    tokens = ids(device)[:1, :6]
    got, want = (one(input_ids=tokens).logits for one in (model, plain))
    assert_near(got, want, 2e-5)


def test_a_routers_loss_that_one_call_asks_for_is_added(device):
    plain = FAMILIES["Mixtral"].peft_model(device).train()
    fused, _, _ = beside(plain, Fusion(**ALL, layer=True))
    inputs = inputs_of(plain, "Mixtral")
    got, want = (model(**inputs, output_router_logits=True) for model in (fused, plain))
    assert want.aux_loss is not None
    assert_near(got.loss, want.loss, 1e-5)
    assert relative_error(got.loss, plain(**inputs).loss) > 1e-4


def test_packed_rows_of_granite_4_are_refused_with_mamba_and_right_without(device):
    """In transformers they see each other: it gives its masks no positions, and Mamba none."""
    tokens, places = ids(device)[:1, :6], torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    fused, _, _ = pair("Granite 4, hybrid", device)
    with pytest.raises(ValueError, match="MambaLayer would mix the documents of its packed rows"):
        fused(tokens, position_ids=places)
    family = FAMILIES["Granite 4, hybrid"]
    config = {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "head_dim": 32}
    fused, plain, done = beside(
        replace(family, config=family.config | config).peft_model(device, torch.bfloat16),
        Fusion(**ALL),
    )
    assert not done.left
    with torch.no_grad():
        got = fused(tokens, position_ids=places).logits
        alone = [plain(row).logits for row in tokens.view(2, 1, 3)]
    assert_near(got, torch.cat(alone, 1), 0.05)


@pytest.mark.parametrize("name", [
    "Mistral", "Ministral", "Ministral 3", "CWM", "Qwen2", "Qwen3", "SmolLM3", "OLMo 3",
    "Qwen3-MoE", "Qwen2-MoE", "Mixtral", "Gemma 2", "Gemma 3", "Gemma 4", "Phi-3",
])  # fmt: skip
def test_documents_with_the_window_of_each_layer_are_transformers_mask(name, device):
    config = FAMILIES[name].config
    slides = WINDOW if config.get("sliding_window") is None else {}
    switch = {"use_sliding_window": True, "attn_implementation": "sdpa"}
    family = replace(FAMILIES[name], config=config | slides | switch)
    if name == "Gemma 2" and family.not_whole:
        pytest.skip("it has no sdpa")
    model, seen = family.base_model().to(device), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda attention, _, given: seen.append((attention, given["attention_mask"])),
            with_kwargs=True,
        )
    tokens = ids(device)[:, :9]
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]] * 2, device=device)
    model(tokens, position_ids=position_ids)
    documents = documents_of(position_ids)
    windows = [window_of(attention) for attention, _ in seen]
    assert len(seen) == 2 and windows[0] == 4
    for attention, mask in seen:
        assert torch.equal(mask_for_attention(attention, documents, torch.float32), mask)


def test_gemma_2_caps_its_scores_where_transformers_does(device):
    """Its eager attention does, and sdpa does not, whose layers run whole."""
    config = {"attn_implementation": "eager", "attn_logit_softcapping": 0.5}
    family = FAMILIES["Gemma 2"]
    plain = replace(family, config=family.config | config).peft_model(device).train()
    fused = copy.deepcopy(plain)
    left = fuse(fused, Fusion(**ALL, layer=True), strict=False).left
    assert any(
        "eager, which soft-caps its scores, unlike sdpa" in reason for reason in left.values()
    )
    got, want = (step(model, "Gemma 2") for model in (fused, plain))
    assert_close(got, want, 2e-4)
    if not family.not_whole:
        plain.set_attn_implementation("sdpa")
        assert relative_error(step(plain, "Gemma 2")["loss"], want["loss"]) > 1e-3
