"""batches.py against streams and counts made by hand or in plain Python."""

import hashlib
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from cases.one_line import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from batches import (
    IGNORED,
    Batch,
    Message,
    TokenizedExample,
    load_tokenizer,
    make_batches,
    read_chats,
    token_shares,
    tokenize,
)

DATA = Path(__file__).resolve().parents[2] / "data"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    Message("system", "Be brief."),
    Message("user", "What is 2 + 2?"),
    Message("assistant", "It is 4."),
    Message("user", "And ∫ dx?"),
    Message("assistant", "x + C\n"),
]


def bytes_tokenizer(special_tokens=()) -> Tokenizer:
    """A token for each byte, and one for each special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def example(first: int, length: int, unlabelled: int) -> TokenizedExample:
    """Return the tokens first, first + 1, ..., with no labels on the first `unlabelled`."""
    ids = list(range(first, first + length))
    return TokenizedExample(ids, [IGNORED] * unlabelled + ids[unlabelled:])


# Seven examples of different lengths, their tokens all different: 0.., 100.., 200..
TOKENIZED = [example(100 * n, 5 + 3 * n, 2 + n) for n in range(7)]


def listed(batches: list[Batch]) -> list[list]:
    return [[tensor.tolist() for tensor in batch.tensors()] for batch in batches]


# --- Tokens and labels ---------------------------------------------------------------------------


def test_a_tokenizer_is_loaded_without_its_own_truncation_and_padding(tmp_path):
    tokenizer = bytes_tokenizer(CHATML)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert len(loaded.encode("twelve bytes", add_special_tokens=False).ids) == 12


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("missing", None, "no tokenizer at {}"),
        ("broken", '{"version": "1.0"}', "{} is not a tokenizer"),
        ("empty", Tokenizer(models.BPE()).to_str(), "{} turns text into no tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_an_error(tmp_path, name, text, given):
    if text:
        (tmp_path / name).write_text(text)
    said = refused(load_tokenizer, tmp_path / name)
    assert said.startswith(given.format(tmp_path / name)) and "; wanted " in said


@pytest.mark.parametrize("special_tokens", [CHATML, []], ids=["chatml tokens", "plain text"])
def test_labels_are_only_on_what_the_assistant_says(special_tokens):
    tokenizer = bytes_tokenizer(special_tokens)
    [tokenized] = tokenize([CHAT], tokenizer)

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    assert text_of(tokenized.input_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\nIt is 4.<|im_end|>\n"
        "<|im_start|>user\nAnd ∫ dx?<|im_end|>\n"
        "<|im_start|>assistant\nx + C\n<|im_end|>\n"
    )
    assert len(tokenized.labels) == len(tokenized.input_ids)
    pairs = list(zip(tokenized.input_ids, tokenized.labels, strict=True))
    assert all(label in (token, IGNORED) for token, label in pairs)
    assert text_of([label for _, label in pairs if label != IGNORED]) == (
        "It is 4.<|im_end|>x + C\n<|im_end|>"
    )
    borders = sum((a == IGNORED) != (b == IGNORED) for a, b in pairwise(tokenized.labels))
    assert borders == 4  # two stretches, each with a border on either side


# --- Packed rows ---------------------------------------------------------------------------------


def test_packed_rows_hold_every_token_once_around_and_in_the_examples_order():
    total = sum(len(tokenized.input_ids) for tokenized in TOKENIZED)
    assert total == 98
    batches = make_batches(TOKENIZED, seq_len=7, batch_size=2, count=14)  # 196: twice around
    assert all(batch.input_ids.shape == batch.labels.shape == (2, 7) for batch in batches)
    assert all(batch.input_ids.dtype == batch.labels.dtype == torch.int64 for batch in batches)
    assert all(batch.attention_mask is None for batch in batches)
    ids = torch.cat([batch.input_ids.flatten() for batch in batches]).tolist()
    labels = torch.cat([batch.labels.flatten() for batch in batches]).tolist()

    orders = []
    for start in (0, total):
        order = list(dict.fromkeys(token // 100 for token in ids[start : start + total]))
        assert sorted(order) == list(range(7))
        again = [TOKENIZED[n] for n in order]
        assert ids[start : start + total] == list(chain(*(one.input_ids for one in again)))
        assert labels[start : start + total] == list(chain(*(one.labels for one in again)))
        orders.append(order)
    assert orders[0] != orders[1] and orders[0] != list(range(7))  # shuffled, and anew


# --- Padded rows ---------------------------------------------------------------------------------


def test_padded_rows_are_one_example_each_cut_or_filled():
    batches = make_batches(TOKENIZED, seq_len=12, batch_size=7, count=2, padded=True, pad_id=9999)
    for batch in batches:
        assert batch.attention_mask.dtype == torch.int64
        numbers = []
        tensors = (batch.input_ids, batch.labels, batch.attention_mask)
        for ids, labels, mask in zip(*(tensor.tolist() for tensor in tensors), strict=True):
            numbers.append(ids[0] // 100)
            source = TOKENIZED[numbers[-1]]
            kept = min(12, len(source.input_ids))
            assert ids == source.input_ids[:kept] + [9999] * (12 - kept)
            assert labels == source.labels[:kept] + [IGNORED] * (12 - kept)
            assert mask == [1] * kept + [0] * (12 - kept)
        assert sorted(numbers) == list(range(7))


# --- Documents -----------------------------------------------------------------------------------


def test_documents_are_whole_examples_in_one_row_each_with_its_own_positions():
    batches = make_batches(TOKENIZED, 12, 4, count=6, documents=True, pad_id=9999)
    seen = set()
    for batch in batches:
        assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (1, 48)
        assert batch.lengths.sum() == 48 and batch.lengths.dtype == torch.int32
        sizes = batch.lengths.tolist()
        rows = (t[0].split(sizes) for t in (batch.input_ids, batch.labels, batch.position_ids))
        *documents, last = zip(*rows, strict=True)
        if batch.filler:
            assert last[0].tolist() == [9999] * batch.filler and set(last[1].tolist()) == {IGNORED}
        else:
            documents.append(last)
        for ids, labels, places in documents:
            source = TOKENIZED[int(ids[0]) // 100]
            assert ids.tolist() == source.input_ids[:48]
            assert labels.tolist() == [IGNORED, *source.labels[1:48]]
            assert places.tolist() == list(range(len(ids)))
            seen.add(int(ids[0]) // 100)
    assert seen == set(range(7))


def test_unsloth_is_told_their_lengths_and_nobody_is_told_of_positions_otherwise():
    [documents] = make_batches(TOKENIZED, 12, 4, 1, documents=True)
    packed = ["input_ids", "labels", "attention_mask"]
    assert list(documents.inputs()) == [*packed, "position_ids"]
    told = documents.inputs(lambda lengths: {"packed_seq_lengths": lengths})
    assert told["packed_seq_lengths"] is documents.lengths
    [rows] = make_batches(TOKENIZED, 12, 4, 1)
    assert list(rows.inputs(dict)) == packed


# --- Either --------------------------------------------------------------------------------------

KINDS = [{}, {"padded": True}, {"documents": True}]


def test_the_published_batches_are_these():
    """Check the first batches of seed 0 at each length: results.json rests on them."""
    chats = read_chats(DATA / "sft_train.jsonl")
    tokenized = tokenize(chats, load_tokenizer(DATA / "tokenizer.json"))
    found = {False: hashlib.sha256(), True: hashlib.sha256()}
    for padded, digest in found.items():
        for seq_len in (64, 128, 256, 512):
            for batch in make_batches(tokenized, seq_len, 32, count=4, padded=padded):
                for tensor in batch.tensors():
                    digest.update(tensor.numpy().tobytes())
    assert found[False].hexdigest().startswith("92ac36184d98b711")
    assert found[True].hexdigest().startswith("a74eebf006339b89")


@pytest.mark.parametrize("kind", KINDS)
def test_batches_depend_on_the_seed_and_not_on_how_many_are_asked_for(kind):
    def made(count: int, seed: int = 3) -> list[Batch]:
        return make_batches(TOKENIZED, 8, 2, count, seed=seed, **kind)

    long = listed(made(25))
    assert len(long) == 25
    for count in (1, 4, 24):
        assert listed(made(count)) == long[:count]
    assert listed(made(25, seed=4)) != long


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_label_is_passed_over_and_data_without_one_is_an_error(kind):
    # The label at a row's first place is lost in the shift, so [x, -100, ...] has none.
    silent = TokenizedExample([1, 2, 3, 4], [1, IGNORED, IGNORED, IGNORED])
    spoken = TokenizedExample([5, 6, 7, 8], [IGNORED, IGNORED, IGNORED, 8])
    batches = make_batches([silent] * 9 + [spoken], 4, 1, count=6, **kind)
    assert [batch.input_ids.tolist() for batch in batches] == [[[5, 6, 7, 8]]] * 6
    said = refused(make_batches, [silent] * 9, 4, 2, count=1, **kind)
    assert said.startswith("no label in ") and said.endswith("; ask for a longer seq_len")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((TOKENIZED, 1, 2, 3), "seq_len is 1; wanted 2 or more; ask for a larger seq_len"),
        ((TOKENIZED, 8, 0, 3), "batch_size is 0; wanted 1 or more; ask for a larger batch_size"),
        ((TOKENIZED, 8, 2, 0), "count is 0; wanted 1 or more; ask for a larger count"),
        (([], 8, 2, 3), "no tokens; wanted at least one chat; read and tokenize some first"),
    ],
)
def test_what_makes_no_batch_is_an_error(arguments, said):
    assert refused(make_batches, *arguments) == said


def test_shares_are_those_counted_by_hand():
    no = IGNORED
    padded = Batch(
        torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]]),
        torch.tensor([[no, 6, 7, no], [5, 6, no, no]]),  # after the shift: 2, and 1 (the 5 is lost)
        torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
    )
    packed = Batch(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[no, 2, 3, 4]]))
    filled = Batch(torch.tensor([[1, 2, 9, 9]]), torch.tensor([[no, 2, no, no]]), filler=2)
    for batches, padding, labelled in (
        ([filled], 2 / 4, 1 / 4),
        ([padded], 3 / 8, 3 / 8), ([packed], 0, 3 / 4), ([padded, packed], 3 / 12, 6 / 12),
    ):  # fmt: skip
        shares = token_shares(batches)
        assert (shares.padding, shares.labelled) == (padding, labelled)
    with pytest.raises(ValueError, match="no batches"):
        token_shares([])


def test_a_batch_moves_whole():
    for kind in KINDS:
        [batch] = make_batches(TOKENIZED, 8, 2, 1, **kind)
        moved = batch.to("meta")
        assert len(moved.tensors()) == len(batch.tensors()) == 2 + len(kind) + ("documents" in kind)
        assert all(tensor.is_meta for tensor in moved.tensors())
