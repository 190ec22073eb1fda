"""What protocols decide besides prompt and grader: how answers are made, a system's turn, and their own data."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from helpers import EOS, MASK, Net
from naive import PAD, assert_by_hand, by_hand, decoder
from unmask.core.token_sampling import TokenSampling
from unmask.models import load_model
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions
from unmask.tasks import TASKS
from unmask.tasks.benchmarks import gsm8k, math500, mbpp, text_countdown, text_sudoku
from unmask.tasks.support.answers import text_before_end
from unmask.tasks.support.protocol import JUSTGRPO_DECODING
from unmask.util.micro_batch import MicroBatch

STORED = Path(__file__).parents[2] / "shared" / "data" / "d1_generations" / "graded.jsonl.gz"

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]]
HOW = Decoding(8, 4, 4, sampling=TokenSampling(0.0))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attended_padding_is_a_prompt_that_begins_with_padding(kind: str) -> None:
    """As a straight line computes it, row by row with no mask; and so an answer depends on the rest of its batch."""
    policy, seed_B = decoder(kind, dtype=torch.float64), torch.arange(4)
    how = replace(HOW, attend_padding=True)
    trace = unmask.sample(policy, PROMPTS, seed_B, how, micro_batch=MicroBatch(4)).trace
    shape = {"order": "low_confidence", "length": 8, "steps": 4, "block": 4, "sampling": TokenSampling(0.0)}
    alike = [by_hand(policy, [PAD] * (6 - len(p)) + p, i, **shape) for i, p in enumerate(PROMPTS)]
    assert_by_hand(trace, alike, 1e-9)
    alone = [by_hand(policy, p, i, **shape) for i, p in enumerate(PROMPTS)]
    assert [row.tokens for row in alone] != [row.tokens for row in alike]
    masked = unmask.sample(policy, PROMPTS, seed_B, HOW, micro_batch=MicroBatch(4)).trace
    assert_by_hand(masked, alone, 1e-9)  # masked padding changes nothing
    two = unmask.sample(policy, PROMPTS, seed_B, how, micro_batch=MicroBatch(2)).trace  # another batch, other answers
    assert two.tokens_BL[:2, -8:].tolist() != trace.tokens_BL[:2, -8:].tolist()
    assert torch.equal(
        unmask.sample(policy, PROMPTS, seed_B, HOW, micro_batch=MicroBatch(2)).trace.tokens_BL[:, -8:],
        masked.tokens_BL[:, -8:],
    )


def test_what_nothing_ends_is_filled_to_its_end_and_begins_alike() -> None:
    policy, prompts = Net(ends=2.5), [[3, 4], [5], [3, 1, 6, 4], [6, 6]]
    how = Decoding(12, 12, 4, sampling=TokenSampling(0.0))
    ended, whole = (
        unmask.sample(policy, prompts, torch.arange(4), way, micro_batch=MicroBatch(4))
        .trace.tokens_BL[:, -12:]
        .tolist()
        for way in (how, replace(how, stops=False))
    )
    assert any(MASK in row for row in ended) and not any(MASK in row for row in whole)
    for short, long in zip(ended, whole, strict=True):
        said = short.index(EOS) + 1 if EOS in short else 12
        assert short[:said] == long[:said]


def test_what_nothing_ends_is_read_whole_with_its_special_tokens() -> None:
    policy = load_model("tiny")
    ids = [[*policy.tokenizer.encode("a"), 2, *policy.tokenizer.encode("b")]]
    trace = unmask.sample(
        policy, [[5]], torch.zeros(1, dtype=torch.long), Decoding(3, 3, 3), micro_batch=MicroBatch(1)
    ).trace
    trace = replace(trace, tokens_BL=torch.tensor([[5, *ids[0]]]))
    assert completions(policy, trace, 3) == ["a"]
    assert completions(policy, replace(trace, eos_id=-1), 3) == ["a\u00b6b"]


@pytest.mark.skipif(not STORED.is_file(), reason="needs the shared data folder beside the checkout")
def test_special_tokens_change_verdicts_of_d1() -> None:
    """Of its stored Sudoku answers, five; of the others none. As docs/benchmarks.md says."""
    names = {"gsm8k": "gsm8k", "math500": "math500", "countdown": "countdown_text", "sudoku": "sudoku_text"}
    tasks = {name: TASKS[task](protocol="d1") for name, task in names.items()}
    with gzip.open(STORED, "rt") as file:
        lines = [json.loads(line) for line in file]
    changed = Counter()
    for line in lines:
        task, whole = tasks[line["task"]], line["generation"]
        row, cut = task.stored_row(line), text_before_end(whole)
        if task.grade(row, whole)[:2] != task.grade(row, cut)[:2]:
            changed[line["task"]] += 1
    assert changed == {"sudoku": 5} and sum(line["task"] == "sudoku" for line in lines) == 372


QUESTION = {"question": "How many?", "answer": "Two and two. #### 4"}


def test_agrpo_speaks_in_a_systems_turn_and_thinks() -> None:
    task = gsm8k.Gsm8k(protocol="agrpo")
    assert task.prompt(QUESTION) == "How many?" and task.prefill == "" and "<think>\n" in task.system
    assert task.solution(QUESTION).startswith("<think>\nTwo and two.\n</think>\n<answer>\n\\boxed{4}")
    assert task.solved(QUESTION, task.solution(QUESTION))
    assert gsm8k.Gsm8k().solution(QUESTION).startswith("\nTwo and two.\n</reasoning>\n<answer>\n\\boxed{4}")
    policy = load_model("tiny")
    both = policy.tokenizer.encode(f"{task.system}\n\nHow many?")
    assert task.prompt_ids(policy.tokenizer, QUESTION) == both


def hub(monkeypatch: pytest.MonkeyPatch, module: Any, sets: dict[tuple[str, str], list[dict]]) -> None:
    def rows(name: str, config: str | None, split: str) -> list[dict]:
        return sets[name, split]

    monkeypatch.setattr(module, "hub_rows", rows)


def test_agrpo_tests_gsm8k_on_platinum(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"question": "How few?", "answer": "#### 1"}
    sets = {("openai/gsm8k", "train"): [QUESTION, other], ("openai/gsm8k", "test"): [other]}
    hub(monkeypatch, gsm8k, sets | {(gsm8k.PLATINUM, "test"): [QUESTION]})
    task = gsm8k.Gsm8k(protocol="agrpo")
    assert task.rows("test", 5, 0) == [QUESTION] and task.rows("train", 1, 0) == [other]
    assert gsm8k.Gsm8k().rows("test", 5, 0) == [other] and gsm8k.Gsm8k().rows("train", 1, 0) == [QUESTION]


def test_agrpo_trains_on_the_easier_part_of_math_without_math500(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sympy")
    levels = ["Level 1", "Level 2", "Level 3", "Level 4", "Level 5", "Level ?"]
    rows = [{"problem": f"P{i}", "level": level, "solution": f"\\boxed{{{i}}}"} for i, level in enumerate(levels)]
    hub(monkeypatch, math500, {(math500.MATH, "train"): rows, ("HuggingFaceH4/MATH-500", "test"): rows[1:2]})
    drawn = math500.Math500(protocol="agrpo").rows("train", 3, 0)
    assert sorted(row["problem"] for row in drawn) == ["P0", "P2", "P3"]


def test_agrpo_trains_on_countdown_from_the_hub_without_the_numbers_of_the_test(monkeypatch, tmp_path) -> None:
    numbers = [[1, 2, 3], [4, 5, 6, 7], [3, 2, 1], [8, 9, 10]]
    rows = [{"nums": n, "target": 6} for n in numbers]
    hub(monkeypatch, text_countdown, {(text_countdown.HUB, "train[:20000]"): rows})
    (tmp_path / "test.jsonl").write_text('{"numbers": [2, 3, 1], "target": 7}\n')
    task = text_countdown.CountdownText(protocol="agrpo", test_data=str(tmp_path / "test.jsonl"))
    assert sorted(row["numbers"] for row in task.rows("train", 2, 0)) == [[4, 5, 6, 7], [8, 9, 10]]
    generated = text_countdown.CountdownText(protocol="agrpo").rows("test", 300, 0)
    assert generated == text_countdown.CountdownText().rows("test", 256, 0)


def test_justgrpo_is_ours_one_token_a_step_one_problem_at_a_time() -> None:
    own, justgrpo = gsm8k.Gsm8k(), gsm8k.Gsm8k(protocol="justgrpo")
    assert justgrpo.decoding is JUSTGRPO_DECODING and justgrpo.prompt(QUESTION) == own.prompt(QUESTION)
    assert mbpp.Mbpp(protocol="justgrpo").decoding is JUSTGRPO_DECODING
    assert text_sudoku.SudokuText(protocol="spg_3shot").decoding == text_sudoku.SudokuText(protocol="d1").decoding
