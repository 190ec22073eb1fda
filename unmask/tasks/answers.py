r"""Where the answer is in a text that a model wrote: \boxed{...}, <answer> tags, numbers.

Everything here reads untrusted text: nothing raises, and every function takes time linear in the text, which
`spoken` and `whole` cut first. The functions with d1 in their name follow that project's evaluation, slips included,
as its stored verdicts show it (tests/test_d1_generations.py); docs/benchmarks.md lists the slips.
"""

import re
from fractions import Fraction

LONGEST = 20_000  # characters of a completion that are read
BOXED = "\\boxed"
ENDS = re.compile(r"<\|eot_id\|>|<\|endoftext\|>|<\|im_end\|>")
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def whole(completion: str) -> str:
    """The completion with its special tokens, bounded: what d1's graders read."""
    return completion[:LONGEST]


def spoken(completion: str) -> str:
    """What the model said before its first end token, bounded."""
    text = whole(completion)
    end = ENDS.search(text)
    return text[: end.start()] if end else text


def in_form(text: str) -> bool:
    """Whether the text has the four tags, each exactly once and in order."""
    places = [text.find(tag) for tag in TAGS]
    return -1 not in places and places == sorted(places) and all(text.count(tag) == 1 for tag in TAGS)


def closing_braces(text: str) -> dict[int, int]:
    """The place of each opening brace that is closed -> the place of its closing brace."""
    closing, open_places = {}, []
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            open_places.append(match.start())
        elif open_places:
            closing[open_places.pop()] = match.start()
    return closing


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...} that is closed and not empty."""
    closing = closing_braces(text)
    for match in reversed(list(re.finditer(r"\\boxed\s{0,3}\{", text))):
        start = match.end() - 1
        if start in closing and (content := text[start + 1 : closing[start]].strip()):
            return content
    return None


def last_answer(text: str) -> str | None:
    """What is in the last <answer> block, which the end of the text closes too; None where it is empty."""
    start = text.rfind("<answer>")
    return text[start + len("<answer>") :].partition("</answer>")[0].strip() or None if start >= 0 else None


def first_answer(text: str) -> str | None:
    """What is in the first closed <answer> block, stripped; it may be empty."""
    start, end = text.find("<answer>"), -1
    if start >= 0:
        end = text.find("</answer>", start)
    return text[start + len("<answer>") : end].strip() if end >= 0 else None


def d1_boxed(text: str) -> str | None:
    r"""What d1 takes for an answer of MATH500, and of Countdown at first: the last \boxed{...}, else <answer>.

    A text without any \boxed counts as the answer itself, so that its <answer> block is never looked at; that block
    is read only where the last \boxed is empty or is not closed.
    """
    start = text.rfind(BOXED)
    if start < 0:
        return text
    opening = start + len(BOXED)
    end = closing_braces(text).get(opening)
    content = None if end is None else text[opening + 1 : end]
    return content if content else first_answer(text) or content


NUMBER = re.compile(r"(?<![0-9.)])(-?)\$?([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(\.[0-9]+)?")
FRACTION = re.compile(
    r"(-?)\\[dt]?frac\{\s{0,9}(-?[0-9]{1,30})\s{0,9}\}\{\s{0,9}([0-9]{1,30})\s{0,9}\}"
    r"|(-?[0-9]{1,30})\s{0,9}/\s{0,9}([0-9]{1,30})"
)
DRESSING = re.compile(r"\\text\{[^{}]*\}|\\(?:mathrm|textbf|mathbf)\{[^{}]*\}|\\[,!;: ]|\\(?=\$)|\\left|\\right")
LONGEST_NUMBER = 40  # digits; longer ones are no answer to a word problem


def last_number(text: str) -> Fraction | None:
    r"""The last number of an answer, exact: 1,234.50, $-3$, −7, 1{,}000, \frac{3}{4}, 3/4."""
    text = DRESSING.sub(" ", text.replace("{,}", ",").replace("−", "-").replace("\\!", "").replace("\\,", ""))
    found: tuple[int, Fraction] | None = None
    for match in FRACTION.finditer(text):
        sign, top, bottom, plain_top, plain_bottom = match.groups()
        if int(bottom or plain_bottom):
            value = Fraction(int(top or plain_top), int(bottom or plain_bottom))
            found = match.end(), -value if sign else value
    for match in NUMBER.finditer(text):
        sign, units, decimals = match.groups()
        units, decimals = (units or "").replace(",", ""), decimals or ""
        within = found is not None and match.end() <= found[0]
        if not (units or decimals) or within:
            continue
        if len(units) + len(decimals) > LONGEST_NUMBER:
            found = None
            continue
        value = Fraction((units or "0") + decimals)
        found = match.end(), -value if sign else value
    return found[1] if found else None


def as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
