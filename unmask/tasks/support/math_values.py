r"""The value of an expression in LaTeX, exact, and whether two values are equal. For a process with a time limit.

The grammar is strict: what it does not know is a ValueError, so that no part of an answer is skipped. Decimals are
fractions, letters are case-sensitive symbols, i and e are the constants, \log has base 10, and 3\frac{1}{2} is a mixed
number. Large powers and factorials are refused.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction

import sympy

NUMBER = re.compile(
    r"(\d+\.?\d*|\.\d+)(?:\\(?:overline|bar)\s*\{(\d+)\})?(?:[eE]([+-]?\d{1,3})(?![A-Za-z\d]))?", re.ASCII
)
TOKEN = re.compile(rf"(?P<number>{NUMBER.pattern})|(?P<command>\\[A-Za-z]+|\\[{{}}|])|(?P<mark>\S)", re.ASCII)
FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    **{
        name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
    },
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    "ln": sympy.log,
    "log": lambda x: sympy.log(x, 10),
    "lg": lambda x: sympy.log(x, 10),
}
INVERSES = {
    name: getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
}
GREEK_LETTERS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi varphi
chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell
"""
GREEK = frozenset(GREEK_LETTERS.split())
TIMES = ("*", "\\cdot", "\\times")
OVER = ("/", "\\div")
LARGEST_POWER, LARGEST_FACTORIAL = 20_000, 1000  # bits of a power; the number under a factorial
DIGITS = 50
POINTS = 3  # random points at which two expressions with symbols are compared first


class Parser:
    """Recursive descent over the tokens of an expression."""

    def __init__(self, text: str) -> None:
        self.tokens = list(TOKEN.finditer(text))
        self.place = 0
        self.bars = 0  # bars of absolute values that are open

    def peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place][0] if place < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise ValueError(f"{token or 'the end'} where {' or '.join(expected) or 'more'} is expected")
        self.place += 1
        return token

    def number(self, ahead: int = 0) -> bool:
        place = self.place + ahead
        return place < len(self.tokens) and self.tokens[place]["number"] is not None

    def whole(self) -> sympy.Expr:
        value = self.sum()
        if self.peek():
            raise ValueError(f"{self.peek()} is left over")
        return value

    def sum(self) -> sympy.Expr:
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> sympy.Expr:
        value = self.signed()
        while True:
            if self.peek() in TIMES:
                self.take()
                value = value * self.signed()
            elif self.peek() in OVER:
                self.take()
                value = _quotient(value, self.signed())
            elif self.starts_factor():
                value = value * self.power()
            else:
                return value

    def starts_factor(self) -> bool:
        token = self.peek()
        if self.number():
            raise ValueError("a number follows a factor")
        if token == "{" and self.number(1):  # 4{10} is set as 410
            raise ValueError("a number in braces follows a factor")
        if token == "|":
            return not self.bars
        return token in ("(", "[", "{") or token.isalpha() or (token[:1] == "\\" and self.known())

    def known(self) -> bool:
        name = self.peek()[1:]
        return name in FUNCTIONS or name in GREEK or name in ("frac", "sqrt", "binom", "pi", "infty", "lfloor", "lceil")

    def signed(self) -> sympy.Expr:
        if self.peek() in ("+", "-"):
            return -self.signed() if self.take() == "-" else self.signed()
        return self.power()

    def power(self) -> sympy.Expr:
        value = self.atom()
        while self.peek() == "!":
            self.take()
            value = _factorial(value)
        if self.peek() != "^":
            return value
        self.take()
        return _power(value, self.exponent())

    def exponent(self) -> sympy.Expr:
        """A group, or one character: 2^10 is 2^1 followed by 0 in LaTeX, and is read as 2^{10}, which it means."""
        if self.peek() == "{":
            return self.group("{", "}")
        if self.peek() in ("+", "-"):
            return -self.exponent() if self.take() == "-" else self.exponent()
        return _number(self.take()) if self.number() else self.power()  # not a mixed number

    def group(self, left: str, right: str) -> sympy.Expr:
        self.take(left)
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.take(right)
        return value

    def argument(self) -> sympy.Expr:
        r"""Of \frac or \sqrt: a group, or one digit or letter."""
        if self.peek() == "{":
            return self.group("{", "}")
        if self.number():
            match = self.tokens[self.place]
            if not match[0].isdigit():
                raise ValueError("a number without braces")
            if len(match[0]) > 1:  # \frac12: one digit each
                self.tokens[self.place : self.place + 1] = TOKEN.finditer(" ".join(match[0]))
            return sympy.Integer(self.take())
        return self.atom()

    def atom(self) -> sympy.Expr:
        token = self.peek()
        if self.number():
            return self.mixed_number()
        if token in ("(", "["):
            return self.group(token, ")" if token == "(" else "]")
        if token == "{":
            return self.group("{", "}")
        if token == "|" or token == "\\|":
            self.take()
            self.bars += 1
            value = self.sum()
            self.bars -= 1
            self.take(token)
            return sympy.Abs(value)
        if token[:1] == "\\":
            return self.command(self.take()[1:])
        if token.isalpha() and token.isascii():
            self.take()
            return (
                {"e": sympy.E, "i": sympy.I}.get(token) if self.peek() != "_" and token in "ei" else self.symbol(token)
            )
        raise ValueError(f"{token or 'the end'} where a value is expected")

    def symbol(self, name: str) -> sympy.Symbol:
        if self.peek() == "_":
            self.take()
            depth, index = 0, ""
            while True:
                token = self.take()
                depth += {"{": 1, "}": -1}.get(token, 0)
                index += token if token not in "{}" else ""
                if depth == 0:
                    break
            name += "_" + index
        return sympy.Symbol(name)

    def mixed_number(self) -> sympy.Expr:
        whole = self.tokens[self.place]
        value = _number(self.take())
        if not whole[0].isdigit():
            if self.number():
                raise ValueError("two numbers")
            return value
        start = self.place
        if self.number() and self.peek(1) == "/" and self.number(2):
            top = _number(self.take())
            self.take("/")
            bottom = _number(self.take())
        elif self.peek() == "\\frac" and (numbers := self.whole_fraction()):
            top, bottom = numbers
        elif self.number():
            raise ValueError("two numbers")
        else:
            self.place = start
            return value
        if not (top.is_Integer and bottom.is_Integer and 0 < top < bottom):
            raise ValueError("not a mixed number")
        return value + sympy.Rational(top, bottom)

    def whole_fraction(self) -> tuple[sympy.Expr, sympy.Expr] | None:
        r"""The numbers of a \frac of whole numbers, which is then taken."""
        start = self.place
        self.take("\\frac")
        top, bottom = self.argument(), self.argument()
        if top.is_Integer and bottom.is_Integer:
            return top, bottom
        self.place = start
        return None

    def command(self, name: str) -> sympy.Expr:
        if name == "frac":
            return _quotient(self.argument(), self.argument())
        if name == "binom":
            return sympy.binomial(self.argument(), self.argument())
        if name == "sqrt":
            degree = self.group("[", "]") if self.peek() == "[" else sympy.Integer(2)
            return _root(self.argument(), degree)
        if name in ("lfloor", "lceil"):
            value = self.sum()
            self.take("\\rfloor" if name == "lfloor" else "\\rceil")
            return sympy.floor(value) if name == "lfloor" else sympy.ceiling(value)
        if name in ("pi", "infty"):
            return sympy.pi if name == "pi" else sympy.oo
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.symbol(f"\\{name}")
        raise ValueError(f"\\{name} is not known")

    def function(self, name: str) -> sympy.Expr:
        r"""\sin x, \sin^2 x, \sin^{-1} x, \log_2 8; the argument goes up to the next sign or function."""
        function, base, power = FUNCTIONS[name], None, None
        for _ in range(2):
            if self.peek() == "_" and name == "log":
                self.take()
                base = self.argument()
            elif self.peek() == "^":
                self.take()
                power = self.exponent()
        if self.peek() in ("(", "{", "["):
            value = self.group(self.peek(), {"(": ")", "{": "}", "[": "]"}[self.peek()])
        else:
            value = self.power()
            while self.starts_factor() and self.peek()[1:] not in FUNCTIONS:
                value = value * self.power()
        if power == -1:
            if name not in INVERSES:
                raise ValueError(f"\\{name}^{{-1}} is not known")
            function, power = INVERSES[name], None
        result = sympy.log(value, base) if base is not None else function(value)
        return result if power is None else _power(result, power)


def _number(text: str) -> sympy.Rational:
    match = NUMBER.fullmatch(text)
    assert match is not None
    digits, repeating, exponent = match.groups()
    value = Fraction(digits)
    if repeating:
        decimals = len(digits.partition(".")[2])
        if "." not in digits:
            raise ValueError("repeating digits without a point")
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**decimals)
    value *= Fraction(10) ** int(exponent or 0)
    return sympy.Rational(value.numerator, value.denominator)


def _quotient(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
    if bottom.is_zero:
        raise ValueError("a division by zero")
    return top / bottom


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    if exponent.is_number and exponent.is_finite:
        bits = sum(abs(number).bit_length() for number in (getattr(base, "p", 1), getattr(base, "q", 1)))
        if abs(sympy.N(exponent, 15)) * max(1, bits) > LARGEST_POWER:
            raise ValueError("a power that is too large")
    if base.is_zero and not exponent.is_positive:
        raise ValueError("a power of zero")
    return base**exponent


def _root(value: sympy.Expr, degree: sympy.Expr) -> sympy.Expr:
    if not (degree.is_Integer and 2 <= degree <= 100):
        raise ValueError("a root of no whole degree")
    return -((-value) ** (1 / degree)) if value.is_negative and degree % 2 else value ** (1 / degree)


def _factorial(value: sympy.Expr) -> sympy.Expr:
    if value.is_number and not (value.is_Integer and 0 <= value <= LARGEST_FACTORIAL):
        raise ValueError("a factorial that is too large")
    return sympy.factorial(value)


def value(text: str) -> sympy.Expr:
    """The exact value of an expression; ValueError if it has none or cannot be read."""
    result = Parser(text).whole()
    if result.has(sympy.nan, sympy.zoo):
        raise ValueError("not a number")
    return result


def same_value(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether two values are equal, proved; they are compared in numbers first, because most are not."""
    if one == other or one.has(sympy.oo) or other.has(sympy.oo):
        return bool(one == other)
    difference = one - other
    if difference.is_Rational or not _zero_in_numbers(difference):
        return bool(difference == 0)
    return sympy.expand(difference) == 0 or sympy.simplify(difference) == 0 or difference.equals(0) is True


def _zero_in_numbers(expression: sympy.Expr) -> bool:
    """Whether it is zero to DIGITS digits, at random points if it has symbols."""
    rng = random.Random(0)
    symbols = sorted(expression.free_symbols, key=str)
    for _ in range(POINTS if symbols else 1):
        point = {symbol: sympy.Rational(rng.randint(10**5, 10**6), 10**6) for symbol in symbols}
        number = expression.evalf(DIGITS, subs=point)
        if number.is_number and number.is_finite and abs(number) > sympy.Float(10) ** (10 - DIGITS):
            return False
    return True


def near(exact: sympy.Expr, rounded: sympy.Expr) -> bool:
    """Whether a rounded value is within a hundredth of the exact one."""
    return bool(abs(sympy.N(exact - rounded)) <= abs(sympy.N(exact)) / 100)


def proportional(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether one is the other times a number that is not zero: two equations with the same solutions."""
    if one == 0 or other == 0:
        return False
    ratio = sympy.cancel(one / other)
    return not ratio.free_symbols and ratio != 0
