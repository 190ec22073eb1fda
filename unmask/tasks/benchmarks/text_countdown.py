r"""Countdown in words: reach the target with + - * / from the given numbers, each used once.

Protocols:
    unmask  the last \boxed{...}, else the last <answer> block; exact fractions over a bounded syntax tree, by
            `expression` of the embedded task
    d1      the last \boxed{...}, else the first equation anywhere; Python's arithmetic, within 1e-5; see
            docs/benchmarks.md
    d1_train  in the form of what d1 trains with: the expression alone in <answer>, without a box or a prefill
    agrpo   graded as unmask; <think> asked for by a system's turn, trained on problems from the hub
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from unmask.tasks.puzzles import countdown
from unmask.tasks.puzzles.countdown import LONGEST, expression, in_test
from unmask.tasks.support import d1_rewards
from unmask.tasks.support.answers import d1_boxed, last_answer, last_boxed, spoken, whole
from unmask.tasks.support.composite import Rewards, Weights
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.manner import D1
from unmask.tasks.support.protocol import SKELETON, Protocol, check_d1_rewards, chosen, text_task, thinking, written_out
from unmask.tasks.support.sources import Shape, puzzle_rows, set_rows
from unmask.tasks.task import About, Grade, Row, Task, checked_partial

HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
HELD_OUT = 256  # generated test problems, where training problems come from the hub
FEWEST, MOST = 2, 6  # numbers of a row
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}
DRESSING = re.compile(r"\\left|\\right|\\[()\[\],!; ]|\$|\\text\{[^{}]*\}")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
EQUATION = re.compile(r"([^=]*)=\s{0,9}-?[0-9.]{1,30}\s{0,9}")

D1_SIGNS = {"\\div": "/", "\\times": "*", "\\cdot": "*"}
D1_EQUATION = re.compile(r"([0-9+\-*/() ]+)=[0-9. ]+")
D1_ALPHABET = re.compile(r"[0-9+\-*/(). ]+\n?")
Number = int | float
D1_OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
LARGEST_POWER = 1000  # of a power's base and exponent


def _replaced(text: str, signs: dict[str, str]) -> str:
    for old, new in signs.items():
        text = text.replace(old, new)
    return text


def answer(completion: str) -> str | None:
    """The expression that the completion ends with, in plain signs; the text as it stands where it is too long."""
    text = spoken(completion)
    found = last_boxed(text) or last_answer(text)
    if found is None or len(found) > 4 * LONGEST:
        return found
    found = DRESSING.sub("", _replaced(found, SIGNS))
    while FRACTION.search(found):
        found = FRACTION.sub(r"((\1)/(\2))", found)
    equation = EQUATION.fullmatch(found)
    return (equation[1] if equation else found).strip()


def grade(row: Row, completion: str) -> Grade:
    found = answer(completion)
    return Grade(float(_points(row, found, 0.0) == 1.0), 1.0, found or "")


def _points(row: Row, text: str | None, partial: float) -> float:
    value = expression(text) if text is not None else None
    if value is None or Counter(value[1]) != Counter(row["numbers"]):
        return 0.0
    return 1.0 if value[0] == row["target"] else partial


def d1_answer(completion: str) -> str:
    """The expression d1 reads: of a text without a box, what is before the first equals sign of an equation."""
    text = whole(completion)
    found = d1_boxed(text)
    found = _replaced(text if found is None else found, D1_SIGNS)
    equation = D1_EQUATION.search(found) if "=" in found else None
    return equation[1].strip() if equation else found


def d1_value(text: str) -> Number | None:
    """The value in Python's arithmetic, // and ** included; None where it has none or where a power is immense."""
    if len(text) > LONGEST or not D1_ALPHABET.fullmatch(text):
        return None
    try:
        return _d1_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError):
        return None


def _d1_value(node: ast.expr) -> Number | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _d1_value(node.operand)
        return value if value is None or isinstance(node.op, ast.UAdd) else -value
    if not isinstance(node, ast.BinOp) or type(node.op) not in D1_OPERATIONS:
        return None
    left, right = _d1_value(node.left), _d1_value(node.right)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Pow) and (max(abs(left), abs(right)) > LARGEST_POWER or (left < 0 and right % 1)):
        return None
    return D1_OPERATIONS[type(node.op)](left, right)


def d1_grade(row: Row, completion: str) -> Grade:
    found = d1_answer(completion)
    right = False
    if len(found) <= LONGEST and sorted(map(int, re.findall(r"[0-9]+", found))) == sorted(row["numbers"]):
        value = d1_value(found)
        right = value is not None and abs(value - row["target"]) < 1e-5
    return Grade(float(right), 1.0, found)


RULE = "Make the target from the numbers with + - * / and parentheses. Use every number exactly once."


def question(row: Row) -> str:
    return f"Numbers: [{', '.join(map(str, row['numbers']))}]\nTarget: {row['target']}"


def prompt(row: Row) -> str:
    form = SKELETON.format(reasoning="your reasoning, step by step", answer="\\boxed{the expression alone}")
    return f"{RULE}\n\n{question(row)}\n\nWrite your answer in exactly this form:\n{form}"


# Reconstructed from a description of d1's prompt, not copied: its hash differs from d1's. That the sentence runs into
# "Respond" is described there.
D1_INSTRUCTIONS = (
    "Using only the provided numbers, create an arithmetic expression that evaluates to exactly the provided target "
    "number. You may use the operations +, -, *, and / as needed, but each number must be used exactly once. "
    "Think step by step. After reasoning, provide only your final expression inside \\boxed{} tags without including "
    "an equals sign or the target number. For example: \\boxed{a + b * c}"
    "Respond in the following format:\n" + SKELETON.format(reasoning="Your reasoning here", answer="\\boxed{...}")
)


def d1_train_prompt(row: Row) -> str:
    """Ours: of the prompt that d1 trains with, it is known here that the answer is an expression in <answer>."""
    form = SKELETON.format(reasoning="your reasoning, step by step", answer="the expression alone")
    return f"{form}\n\n{RULE}\n\n{question(row)}"


def d1_train_grade(row: Row, completion: str) -> Grade:
    """Right where d1's reward is 1: its evaluation would look for a box, which this prompt does not ask for."""
    text = d1_rewards.read(completion)
    earned = d1_rewards.expression_score(text, row["numbers"], row["target"], d1_value)
    return Grade(float(earned == 1.0), 1.0, d1_rewards.last_block(text) or "")


def first_rows() -> Sequence[Row]:
    """What AGRPO trains on, before the numbers of the test are left out."""
    return [{"numbers": row["nums"], "target": row["target"]} for row in hub_rows(HUB, None, "train[:20000]")]


PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: f"{D1_INSTRUCTIONS}\n\n{question(row)}", d1_grade, manner=D1),
    "d1_train": Protocol(d1_train_prompt, d1_train_grade, prefill="", manner=D1),
    "agrpo": replace(thinking(question, grade, RULE, "\\boxed{the expression alone}"), sets={"train": first_rows}),
}


def shaped(row: Row) -> Row:
    numbers, target = row["numbers"], row["target"]
    if not FEWEST <= len(numbers) <= MOST or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f'"numbers" must be {FEWEST} to {MOST} whole numbers, not {numbers}')
    if type(target) is not int:
        raise ValueError(f'"target" must be a whole number, not {target!r}')
    return row


SHAPE = Shape(
    wanted={"numbers": list, "target": int},
    row=shaped,
    key=lambda row: tuple(sorted(row["numbers"])),
    split=lambda row: "test" if in_test(row["numbers"]) else "train",
)


def stored_row(line: Row) -> Row:
    """The row that a stored generation answers: its `numbers` and `target`, or [numbers, target] as `ground_truth`."""
    if "numbers" in line and "target" in line:
        numbers, target = line["numbers"], line["target"]
    else:
        match line["ground_truth"]:
            case [numbers, target]:
                pass
            case _:
                raise ValueError('"ground_truth" must be [numbers, target]')
    if not isinstance(numbers, list):
        raise ValueError('"numbers" must be a list')
    return shaped({"numbers": numbers, "target": target})


def solution(row: Row, form: str = "\\boxed{{{}}}") -> str:
    """The expression the row brings; a file need not bring one, and then the shortest of whole numbers is found."""
    found = row.get("solution") or countdown.reachable(tuple(sorted(row["numbers"]))).get(row["target"])
    if found is None:
        raise ValueError(f"{question(row)!r} has no solution in whole numbers")
    return written_out(f"{found} = {row['target']}", form.format(found))


ABOUT = About(
    source=f"generated (agrpo trains on {HUB} from the hub); or JSONL files with numbers and target",
    apart="by the set of numbers: one in five is for the test",
    example={"numbers": [8, 3, 20], "target": 44, "solution": "3*8+20"},
    protocols=tuple(PROTOCOLS),
)


def task(
    data: str = "",
    test_data: str = "",
    protocol: str = "unmask",
    numbers: int = 3,
    partial: float = 0.0,
    rewards: Rewards = "unmask",
    weights: Weights = None,
) -> Task:
    """Generated problems with `numbers` numbers up to 100, or JSONL files with `numbers` and `target`.

    The reward is 1 for an expression with the right numbers and value, `partial` for the right numbers alone;
    `weights` makes it one of several parts, `rewards` takes d1's.
    """
    partial = checked_partial("countdown_text", partial)
    if partial and rewards == "d1":
        raise ValueError("partial: d1's rewards have their own credit for a wrong answer; leave it out")
    if not 3 <= numbers <= MOST:
        raise ValueError(f"numbers must be within 3 to {MOST} where problems are generated, not {numbers}")
    generated = countdown.task(numbers=numbers, largest=100, target_largest=100, signs="+-*/").rows
    rules = chosen(PROTOCOLS, protocol)
    check_d1_rewards("countdown_text", rewards, rules)
    rows = puzzle_rows("countdown_text", data, test_data, SHAPE, generated)
    if rules.sets:
        held_out = rules.source(lambda split: generated(split, HELD_OUT, 0))
        rows = set_rows("countdown_text", data, test_data, SHAPE, held_out)
    return text_task(
        name="countdown_text",
        summary="Countdown in words, generated or from a file",
        rows=rows,
        solution=(lambda row: solution(row, "{}")) if rules.name == "d1_train" else solution,
        protocol=rules,
        about=ABOUT,
        weights=weights,
        parts=d1_rewards.countdown_parts(d1_value) if rewards == "d1" else None,
        fixed=bool(data or test_data or rules.sets),
        credit=lambda row, completion: min(partial, _points(row, answer(completion), partial)),
        stored=stored_row,
    )
