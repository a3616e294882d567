"""The committed data is what data/make/ writes: anyone can make it again or change it."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import sympy

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA / "make"))


@pytest.mark.slow
@pytest.mark.skipif(
    not sympy.__version__.startswith("1.14."), reason="another sympy may print formulas otherwise"
)
def test_the_chats_are_made_again_byte_for_byte():
    """Make two of each family. All 2400 also come out the same, but take a minute or two."""
    import sft_train

    lines = (DATA / "sft_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == len(set(lines)) == sft_train.EXAMPLES
    count = 2 * len(sft_train.FAMILIES)
    assert list(islice(sft_train.lines(), count)) == lines[:count]


def test_a_wrong_answer_is_not_written():
    from worked_solution import Ln, Solution, exp, x

    solution = Solution(None, x * exp(x), [])
    with pytest.raises(ArithmeticError, match="not the integral of"):
        solution.conclude(x * exp(x))
    solution.integrand, solution.answer = 1 / x, Ln(x)
    with pytest.raises(ArithmeticError):  # over a pole
        solution.evaluate(-1, 2)


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

    from batches import load_tokenizer, read_chats, tokenize

    assert made.padding([4, 2, 3, 1], 2) == 1 - 10 / 14  # the first two make rows of 4
    drawn = made.draw(made.SETS["dolly"], 400)
    assert max(drawn) == 512 and made.draw(made.SETS["dolly"], 400) == drawn
    path = tmp_path / "chats.jsonl"
    monkeypatch.setattr(made, "TOKENS", round(400 * made.SETS["dolly"].mean))
    assert made.main(["dolly", str(path)]) == 0
    chats = tokenize(read_chats(path), load_tokenizer(DATA / "tokenizer.json"))
    off = [abs(len(chat.input_ids) - n) / n for chat, n in zip(chats, drawn, strict=True) if n > 40]
    assert max(off) < 0.1
    assert made.main([]) == 0 and "| sharegpt | 10" in capsys.readouterr().out
    assert made.main(["dollies", "x"]) == 2
