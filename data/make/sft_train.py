"""Write data/sft_train.jsonl: chats about integrals with worked solutions, one JSON object a line.

    python data/make/sft_train.py         # a minute or two; the same bytes every time

The words are templates; the mathematics is sympy's (dev/requirements/dev.txt). Answers are checked
before they are written (worked_solution.py).
"""

import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import parts_and_substitution as parts
import rational_and_trigonometric as rational
from sympy import Integral
from worked_solution import Solution, tex, x

SEED = 20250
EXAMPLES = 2400
PATH = Path(__file__).resolve().parents[1] / "sft_train.jsonl"

FAMILIES = [
    parts.product_of_polynomials,
    rational.distinct_linear_factors,
    parts.quotient_by_a_power,
    rational.odd_trigonometric_power,
    parts.sum_of_standard_forms,
    rational.completing_the_square,
    parts.linear_substitution,
    rational.product_of_waves,
    parts.chain_rule_backwards,
    rational.repeated_or_quadratic_factor,
    parts.polynomial_by_parts,
    rational.trigonometric_substitution,
    parts.logarithm_by_parts,
    rational.rational_in_exponential,
    parts.arctangent_by_parts,
    parts.exponential_times_wave,
]

SYSTEM = [
    "You are a patient calculus tutor. Show every step and end with a line that gives the answer.",
    "You are a mathematics assistant. Work step by step and write formulas in LaTeX.",
    "You help students with integrals. Explain which method you use, and why it works.",
    "Solve the problem you are given. Justify each step briefly and state the result clearly.",
]
INDEFINITE = [
    "Find ${integral}$.",
    "Evaluate the integral ${integral}$ and show your work.",
    "Compute ${integral}$ step by step.",
    "How do I integrate this? ${integral}$",
    "Please work out ${integral}$ and explain the method.",
    "Find an antiderivative of $f(x) = {integrand}$.",
    "Determine all antiderivatives of $f(x) = {integrand}$.",
    "I am stuck on ${integral}$. Which technique works here, and what is the result?",
    "What is ${integral}$? I would like to see each step.",
    "My homework asks for ${integral}$. Can you walk me through it?",
]
DEFINITE = [
    "Evaluate ${integral}$.",
    "Compute the definite integral ${integral}$ exactly, then give a decimal.",
    "What is the exact value of ${integral}$? Show the steps.",
    "Find the signed area between $f(x) = {integrand}$ and the $x$-axis, "
    "from $x = {lower}$ to $x = {upper}$.",
    "Integrate $f(x) = {integrand}$ from $x = {lower}$ to $x = {upper}$.",
    "Please calculate ${integral}$ and explain how you get there.",
]
THEN_EVALUATE = [
    "Thanks. Now evaluate it from $x = {lower}$ to $x = {upper}$.",
    "And what is ${integral}$?",
    "Great. Use this to find the definite integral between ${lower}$ and ${upper}$.",
    "With that antiderivative, what do I get for ${integral}$?",
]
THEN_CHECK = [
    "How can I be sure that this is right?",
    "Could you check that by differentiating?",
    "I would like to verify the result. How?",
    "Is there a quick way to confirm the answer?",
]
FIRST = [
    "First find an antiderivative.",
    "We begin with the indefinite integral.",
    "Start by finding a function whose derivative is the integrand.",
]


def ask(rng: random.Random, wordings: list[str], solution: Solution, bounds: tuple = ()) -> str:
    lower, upper = map(tex, bounds or (x, x))
    integral = tex(Integral(solution.integrand, (x, *bounds)))
    integrand = tex(solution.integrand)
    return rng.choice(wordings).format(
        integral=integral, integrand=integrand, lower=lower, upper=upper
    )


def converse(rng: random.Random, solution: Solution) -> list[dict[str, str]]:
    """Return a chat about the solution: one question, or a second one that builds on the first."""
    worked, bounds = solution.lines, rng.choice(solution.bounds)
    answer = f"**Answer:** ${tex(solution.answer)} + C$"
    shapes = ["checked", "definite", "then evaluate", "then check", "unchecked"]
    shape = rng.choices(shapes, weights=[8, 6, 4, 2, 1])[0]
    if shape == "definite":
        lines = [rng.choice(FIRST), *worked, *solution.evaluate(*bounds)]
        turns = [(ask(rng, DEFINITE, solution, bounds), lines)]
    else:
        check = solution.check() if shape == "checked" else []
        turns = [(ask(rng, INDEFINITE, solution), [*worked, *check, answer])]
    if shape == "then evaluate":
        turns.append((ask(rng, THEN_EVALUATE, solution, bounds), solution.evaluate(*bounds)))
    if shape == "then check":
        turns.append((ask(rng, THEN_CHECK, solution), solution.check()))

    messages = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    gap = rng.choice(["\n", "\n\n"])
    for question, lines in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": gap.join(lines)})
    return messages


def examples() -> Iterator[dict]:
    """Yield examples without end, the families in turn, no integrand twice."""
    rng, seen = random.Random(SEED), set()
    for family in cycle(FAMILIES):
        solution = family(rng)
        while solution.integrand in seen:
            solution = family(rng)
        seen.add(solution.integrand)
        yield {"messages": converse(rng, solution)}


def lines() -> Iterator[str]:
    """Yield the lines of the file, in order."""
    for example in examples():
        yield json.dumps(example, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text("".join(islice(lines(), EXAMPLES)), encoding="utf-8")
