r"""The answer in a text that a model wrote: \boxed{...}, <answer> tags, numbers.

The text is untrusted: nothing raises, and every function takes time linear in the text, which `text_before_end` and
`bounded_text` cut first.
"""

import re
from fractions import Fraction

LONGEST = 20_000  # characters of a completion that are read
ENDS = re.compile(r"<\|eot_id\|>|<\|endoftext\|>|<\|im_end\|>")
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def bounded_text(completion: str) -> str:
    """The completion with its special tokens, bounded: the text that d1's graders read."""
    return completion[:LONGEST]


def text_before_end(completion: str) -> str:
    """The completion up to its first end token, bounded."""
    text = bounded_text(completion)
    end = ENDS.search(text)
    return text[: end.start()] if end else text


def in_form(text: str) -> bool:
    """Whether the text has the four tags once each, in order, and text in both pairs."""
    places = [text.find(tag) for tag in TAGS]
    if -1 in places or places != sorted(places) or any(text.count(tag) > 1 for tag in TAGS):
        return False
    starts = (place + len(tag) for place, tag in zip(places, TAGS, strict=True))
    inside = [text[start:end] for start, end in zip(starts, places[1:], strict=False)]
    return bool(inside[0].strip() and inside[2].strip())


def closing_braces(text: str) -> dict[int, int]:
    """The place of each closed opening brace -> the place of its closing brace."""
    closing, open_places = {}, []
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            open_places.append(match.start())
        elif open_places:
            closing[open_places.pop()] = match.start()
    return closing


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed and not empty."""
    closing = closing_braces(text)
    for match in reversed(list(re.finditer(r"\\boxed\s{0,3}\{", text))):
        start = match.end() - 1
        if start in closing and (content := text[start + 1 : closing[start]].strip()):
            return content
    return None


def last_answer(text: str) -> str | None:
    """The content of the last <answer> block, which the end of the text also closes; None if it is empty."""
    start = text.rfind("<answer>")
    return text[start + len("<answer>") :].partition("</answer>")[0].strip() or None if start >= 0 else None


def first_answer(text: str) -> str | None:
    """The content of the first closed <answer> block, stripped; it may be empty."""
    start, end = text.find("<answer>"), -1
    if start >= 0:
        end = text.find("</answer>", start)
    return text[start + len("<answer>") : end].strip() if end >= 0 else None


DIGITS = "[0-9]{1,40}"  # longer numbers do not answer a word problem
GROUPS = "[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9]{1,3}(?:[ _][0-9]{3}){1,12}"
NUMBER = re.compile(
    rf"""(?<![0-9.])(?<![0-9][,_]) (?P<sign>[-+$]{{0,2}}) (?:
    (?:(?P<ones>{DIGITS})\s?)? \\[dt]?frac\s? (?:\{{\s?(?P<top>-?{DIGITS})\s?\}}|(?P<digit>[0-9]))\s?
        (?:\{{\s?(?P<bottom>{DIGITS})\s?\}}|(?P<under>[0-9]))
    | (?:(?P<whole>{DIGITS})\s)? (?P<upper>{DIGITS})\s?/\s?(?P<lower>{DIGITS})
    | (?P<base>{DIGITS})\s?(?:\^|\*\*)\s? (?:\{{\s?(?P<braced>-?[0-9]{{1,3}})\s?\}}|(?P<bare>[0-9]{{1,3}}))
    | (?=\.?[0-9]) (?P<units>{GROUPS}|{DIGITS})? (?P<decimals>\.{DIGITS})? (?:[eE](?P<places>[-+]?[0-9]{{1,2}}))?
    ) (?![0-9]|[.,_][0-9])""",
    re.VERBOSE,
)
# If this precedes or follows a number, the number is part of an expression, which is not evaluated here.
BEFORE = re.compile(r"(?:[*/^_×·÷+]|\\(?:times|cdot|div)|[0-9)}%]\s?[-:(]|[A-Za-z}]\{|[0-9]\s.*\s-)\s?$")
BEHIND = re.compile(r"\s?(?:[*/^×·÷+]\s?[0-9({\\]|\\(?:times|cdot|div|frac|sqrt)|\()|\s-\s?[0-9]")
ASIDE = re.compile(r"(?<=\s)\([^()]*\)")
DRESSING = re.compile(r"\\[;: ]|\\(?=\$)|\\left|\\right|\\?\bboxed|[\u00a0\u2007\u2009\u202f]")
LETTERED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]*)\}")
BOLD = re.compile(r"(?<![0-9])\*\*([^*]{1,200})\*\*")
LONGEST_NUMBER = 40  # digits of a power


def last_number(text: str) -> Fraction | None:
    r"""The number that an answer ends with, exact: 1,234.50, 1 000, $-3$, −7, 1{,}000, 3\frac12, 3/4, 2^{10}, 1e3.

    The search is after the last equals sign; words around the number and brackets after it are ignored. None for a
    number that is part of an expression: 16-7, 9 \times 2, \sqrt{16}, 1/0.
    """
    for old, new in (("{,}", ","), ("−", "-"), ("\\!", ""), ("\\,", "")):
        text = text.replace(old, new)
    text = LETTERED.sub(lambda match: " " if re.search("[A-Za-z]", match[1]) else match[1], text)
    text = BOLD.sub(r" \1 ", DRESSING.sub(" ", text)).rpartition("=")[2]
    outside = ASIDE.sub(" ", text)
    text = outside if re.search("[0-9]", outside) else text
    if not (numbers := list(NUMBER.finditer(text))):
        return None
    number = numbers[-1]
    before = text[: number.start()][-40:]
    subtracted = number["sign"].strip("$") and re.search(r"[0-9)}]\s?$", before)
    if subtracted or BEFORE.search(before) or BEHIND.match(text, number.end()):
        return None
    value = _value({name: part or "" for name, part in number.groupdict().items()})
    return -value if value is not None and "-" in number["sign"] else value


def _value(part: dict[str, str]) -> Fraction | None:
    """The value of a number from the groups of its pattern."""
    top, bottom = part["top"] or part["digit"] or part["upper"], part["bottom"] or part["under"] or part["lower"]
    if bottom:
        return int(part["ones"] or part["whole"] or 0) + Fraction(int(top), int(bottom)) if int(bottom) else None
    base, power = re.sub("[ ,_]", "", part["base"] or part["units"]) or "0", int(part["braced"] or part["bare"] or 1)
    if len(base) * abs(power) > LONGEST_NUMBER or (power < 0 and not int(base)):
        return None
    return (Fraction(base) ** power + Fraction(part["decimals"] or 0)) * Fraction(10) ** int(part["places"] or 0)


def as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
