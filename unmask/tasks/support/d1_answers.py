r"""The answers that d1's evaluation (dllm-reasoning/d1) reads, and when it takes two formulas as equal.

These functions behave like d1's, errors included, on the 3,138 stored generations of tests/test_d1_generations.py;
docs/benchmarks.md lists the errors.
"""

from unmask.tasks.support.answers import first_answer

BOXED, SPACED = "\\boxed", "\\boxed "
# Replaced in this order. Two backslashes are a new line of a matrix, which becomes one backslash.
PLAINER = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


def box(text: str) -> str | None:
    r"""The content of the last \boxed{...}; None if it is not closed; the whole text if there is no box.

    If a space follows any \boxed, the text from the last of these up to the next dollar sign. An \fbox{...} counts if
    there is no \boxed; it keeps its command, and so does a \boxed without a brace of its own.
    """
    if SPACED in text:
        return text.rpartition(SPACED)[2].partition("$")[0]
    start = text.rfind(BOXED)
    if start < 0 and (start := text.rfind("\\fbox")) < 0:
        return text
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                content = text[start : place + 1]
                return content[len(BOXED) + 1 : -1] if content.startswith(BOXED + "{") else content
    return None


def math_answer(text: str) -> str | None:
    """The box; the first <answer> block if the box is empty or not closed."""
    content = box(text)
    block = None if content else first_answer(text)
    return content if block is None else block


def countdown_answer(text: str) -> str:
    """The box, also if it is empty; else the first <answer> block, else the whole text, if the box is not closed."""
    content = box(text)
    if content is None:
        content = first_answer(text)
    return text if content is None else content


def equal(answer: str, gold: str) -> bool:
    """Whether the normal forms are equal; whether the texts are, if one has no normal form."""
    try:
        return normal(answer) == normal(gold)
    except ValueError:
        return answer == gold


def normal(text: str) -> str:
    r"""An answer in the normal form of Hendrycks' MATH: \tfrac12 is \frac{1}{2}, and so is 0.5. ValueError if d1's
    normalisation stops: at two units, at \sqrt or \frac without an argument, or at a/b with other than whole numbers.
    """
    for old, new in PLAINER:
        text = text.replace(old, new)
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError(f"{text} has two units")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # x = 5
        text = sides[1]
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        text = "\\frac{1}{2}"
    sides = text.split("/")
    if len(sides) != 2:
        return text
    top, bottom = map(int, sides)
    return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text


def _braced_roots(text: str) -> str:
    r"""\sqrt3 -> \sqrt{3}."""
    head, *parts = text.split("\\sqrt")
    if "" in parts:
        raise ValueError(f"{text} has a root of nothing")
    return head + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in parts)


def _braced_fractions(text: str) -> str:
    r"""\frac12 -> \frac{1}{2}, \frac1{72} -> \frac{1}{72}; a text with an incomplete fraction stays the same."""
    result, *parts = text.split("\\frac")
    for part in parts:
        if not part:
            raise ValueError(f"{text} has an empty fraction")
        if part[0] == "{":
            result += "\\frac" + part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            result += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            result += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return result
