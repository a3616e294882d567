"""Families of integrals done term by term, by substitution or by parts.

Each family draws its numbers and returns one checked Solution; it owns its method and its words.
`bounds` are intervals on which the integrand is continuous.
"""

# ruff: noqa: E501, F403, F405
from sympy import *
from worked_solution import *


def product_of_polynomials(rng):
    factors = [polynomial(rng, 1, 6), polynomial(rng, rng.randint(1, 3), 7)]
    factors[0] **= rng.randint(1, 2)
    work = Solution(rng, Mul(*factors), [(-1, 1), (0, 1), (0, 2), (-1, 2), (1, 3)])
    work.say("""The power rule works on sums of powers, not on products, so multiply out first:
        There is no product rule for integrals; expand the brackets before integrating:""")
    expanded = expand(work.integrand)
    work.show(work.integrand, expanded)
    work.say(r"""Now use $\int x^{n} \, dx = \frac{x^{n + 1}}{n + 1}$ on each term:
        Every term is a constant times a power; raise the power by one and divide by it:""")
    return work.conclude(work.term_by_term(expanded))


def quotient_by_a_power(rng):
    power = rng.choice([Rational(1, 2), Rational(1, 3), Rational(3, 2), Integer(2), Integer(3)])
    integrand = polynomial(rng, rng.randint(2, 3), 9) / x**power
    work = Solution(rng, integrand, [(1, 2), (1, 3), (1, 4), (2, 4)])
    work.say(f"""For $x > 0$ divide each term of the numerator by ${tex(x**power)}$:
        Take $x > 0$. The denominator ${tex(x**power)}$ is a single power, so split it:""")
    work.show(integrand, expand(integrand))
    if power.is_Integer:
        work.say(r"""The power rule holds for every exponent but $-1$, where the logarithm appears:
            Integrate the powers one at a time, remembering $\int \frac{dx}{x} = \ln|x|$:""")
    else:
        work.say("""The power rule holds for fractional exponents too:
            Raise each exponent by one and divide by the new exponent:""")
    return work.conclude(work.term_by_term(expand(integrand)))


def sum_of_standard_forms(rng):
    a, b, c, d = (rng.randint(1, 7) for _ in range(4))
    forms = [
        exp(a * x),
        sin(b * x),
        cos(c * x),
        1 / (x**2 + d**2),
        1 / (x + d),
        sqrt(x),
        x**a,
        exp(-b * x),
    ]
    integrand = Add(*(nonzero(rng, 9) * form for form in rng.sample(forms, rng.randint(3, 5))))
    work = Solution(rng, integrand, [(0, 1), (0, 2), (1, 2), (1, 4)])
    work.say("""Integration is linear, so take the terms one at a time; each is a standard form:
        Each term can be integrated on sight, and the constants come along unchanged:""")
    return work.conclude(work.term_by_term(integrand))


def linear_substitution(rng):
    a, b = rng.randint(1, 5), nonzero(rng, 9)
    powers = [Rational(1, 2), Rational(-1, 2), Rational(3, 2), Integer(-2), Integer(4), Integer(6)]
    power, outside = rng.choice(powers), polynomial(rng, rng.randint(1, 2), 6)
    lower = max(0, 1 - b // a)  # a x + b is positive from here on
    work = Solution(rng, outside * (a * x + b) ** power, [(lower, lower + 1), (lower, lower + 2)])
    inner, back = tex(a * x + b), expand((u - b) / a)
    work.say(f"""Let $u = {inner}$, because the power of it is what stands in the way.
        The awkward part is the power of ${inner}$, so set $u = {inner}$.""")
    work.lines[-1] += (
        f" Then {math(x, together(back))} and "
        f"$dx = {times_differential(Rational(1, a), u)}$, so the integral becomes"
    )
    in_u = factor(outside.subs(x, back)) / a * u**power
    work.show(Integral(work.integrand, x), Integral(in_u, u))
    work.say(
        "Expanded, the integrand is a sum of powers of $u$:", "Multiply the powers of $u$ out:"
    )
    work.show(in_u, expand(in_u))
    work.say("Now integrate each power:", "The power rule gives, term by term,")
    result = work.term_by_term(expand(in_u), u)
    work.say(f"Finally replace $u$ by ${inner}$ again.", f"Return to $x$ with $u = {inner}$.")
    return work.conclude(result.subs(u, a * x + b))


def chain_rule_backwards(rng):
    a, b, n, m = rng.randint(1, 5), rng.randint(1, 9), rng.randint(2, 4), rng.randint(2, 6)
    inner, bounds = rng.choice(
        [
            (a * x**n + b, [(0, 1), (0, 2), (1, 2)]),
            (x**2 + a * x + b, [(0, 1), (0, 2), (1, 3)]),
            (sin(a * x), [(pi / (6 * a), pi / (2 * a))]),
            (cos(a * x), [(0, pi / (3 * a))]),
            (exp(a * x) + b, [(0, 1), (0, log(2))]),
            (log(x), [(exp(1), exp(2)), (2, 4)]),
        ]
    )
    outer = rng.choice([u**m, 1 / u, 1 / u**m, exp(u), sin(u), cos(u), 1 / sqrt(u), sqrt(u)])
    slope = inner.diff(x)
    scale = nonzero(rng, 8) / (slope.as_coeff_Mul()[0] if rng.random() < 0.5 else Integer(1))
    work = Solution(rng, scale * slope * outer.subs(u, inner), bounds)
    work.say(f"""The integrand holds ${tex(inner)}$ and, up to a constant, its derivative. So let
        Look for a function whose derivative also appears as a factor. Here it pays to set
        This is the chain rule read backwards. Substitute""")
    work.lines[-1] += f" {math(u, inner)}, with $du = {times_differential(slope)}$."
    work.say("In the new variable the integral is", "The integral turns into")
    in_u = Integral(scale * outer, u)
    work.show(Integral(work.integrand, x), in_u)
    work.say("This one is a standard form:", "Integrate with respect to $u$:")
    result = antiderivative(scale * outer, u)
    work.show(in_u, result)
    work.say(f"Undo the substitution with {math(u, inner)}.", f"Put {math(u, inner)} back.")
    return work.conclude(result.subs(u, inner))


def polynomial_by_parts(rng):
    k, first = rng.randint(1, 6), polynomial(rng, rng.randint(1, 3), 6)
    second = rng.choice([exp(k * x), exp(-k * x), sin(k * x), cos(k * x)])
    work = Solution(rng, first * second, [(0, 1), (0, pi), (0, pi / 2), (-1, 1)])
    work.say(r"""Integrate by parts, $\int u \, dv = u v - \int v \, du$, differentiating the polynomial, since each derivative lowers its degree.
        A polynomial times a function that is easy to integrate calls for parts: the polynomial is differentiated until it is gone.""")
    answer, sign = 0, 1
    while first.has(x):
        product, step, rest = work.by_parts(first, second)
        answer, sign, first = answer + sign * product, sign * step, first.diff(x)
        second = rest / first
        if first.has(x):
            work.say("""The integral that is left is simpler; treat it in the same way.
                The degree has dropped by one. Again by parts:
                One step closer: the polynomial in the new integral has lower degree.""")
    work.say("What is left is a standard form:", "The last integral can be done on sight:")
    last = antiderivative(rest)
    work.show(Integral(rest, x), last)
    return work.conclude(expand(answer + sign * last))


def logarithm_by_parts(rng):
    a, power = rng.randint(1, 6), rng.randint(1, 2)
    square = nonzero(rng, 9) * x ** rng.randint(0, 5)
    first, second = (
        log(a * x) ** power,
        polynomial(rng, rng.randint(1, 2), 7) if power == 1 else square,
    )
    work = Solution(rng, first * second, [(1, 2), (1, 3), (1, exp(1)), (2, 4)])
    work.say("""Here $x > 0$. The logarithm becomes simple when differentiated, so it plays $u$.
        For $x > 0$, integrate by parts and let the logarithm be the factor that is differentiated: that turns it into a power of $x$.""")
    answer, sign = 0, 1
    while power:
        product, step, rest = work.by_parts(first, second)
        answer, sign, power = answer + sign * product, sign * step, power - 1
        first, second = log(a * x) ** power, expand(rest / log(a * x) ** power)
        if power:
            work.say("A logarithm is left, to a lower power, so integrate by parts once more.")
    work.say("""No logarithm is left; what remains is a sum of powers:
        The remaining integral is a matter of the power rule:""")
    return work.conclude(expand(answer + sign * work.term_by_term(second), log=False))


def arctangent_by_parts(rng):
    first, second = atan(rng.randint(1, 6) * x), polynomial(rng, rng.randint(0, 2), 8)
    work = Solution(rng, first * second, [(0, 1), (-1, 1), (0, 2)])
    work.say(r"""Few remember an antiderivative of $\arctan$, but its derivative is rational, so integrate by parts with the inverse tangent as $u$.
        Differentiating the inverse tangent leaves a rational function, which can always be integrated. That suggests integration by parts.""")
    product, sign, rest = work.by_parts(first, second)
    split = Add(*(factor(term) for term in expand(apart(rest)).as_ordered_terms()))
    if tex(split) != tex(rest):
        work.say("Divide the polynomials in the remaining integrand:")
        work.show(rest, split)
    work.say("The remaining integral is elementary:", "Term by term, what remains is")
    return work.conclude(expand(product + sign * work.term_by_term(split)))


def exponential_times_wave(rng):
    a, b, scale = nonzero(rng, 5), rng.randint(1, 7), nonzero(rng, 9)
    wave, other = rng.choice([(sin(b * x), cos(b * x)), (cos(b * x), sin(b * x))])
    work = Solution(rng, scale * exp(a * x) * wave, [(0, pi), (0, pi / 2), (0, pi / 4)])
    work.say("""Neither factor disappears when it is differentiated, but after two rounds of parts the original integral returns, and we can solve for it.
        Integrate by parts twice, keeping the trigonometric factor as $u$: the integral we started from comes back, and an equation for it follows.""")
    if scale != 1:
        work.say(f"Leave the constant factor ${scale}$ aside until the end.")
    product, sign, rest = work.by_parts(wave, exp(a * x))
    work.say("Again by parts, with the same choice of roles:", "And once more:")
    ratio = rest / (other * exp(a * x))
    again, _, _ = work.by_parts(other, exp(a * x))
    known, whole = expand(product + sign * ratio * again), Integral(wave * exp(a * x), x)
    repeat = Rational(b**2, a**2)
    work.lines.append(f"Write $I = {tex(whole)}$. The two lines together say")
    work.lines.append(f"$$I = {tex(known)} - {tex(repeat) + ' ' if repeat != 1 else ''}I$$")
    work.say(
        f"so that ${tex(1 + repeat)} I = {tex(known)}$. Divide by ${tex(1 + repeat)}$"
        + (f" and restore the factor ${scale}$." if scale != 1 else ".")
    )
    return work.conclude(expand(scale * known / (1 + repeat)))
