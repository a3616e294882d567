"""A worked solution whose answer is checked before it is written.

An antiderivative's derivative must be the integrand, to 30 digits. The value of a definite integral
must be that of numerical quadrature, so an interval over a singularity cannot slip through.
"""

# ruff: noqa: E501, F403, F405
import mpmath
from sympy import *
from sympy.printing.latex import LatexPrinter

x, u, theta = symbols("x u theta", real=True)
NAMES = {log: r"\ln", atan: r"\arctan", asin: r"\arcsin"}


def nonzero(rng, most):
    return rng.choice([-1, 1]) * rng.randint(1, most)


def polynomial(rng, degree, most):
    """Return a polynomial. All coefficients are nonzero integers up to `most`, the leading one
    positive."""
    lower = Add(*(nonzero(rng, most) * x**n for n in range(degree)))
    return rng.randint(1, most) * x**degree + lower


class Ln(Function):
    """ln|argument|, whose derivative is argument'/argument on either side of zero."""

    @classmethod
    def eval(cls, argument):
        if argument.is_positive:
            return log(argument)
        if argument.is_negative:
            return log(-argument)

    def fdiff(self, argindex=1):
        return 1 / self.args[0]


class Printer(LatexPrinter):
    r"""sympy's LaTeX, but \sin(3 x) where sympy writes \sin{\left(3 x \right)}."""

    def _print_Function(self, expr, exp=None):
        inner = self._print(expr.args[0])
        if expr.func is Ln:
            return rf"\ln\left|{inner}\right|" + (f"^{{{exp}}}" if exp else "")
        opening, closing = (r"\left(", r"\right)") if r"\frac" in inner else "()"
        name = NAMES.get(expr.func, "\\" + expr.func.__name__)
        return name + (f"^{{{exp}}}" if exp else "") + opening + inner + closing

    _print_log = _print_Function


def tex(expression) -> str:
    return Printer().doprint(expression).replace(r"\int\limits", r"\int")


def value_at(point) -> str:
    """Write F at a point, in brackets as tall as the point."""
    return rf"F\left({tex(point)}\right)" if r"\frac" in tex(point) else f"F({tex(point)})"


def times_differential(scale, variable=x) -> str:
    """Write scale dx, with the brackets and the 1 handled as on paper."""
    written = rf"\left({tex(scale)}\right)" if scale.is_Add else tex(scale)
    return ("" if scale == 1 else written + r" \, ") + f"d{tex(variable)}"


def math(*sides) -> str:
    """Join the sides by = signs, for use inside a sentence."""
    return "$" + " = ".join(map(tex, sides)) + "$"


def antiderivative(expression, variable=x):
    """Return sympy's own antiderivative, with ln|...| for its ln(...)."""
    return integrate(expression, variable).replace(log, Ln)


def derivative(term):
    """Return the derivative: one fraction if it is rational, and no fractions inside roots."""
    slope = term.diff(x).replace(
        lambda part: part.is_Pow and part.exp.is_Rational and not part.exp.is_Integer,
        lambda part: together(part.base) ** part.exp,
    )
    return factor(slope) if slope.is_rational_function(x) else slope


class Solution:
    """The lines that solve one integral.

    `bounds` are intervals on which the integrand is continuous; `answer` is an antiderivative.
    """

    def __init__(self, rng, integrand, bounds):
        self.rng, self.integrand, self.bounds = rng, sympify(integrand), bounds
        self.lines, self.answer = [], None

    def say(self, *wordings):
        """Write one of the wordings, each an argument or a line of one."""
        wordings = [line.strip() for text in wordings for line in text.split("\n")]
        self.lines.append(self.rng.choice(wordings))

    def show(self, *sides):
        """Write sides[0] = sides[1] = ... on a separate line, with + C where an integral ends."""
        indefinite = any(side.has(Integral) for side in sides)
        written = [
            tex(side) + (" + C" if indefinite and not side.has(Integral) else "") for side in sides
        ]
        distinct = dict.fromkeys(written)  # an ordered set: sides that look alike appear once
        self.lines.append("$$" + " = ".join(distinct) + "$$")

    def bullet(self, before, after, form="{}"):
        self.lines.append("- $" + form.format(tex(before)) + " = " + tex(after) + "$")

    def term_by_term(self, expression, variable=x):
        """Integrate a sum of standard forms, a line each; return their sum, in `variable`."""
        total = 0
        for term in expression.as_ordered_terms():
            result = antiderivative(term, variable)
            self.bullet(Integral(term, variable), result)
            total += result
        return total

    def by_parts(self, first, second):
        """Write one round of parts. Returns (product, sign, rest), such that

        the integral of first * second = product + sign * the integral of rest.
        """
        v, du = antiderivative(second), sympify(first.diff(x))
        rest = cancel(du * v) if (du * v).is_rational_function(x) else du * v
        sign = -1
        if rest.as_coeff_Mul()[0] < 0:  # - of a negative integrand is written as a +
            sign, rest = 1, -rest
        self.lines.append(
            f"Take $u = {tex(first)}$ and $dv = {times_differential(second)}$. "
            f"Then $du = {times_differential(du)}$ and $v = {tex(v)}$, so"
        )
        whole, remaining = Integral(first * second, x), Integral(rest, x)
        joined = "+" if sign > 0 else "-"
        self.lines.append(f"$${tex(whole)} = {tex(first * v)} {joined} {tex(remaining)}$$")
        return first * v, sign, rest

    def conclude(self, answer):
        """End with the answer. Raise unless its derivative is the integrand at two points."""
        self.answer, difference = answer, answer.diff(x) - self.integrand
        if any(abs(N(difference.subs(x, Rational(n, 100)), 40)) > 1e-30 for n in (37, 81)):
            raise ArithmeticError(f"not the integral of {self.integrand}: {answer}")
        self.say("""Putting the pieces together:
            Collecting everything:
            So, altogether,
            Adding the parts, with one constant of integration:""")
        self.show(Integral(self.integrand, x), answer)
        return self

    def check(self) -> list[str]:
        """Write the lines that differentiate the answer back to the integrand."""
        part = Solution(self.rng, self.integrand, self.bounds)
        terms = self.answer.as_ordered_terms()
        slopes = [derivative(term) for term in terms]
        part.say("""**Check.** The derivative of the answer should be the integrand:
            **Check.** Differentiate the answer:
            **Verification.** Differentiating must bring the integrand back:""")
        for term, slope in zip(terms, slopes, strict=True):
            part.bullet(term, slope, r"\frac{{d}}{{dx}}\left[{}\right]")
        if len(terms) > 1:
            part.say("Altogether this gives", "The terms add up to", "Their sum is")
        else:
            part.say("That is", "Compare it with the integrand:")
        part.show(Add(*slopes), self.integrand)
        part.say("""which is the integrand, as required.
            and that is the integrand again.
            which is the function we set out to integrate.""")
        return part.lines

    def evaluate(self, lower, upper) -> list[str]:
        """Write the lines that evaluate the antiderivative between two bounds."""
        at_upper, at_lower = (
            expand(self.answer.subs(x, bound), log=False) for bound in (upper, lower)
        )
        value = expand(expand_log(at_upper - at_lower, factor=True), log=False)
        ends = [mpmath.mpf(sympify(bound).evalf(30)) for bound in (lower, upper)]
        measured = mpmath.quad(lambdify(x, self.integrand, "mpmath"), ends)
        if abs(value.evalf(30) - measured) > 1e-9 * (1 + abs(measured)):
            raise ArithmeticError(f"{self.integrand}, {lower} to {upper}: {value} or {measured}?")
        part = Solution(self.rng, self.integrand, self.bounds)
        part.say("""By the fundamental theorem of calculus we need the two end values of
            The integrand is continuous on this interval, so take the difference of the values of""")
        part.lines[-1] += f" $F(x) = {tex(self.answer)}$:"
        part.lines += [
            f"- at the upper end, ${value_at(upper)} = {tex(at_upper)}$;",
            f"- at the lower end, ${value_at(lower)} = {tex(at_lower)}$.",
        ]
        part.say("Subtracting,", "The difference is")
        part.lines.append(f"$${tex(Integral(self.integrand, (x, lower, upper)))} = {tex(value)}$$")
        decimal = "" if value.is_Integer else rf" \approx {float(value):.6g}"
        part.lines.append(f"**Answer:** ${tex(value)}{decimal}$")
        return part.lines
