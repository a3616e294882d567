"""Packed and padded batches in fused models, against vanilla PEFT on one document at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases.families_case import FAMILIES, SECTIONS, TEXT, WINDOW
from cases.fused_case import ALL, assert_close, beside, values_of
from cases.peft_models import adapt, base_model, layers
from cases.reference import assert_within_budget, seeded
from transformers import DataCollatorWithFlattening

from fused_lora import FilledRows, Fusion, fill_row, pack
from fused_lora.forwards import attend
from fused_lora.packing import PACKED

PARTS = Fusion(**ALL)
WHOLE = Fusion(layer=True, rms_norm=True, cross_entropy=True)
LENGTHS = (5, 1, 9, 3)


def pair(device, fusion, family="Qwen2", use_dora=False, **changes):
    sizes = {"attn_implementation": "sdpa", "head_dim": 32, "num_hidden_layers": 1}
    sizes |= {"use_cache": False} | changes
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a GPU has no kernels for fp32
    fused, plain, _ = beside(
        adapt(base_model(device, family, dtype, **sizes), device, use_dora=use_dora).train(), fusion
    )
    return fused, plain


def documents(device, seed=3):
    """Return each document's token ids and labels. Its first token has no label."""
    generator = seeded(seed)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(96, (length,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + length // 3] = -100
        found.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return found


def on(model, batch):
    def moved(value):
        return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)

    return {k: moved(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def step(model, *batches):
    """Run a step on these batches, adding their losses."""
    items = torch.tensor(10, device=model.device)
    losses = [model(**on(model, batch), num_items_in_batch=items).loss for batch in batches]
    return values_of(model, sum(losses))


def assert_trained_as(got, plain, *batches):
    """Check that got is what vanilla PEFT computes from these batches. In bf16 we compare the loss
    and all gradients as one with the budget: what rounding does to a small one alone is luck."""
    want = step(plain, *batches)
    if plain.dtype == torch.float32:
        assert_close(got, want)
        return
    truth = step(copy.deepcopy(plain).double(), *batches)
    assert got.keys() == want.keys() == truth.keys() and len(truth) > 1
    sizes = {name: torch.linalg.vector_norm(tensor) for name, tensor in truth.items()}
    as_one = (
        torch.cat([(found[name] / sizes[name]).float().flatten() for name in truth])
        for found in (got, want, truth)
    )
    assert_within_budget("loss and gradients", *as_one)


def one_by_one(seed=3):
    return [
        {name: torch.tensor([values]) for name, values in document.items()}
        for document in documents("cpu", seed)
        if len(document["labels"]) > 1  # one token predicts nothing
    ]


@pytest.fixture
def no_masks(monkeypatch):
    """Fail if anything builds a mask of documents."""

    def refuse(mask):
        raise AssertionError("a mask of positions x positions was made")

    monkeypatch.setattr(attend, "mask_of_documents", refuse)


SLIDING = WINDOW | {"use_sliding_window": True, "num_hidden_layers": 2}
GEMMA_3 = SLIDING | {"head_dim": 256, "query_pre_attn_scalar": 4096}  # scores of a few units


@pytest.mark.slow("Qwen3-fusion3")
@pytest.mark.parametrize(
    ("family", "fusion", "collate", "config"),
    [
        ("Qwen2", PARTS, {}, {}),
        ("Qwen2", WHOLE, {"return_flash_attn_kwargs": True}, {}),
        ("Qwen3", PARTS, {"return_flash_attn_kwargs": True}, {}),
        ("Qwen3", WHOLE, {}, {}),
        ("Mistral", WHOLE, {}, {}),
        ("Mistral", WHOLE, {}, {"sliding_window": 4, "use_dora": True}),
        ("Qwen2", PARTS, {}, SLIDING),
        ("Gemma3Text", PARTS, {}, GEMMA_3),  # a layer with a window, and one without
        ("Gemma3Text", WHOLE, {}, GEMMA_3),
    ],
)
def test_packed_documents_train_as_they_do_alone(family, fusion, collate, config, device, no_masks):
    fused, plain = pair(device, fusion, family, **config)
    seeds = (3, 4, 5, 6) if device == "cuda" else (3,)  # bf16's error on one batch is luck
    flattened = DataCollatorWithFlattening(**collate)
    batches = [flattened(documents(device, seed)) for seed in seeds]
    assert all(("cu_seq_lens_q" in batch) is bool(collate) for batch in batches)
    got = step(fused, *batches)
    assert_trained_as(got, plain, *(one for seed in seeds for one in one_by_one(seed)))
    ran = "DecoderLayer" if fusion is WHOLE else "LoRA_Attention"
    assert got.functions[ran] == len(seeds) * len(layers(fused))
    assert got.functions["LinearCrossEntropy"] == len(seeds)


def padded(side, device):
    rows = documents(device)
    longest = max(LENGTHS)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for row, document in enumerate(rows):
        fill = longest - LENGTHS[row]
        before = {"left": fill, "right": 0, "both": fill // 2}[side]
        for name, filler in (("input_ids", 7), ("labels", -100)):
            values = [filler] * before + document[name] + [filler] * (fill - before)
            batch[name].append(values)
        batch["attention_mask"].append([0] * before + [1] * LENGTHS[row] + [0] * (fill - before))
    return {name: torch.tensor(rows) for name, rows in batch.items()}


@pytest.mark.slow("left-whole", "both-parts")
@pytest.mark.thinned
@pytest.mark.parametrize("fusion", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_batches_train_as_they_do_and_without_their_padding(
    side, fusion, device, no_masks, monkeypatch
):
    fused, plain = pair(device, fusion, "Mistral", sliding_window=4)
    seen, embed = [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda ids, *a: seen.append(ids.shape) or embed(ids, *a))
    batch = padded(side, device)
    got = step(fused, batch)
    assert seen == [(1, sum(LENGTHS))]
    assert_trained_as(got, plain, batch)


GEMMA_4 = {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0, "global_head_dim": 32}


@pytest.mark.parametrize(
    ("name", "family"), [("embed_tokens", "Qwen2"), ("", "Qwen2"), ("embed_tokens", "Gemma4Text")]
)
def test_a_hook_on_a_decoder_or_its_embeddings_sees_the_padded_batch(name, family, device):
    """NEFTune's scales noise by the number of positions. Gemma 4 embeds for each layer too."""
    fused, plain = pair(device, WHOLE, family, **(GEMMA_4 if family == "Gemma4Text" else {}))
    batch = padded("right", device)

    def divide(_, given, output):
        hidden = output if name else output.last_hidden_state
        assert hidden.shape[:2] == batch["input_ids"].shape
        hidden = hidden / hidden.shape[1]
        return hidden if name else type(output)(last_hidden_state=hidden)

    for model in (fused, plain):
        decoder = model.base_model.model.model
        decoder.get_submodule(name).register_forward_hook(divide)
    assert_trained_as(step(fused, batch), plain, batch)


def test_padding_leaves_the_inputs_of_each_layer_as_well(device):
    """Whoever gives Gemma 4 embeddings may give those of its layers beside them."""
    fused, plain = pair(device, PARTS, "Gemma4Text", **GEMMA_4)
    batch, decoder = on(plain, padded("right", device)), plain.base_model.model.model
    tokens = batch.pop("input_ids")
    batch["inputs_embeds"] = decoder.embed_tokens(tokens).detach()
    batch["per_layer_inputs"] = decoder.get_per_layer_inputs(tokens, None).detach()
    assert_trained_as(step(fused, batch), plain, batch)


@pytest.mark.slow("Llava")
@pytest.mark.parametrize("name", ["Qwen2-VL", "Gemma 3, multimodal", "Llava"])
def test_padded_batches_of_multimodal_models_keep_their_padding(name, device):
    fused, plain, _ = beside(FAMILIES[name].peft_model(device).train(), PARTS)
    batch = padded("right", device)
    assert_close(step(fused, batch), step(plain, batch))


@pytest.mark.parametrize("name", ["k_proj", "o_proj"])
def test_where_a_projection_is_left_no_mask_of_a_row_of_all_is_made(name, device, no_masks):
    """The batch keeps its shape, and transformers makes masks for that shape."""
    fused, plain = pair(device, WHOLE)
    for model in (fused, plain):
        model.base_model.model.model.layers[0].self_attn.get_submodule(name).register_forward_hook(
            lambda *_: None
        )
    batch = padded("right", device)
    with pytest.warns(UserWarning, match="it has hooks"):
        got = step(fused, batch)
    assert_trained_as(got, plain, batch)


ROPES = {
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i for i in range(16)], "original_max_position_embeddings": 12,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}  # fmt: skip


def twelve_longer(batch):
    for name, rows in batch.items():
        batch[name] = F.pad(rows, (0, 11), value=-100 if name == "labels" else 0)


def label_a_first_token(batch):
    """In a left-padded row the last padding predicts the first token."""
    batch["labels"][0] = batch["input_ids"][0]


def pad_between(batch):
    batch["attention_mask"][2, 3:5] = 0
    batch["labels"][2, 3:6] = -100


KEPT = {  # the family, its config, the side of the padding, and what is done to the batch
    **{
        f"RoPE is {name}": (
            "Qwen2", {"rope_parameters": rope, "max_position_embeddings": 12}, "right",
            twelve_longer,
        )
        for name, rope in ROPES.items()
    },
    "it predicts a label": ("Qwen2", {}, "left", label_a_first_token),
    "a window counts it": ("Mistral", {"sliding_window": 4}, "right", pad_between),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config", "side", "change"), KEPT.values(), ids=KEPT)
def test_padding_is_kept_where_without_it_the_result_would_be_another(
    family, config, side, change, device
):
    fused, plain = pair(device, WHOLE, family, **config)
    batch = padded(side, device)
    change(batch)
    assert_trained_as(step(fused, batch), plain, batch)


@pytest.mark.parametrize(
    "fusion", [PARTS, WHOLE, Fusion(layer=True)], ids=["parts", "whole", "layer"]
)
def test_a_layer_that_steps_aside_still_attends_to_documents(fusion, device):
    fused, plain = pair(device, fusion)
    batch = DataCollatorWithFlattening()(documents(device))
    layers(fused)[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="stepped aside"):
        got = step(fused, batch)
    assert_trained_as(got, plain, *one_by_one())


def test_positions_of_several_axes_say_nothing_of_documents(device, monkeypatch):
    """transformers ignores them as well: its Qwen2-VL uses a token's one position on every axis."""
    monkeypatch.setitem(TEXT, "head_dim", 32)
    monkeypatch.setitem(TEXT, "hidden_size", 64)
    monkeypatch.setitem(SECTIONS, "mrope_section", [4, 6, 6])
    fused, plain, _ = beside(FAMILIES["Qwen2-VL"].peft_model(device).train(), PARTS)
    batch = DataCollatorWithFlattening()(documents(device))
    assert_close(step(fused, batch), step(plain, batch))


# --- rows of one size -----------------------------------------------------------------------------


def test_documents_are_grouped_to_fill_rows():
    lengths = [3, 9, 1, 5, 4, 10, 2]
    groups = pack(lengths, 10)
    assert sorted(place for group in groups for place in group) == list(range(7))
    assert sorted(sum(lengths[place] for place in group) for group in groups) == [5, 9, 10, 10]
    assert pack([], 8) == [] and pack([0, torch.tensor(8)], 8) == [[1, 0]]
    for wrong, tokens, told in (
        ([3, 9], 8, "document 1 has 9 tokens, more than 8"),
        ([3, -1], 8, "whole tokens of at least 0, got -1 for document 1"),
        ([2.5, 3], 8, "whole tokens of at least 0, got 2.5 for document 0"),
        ([3, float("nan")], 8, "got nan for document 1"),
        ([3], 0, "whole tokens of at least 1, got 0 for tokens"),
        ([3], 8.5, "got 8.5 for tokens"),
    ):
        with pytest.raises(ValueError, match=f"^pack.*{told}"):
            pack(wrong, tokens)


def test_a_row_is_filled_without_changing_what_is_trained(device):
    fused, plain = pair(device, WHOLE)
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents(device))
    filled = fill_row(batch, 40)
    assert {name: rows.shape for name, rows in filled.items()} == dict.fromkeys(PACKED, (1, 40))
    assert filled["position_ids"].max() == batch["position_ids"].max()
    assert_trained_as(step(fused, filled), plain, *one_by_one())
    for wrong, told in (
        ({name: batch[name].view(2, -1) for name in PACKED}, "2 x 9 tokens, should be one row"),
        ({name: batch[name][:, :0] for name in PACKED}, "1 x 0 tokens, should be one row of 1 to"),
        ({"input_ids": batch["input_ids"]}, "no tensor labels, position_ids"),
        (batch | {"labels": [1, 2]}, "no tensor labels: collate"),
        (batch | {"labels": batch["labels"][:, 1:]}, r"labels \[1, 17\], position_ids \[1, 18\]"),
        ({name: batch[name][0] for name in PACKED}, r"\[1, T\], got input_ids \[18\]"),
    ):
        with pytest.raises(ValueError, match=told):
            fill_row(wrong, 24)
    with pytest.raises(ValueError, match="1 x 18 tokens, should be one row of 1 to 17"):
        fill_row(batch, 17)


def test_a_trainers_examples_become_one_row_of_one_length():
    """As DataCollatorWithFlattening and fill_row make it, from documents as they are, with masks
    of what is trained, or packed by TRL."""
    ids, kept = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], [[0, 0, 1], [0, 1], [0, 1, 1, 0]]
    labels = [
        [one if is_kept else -100 for one, is_kept in zip(*each, strict=True)]
        for each in zip(ids, kept, strict=True)
    ]
    collate = DataCollatorWithFlattening()
    for labelled, given in (
        (ids, [{"input_ids": one} for one in ids]),
        (labels, [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]),
        (labels, [{"input_ids": a, "completion_mask": b} for a, b in zip(ids, kept, strict=True)]),
        (
            labels,
            [  # each mask leaves out what the other keeps
                {
                    "input_ids": a,
                    "assistant_masks": [one or at % 2 for at, one in enumerate(b)],
                    "completion_mask": [one or 1 - at % 2 for at, one in enumerate(b)],
                }
                for a, b in zip(ids, kept, strict=True)
            ],
        ),
        (labels, [
            {"input_ids": ids[0] + ids[1], "labels": labels[0] + labels[1], "seq_lengths": [3, 2]},
            {"input_ids": ids[2], "labels": labels[2], "seq_lengths": [4]},
        ]),
    ):  # fmt: skip
        pairs = zip(ids, labelled, strict=True)
        want = fill_row(collate([{"input_ids": a, "labels": b} for a, b in pairs]), 12)
        for tokens in (6, 12):  # the next multiple is 12
            got = FilledRows(tokens)(given)
            assert got.keys() == want.keys()
            assert all(got[name].equal(want[name]) for name in want)
        assert FilledRows(9)(given)["input_ids"].shape == (1, 9)  # full already
    for wrong, told in (
        ([{"input_ids": [1, 2], "labels": [1]}], "example 0 has 2 tokens, 1 labels"),
        ([{"input_ids": [1, 2], "completion_mask": [1]}], "2 tokens, 1 labels and documents of 2"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], "2 labels and documents of 1: give"),
        ([], "should be one row"),
    ):
        with pytest.raises(ValueError, match=told):
            FilledRows(4)(wrong)
    with pytest.raises(ValueError, match="at least 1, got 0 for a row"):
        FilledRows(0)
