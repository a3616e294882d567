"""The data: what the generator proves, and every claim about the file, checked from the text alone.

The answers are read back from their LaTeX by a reader that shares nothing with the generator, and
compared with the question's integrand by numbers.
"""

import json
import random
import re
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import mpmath
import pytest
import sympy
from tokenizers import Tokenizer

from batches import load_tokenizer, read_examples, tokenize

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

x = sympy.Symbol("x")


@cache
def lines() -> list[str]:
    return (DATA / "sft_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)


@cache
def chats() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in lines()]


def question_of(chat: list[dict[str, str]]) -> str:
    return next(message["content"] for message in chat if message["role"] == "user")


# --- A reader of the LaTeX in the file -----------------------------------------------------------


def read_latex(text: str) -> sympy.Expr:
    """The expression, with ln|a| read as ln(a), which has the same derivative."""
    for latex, plain in (
        (r"\ln\left|", "ln("),
        (r"\right|", ")"),
        (r"\left(", "("),
        (r"\right)", ")"),
    ):
        text = text.replace(latex, plain)
    text = re.sub(r"\\(sin|cos|tan|ln)\^\{(\d+|\\frac\{\d\}\{\d\})\}\(", r"power_\1(\2, ", text)
    while "{" in text:  # from the innermost braces outwards
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\[3\]\{([^{}]*)\}", r"cbrt(\1)", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", text)
    text = text.replace(r" \cdot ", "*").replace("\\", "").replace("arc", "a").strip()
    text = re.sub(r"(?<=[\w)]) +(?=[\w(])", "*", text)
    powers = {
        f"power_{name}": lambda n, a, f=f: f(a) ** n
        for name, f in {
            "sin": sympy.sin,
            "cos": sympy.cos,
            "tan": sympy.tan,
            "ln": sympy.log,
        }.items()
    }
    return sympy.sympify(text, {"x": x, "e": sympy.E, **powers})


def braced(text: str) -> tuple[str, str]:
    """What stands in the braces that `text` opens with, and what follows them."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[1:place], text[place + 1 :]
    raise ValueError(text)


def read_integral(text: str) -> tuple[str, tuple[str, str] | None]:
    """The integrand's LaTeX, and the bounds', of the first integral in the text."""
    named = re.search(r"\$f\(x\) = (.*?)\$", text)
    if named:
        return named[1], None
    inside = re.search(r"\\int(.*?)\\, dx", text)[1]
    if not inside.startswith("_"):
        return inside, None
    lower, rest = braced(inside.removeprefix("_"))
    upper, rest = braced(rest.removeprefix("^"))
    return rest, (lower, upper)


def answers_of(chat):
    """(LaTeX of the integrand, bounds or None, LaTeX of the answer, decimal or None) for each."""
    integrand, _ = read_integral(question_of(chat))
    for message in chat:
        found = re.search(r"\*\*Answer:\*\* \$(.*)\$", message["content"])
        if message["role"] == "assistant" and found:
            if found[1].endswith(" + C"):
                yield integrand, None, found[1].removesuffix(" + C"), None
            else:
                shown = re.findall(r"\$\$(\\int_.*?) = ", message["content"])[-1]
                again, bounds = read_integral(shown)
                assert read_latex(again) == read_latex(integrand)
                value, _, decimal = found[1].partition(r" \approx ")
                yield integrand, bounds, value, decimal or None


def is_antiderivative(answer: str, integrand: str) -> bool:
    difference = sympy.diff(read_latex(answer), x) - read_latex(integrand)
    points = (sympy.Rational(37, 100), sympy.Rational(81, 100))
    return all(abs(sympy.N(difference.subs(x, point), 30, chop=False)) < 1e-18 for point in points)


def is_value(answer: str, integrand: str, bounds: tuple[str, str]) -> bool:
    function = sympy.lambdify(x, read_latex(integrand), "mpmath")
    ends = [mpmath.mpf(sympy.N(read_latex(bound), 20)) for bound in bounds]
    measured, value = mpmath.quad(function, ends), sympy.N(read_latex(answer), 20)
    return abs(measured - value) <= 1e-9 * (1 + abs(value))


# --- The file ------------------------------------------------------------------------------------


def test_there_are_at_least_2000_chats_and_each_is_readable():
    assert len(read_examples(DATA / "sft_train.jsonl")) == len(lines()) >= 2000


def test_no_question_comes_twice():
    assert len({question_of(chat) for chat in chats()}) == len(chats())


def test_every_first_reply_has_an_answer_line():
    for chat in chats():
        replies = [message["content"] for message in chat if message["role"] == "assistant"]
        assert "**Answer:** $" in replies[0].splitlines()[-1]


def test_chats_alternate_and_end_with_the_assistant():
    shapes = {" ".join(message["role"][0] for message in chat) for chat in chats()}
    assert shapes == {"u a", "s u a", "u a u a", "s u a u a"}


def test_answers_read_back_from_the_text_are_right():
    indefinite = definite = 0
    for chat in chats()[::7]:  # 7 and the 16 families share no divisor: every family is in
        for integrand, bounds, answer, decimal in answers_of(chat):
            if bounds is None:
                indefinite += 1
                assert is_antiderivative(answer, integrand), (integrand, answer)
            else:
                definite += 1
                assert is_value(answer, integrand, bounds), (integrand, bounds, answer)
            if decimal:
                exact = float(sympy.N(read_latex(answer), 20))
                assert float(decimal) == pytest.approx(exact, rel=1e-5)
    assert indefinite > 150 and definite > 100


def test_the_reader_tells_right_answers_from_wrong_ones():
    assert is_antiderivative(
        r"\frac{x^{3}}{3} + 2 \ln\left|x - 1\right|", r"x^{2} + \frac{2}{x - 1}"
    )
    assert not is_antiderivative(r"\frac{x^{3}}{2}", r"x^{2}")
    assert is_value(r"- \frac{\sqrt{2}}{2} + 1", r"\sin(x)", ("0", r"\frac{\pi}{4}"))
    assert not is_value(r"\frac{\sqrt{2}}{2}", r"\cos(2 x)", ("0", r"\frac{\pi}{4}"))


# --- The generator -------------------------------------------------------------------------------


@pytest.mark.skipif(
    not sympy.__version__.startswith("1.14."), reason="another sympy may print formulas otherwise"
)
def test_the_generator_writes_the_bytes_of_the_file():
    import make_sft_train

    assert len(lines()) == make_sft_train.EXAMPLES
    count = 2 * len(make_sft_train.FAMILIES)
    assert list(islice(make_sft_train.lines(), count)) == lines()[:count]


def solution(integrand, answer=None):
    from worked_solution import Solution

    made = Solution(random.Random(0), integrand, [])
    made.answer = answer
    return made


def test_an_equation_that_is_false_is_not_written():
    from worked_solution import u, x

    with pytest.raises(ArithmeticError, match="not proved"):
        solution(x).show((x + 1) ** 2, x**2 + 1)
    with pytest.raises(ArithmeticError, match="not proved"):
        solution(x).show(sympy.Integral(x, x), x**2)
    substituted = solution(x)
    substituted.substitute(x**2)
    substituted.show(sympy.Integral(2 * x * sympy.exp(x**2), x), sympy.Integral(sympy.exp(u), u))
    with pytest.raises(ArithmeticError, match="not proved"):
        substituted.show(sympy.Integral(x * sympy.exp(x**2), x), sympy.Integral(sympy.exp(u), u))


def test_a_definite_integral_over_a_pole_is_refused():
    from worked_solution import Ln, x

    assert solution(1 / x, Ln(x)).evaluate(1, 2)[-1].endswith(r"\approx 0.693147$")
    with pytest.raises(ArithmeticError):
        solution(1 / x, Ln(x)).evaluate(-1, 2)


# --- The tokenizer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DATA / "tokenizer.json")


def test_the_tokenizer_comes_from_the_data(tokenizer):
    import make_tokenizer

    again = make_tokenizer.train([{"messages": chat} for chat in chats()])
    assert again.get_vocab() == tokenizer.get_vocab()
    assert tokenizer.get_vocab_size() == make_tokenizer.VOCABULARY == 4096


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
def test_special_tokens_are_one_token(tokenizer, token):
    ids = tokenizer.encode(f"x{token}y", add_special_tokens=False).ids
    assert ids.count(tokenizer.token_to_id(token)) == 1 and len(ids) == 3


@pytest.mark.parametrize(
    "text",
    ["", " ", "a\tb\r\n\n  c ", "naïve ∫ 数学 🙂", "\x00\x7f", r"\int_{0}^{1} x\, dx", "1024 "],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_chats_are_several_hundred_tokens_long(tokenizer):
    examples = read_examples(DATA / "sft_train.jsonl")
    lengths = [len(example.input_ids) for example in tokenize(examples, tokenizer)]
    assert 250 < sum(lengths) / len(lengths) < 450
    assert sum(length >= 300 for length in lengths) > 0.4 * len(lengths)
    assert min(lengths) < 150 and max(lengths) > 512
