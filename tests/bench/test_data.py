"""The committed tokenizer is what data/make/ writes, and chats have the lengths it draws."""

import json
import shutil
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA / "make"))


def test_the_tokenizer_is_made_again_and_reads_any_text():
    import tokenizer

    made, text = tokenizer.train(), "a\tb\r\n\n  naïve ∫ 数学 🙂\x00 \\int_{0}^{1} x\\, dx 1024 "
    kept = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(made.to_str()) == kept and made.get_vocab_size() == 4096
    assert made.decode(made.encode(text, add_special_tokens=False).ids) == text
    for place, token in enumerate(tokenizer.SPECIAL_TOKENS):
        assert made.encode(token, add_special_tokens=False).ids == [place]


@pytest.mark.slow
def test_chats_have_the_lengths_that_were_drawn(capsys, tmp_path, monkeypatch):
    import chats_of_lengths as made
    from cases.rehearsal_case import few_chats

    from batches import load_tokenizer, read_chats, tokenize

    assert made.padding([4, 2, 3, 1], 2) == 1 - 10 / 14  # the first two make rows of 4
    drawn = made.draw(made.SETS["dolly"], 400)
    assert max(drawn) == 512 and made.draw(made.SETS["dolly"], 400) == drawn
    path = tmp_path / "chats.jsonl"
    monkeypatch.setattr(made, "HERE", tmp_path)  # few chats, which are said again and again
    shutil.copy(DATA / "tokenizer.json", tmp_path)
    Path(few_chats(tmp_path)).rename(tmp_path / "sft_train.jsonl")
    monkeypatch.setattr(made, "TOKENS", round(400 * made.SETS["dolly"].mean))
    assert made.main(["dolly", str(path)]) == 0
    chats = tokenize(read_chats(path), load_tokenizer(DATA / "tokenizer.json"))
    off = [abs(len(chat.input_ids) - n) / n for chat, n in zip(chats, drawn, strict=True) if n > 40]
    assert max(off) < 0.1
    assert made.main([]) == 0 and "| sharegpt | 10" in capsys.readouterr().out
    assert made.main(["dollies", "x"]) == 2
