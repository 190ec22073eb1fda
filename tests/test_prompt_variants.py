"""Other wordings: templates that are text and nothing else, and paired differences with an interval that holds."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, card, prompt_hash
from unmask.evaluation.prompt_variants import (
    OWN_PROMPT,
    PromptVariant,
    paired_difference,
    read_prompt_variants,
    task_in_variant,
    template_text,
)
from unmask.models import tiny_policy
from unmask.rollout.decoding import Decoding
from unmask.tasks import TASKS
from unmask.tasks.task import Grade, Task
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import Z_95
from wording import mentions


def written(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_fields_are_put_in_their_places() -> None:
    fields = {"question": "How {many}?", "numbers": [3, 4], "schema": {"type": "integer"}, "n": 2, "name": "é"}
    template = "{{{question}}} {numbers} {schema}{n}{name}{{}}"
    assert template_text(template, fields) == '{How {many}?} [3, 4] {"type": "integer"}2é{}'
    assert template_text("no field", {}) == "no field" and template_text("", fields) == ""


@given(st.text())
def test_a_template_without_fields_is_its_text(text: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert template_text(escaped, {"question": "?"}) == text
    assert template_text("{question}" + escaped + "{question}", {"question": "?"}) == f"?{text}?"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{questoin}", "'questoin'"),
        ("\\boxed{}", "{{ and }}"),
        ("{question.__class__}", "{question.__class__}"),
        ("{question[0]}", "{question[0]}"),
        ("{question!r}", "{question!r}"),
        ("{question:>{answer}}", "{question"),
        ("{0}", "{0}"),
        ("}", "{{ and }}"),
        ("{question", "{{ and }}"),
    ],
)
def test_nothing_but_the_names_of_fields_is_understood(template: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        template_text(template, {"question": "?", "answer": "!"})
    assert told in str(error.value)


def test_a_task_in_other_words_is_else_the_same() -> None:
    task = TASKS["gsm8k"](protocol="d1")
    row = {"question": "How many?", "answer": "#### 4"}
    other = task_in_variant(task, PromptVariant("short", "Q: {question} A:", "here"))
    assert other.prompt(row) == "Q: How many? A:" and other.prefill == task.prefill
    assert other.grade(row, r"\boxed{4}") == task.grade(row, r"\boxed{4}") and other.decoding == task.decoding
    around = task_in_variant(task, PromptVariant("polite", f"Please. {{{OWN_PROMPT}}}", "here"))
    assert around.prompt(row) == f"Please. {task.prompt(row)}"


def test_a_file_of_wordings(tmp_path: Path) -> None:
    found = read_prompt_variants(written(tmp_path / "w.jsonl", {"name": "short", "template": "a"}, {"template": "b"}))
    assert [(w.name, w.template) for w in found] == [("short", "a"), ("wording 2", "b")]
    for name in ("own", "short"):
        rows = [{"name": "short", "template": "a"}, {"name": name, "template": "b"}]
        with pytest.raises(ValueError, match=f"row 2: the name '{name}' is taken"):
            read_prompt_variants(written(tmp_path / "bad.jsonl", *rows))


def test_one_prompt_has_one_hash() -> None:
    """In a table of lengths, in one of wordings, and worded anew in the same words; of the example, if it will do."""
    policy, task = tiny_policy(), TASKS["gsm8k"](protocol="d1")
    bench = Benchmark(policy, [{"question": "Who?", "answer": "#### 4", "id": "a"}])

    def told(task: Task, wording: str = "") -> tuple[str, str]:
        found = card(bench, BenchmarkCase(task, Decoding(8, 8, 8), MicroBatch(4), wording))
        return found["prompt"], found["template"]

    plain = told(task)
    assert plain[0] == prompt_hash(task, task.about.example) != prompt_hash(task, bench.rows[0])
    assert (
        told(task, "own") == told(task_in_variant(task, PromptVariant("same", "{own_prompt}", "here")), "same") == plain
    )
    assert told(task_in_variant(task, PromptVariant("other", "{question}", "here")), "other")[0] != plain[0]
    numbered = task_in_variant(
        task, PromptVariant("numbered", "{id}: {question}", "here")
    )  # which the example cannot be asked in
    assert told(numbered, "numbered")[0] == prompt_hash(numbered, bench.rows[0])


def verdicts(*right: int) -> list[Grade]:
    return [Grade(float(r), 1.0) for r in right]


def test_the_interval_of_a_paired_difference_is_agresti_and_mins() -> None:
    """By its formula: gained and lost problems, half a problem more of each, two more in all."""
    before, after = verdicts(1, 1, 0, 0, 0, 1, 0, 0), verdicts(1, 0, 1, 1, 1, 1, 0, 0)
    gained, lost, n = 3 + 0.5, 1 + 0.5, 8 + 2
    centre = (gained - lost) / n
    half = Z_95 * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    found = paired_difference(before, after)
    assert tuple(found) == pytest.approx((2 / 8, centre - half, centre + half))
    assert tuple(paired_difference(after, before)) == pytest.approx((-found.value, -found.high, -found.low))
    same = paired_difference(before, before)
    assert same.value == 0 and -same.low == pytest.approx(same.high) and same.high > 0.1  # eight alike prove little


def test_points_are_pooled_as_scores_are() -> None:
    """Two problems of eight and four cells: the difference of the scores, whatever the sizes."""
    before, after = [Grade(2.0, 8.0), Grade(1.0, 4.0)], [Grade(8.0, 8.0), Grade(0.0, 4.0)]
    found = paired_difference(before, after)
    assert found.value == pytest.approx(8 / 12 - 3 / 12) and -1 <= found.low < found.value < found.high <= 1
    scaled = [[Grade(3 * grade.points, 3 * grade.out_of) for grade in grades] for grades in (before, after)]
    assert tuple(paired_difference(*scaled)) == pytest.approx(tuple(found))


@pytest.mark.parametrize(("gains", "losses"), [(0.1, 0.1), (0.2, 0.05), (0.02, 0.0), (0.4, 0.3), (0.6, 0.1)])
def test_the_interval_holds_the_truth_as_often_as_it_says(gains: float, losses: float) -> None:
    """Every outcome of thirty problems with its probability."""
    n, holds = 30, 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            ways = math.comb(n, gained) * math.comb(n - gained, lost)
            chance = ways * gains**gained * losses**lost * (1 - gains - losses) ** (n - gained - lost)
            after = verdicts(*[1] * gained, *[0] * (n - gained))
            before = verdicts(*[0] * gained, *[1] * lost, *[0] * (n - gained - lost))
            found = paired_difference(before, after)
            holds += chance * (found.low <= gains - losses <= found.high)
    assert 0.93 < holds <= 1.0


def test_the_command_compares_wordings_on_the_same_problems(unmask, tmp_path: Path) -> None:
    file = written(
        tmp_path / "w.jsonl",
        {"name": "same", "template": "{puzzle}="},
        {"name": "strange", "template": "Solve this: {puzzle}="},
    )
    command = ["eval", "tiny", "--task", "sudoku", "--problems", "32", "--paraphrase", str(file)]
    code, said, _ = unmask(*command, "--out", "found.json")
    assert code == 0
    own, same, strange = json.loads((tmp_path / "found.json").read_text())
    assert [line["wording"] for line in (own, same, strange)] == ["own", "same", "strange"]
    assert same["answers"] == own["answers"] and same["card"]["prompt"] == own["card"]["prompt"]
    assert own["difference"] is None and same["difference"]["value"] == 0 < same["difference"]["high"]
    assert strange["card"]["prompt"] != own["card"]["prompt"]
    assert strange["difference"]["value"] == pytest.approx(strange["score"] - own["score"]) != 0
    low, high = sorted((own["score"], strange["score"]))
    assert f"spread: {100 * low:.1f} % (strange) to {100 * high:.1f} % (own)" in said
    code, found, _ = unmask(*command, "--json")
    assert [line["score"] for line in json.loads(found)] == [own["score"], same["score"], strange["score"]]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("Löse {puzzle}=", ["ASCII", "ö"]),
        ("{puzzel}=", ["puzzel", "puzzle"]),
        ("{own_prompt}" * 9, [153, "tokens"]),
    ],
)
def test_a_wording_that_cannot_be_asked_is_named_before_anything_is(unmask, tmp_path: Path, template, names) -> None:
    file = written(tmp_path / "w.jsonl", {"template": "{puzzle}="}, {"template": template})
    code, said, error = unmask("eval", "tiny", "--task", "sudoku", "--problems", "4", "--paraphrase", str(file))
    assert code == 2 and mentions(error, "w.jsonl:2", *names) and not said
