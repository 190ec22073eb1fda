r"""The form of an answer in LaTeX: an expression with a unit, a list, a set, a tuple, an interval, a matrix and others.

`form` reads a whole answer or raises ValueError: nothing is skipped. It decides the structure only; the expressions in
it stay text, which math_values.py evaluates. The text is untrusted and short: verifier.py bounds it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unmask.tasks.support.math_units import MEASURES, unit_name
from unmask.tasks.support.math_values import GREEK

UNICODE = {
    **dict.fromkeys("−–‐", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u202f\t\n\r", " "),
    **{"×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "θ": "\\theta ", "∞": "\\infty ", "√": "\\sqrt "},
    **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∪": "\\cup ", "∈": "\\in "},
    **{"°": "\\degree ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "∅": "\\emptyset "},
}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# Replaced in this order.
PLAIN = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\\\", "\\\\newrow "),
        (r"\\(?:text)?color\{\w+\}|\\[hv]space\*?\{[^{}]*\}", " "),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\[!,;: ]|~|\\(?:q?quad|enspace|thinspace|displaystyle|textstyle)(?![A-Za-z])", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
        (r"\\[()\[\]]|(?<!\\)\$", " "),
        (r"\\\$", "\\\\dollar "),
        (r"\\?%", "\\\\percent "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "\\\\degree "),
        (r"\\[dtc]frac(?![A-Za-z])", "\\\\frac"),
        (r"\\(?:leqslant|leq)(?![A-Za-z])", "\\\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])", "\\\\ge "),
        (r"\\neq(?![A-Za-z])", "\\\\ne "),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])|\\\{\s*\\\}", "\\\\emptyset "),
        (r"\\(?:lor|vee)(?![A-Za-z])", "\\\\word{or}"),
        (r"\\(?:land|wedge)(?![A-Za-z])", "\\\\word{and}"),
    )
]
# 58,\!500, 58{,}500, 58\,500 and 0.000\,25; and 58 500. The first group does not begin with 0: 0,500 may be a decimal.
GROUPED = re.compile(
    r"(?<![\d.])[1-9]\d{0,2}(?:(?:,\\!\s*|\{,\}|\\,|\\;|~)\d{3})+(?!\d)|(?<=\.)(?:\d{3}\\,)+\d{1,3}(?!\d)"
)
SPACED = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?: \d{3})+(?![\d./]| /)")
FONTS = re.compile(r"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|underline|boxed|fbox|bold|pmb)\s*(?=\{)")
UPRIGHT = re.compile(r"\\mathrm\s*\{([ei])\}")
TEXTS = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|operatorname|emph)\s*(?=\{)")
LEAD = re.compile(r"(?:the\s)?(?:final\s)?answer\s?(?:is|:)\s", re.IGNORECASE)
RELATION = re.compile(r"<|>|=|\\(?:le|ge|ne|approx)(?![A-Za-z])")
NOUNS = """
answer area volume perimeter circumference radius diameter length width height depth distance speed time cost price
profit total sum product difference quotient remainder ratio rate average mean median mode probability angle slope
number value age weight mass result minimum maximum
"""
INDEX = r"(?:_(?:\w|\{\s*\w+\s*\}))?"
LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))})(?![A-Za-z])){INDEX}"
VARIABLE = re.compile(
    rf"{LETTER}|(?!NOT)[A-Z]{{2,3}}{INDEX}|\\word\{{\s*(?i:{'|'.join(NOUNS.split())})\s*\}}{INDEX}\s*[A-Z]{{0,4}}"
)
FUNCTION = re.compile(rf"{LETTER}\s*\((?:[a-z](?:,\s*[a-z])*|-?\d+)\)")
POINT = re.compile(r"\([a-z](?:,\s*[a-z])+\)")
NAME = re.compile(f"{VARIABLE.pattern}|{FUNCTION.pattern}|{POINT.pattern}")
SYMBOL = re.compile(rf"(?:\\[A-Za-z]+|[A-Za-z]){INDEX}")
BASE = re.compile(r"(-?)\(?((?=[A-F]*[0-9])[0-9A-F]+)\)?_(?:(\d)|\{\s*(?:\\word\{)?\s*(?:base\s+)?(\w+)\s*\}?\s*\})")
BASES = dict(zip(("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), range(2, 11), strict=True))
MATRIX = re.compile(r"(.*?)\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\2\}")
BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\mid|:|\|)(.*)\\\}")
SQUARED = r"\s*(?:\^\s*(?:\{\s*([23])\s*\}|([23])))?\s*$"
WORD_UNIT = re.compile(r"\\word\{([^{}]*)\}" + SQUARED)
BARE_UNIT = re.compile(r"(?<=[\d})\s])((?:\s*+[A-Za-z]{2,}+\.?+)++)" + SQUARED)
OPENING, CLOSING = ("(", "[", "{", "\\{", "\\langle"), (")", "]", "}", "\\}", "\\rangle")
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


@dataclass(frozen=True)
class Form:
    kind: str
    """expression, base, word, list, set, tuple, interval, union, matrix, equation, chain or rounded."""
    parts: tuple["Form", ...] = ()
    text: str = ""
    """An expression or a word; digits and base; the brackets of an interval; rows and columns of a matrix."""
    unit: str = ""
    name: str = ""
    """x in x = 5 and x > 0; f(x) in f(x) = 2x; (x,y) in (x,y) = (3,5)."""


def form(text: str) -> Form:
    """The form of an answer; ValueError if a part of it cannot be read."""
    return _form(_plain(text))


def word(text: str) -> str:
    r"""The letters of an answer that is nothing but words: C for \text{(C)}, empty for 5."""
    return _word(_plain(text))


def _word(text: str) -> str:
    text = re.sub(r"\\word\{([^{}]*)\}", r"\1", text).replace("\\emptyset", "emptyset").strip()
    words = re.fullmatch(r"[A-Za-z][A-Za-z\s.]*|\([A-Za-z]\)", text)
    return re.sub(r"[\s().]", "", text) if words else ""


def _plain(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    for old, new in UNICODE.items():
        text = text.replace(old, new)
    text = LEAD.sub("", text, count=1) if LEAD.match(text) else text
    text = UPRIGHT.sub(r" \1 ", text)
    text = _unwrapped(FONTS, text, lambda content: f" {content} ")
    text = _unwrapped(
        TEXTS, text, lambda content: f"\\word{{{content}}}" if re.search("[a-zA-Z]", content) else content
    )
    text = GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    for pattern, new in PLAIN:
        text = pattern.sub(new, text)
    return _trimmed(SPACED.sub(lambda match: match[0].replace(" ", ""), text))


def _unwrapped(command: re.Pattern[str], text: str, replaced: Callable[[str], str]) -> str:
    """The text with every command{content} replaced, the inner ones first."""
    while places := list(command.finditer(text)):
        start, opening = places[-1].start(), places[-1].end()
        end = _closing(text, opening)
        text = text[:start] + replaced(text[opening + 1 : end]) + text[end + 1 :]
    return text


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) * (text[place - 1 : place] != "\\")
        if depth == 0:
            return place
    raise ValueError("a brace is open")


def _trimmed(text: str) -> str:
    """Without white space, a full stop or comma at the end, and braces around all of it."""
    while True:
        text = text.strip().rstrip(".,;: ") if not text.rstrip().endswith("\\") else text.strip()
        if not text.startswith("{") or _closing(text, 0) != len(text) - 1:
            return text
        text = text[1:-1]


def _tokens(text: str) -> Iterator[tuple[int, str, int]]:
    """(place, token, depth of brackets around it); a half-open interval closes with the other bracket."""
    depth = 0
    for match in TOKEN.finditer(text):
        token = match[0]
        if token in CLOSING:
            depth -= 1
        yield match.start(), token, depth
        if token in OPENING:
            depth += 1
    if depth:
        raise ValueError("a bracket is open")


def _split(text: str, separators: re.Pattern[str]) -> list[str]:
    """The parts between separators outside brackets; separators that are groups of the pattern are kept."""
    parts, start, skip = [], 0, 0
    for place, _, depth in _tokens(text):
        if depth == 0 and place >= skip and (match := separators.match(text, place)):
            parts += [text[start:place], *match.groups()]
            start = skip = match.end()
    return [*parts, text[start:]]


UNION = re.compile(r"\\cup(?![A-Za-z])|\\word\{\s*or\s*\}")
COMMAS = re.compile(r"[,;]\s*(?:\\word\{\s*(?:and|or)\s*\})?|\\word\{\s*(?:and|or)\s*\}")
RELATIONS = re.compile(rf"({RELATION.pattern})")
MEMBER = re.compile(r"\\in(?![A-Za-z])")


def _form(text: str) -> Form:
    text = _trimmed(text)
    if not text:
        raise ValueError("there is nothing")
    if match := BASE.fullmatch(text):
        base = match[3] or match[4]
        return Form("base", text=f"{match[1]}{match[2]} {BASES.get(base, base)}")
    if match := BUILDER.fullmatch(text):
        return _form(match[2])
    if len(parts := _split(text, MEMBER)) == 2 and VARIABLE.fullmatch(parts[0].strip()):
        return _named(parts[0], _form(parts[1]))
    if len(parts := _split(text, UNION)) > 1 and all(_is_range(part) for part in parts):
        return _union([_form(part) for part in parts])
    if len(parts := _split(_joined_thousands(text), COMMAS)) > 1:
        return Form("list", tuple(part for each in parts for part in _listed(_form(each))))
    if len(parts := _split(text, RELATIONS)) > 1:
        return _relation([part.strip() for part in parts])
    if bracketed := _bracketed(text):
        return bracketed
    if match := MATRIX.fullmatch(text):
        return _matrix(match[1], match[3])
    if (text == "\\emptyset" or "\\word" in text) and (letters := _word(text)):
        return Form("word", text=letters)
    return _expression(_joined_thousands(text))


def _joined_thousands(text: str) -> str:
    """58,500 -> 58500, also in braces, but not in other brackets, where a comma separates."""

    def joined(match: re.Match[str]) -> str:
        before = re.sub(r"\\[{}]", lambda brace: "(" if brace[0] == "\\{" else ")", text[: match.start()])
        inside = sum(before.count(mark) for mark in "([") - sum(before.count(mark) for mark in ")]")
        return match[0] if inside else match[0].replace(",", "")

    return re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", joined, text)


def _is_range(text: str) -> bool:
    return bool(re.search(r"[(\[].*,.*[)\]]", text)) or any(mark in text for mark in ("<", ">", "\\le", "\\ge", "\\ne"))


def _union(parts: list[Form]) -> Form:
    names = {part.name for part in parts if part.name}
    if len(names) > 1 or any(part.kind not in ("tuple", "interval", "union") for part in parts):
        raise ValueError("not a union of intervals")
    flat = [one for part in parts for one in (part.parts if part.kind == "union" else (part,))]
    return Form("union", tuple(Form(one.kind, one.parts, one.text) for one in flat), name="".join(names))


def _listed(part: Form) -> tuple[Form, ...]:
    """The parts of 1 \\pm 2 within a list."""
    return part.parts if part.kind == "list" and not part.name else (part,)


def _named(name: str, value: Form) -> Form:
    name = re.sub(r"[\s{}]", "", name)
    if value.name and value.name != name:
        raise ValueError("two names")
    if value.kind == "chain":
        return Form("chain", tuple(_named(name, side) for side in value.parts))
    if POINT.fullmatch(name) and (value.kind != "tuple" or len(value.parts) != name.count(",") + 1):
        raise ValueError("a point without its coordinates")
    if FUNCTION.fullmatch(name) and (arguments := _arguments(name)) and not arguments & _symbols(value.text):
        raise ValueError("a function of something else")
    return Form(value.kind, value.parts, value.text, value.unit, name)


def _arguments(name: str) -> set[str]:
    """The letters in the brackets of f(x,y)."""
    return set(re.findall("[a-z]", name.partition("(")[2]))


def _symbols(text: str) -> set[str]:
    return {re.sub(r"[\s{}]", "", symbol) for symbol in SYMBOL.findall(re.sub(r"\\word\{[^{}]*\}", "", text))}


def _relation(parts: list[str]) -> Form:
    """x = 5, 5 = x, 2 + 3 = 5, 2x + y = 0, 0 < x \\le 5, x \\ne 5."""
    if "\\approx" in parts:  # the exact value comes first
        place = parts.index("\\approx")
        exact = _relation(parts[:place]) if place > 1 else _form(parts[0])
        return Form("rounded", (exact, _form("".join(parts[place + 1 :]))))
    sides, signs = parts[::2], parts[1::2]
    if set(signs) == {"="}:
        return _equality([side for place, side in enumerate(sides) if side or place])
    if "=" in signs or not all(sides):
        raise ValueError("a relation without a side")
    return _range(sides, signs)


def _equality(sides: list[str]) -> Form:
    if len(sides) == 1:
        return _form(sides[0])
    if len(sides) == 2 and not NAME.fullmatch(sides[0]) and NAME.fullmatch(sides[1]):
        sides = sides[::-1]
    if NAME.fullmatch(sides[0]):
        name, *others = sides
        if not any(_symbols(name.partition("(")[0]) & _symbols(side) for side in others):
            return _named(name, _equality(others))
    forms = tuple(_form(side) for side in sides)
    symbols = re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", "".join(one.text for one in forms)))
    return Form("equation" if symbols and len(sides) == 2 else "chain", forms)


def _range(sides: list[str], signs: list[str]) -> Form:
    """The interval of an inequality with one name."""
    places = [place for place, side in enumerate(sides) if VARIABLE.fullmatch(side)]
    if len(places) != 1 or len(sides) > 3 or (len(sides) == 3 and places != [1]):
        raise ValueError("not an inequality of one name")
    name = sides[places[0]]
    if len(sides) == 2 and places == [1]:
        flip = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
        sides, signs = sides[::-1], [flip[signs[0]]]
    if len(sides) == 2:
        end, sign = _expression(sides[1]), signs[0]
        if sign == "\\ne":
            return _named(name, Form("union", (_interval("(", LOW, end, ")"), _interval("(", end, HIGH, ")"))))
        if sign in ("<", "\\le"):
            return _named(name, _interval("(", LOW, end, ")" if sign == "<" else "]"))
        return _named(name, _interval("(" if sign == ">" else "[", end, HIGH, ")"))
    low, high = _expression(sides[0]), _expression(sides[2])
    if set(signs) <= {">", "\\ge"}:
        low, high, signs = high, low, signs[::-1]
    elif not set(signs) <= {"<", "\\le"}:
        raise ValueError("not an interval")
    brackets = ["(" if signs[0] in "<>" else "[", ")" if signs[1] in "<>" else "]"]
    return _named(name, _interval(brackets[0], low, high, brackets[1]))


def _interval(left: str, low: Form, high: Form, right: str) -> Form:
    """An open interval is written as a pair is."""
    return Form("tuple", (low, high)) if left + right == "()" else Form("interval", (low, high), left + right)


def _bracketed(text: str) -> Form | None:
    """A tuple, an interval or a set, if one pair of brackets is around the whole text."""
    tokens = list(_tokens(text))
    if tokens[0][1] not in OPENING or tokens[0][1] == "{" or tokens[-1][1] not in CLOSING or len(tokens) < 3:
        return None
    if any(depth == 0 for _, _, depth in tokens[1:-1]):
        return None
    left, right = tokens[0][1], tokens[-1][1]
    parts = _split(text[len(left) : tokens[-1][0]], re.compile("[,;]"))
    if left == "\\{" and right == "\\}":
        return Form("set", tuple(one for part in parts for one in _listed(_form(part))))
    if len(parts) == 1:
        return _form(parts[0]) if (left, right) in (("(", ")"), ("[", "]")) else None
    forms = tuple(_form(part) for part in parts)
    names = [one.name for one in forms]
    if any(names):  # (x=3, y=5)
        coordinates = tuple(Form(one.kind, one.parts, one.text, one.unit) for one in forms)
        if (left, right) != ("(", ")") or not POINT.fullmatch(f"({','.join(names)})"):
            raise ValueError("names that are not coordinates")
        return Form("tuple", coordinates, name=f"({','.join(names)})")
    if (left, right) in (("(", ")"), ("\\langle", "\\rangle")):
        return Form("tuple", forms)
    if len(forms) == 2 and left in "([" and right in ")]":
        return Form("interval", forms, left + right)
    raise ValueError("brackets that do not fit")


def _matrix(factor: str, body: str) -> Form:
    rows = [row.split("&") for row in body.strip().removesuffix("\\newrow").split("\\newrow")]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows of different lengths")
    factor = factor.strip() if factor.strip() in ("", "-") else f"({factor})"
    entries = (f"{factor}({entry})" if factor else entry for row in rows for entry in row)
    return Form("matrix", tuple(_expression(entry.strip()) for entry in entries), f"{len(rows)} {len(rows[0])}")


def _expression(text: str) -> Form:
    text, unit = _without_unit(text.strip())
    if "\\word" in text or not text.strip():
        raise ValueError(f"{text} has words that are not a unit")
    if "\\pm" in text or "\\mp" in text:
        signs = ({"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"})
        texts = [text.replace("\\pm", sign["\\pm"]).replace("\\mp", sign["\\mp"]) for sign in signs]
        return Form("list", tuple(Form("expression", text=one.strip(), unit=unit) for one in texts))
    return Form("expression", text=text.strip(), unit=unit)


def _without_unit(text: str) -> tuple[str, str]:
    """The text and its unit: degrees, percent, dollars, or words after the number."""
    text, unit = _without_words(text)
    for mark in ("degree", "percent", "dollar"):
        if text.endswith(f"\\{mark}") or (mark == "dollar" and re.match(r"-?\s*\\dollar ", text)):
            text = text.replace(f"\\{mark}", " ", 1).strip()
            if unit not in ("", mark):
                raise ValueError("two units")
            unit = mark
    return text, unit


def _without_words(text: str) -> tuple[str, str]:
    r"""The text and the unit in the words after it. Letters outside \text are variables unless they are a unit."""
    in_text = WORD_UNIT.search(text)
    match = in_text or BARE_UNIT.search(text)
    if match is None:
        return text, ""
    words, *powers = match.groups("")
    try:
        name = unit_name(words + {"2": " squared", "3": " cubed"}.get("".join(powers), ""))
    except ValueError:
        if in_text:
            raise
        return text, ""
    if not in_text and ("?" in name or (not words[0].isspace() and name.partition("^")[0] not in MEASURES)):
        return text, ""
    return text[: match.start()].strip(), name


LOW, HIGH = Form("expression", text="-\\infty"), Form("expression", text="\\infty")
