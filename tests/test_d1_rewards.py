"""d1's training rewards, slips included, against sums worked out by hand."""

import pytest

from unmask.tasks import TASKS
from unmask.tasks.benchmarks import gsm8k, math500, text_countdown, text_sudoku
from unmask.tasks.support import d1_rewards

GSM = {"question": "How many?", "answer": "3*4=<<3*4=12>>12 and 12-5=7.\n#### 7"}
FULL = "<reasoning>\nTwelve less five.\n</reasoning>\n<answer>\n7\n</answer>\n"


def gsm(text: str, **options: object) -> dict[str, float]:
    task = gsm8k.Gsm8k(rewards="d1", protocol="d1_train", **options)
    return task.parts(GSM, text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        # four eighths; nothing after the last "\n</answer>\n", one character after "\n</answer>", less one
        (FULL, 0.5),
        # the same without the last line's end: the third tag is charged for the whole text of 63 characters, and the
        # fourth for minus one
        (FULL[:-1], 0.5 - 0.063 + 0.001),
        # three characters behind it: charged three, and once more four less one
        (FULL + "abc", 0.5 - 0.003 - 0.003),
        # first tag twice: none of its eighth
        ("<reasoning>\n" + FULL, 0.375),
        # the answer twice: neither third nor fourth counts nor is charged
        (FULL + "\n<answer>\n7\n</answer>\n", 0.25),
        ("<reasoning>\nonly this", 0.125),
        ("\n<answer>\n7", 0.125 - 0.011),
        ("", 0.0),
    ],
)
def test_the_count_of_tags_and_trailing_text(text: str, count: float) -> None:
    assert len(FULL[:-1]) == 63
    assert gsm(text)["xml_count"] == pytest.approx(count, abs=1e-12)


def test_long_trailing_text_costs_more_than_the_rest_earns() -> None:
    assert gsm(FULL + "x" * 1000)["xml_count"] == pytest.approx(0.5 - 1.0 - 1.0)
    assert gsm8k.Gsm8k(rewards="d1", protocol="d1_train").reward(GSM, FULL + "x" * 3000) < 0


@pytest.mark.parametrize(
    ("text", "soft", "strict"),
    [
        (FULL, 0.0, 1.0),
        (FULL[:-1], 0.0, 0.0),  # the pattern wants a line's end
        (FULL.replace("less", "less\n"), 0.0, 0.0),  # reasoning of two lines: a dot matches no line's end
        ("<reasoning>a</reasoning>\n<answer>7</answer> and more", 1.0, 0.0),
        (" <reasoning>a</reasoning><answer>7</answer>", 0.0, 0.0),  # anchored at the start
        ("<reasoning>a\nb</reasoning><answer>7</answer>", 0.0, 0.0),
    ],
)
def test_formats_are_of_one_line_and_exclude_each_other(text: str, soft: float, strict: float) -> None:
    parts = gsm(text)
    assert (parts["soft_format"], parts["strict_format"]) == (soft, strict)


@pytest.mark.parametrize(
    ("answer", "integer", "right"),
    [
        ("7", 1.0, 1.0),
        (" 7 \n", 1.0, 1.0),
        ("7.0", 0.0, 0.0),
        ("-7", 0.0, 0.0),
        ("\\boxed{7}", 0.0, 0.0),
        ("²", 1.0, 0.0),  # isdigit, though int cannot read it
        ("", 0.0, 0.0),
        ("8</answer><answer>7", 1.0, 1.0),  # the last <answer> counts
    ],
)
def test_the_answer_is_compared_as_text(answer: str, integer: float, right: float) -> None:
    parts = gsm(f"<answer>{answer}</answer>")
    assert (parts["integer"], parts["correctness"]) == (integer, right)


def test_a_text_without_tags_is_the_answer_and_commas_count() -> None:
    assert gsm("7")["correctness"] == 1.0
    task = gsm8k.Gsm8k(rewards="d1", protocol="d1_train")
    thousand = {"question": "?", "answer": "#### 1,000"}
    assert [task.parts(thousand, f"<answer>{a}</answer>")["correctness"] for a in ("1,000", "1000")] == [1.0, 0.0]


def test_the_sum_and_its_weights() -> None:
    task = gsm8k.Gsm8k(rewards="d1", protocol="d1_train")
    assert task.weights == {
        "correctness": 2.0, "integer": 0.5, "soft_format": 0.5, "strict_format": 0.5, "xml_count": 1.0
    }  # fmt: skip
    assert task.reward(GSM, FULL) == 2 + 0.5 + 0.5 + 0.5
    assert task.reward(GSM, FULL.replace("7", "8")) == 1.5
    assert task.reward(GSM, "") == 0.0
    lighter = gsm8k.Gsm8k(rewards="d1", protocol="d1_train", weights={"integer": 0, "xml_count": 0})
    assert lighter.reward(GSM, FULL) == 2.5
    with pytest.raises(ValueError, match="soft_format"):
        gsm8k.Gsm8k(rewards="d1", protocol="d1_train", weights={"format": 1})


def test_the_prefill_counts_as_part_of_the_answer() -> None:
    """Under a prompt with a prefill the text of the answer begins with it; special tokens are not seen."""
    task, row = math500.Math500(rewards="d1", protocol="d1"), {"problem": "Which tag?", "answer": "<reasoning>7"}
    assert task.reward(row, "7") == task.reward(row, "7<|eot_id|><|endoftext|>") == 2.25


@pytest.mark.parametrize("kind", [gsm8k.Gsm8k, text_countdown.CountdownText])
def test_d1_rewards_with_a_prompt_of_another_protocol_are_refused(kind) -> None:
    """A right answer in a box, as the others ask for it, would earn less than a wrong one without."""
    for protocol in kind.protocols:
        task = kind(protocol=protocol)
        row = task.about.example
        if protocol == "d1_train":
            trained = kind(protocol=protocol, rewards="d1")
            assert "\\boxed" not in task.system + task.prompt(row) and trained.solved(row, trained.solution(row))
            # the answer, a whole number and the tags; without a line's end after the last tag no format is strict
            best = {"gsm8k": 2 + 0.5 + gsm(trained.solution(row))["xml_count"], "countdown_text": 1.0}
            assert trained.reward(row, trained.solution(row)) == best[task.name]
            continue
        with pytest.raises(ValueError, match=rf"{task.name}\.protocol=d1_train asks for one"):
            kind(protocol=protocol, rewards="d1")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>\\boxed{\\frac12}</answer>", 2.75),
        ("so \\boxed{0.5}", 2.25),
        ("\\boxed{3} or \\boxed{\\frac{1}{2}}", 2.25),  # the last box
        ("<answer>\\boxed{1}</answer>", 0.75),
        ("\\frac{1}{2}", 2.25),  # without a box the whole text is the answer
        ("\\boxed{\\frac{1}{2}", 0.25),  # not closed
        ("", 0.25),  # whatever the text: the test for a box is never true
    ],
)
def test_math(text: str, reward: float) -> None:
    task = math500.Math500(rewards="d1", protocol="d1")
    row = {"problem": "Half?", "answer": "\\frac{1}{2}"}
    # what d1's protocol begins an answer with is part of the text, and would be part of a text without a box
    plain = d1_rewards.MATH
    assert sum(part.weight * part.value(row, text) for part in plain.values()) == reward
    if "boxed" in text:
        assert task.reward(row, text) == reward
    assert task.reward_range == (0.25, 2.75)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>\n(8-3)*20\n</answer>", 1.0),
        ("<answer>1</answer><answer>(8-3)*20</answer>", 1.0),  # the last block
        ("<answer>(8-3)*20</answer><answer>1</answer>", 0.1),
        ("<answer>8+3+20</answer>", 0.1),  # another value
        ("<answer>5*20</answer>", 0.1),  # other numbers
        ("<answer>\\boxed{(8-3)*20}</answer>", 0.1),  # cannot be evaluated
        ("<answer>(8-3)*20 = 100</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>(8-3)*20", 0.0),  # not closed
        ("(8-3)*20", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(text: str, reward: float) -> None:
    row = {"numbers": [8, 3, 20], "target": 100}
    task = text_countdown.CountdownText(rewards="d1", protocol="d1_train")
    assert task.reward(row, text) == reward
    assert task.solved(row, text) == (reward == 1.0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>\n1342241331244231\n</answer>", 1.0),
        ("<answer>1342 2413 3124 4231</answer>", 1.0),
        ("<answer>13422413</answer>", 0.5),  # filled with zeros: three of the six empty cells are in the first rows
        ("<answer>13422413312442319999</answer>", 1.0),  # cut
        ("<answer>4x4: 1342241331244231</answer>", 0.0),  # two digits before it shift the grid
        ("<answer>0</answer><answer>none</answer>", 0.0),
        ("1342241331244231", 0.0),
    ],
)
def test_sudoku(text: str, reward: float) -> None:
    puzzle, grid = "1300041300240231", "1342241331244231"
    task = text_sudoku.SudokuText(rewards="d1", protocol="d1")
    assert task.reward({"puzzle": puzzle, "solution": grid}, text) == reward


@pytest.mark.parametrize("name", ["countdown_text", "sudoku_text"])
def test_partial_credit_cannot_be_combined_with_d1_rewards(name: str) -> None:
    with pytest.raises(ValueError, match="partial"):
        TASKS[name](rewards="d1", partial=0.5)


def test_a_hostile_text_costs_little() -> None:
    for piece in ("<reasoning>", "</reasoning><answer>", "<answer>", "</answer>", "\n</answer>\n", "\\boxed{", "9"):
        text = "<reasoning>" + piece * (100_000 // len(piece))
        for name, most in (("gsm8k", 1.5), ("math500", 1.5), ("countdown_text", 0.5), ("sudoku_text", 0.5)):
            task = TASKS[name](rewards="d1", protocol="d1_train" if name in ("gsm8k", "countdown_text") else "d1")
            assert task.about.example is not None and task.reward(task.about.example, text) <= most
