"""The field's table: every figure from answers that are known, and a card that says how it was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from task_variants import task_of

import unmask
from checkpoints import LLADA_SPECIALS, LLADA_TEMPLATE, LLADA_TEXT, llada, with_tokenizer
from helpers import MASK, Net, sample
from naive import by_hand
from unmask import sandbox
from unmask.config import read_config
from unmask.core.schedule import timestep
from unmask.core.token_sampling import TokenSampling
from unmask.evaluation.benchmark import (
    Benchmark,
    BenchmarkCase,
    card,
    cases_by_length,
    completion_lengths,
    forward_passes,
    measure,
    protocol_decoding,
    short_hash,
)
from unmask.evaluation.evaluate import Evaluator
from unmask.models import load_model
from unmask.rollout.decoding import Decoding
from unmask.tasks import TASKS
from unmask.tasks.benchmarks import gsm8k
from unmask.tasks.support.protocol import D1_DECODING, JUSTGRPO_DECODING
from unmask.tasks.task import FIELD_DECODING, Grade, Task
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import wilson_interval

PROBLEMS = [{"question": f"What is {n}?", "answer": f"It is {n}. #### {n}"} for n in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return path


@pytest.fixture(scope="session")
def bytes_llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaDA of random weights with a token for each byte, and room for real prompts."""
    settings = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "chat_template": LLADA_TEMPLATE}
    folder, _, _ = llada(tmp_path_factory.mktemp("models") / "bytes", **LLADA_TEXT, max_sequence_length=4096)
    return with_tokenizer(folder, LLADA_SPECIALS, **settings)


def letter_task() -> Task:
    """Points for how often a completion says 31, out of two; the model is asked for Sudoku."""
    return task_of(
        name="letters",
        summary="",
        length=16,
        rows=lambda split, n, seed: [{"i": i} for i in range(n)],
        prompt=lambda row: "..3.1...2.......=" if row["i"] % 2 else "1.3.1...2.......=",
        solution=lambda row: "",
        reward=lambda row, text: 0.0,
        solved=lambda row, text: "11" in text,
        text=True,
        grade=lambda row, text: Grade(float(min(2, text.count("31"))), 2.0, text),
    )


def test_decodings_are_those_of_their_protocols() -> None:
    def told(protocol, length):
        how = protocol_decoding(protocol, length)
        assert how.sampling.temperature == 0.0
        return how.steps, how.block, how.attend_padding, how.stops

    assert [told(FIELD_DECODING, n) for n in (128, 256, 512)] == [(n // 2, 32, False, True) for n in (128, 256, 512)]
    assert [told(D1_DECODING, n) for n in (128, 256, 512)] == [(n // 2, 32, True, False) for n in (128, 256, 512)]
    assert [D1_DECODING.batch(n) for n in (128, 256, 512)] == [8, 8, 4]
    assert told(JUSTGRPO_DECODING, 256) == (256, 32, False, True) and JUSTGRPO_DECODING.batch(512) == 1
    assert told(FIELD_DECODING, 16)[:2] == (8, 16) and told(FIELD_DECODING, 1)[:2] == (1, 1)


def test_batches_are_the_protocols_where_it_says_so() -> None:
    d1, ours = gsm8k.Gsm8k(protocol="d1"), gsm8k.Gsm8k()
    assert [case.micro_batch.size for case in cases_by_length(d1, [128, 512], None, MicroBatch(32))] == [8, 4]
    assert [case.micro_batch.size for case in cases_by_length(ours, [128, 512], None, MicroBatch(32))] == [32, 32]


def test_a_line_is_what_grading_the_greedy_answers_gives() -> None:
    policy, task = load_model("tiny"), letter_task()
    bench = Benchmark(policy, task.rows("test", 6, 0))
    case = BenchmarkCase(task, protocol_decoding(FIELD_DECODING, 16), MicroBatch(4))
    line = measure(bench, case)
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in bench.rows]
    trace = unmask.sample(
        policy, prompts, torch.zeros(6, dtype=torch.long), case.decoding, micro_batch=MicroBatch(64)
    ).trace
    texts = [policy.tokenizer.decode(ids) for ids in trace.tokens_BL[:, -16:].tolist()]
    assert list(line.texts) == texts  # greedy: noise and batch do not matter
    points = sum(min(2, text.count("31")) for text in texts)
    assert 0 < points < 12 and line.score.value == pytest.approx(points / 12)
    assert line.tokens == pytest.approx(sum(len(text) for text in texts) / 6)
    assert line.passes == 8
    assert line.data()["card"] == card(bench, case) and line.sampled == {}


def test_pass_at_k_of_a_table_is_that_of_an_evaluation() -> None:
    policy, task = load_model("tiny"), TASKS["sudoku"]()
    rows, how = task.rows("test", 12, 0), Decoding(16, 8, 16)
    line = measure(
        Benchmark(policy, rows, samples=4, sampling=how.sampling, seed=5), BenchmarkCase(task, how, MicroBatch(5))
    )
    expected = Evaluator(policy, task, how, samples=4, seed=5).evaluate(rows)
    assert line.sampled == expected.passes and 0 < line.sampled[1].value < line.sampled[4].value
    assert line.score == expected.greedy
    assert line.data()["pass@4"] == expected.passes[4]._asdict()
    told = "4 at temperature 1.0, top_k 0, top_p 1.0, guidance 0.0, seed 5"
    assert line.card["temperature"] == 0.0 and line.card["sampled"] == told


def test_samples_are_guided_as_the_line_is_and_the_card_has_their_whole_law() -> None:
    policy, task = load_model("tiny"), TASKS["sudoku"]()
    rows, law = task.rows("test", 6, 0), TokenSampling(0.7, top_k=3, top_p=0.9, guidance=1.0)
    bench = Benchmark(policy, rows, samples=2, sampling=law, seed=1234567)
    line = measure(bench, BenchmarkCase(task, protocol_decoding(FIELD_DECODING, 16), MicroBatch(8)))
    told = "2 at temperature 0.7, top_k 3, top_p 0.9, guidance 0.0, seed 1234567"
    assert (line.card["sampled"], line.card["guidance"]) == (told, 0)  # a protocol's line is not guided
    how = replace(protocol_decoding(FIELD_DECODING, 16), sampling=replace(law, guidance=0.0))
    assert line.sampled == Evaluator(policy, task, how, samples=2, seed=1234567).evaluate(rows).passes
    guided = card(bench, BenchmarkCase(task, Decoding(16, 8, 16, sampling=law), MicroBatch(8)))
    assert (guided["sampled"], guided["guidance"]) == (told.replace("guidance 0", "guidance 1"), 1)


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 6, "block": 6},
        {"steps": 8, "block": 3},
        {"threshold": 0.4},
        {"schedule": timestep, "steps": 9},
        {"steps": 6, "block": 4, "sampling": TokenSampling(0.0, guidance=1.0)},
    ],
)
def test_the_passes_counted_are_those_that_a_row_makes_alone(how: dict) -> None:
    policy = Net(ends=1.0)
    how = {"length": 12, "sampling": TokenSampling(0.0), **how}
    prompts = [[3, 4], [5], [3, 1, 6, 4], [6, 6]]
    trace = sample(policy, prompts, torch.arange(4), **how).trace
    each = 2 if trace.sampling.guidance else 1
    expected = [each * by_hand(policy, p, i, order="low_confidence", **how).forwards for i, p in enumerate(prompts)]
    assert forward_passes(trace) == expected and len(set(expected)) > 1
    for i, prompt in enumerate(prompts):
        policy.calls.clear()
        sample(policy, [prompt], torch.tensor([i]), **how)
        assert len(policy.calls) == expected[i]
    said = [row[-12:] for row in trace.tokens_BL.tolist()]
    assert completion_lengths(trace, 1) == [row.index(1) if 1 in row else 12 - row.count(MASK) for row in said]


def test_the_card_changes_with_what_changes_a_number() -> None:
    policy, task = load_model("tiny"), letter_task()
    rows, how = task.rows("test", 4, 0), protocol_decoding(FIELD_DECODING, 16)

    def told(rows=rows, task=task, batch=4, **changes) -> dict:
        return card(Benchmark(policy, rows), BenchmarkCase(task, replace(how, **changes), MicroBatch(batch)))

    first = told()
    assert first["model"] == "tiny" and first["dtype"] == "float32" and first["problems"] == 4
    assert first["prompt"] == short_hash(["", task.prompt(rows[0]), ""]) and first["split"] == short_hash(rows)
    assert first["template"] == short_hash(policy.tokenizer.encode(task.prompt(rows[0])))
    assert (first["padding"], first["ends"], first["batch"]) == ("masked", "at the end token", 4)
    others = [told(rows[1:]), told(task=task.variant(system="Think.")), told(steps=4), told(batch=8)]
    others += [told(attend_padding=True), told(stops=False), told(threshold=0.9), told(schedule=timestep)]
    assert all(other != first for other in others) and len({json.dumps(other) for other in others}) == len(others)
    assert others[4]["padding"] == "attended"


def test_the_command_prints_the_table_and_writes_scores_cards_and_answers(unmask, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    command = ["eval", "tiny", "--task", "gsm8k", "--protocol", "d1", "--data", str(data), "--problems", "3"]
    # The tiny model knows neither the words nor the length of a real prompt.
    code, said, told = unmask(*command, "--lengths", "16", "--out", str(out))
    assert code == 2 and "limit of 128" in told
    assert not out.exists() and not said  # not even the head of a table
    short = ["eval", "tiny", "--task", "sudoku", "--problems", "8", "--lengths", "16", "--samples", "2"]
    code, said, _ = unmask(*short, "--out", str(out))
    assert code == 0
    (line,) = json.loads(out.read_text())
    task = TASKS["sudoku"]()
    solved = sum(task.solved(r, t) for r, t in zip(task.rows("test", 8, 0), line["answers"], strict=True))
    assert (line["score"], line["low"], line["high"]) == pytest.approx(tuple(wilson_interval(solved, 8)))
    assert line["card"]["protocol"] == "unmask" and f"{100 * line['score']:.1f} %" in said
    assert said.splitlines()[1].split() == ["length", "score", "pass@1", "pass@2", "passes", "tokens", "seconds"]
    assert f" {100 * line['pass@2']['value']:.1f} %" in said.splitlines()[2]
    code, found, _ = unmask(*short, "--json")
    assert json.loads(found)[0]["pass@2"] == line["pass@2"] and json.loads(found)[0]["score"] == line["score"]


ROWS = {
    "gsm8k": {"question": "Two and two?", "answer": "#### 4"},
    "math500": {"problem": "Two and two?", "answer": "4"},
    "json_schema": {"request": "A number.", "schema": {"type": "integer"}},
    "multiple_choice": {"question": "Which?", "options": ["this", "that"], "answer": "A"},
    "mbpp": {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]},
    "humaneval": {
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
    "own": {"prompt": "Say so."},
    "countdown_text": {"numbers": [1, 2, 3], "target": 6},
    "sudoku_text": {"puzzle": "1040040300204031", "solution": "1342241331244231"},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_task_has_its_table(unmask, bytes_llada: Path, tmp_path: Path, name: str) -> None:
    if name in ("mbpp", "humaneval") and sandbox.problem():
        pytest.skip(sandbox.problem())
    pytest.importorskip("sympy" if name == "math500" else "jsonschema_rs" if name == "json_schema" else "json")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    (tmp_path / "mine.py").write_text("def reward(prompt, completion, row): return 0.0\n")
    task = "mine.py" if name == "own" else name
    section = f"{name}.test_data=rows.jsonl"
    code, said, told = unmask("eval", str(bytes_llada), "--task", task, "--lengths", "8", "--json", section)
    assert code == 0, told
    (line,) = json.loads(said)
    assert line["score"] == 0.0 and 0 < line["passes"] <= 4
    assert line["card"]["problems"] == 1 and line["card"]["protocol"] == "unmask"


def test_turns_and_special_tokens_of_a_real_tokenizer(bytes_llada: Path) -> None:
    tokenizer = load_model(bytes_llada).tokenizer
    byte = tokenizer.encode
    system, user, answer = ([259, *byte(role), 260, *byte("\n\n")] for role in ("system", "user", "assistant"))
    turns = [256, *system, *byte("Think."), 261, *user, *byte("2?"), 261, *answer]
    assert tokenizer.prompt("2?", "Think.") == turns
    said = [*byte("4"), 261, *byte("no"), 258, 257]
    assert tokenizer.raw(said) == "4<|eot_id|>no\ufffd<|endoftext|>" and tokenizer.decode(said) == "4"


def test_the_card_tells_chat_templates_apart(bytes_llada: Path) -> None:
    policy, other = load_model(bytes_llada), load_model(bytes_llada)
    other.tokenizer.fast.chat_template = LLADA_TEMPLATE.replace("user", "human") + " "
    task = gsm8k.Gsm8k()
    one, two = (
        card(Benchmark(each, PROBLEMS[:2]), BenchmarkCase(task, protocol_decoding(FIELD_DECODING, 8), MicroBatch(2)))
        for each in (policy, other)
    )
    assert one["template"] == short_hash(task.prompt_ids(policy.tokenizer, task.about.example)) != two["template"]
    assert {**one, "template": ""} == {**two, "template": ""}


def test_a_table_asks_all_rows_of_a_set_and_says_what_a_file_for_both_splits_leaves(
    unmask, bytes_llada: Path, data: Path
) -> None:
    def asked(*more: str) -> tuple[int, str]:
        code, said, told = unmask("eval", str(bytes_llada), "--task", "gsm8k", "--lengths", "2", "--json", *more)
        assert code == 0, told
        return json.loads(said)[0]["card"]["problems"], told

    held_out = len(gsm8k.Gsm8k(data=str(data)).rows("test", 99, 0))
    assert 0 < held_out < 40
    told = f"{held_out} of the 40 rows of {data} are the test split; for a file of test rows alone set gsm8k.test_data="
    assert asked("--data", str(data)) == (held_out, f"{told}{data}\n")
    data.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS * 7))
    assert asked(f"gsm8k.test_data={data}") == (280, "")
    assert asked(f"gsm8k.test_data={data}", "--problems", "9") == (9, "")


def test_an_evaluation_says_how_many_problems_it_found(unmask, tmp_path: Path) -> None:
    """Of a set of 300: unless told otherwise 256, which is told; at most all of them."""
    (tmp_path / "mine.py").write_text(
        "length = 8\ndef reward(completion): return 0\n"
        "def rows(): return [{'prompt': f'{n}', 'split': 'test'} for n in range(300)]\n"
    )
    quick = ["reward.timeout=null", "rollout.steps=1"]
    command = ["eval", "tiny", "--task", "mine.py", "--samples", "1", "--json", *quick]
    for more, problems, noted in ([], 256, True), (["--problems", "400"], 300, False), (["--problems", "3"], 3, False):
        code, said, told = unmask(*command, *more)
        assert code == 0 and json.loads(said)["problems"] == problems
        assert ("256 of 300" in told and "--problems 300" in told) == noted


def test_a_run_with_the_rewards_of_d1_is_measured_under_any_protocol(unmask, bytes_llada: Path, data: Path) -> None:
    settings = [f"gsm8k.test_data={data}", "gsm8k.protocol=d1_train", "gsm8k.rewards=d1"]
    run = data.parent / "run"
    run.mkdir()
    config = read_config(overrides=[f"model={bytes_llada}", "task=gsm8k", "method=diffu_grpo", "device=cpu", *settings])
    (run / "config.yaml").write_text(yaml.safe_dump(config.dump()))
    (run / "checkpoint").symlink_to(bytes_llada)
    measured = ["eval", str(run), "--task", "gsm8k", "--lengths", "8", "--problems", "2", "--json"]
    for more, protocol in ([], "d1_train"), (["--protocol", "d1"], "d1"), (["--protocol", "unmask"], "unmask"):
        code, said, told = unmask(*measured, *more)
        assert code == 0, told
        assert json.loads(said)[0]["card"]["protocol"] == protocol


def test_a_protocol_that_an_override_names_is_on_the_card(unmask, bytes_llada: Path, data: Path) -> None:
    command = ["eval", str(bytes_llada), "--task", "gsm8k", "--data", str(data), "--problems", "3", "--lengths", "8"]
    code, said, told = unmask(*command, "--json", "gsm8k.protocol=d1")
    assert code == 0, told
    (line,) = json.loads(said)
    about = {"protocol": "d1", "padding": "attended", "batch": 8, "ends": "never"}
    assert {key: line["card"][key] for key in about} == about
    assert line["passes"] == 4


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--lengths", "128,x"], "--lengths: '128,x'"),
        (["--lengths", "0"], "--lengths: 0"),
        (["--lengths", "16", "--samples", "2", "rollout.temperature=0"], "greedy"),
        (["--lengths", "16", "--out", "nowhere/table.json"], "there is no folder nowhere"),
        (["--out", "nowhere/table.json"], "there is no folder nowhere"),
        (["--protocol", "d1"], "--protocol"),
        (["--data", "rows.jsonl"], "--data"),
        (["--task", "gsm8k", "--protocol", "d2", "--lengths", "16"], "'d2'"),
        (["--task", "gsm8k", "--data", "none.jsonl"], "none.jsonl"),
        (["--task", "sudoku", "--protocol", "d1"], "sudoku.protocol"),
    ],
)
def test_honest_errors(unmask, more: list[str], told: str) -> None:
    code, _, said = unmask("eval", "tiny", *more)
    assert code == 2 and told in said
