"""Families of integrals of rational and trigonometric functions.

Each family draws its numbers and returns one checked Solution; it owns its method and its words.
`bounds` are intervals on which the integrand is continuous.
"""

# ruff: noqa: E501, F403, F405
from sympy import *
from sympy.simplify.fu import TR7, TR8
from worked_solution import *


def odd_trigonometric_power(rng):
    a, m, n, scale = rng.randint(1, 6), rng.randint(1, 3), rng.randint(0, 4), nonzero(rng, 9)
    sine, cosine, tangent = sin(a * x), cos(a * x), tan(a * x)
    inner, slope, square, in_inner = rng.choice(
        [
            (sine, a * cosine, cosine**2, 1 - sine**2),
            (cosine, -a * sine, sine**2, 1 - cosine**2),
            (tangent, a / cosine**2, 1 / cosine**2, 1 + tangent**2),
        ]
    )
    work = Solution(
        rng,
        scale * inner**n * square**m * slope / a,
        [(0, pi / (4 * a)), (0, pi / (3 * a)), (pi / (6 * a), pi / (4 * a))],
    )
    work.say(f"""Keep one derivative of ${tex(inner)}$ for the differential and rewrite the even power that is left with {math(square, in_inner)}.
        Set $u = {tex(inner)}$. One factor goes into $du$; the identity {math(square, in_inner)} turns the rest into powers of $u$.""")
    work.lines[-1] += f" As $du = {times_differential(slope)}$, this gives"
    in_u = Rational(scale, a) * u**n * in_inner.subs(inner, u) ** m
    work.show(Integral(work.integrand, x), Integral(in_u, u))
    work.say("Expand and integrate the polynomial in $u$:", "A polynomial is left. Its terms:")
    result = work.term_by_term(expand(in_u), u)
    work.say(f"Put {math(u, inner)} back.", f"In terms of $x$, {math(u, inner)}.")
    return work.conclude(result.subs(u, inner))


def product_of_waves(rng):
    a, b, scale = rng.randint(1, 5), rng.randint(1, 7), nonzero(rng, 9)
    sine, cosine = sin(a * x), cos(a * x)
    waves = rng.choice(
        [
            sine * cos(b * x),
            sine**2 * cos(b * x),
            sine * sin(b * x),
            cosine**2 * cos(b * x) ** 2,
            cosine**4,
            sine**4,
            sine**2 * cosine**2,
            cosine * cos(b * x) ** 3,
        ]
    )
    work = Solution(rng, scale * waves, [(0, pi), (0, pi / 2), (0, pi / 4), (0, pi / 3)])
    work.say(r"""Products and powers of sines and cosines become sums by the product-to-sum and half-angle formulas, such as $\sin^{2}(t) = \frac{1 - \cos(2 t)}{2}$:
        Linearise with $2 \sin(p) \cos(q) = \sin(p + q) + \sin(p - q)$ and its relatives:""")
    sums, before = expand(TR8(expand(TR7(waves)))), waves
    while sums != before:
        sums, before = expand(TR8(expand(TR7(sums)))), sums
    work.show(waves, sums)
    if scale != 1:
        work.say(f"The factor ${scale}$ multiplies every term.", f"Bring the factor ${scale}$ in.")
    work.say(r"""Every term is now a constant or of the form $\sin(k x)$ or $\cos(k x)$:
        Only constants and single waves are left to integrate:""")
    return work.conclude(work.term_by_term(expand(scale * sums)))


def distinct_linear_factors(rng):
    roots = sorted(rng.sample(range(-5, 6), rng.randint(2, 3)))
    tops = [nonzero(rng, 7) for _ in roots]
    whole = rng.choice([0, 0, nonzero(rng, 4), nonzero(rng, 3) * x + nonzero(rng, 5)])
    fractions = Add(*(top / (x - root) for top, root in zip(tops, roots, strict=True)))
    denominator = Mul(*(x - root for root in roots))
    rest = expand(cancel(fractions * denominator))
    integrand = expand(cancel((whole + fractions) * denominator)) / denominator
    work = Solution(
        rng, integrand, [(roots[-1] + 1, roots[-1] + 2), (roots[-1] + 1, roots[-1] + 3)]
    )
    if whole:
        work.say("The numerator's degree is not below the denominator's, so divide first:")
        work.show(work.integrand, whole + rest / denominator)
    names = symbols("A B D")[: len(roots)]  # C is the constant of integration
    work.say("Split the proper fraction into partial fractions:", "Use partial fractions. Write")
    form = [name / (x - root) for name, root in zip(names, roots, strict=True)]
    work.lines.append(f"$${tex(rest / denominator)} = {' + '.join(map(tex, form))}$$")
    work.say("""Multiply by the denominator and put $x$ equal to each root in turn; all but one of the unknowns then drop out:
        Cover up one factor at a time: at a root of the denominator only the matching unknown survives.""")
    for name, root, top in zip(names, roots, tops, strict=True):
        at_root, others = rest.subs(x, root), cancel(denominator / (x - root)).subs(x, root)
        work.lines.append(
            f"- at {math(x, Integer(root))}: {math(at_root, others * name)}"
            + (f", so {math(name, Integer(top))}" if others != 1 else "")
        )
    work.say("Hence", "The integrand is therefore")
    work.show(work.integrand, whole + fractions)
    work.say("Integrate each piece:", "Each piece is a power or a logarithm:")
    return work.conclude(work.term_by_term(whole + fractions))


def repeated_or_quadratic_factor(rng):
    root, other, values = rng.randint(-4, 4), rng.randint(1, 5), [nonzero(rng, 7) for _ in range(3)]
    names, linear, quadratic = symbols("A B D"), x - root, x**2 + other**2
    if rng.random() < 0.5:
        form, denominator = (
            [names[0] / linear, names[1] / linear**2, names[2] / (linear + other)],
            linear**2 * (linear + other),
        )
    else:
        form, denominator = (
            [names[0] / linear, (names[1] * x + names[2]) / quadratic],
            linear * quadratic,
        )
    solved = dict(zip(names, values, strict=True))
    fractions = Add(*form).subs(solved)
    numerator = expand(cancel(fractions * denominator))
    work = Solution(rng, numerator / denominator, [(root + 1, root + 2), (root + 1, root + 3)])
    work.say("""The denominator does not split into distinct linear factors, so the form is
        The right form of the partial fractions for this denominator is""")
    work.lines.append(f"$${tex(work.integrand)} = {' + '.join(map(tex, form))}$$")
    work.say("Multiply both sides by the denominator and compare the coefficients:")
    identity = Poly(expand(cancel(Add(*form) * denominator)), x)
    for power in (2, 1, 0):
        left, right = numerator.coeff(x, power), identity.coeff_monomial(x**power)
        work.lines.append(
            f"- of ${tex(x**power)}$: {math(left, right)}"
            if power
            else f"- the constants: {math(left, right)}"
        )
    work.say("This linear system has the solution", "Solving the three equations gives")
    work.lines[-1] += " " + ", ".join(math(*pair) for pair in solved.items()) + ", so"
    work.show(work.integrand, fractions)
    work.say("Integrate each piece:", "The pieces are standard forms:")
    return work.conclude(work.term_by_term(expand(fractions)))


def completing_the_square(rng):
    b, c, p, left = nonzero(rng, 6), rng.randint(1, 6), nonzero(rng, 8), nonzero(rng, 9)
    square, half = (x + b) ** 2 + c**2, Rational(p, 2)
    quadratic = expand(square)
    numerator = p * x + p * b + left
    work = Solution(rng, numerator / quadratic, [(0, 1), (-1, 1), (0, 2), (-b, c - b)])
    work.say("""The denominator has no real roots, so complete the square:
        The quadratic cannot be factored over the reals. Completing the square gives""")
    work.show(quadratic, square)
    slope = quadratic.diff(x)
    work.say(f"""The derivative of the denominator is ${tex(slope)}$. Write the numerator as a multiple of it and a constant:
        Aim for the derivative ${tex(slope)}$ of the denominator in the numerator; a constant is left over:""")
    work.lines.append(
        rf"$${tex(numerator)} = {tex(half)} \left({tex(slope)}\right) "
        f"{'+' if left > 0 else '-'} {abs(left)}$$"
    )
    work.say(r"""The first part gives a logarithm,
        The first part has the form $\frac{q'(x)}{q(x)}$, so its integral is a logarithm,""")
    first, second = half * log(quadratic), Rational(left, c) * atan(together((x + b) / c))
    work.show(Integral(half * slope / quadratic, x), first)
    work.say(f"""and the second an inverse tangent, through $t = {tex(together((x + b) / c))}$:
        and the second, with $t = {tex(together((x + b) / c))}$, an inverse tangent:""")
    work.show(Integral(left / square, x), second)
    return work.conclude(first + second)


def trigonometric_substitution(rng):
    a, p, q = rng.randint(1, 6), nonzero(rng, 8), rng.randint(-9, 9)
    root, top = sqrt(a**2 - x**2), p * x**2 + q
    work = Solution(rng, top / root, [(0, Rational(a, 2)), (-Rational(a, 2), Rational(a, 2))])
    work.say(f"The root ${tex(root)}$ suggests", f"To remove the root ${tex(root)}$, put")
    work.lines[-1] += (
        rf" {math(x, a * sin(theta))} with $-\frac{{\pi}}{{2}} < \theta < "
        rf"\frac{{\pi}}{{2}}$. Then $dx = {times_differential(a * cos(theta), theta)}$"
        f" and the root equals ${tex(a * cos(theta))}$, so"
    )
    in_theta = top.subs(x, a * sin(theta))
    double = expand(top.subs(x**2, a**2 * (1 - cos(2 * theta)) / 2))
    work.show(Integral(work.integrand, x), Integral(in_theta, theta), Integral(double, theta))
    work.say("In terms of the double angle the terms are standard:", "Term by term,")
    work.term_by_term(double, theta)
    work.say(
        rf"""To return to $x$, use $\sin(2 \theta) = 2 \sin(\theta) \cos(\theta)$ with $\sin(\theta) = {tex(x / a)}$ and $\cos(\theta) = {tex(root / a)}$."""
    )
    return work.conclude((Rational(p * a**2, 2) + q) * asin(x / a) - Rational(p, 2) * x * root)


def rational_in_exponential(rng):
    a, b = rng.sample(range(1, 9), 2)
    second = rng.choice([nonzero(rng, 8) / (u + b), nonzero(rng, 5) / u])
    fractions = nonzero(rng, 8) / (u + a) + second
    in_u = factor(together(fractions))
    work = Solution(
        rng, factor(in_u * u).subs(u, exp(x)), [(0, 1), (0, log(2)), (0, log(3)), (1, 2)]
    )
    work.say(r"""Everything is a function of $e^{x}$. Let $u = e^{x}$, so $dx = \frac{du}{u}$:
        Put $u = e^{x}$; then $du = u \, dx$, and a rational function appears:""")
    work.show(Integral(work.integrand, x), Integral(in_u, u))
    work.say("Its partial fractions are", "Split it into partial fractions:")
    work.show(in_u, fractions)
    work.say("and the terms integrate to logarithms:", "and each of them gives a logarithm:")
    result = work.term_by_term(fractions, u)
    work.say("""Since $u = e^{x} > 0$, no absolute values are needed.
        With $u = e^{x}$, which is positive, the bars can be dropped.""")
    return work.conclude(result.subs(u, exp(x)))
