"""Packed rows in models whose layers have a recurrence or a short convolution in place of
attention, against vanilla PEFT on one document at a time."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases.families_case import FAMILIES
from cases.fused_case import ALL, beside
from cases.graph_case import EagerStep, adamw, captured, graphed
from cases.reference import assert_at_most, relative_error
from test_fuse_documents import LENGTHS, assert_trained_as, documents, on, one_by_one, padded, step
from transformers import DataCollatorWithFlattening

from fused_lora import FilledRows, Fusion, fill_row
from fused_lora.forwards.mixer_layer import mixers
from fused_lora.step.graph import EAGER_CALLS

NAMES = "Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next", "LFM2", "LFM2-MoE"
PARTS = Fusion(**ALL)
WHOLE = Fusion(**ALL, layer=True)
FUSIONS = {
    "whole": WHOLE,
    "parts": PARTS,
    "again": Fusion(**ALL, layer=True, checkpoint="full"),
    "MLP alone": Fusion(mlp=True),
}


def pair(name, device, fusion=PARTS, **config):
    """Return models whose heads have a size that attention's kernels for documents take."""
    family = FAMILIES[name]
    sizes = {"head_dim": 32, "hidden_size": 64, "attn_implementation": "sdpa"}
    family = replace(family, config=family.config | sizes | config)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a GPU has no kernels for fp32
    fused, plain, _ = beside(family.peft_model(device, dtype).train(), fusion, strict=False)
    return fused, plain


def check(fused, plain, batch, *wanted):
    """Check that a batch trains as vanilla PEFT does on the wanted ones.

    In fp32, sums of the decays' logarithms have fewer digits where the recurrence forgets: with
    four documents they reach 512, whose eps is 6e-5. A gradient of few numbers may be off by more,
    as luck has it, so we take the root mean square over loss and gradients.
    """
    got = step(fused, batch)
    if plain.dtype != torch.float32:
        assert_trained_as(got, plain, *wanted)
        return
    want = step(plain, *wanted)
    assert got.keys() == want.keys() and len(want) > 1
    errors = [relative_error(got[name], want[name]) for name in want]
    assert_at_most(math.hypot(*errors) / len(errors) ** 0.5, 2e-4, "loss and gradients")


def given(how, seed=3):
    """Return a batch whose documents a collator tells in this way alone."""
    if how == "filled":
        return FilledRows(24)(documents("cpu", seed))
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        documents("cpu", seed)
    )
    assert batch.keys() >= {"position_ids", "cu_seq_lens_q", "seq_idx"}
    kept = {"input_ids", "labels", *([how] if how != "all" else batch)}
    return {name: one for name, one in batch.items() if name in kept}


@pytest.mark.slow(
    "position_ids-whole-LFM2", "position_ids-whole-LFM2-MoE", "position_ids-whole-Qwen3-Next",
    "position_ids-MLP alone-Qwen3.5", "cu_seq_lens_q-whole-Qwen3.5", "seq_idx-whole-Qwen3.5",
)  # fmt: skip
@pytest.mark.thinned
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q", "seq_idx", "all", "filled"])
def test_each_document_trains_as_it_does_alone(how, fusion, name, device):
    fused, plain = pair(name, device, FUSIONS[fusion])
    check(fused, plain, given(how), *one_by_one())


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_another_document(name, device):
    """Only rounding in the recurrence's sums of decays does."""
    fused, _ = pair(name, device, WHOLE)
    seen = []
    fused.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(output.requires_grad_()) or output
    )
    batch = on(fused, given("position_ids"))
    first = sum(LENGTHS[:2])  # of the third document, which alone has labels
    batch["labels"][:, :first] = batch["labels"][:, first + LENGTHS[2] :] = -100
    (grad,) = torch.autograd.grad(fused(**batch).loss, seen[-1])
    is_own = torch.zeros(sum(LENGTHS), dtype=torch.bool, device=device)
    is_own[first : first + LENGTHS[2]] = True
    own, others = (torch.linalg.vector_norm(grad[0, which]) for which in (is_own, ~is_own))
    assert others <= (0 if "LFM2" in name else 1e-7 * own)


@pytest.mark.slow("Qwen3.5-MoE", "LFM2-MoE")
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_takes_rows_of_any_documents(name, device):
    fused, _ = pair(name, device, WHOLE)
    eager = EagerStep(twin := copy.deepcopy(fused), adamw(twin))
    replayed = graphed(fused, adamw(fused))
    for seed in range(EAGER_CALLS + 3):
        rows = fill_row(given("position_ids", seed), 24)
        torch.testing.assert_close(replayed(**rows), eager(**rows), rtol=1e-5, atol=0)
    assert captured(replayed) == 1


@pytest.mark.slow("left-Qwen3.5", "right-LFM2-MoE")
@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "LFM2-MoE"])  # the others' gate keeps it
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_train_as_they_do_and_without_their_padding(side, name, device, monkeypatch):
    fused, plain = pair(name, device, WHOLE)
    seen, embed = [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda ids, *a: seen.append(ids.shape) or embed(ids, *a))
    check(fused, plain, padded(side, device), padded(side, device))
    as_it_is, without = torch.Size([len(LENGTHS), max(LENGTHS)]), torch.Size([1, sum(LENGTHS)])
    assert seen[0] == without and {*seen[1:]} == {as_it_is}


def hook_a_convolution(mixer):
    mixer.get_submodule("conv" if hasattr(mixer, "conv") else "conv1d").register_forward_hook(
        lambda *_: None
    )


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2"])
def test_a_mixer_that_would_mix_them_is_an_error(name, device):
    fused, _ = pair(name, device, WHOLE)
    hook_a_convolution(next(mixer for mixer, _ in mixers(fused)))
    with pytest.raises(ValueError, match=r"mix the documents of its packed rows: conv.* hooks"):
        step(fused, given("position_ids"))
