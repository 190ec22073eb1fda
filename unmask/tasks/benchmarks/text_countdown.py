r"""Countdown in words: reach the target with + - * / from the given numbers, each used once.

Protocols:
    unmask    the last \boxed{...}, else the last <answer> block; exact fractions, by the embedded task's `expression`
    d1        the last \boxed{...}, else the first equation; Python's arithmetic, within 1e-5; see docs/benchmarks.md
    d1_train  d1's training form: the expression alone in <answer>, without a box or a prefill
    agrpo     graded like unmask; the system turn asks for <think>; trained on problems from the hub
    short     numbers and target without rule or form, for a model that was fine-tuned on the form; graded like unmask
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence

from unmask.tasks.puzzles.countdown import LONGEST, Countdown, numbers_key, points, reachable
from unmask.tasks.support import d1_answers, d1_rewards
from unmask.tasks.support.answers import bounded_text, last_answer, last_box, text_before_end
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.protocol import (
    D1_DECODING,
    Protocol,
    Rewards,
    TextPuzzle,
    answer_form,
    tagged_completion,
    think_protocol,
)
from unmask.tasks.task import About, Grade, Row, Weights

FIELDS = {"numbers": list, "target": int}
HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
FEWEST, MOST = 2, 6  # numbers of a row
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}
DRESSING = re.compile(r"\\left|\\right|\\[()\[\],!; ]|\$|\\text\{[^{}]*\}")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
EQUATION = re.compile(r"([^=]*)=\s{0,9}-?[0-9.]{1,30}\s{0,9}")

D1_SIGNS = {"\\div": "/", "\\times": "*", "\\cdot": "*"}
D1_EQUATION = re.compile(r"([0-9+\-*/() ]+)=[0-9. ]+")
D1_ALPHABET = re.compile(r"[0-9+\-*/().\s]+")
Number = int | float | complex
D1_OPERATIONS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
LARGEST_POWER = 1000  # of a power's base and exponent


def _with_signs(text: str, signs: dict[str, str]) -> str:
    for old, new in signs.items():
        text = text.replace(old, new)
    return text


def answer(completion: str) -> str | None:
    """The last expression of the completion, in plain signs; unchanged if it is too long."""
    text = text_before_end(completion)
    content = last_box(text) or last_answer(text)
    if content is None or len(content) > 4 * LONGEST:
        return content
    content = DRESSING.sub("", _with_signs(content, SIGNS))
    while FRACTION.search(content):
        content = FRACTION.sub(r"((\1)/(\2))", content)
    equation = EQUATION.fullmatch(content)
    return (equation[1] if equation else content).strip()


def grade(row: Row, completion: str) -> Grade:
    text = answer(completion) or ""
    return Grade(float(points(row, text, 0.0) == 1.0), 1.0, text)


def d1_answer(completion: str) -> str:
    """The expression that d1 reads; the left side of the first equation in the box or, without a box, in the text."""
    content = _with_signs(d1_answers.countdown_answer(bounded_text(completion)), D1_SIGNS)
    equation = D1_EQUATION.search(content) if "=" in content else None
    return equation[1].strip() if equation else content


def d1_value(text: str) -> Number | None:
    """The value in Python's arithmetic, // and ** included; None if it has none or a power is too large."""
    if len(text) > LONGEST or not D1_ALPHABET.fullmatch(text):
        return None
    try:
        return _d1_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, TypeError):  # TypeError: // of a complex number
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
    if isinstance(node.op, ast.Pow) and max(abs(left), abs(right)) > LARGEST_POWER:
        return None
    return D1_OPERATIONS[type(node.op)](left, right)


def d1_grade(row: Row, completion: str) -> Grade:
    text, right = d1_answer(completion), False
    if len(text) <= LONGEST and sorted(map(int, re.findall(r"[0-9]+", text))) == sorted(row["numbers"]):
        value = d1_value(text)
        right = value is not None and abs(value - row["target"]) < 1e-5
    return Grade(float(right), 1.0, text)


RULE = "Make the target from the numbers with + - * / and parentheses. Use every number exactly once."


def question(row: Row) -> str:
    return f"Numbers: [{', '.join(map(str, row['numbers']))}]\nTarget: {row['target']}"


def prompt(row: Row) -> str:
    form = answer_form("\\boxed{the expression alone}")
    return f"{RULE}\n\n{question(row)}\n\nWrite your answer in exactly this form:\n{form}"


# Reconstructed from a description of d1's prompt, not copied: its hash differs from d1's. The missing space before
# "Respond" is in the description.
D1_INSTRUCTIONS = (
    "Using only the provided numbers, create an arithmetic expression that evaluates to exactly the provided target "
    "number. You may use the operations +, -, *, and / as needed, but each number must be used exactly once. "
    "Think step by step. After reasoning, provide only your final expression inside \\boxed{} tags without including "
    "an equals sign or the target number. For example: \\boxed{a + b * c}"
    "Respond in the following format:\n" + answer_form("\\boxed{...}", "Your reasoning here")
)


def d1_train_prompt(row: Row) -> str:
    """Our wording: of d1's training prompt we know only that the answer is an expression in <answer>."""
    return "\n\n".join((answer_form("the expression alone"), RULE, question(row)))


def d1_train_grade(row: Row, completion: str) -> Grade:
    """Right if d1's reward is 1: its evaluation reads a box, which this prompt does not ask for."""
    text = d1_rewards.plain_text(completion)
    score = d1_rewards.expression_score(text, row["numbers"], row["target"], d1_value)
    return Grade(float(score == 1.0), 1.0, d1_rewards.last_block(text) or "")


def first_rows() -> Sequence[Row]:
    """AGRPO's training rows, before the number sets of the test are left out."""
    return [{"numbers": row["nums"], "target": row["target"]} for row in hub_rows(HUB, None, "train[:20000]")]


PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: f"{D1_INSTRUCTIONS}\n\n{question(row)}", d1_grade, decoding=D1_DECODING),
    "d1_train": Protocol(d1_train_prompt, d1_train_grade, prefill="", decoding=D1_DECODING),
    "agrpo": think_protocol(question, grade, RULE, "\\boxed{the expression alone}", sets={"train": first_rows}),
    "short": Protocol(lambda row: f"Countdown: {' '.join(map(str, row['numbers']))} to {row['target']}", grade),
}


class CountdownText(TextPuzzle):
    """Generated problems with `numbers` numbers up to 100, or JSONL files with `numbers` and `target`.

    The reward is 1 for an expression with the right numbers and value, `partial` for the right numbers only;
    `weights` makes it one of several parts, `rewards` selects d1's.
    """

    name = "countdown_text"
    summary = "Countdown in words, generated or from a file"
    about = About(
        source=f"generated (agrpo trains on {HUB} from the hub); or JSONL files with numbers and target",
        separation="by the set of numbers: one in five is for the test",
        example={"numbers": [8, 3, 20], "target": 44, "solution": "3*8+20"},
        protocols=tuple(PROTOCOLS),
    )
    protocols = PROTOCOLS
    d1_parts = d1_rewards.countdown_parts(d1_value)
    row_fields = FIELDS

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        protocol: str = "unmask",
        numbers: int = 3,
        partial: float = 0.0,
        rewards: Rewards = "unmask",
        weights: Weights = None,
    ) -> None:
        super().__init__(data, test_data, protocol, partial, rewards, weights)
        if not 3 <= numbers <= MOST:
            raise ValueError(f"numbers must be within 3 to {MOST} for generated problems, not {numbers}")
        self.set_generator(Countdown(numbers=numbers, largest=100, target_largest=100, signs="+-*/"))

    def parse_row(self, row: Row) -> Row:
        numbers, target = row["numbers"], row["target"]
        if not FEWEST <= len(numbers) <= MOST or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f'"numbers" must be {FEWEST} to {MOST} whole numbers, not {numbers}')
        if type(target) is not int:
            raise ValueError(f'"target" must be a whole number, not {target!r}')
        return row

    def key(self, row: Row) -> str:
        return numbers_key(row["numbers"])

    def stored_row(self, line: Row) -> Row:
        """A line with `numbers` and `target`, or [numbers, target] as `ground_truth`."""
        truth = [line["numbers"], line["target"]] if "numbers" in line and "target" in line else line["ground_truth"]
        if not isinstance(truth, list) or len(truth) != 2:
            raise ValueError('"ground_truth" must be [numbers, target]')
        numbers, target = truth
        if not isinstance(numbers, list):
            raise ValueError('"numbers" must be a list')
        return self.parse_row({"numbers": numbers, "target": target})

    def credit(self, row: Row, completion: str) -> float:
        return min(self.partial, points(row, answer(completion) or "", self.partial))

    def tagged_solution(self, row: Row) -> str:
        """The expression in the row, else the shortest with whole results."""
        expression = row.get("solution") or reachable(tuple(sorted(row["numbers"]))).get(row["target"])
        if expression is None:
            raise ValueError(f"{question(row)!r} has no solution in whole numbers")
        boxed = expression if self.protocol == "d1_train" else f"\\boxed{{{expression}}}"
        return tagged_completion(f"{expression} = {row['target']}", boxed)
