"""Tasks in a file of the user's own: both forms of reward, several with weights, errors, and a training run."""

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from unmask.cli.display import next_commands
from unmask.cli.main import main
from unmask.config import parse_config
from unmask.tasks import Task, own
from unmask.tasks.scoring import score
from unmask.tasks.support import data as task_data
from wording import mentions, naming

PLAIN = """
'''Say the digit again.

More about it.'''
length = 8

def reward(prompt, completion, row):
    assert prompt == row["prompt"]
    return completion.count(row["answer"]) / 8
"""
ROWS = [{"prompt": f"{a}{b}=", "answer": str(b)} for a in range(10) for b in range(10)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def made(source: str, data: str = "rows.jsonl", **options: object) -> Task:
    Path("my_task.py").write_text(source)
    return own.task("my_task.py", data, **options)  # type: ignore[arg-type]


def test_a_reward_and_rows_from_a_file(folder: Path):
    task = made(PLAIN)
    assert (task.name, task.summary, task.length) == ("my_task", "Say the digit again.", 8)
    test, train = task.rows("test", 99, 0), task.rows("train", 99, 0)
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in train}
    row = {"prompt": "27=", "answer": "7"}
    assert task.prompt(row) == "27=" and task.reward(row, "7x7") == 0.25
    assert not task.solved(row, "7777777") and task.solved(row, "77777777")


@pytest.mark.parametrize("data", ["two.jsonl", ""])
def test_too_few_rows_are_reported_with_a_way_out(folder: Path, data: str):
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+4=", "answer": "7"}]
    (folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = made(PLAIN + f"\ndef rows(): return {rows}\n", data)
    with pytest.raises(ValueError) as error:
        task.rows("test", 1, 0)
    assert mentions(str(error.value), data or "my_task.py", "'test'", '"split": "test"', "own.test_data")


def test_rows_prompt_and_solved_of_the_file(folder: Path):
    task = made(
        """
def rows():
    return [{"n": n, "split": "test" if n % 2 else "train"} for n in range(10)]

def prompt(row):
    return f"{row['n']}="

def reward(prompt, completion, row):
    return 0.5 * (completion == prompt)

def solved(prompt, completion, row):
    return completion == prompt
""",
        data="",
    )
    assert {row["n"] for row in task.rows("test", 99, 0)} == {1, 3, 5, 7, 9}
    assert {row["n"] for row in task.rows("train", 99, 0)} == {0, 2, 4, 6, 8}
    assert task.prompt({"n": 3}) == "3=" and task.reward({"n": 3}, "3=") == 0.5 and task.solved({"n": 3}, "3=")


TRL = """
import re

def accuracy_reward(completions, answer, **kwargs):
    return [1.0 if completion == wanted else 0.0 for completion, wanted in zip(completions, answer)]

def format_reward(prompts, completions, **columns):
    assert len(prompts) == len(completions) == len(columns["answer"])
    return [float(bool(re.fullmatch(r"\\d", completion))) for completion in completions]

def length_reward(completions):
    return [-len(completion) / 8 for completion in completions]

rewards = [accuracy_reward, format_reward, length_reward]
weights = {"format_reward": 0.5}
"""


def test_reward_functions_of_trl_as_they_are_with_weights(folder: Path):
    row = {"prompt": "27=", "answer": "7"}
    task = made(TRL)
    assert task.weights == {"accuracy_reward": 1.0, "format_reward": 0.5, "length_reward": 1.0}
    assert task.parts(row, "7") == {"accuracy_reward": 1.0, "format_reward": 1.0, "length_reward": -1 / 8}
    assert task.reward(row, "7") == pytest.approx(1 + 0.5 - 1 / 8)
    assert task.solved(row, "7") and not task.solved(row, "8")  # by the first reward
    scores = score(task, [row, row], ["7", "88"])
    assert {name: part_B.tolist() for name, part_B in scores.parts.items()} == {
        "accuracy_reward": [1.0, 0.0],
        "format_reward": [1.0, 0.0],
        "length_reward": [-1 / 8, -2 / 8],
    }
    assert scores.reward_B.tolist() == pytest.approx([1 + 0.5 - 1 / 8, -2 / 8])
    assert scores.solved_B.tolist() == [True, False]
    lighter = made(TRL, weights={"length_reward": 0.1, "format_reward": 0.0})
    assert lighter.reward(row, "7") == pytest.approx(1 - 0.1 / 8)


def test_conversations_in_the_form_of_trl(folder: Path):
    task = made("""
def reward(completions, answer, **kwargs):
    return [float(completion[0]["content"] == wanted) for completion, wanted in zip(completions, answer)]
""")
    row = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "27="}], "answer": "7"}
    assert task.prompt(row) == "Be brief.\n\n27=" and task.turns(row) == row["prompt"]
    assert task.reward(row, "7") == 1.0 and task.reward(row, "8") == 0.0


def test_numbers_of_any_library_are_numbers(folder: Path):
    source = "import numpy, torch\nvalue = {}\ndef reward(completion): return value\n"
    for value in ("True", "1", "numpy.float32(1)", "torch.tensor(1.0)"):
        Path("my_task.py").unlink(missing_ok=True)
        assert made(source.format(value)).reward(ROWS[0], "") == 1.0
    many = "import torch\ndef reward(completions, **_): return torch.ones(len(completions))\n"
    assert made(many).reward(ROWS[0], "") == 1.0


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("def reward(prompt, completion, row): return row['nothing']", ["KeyError"]),
        ("def reward(prompt, completion, row): return None", ["None"]),
        ("def reward(prompt, completion, row): return float('nan')", ["nan"]),
        ("def reward(prompt, completion, row): return float('inf')", ["inf"]),
        ("def reward(prompt, completion, row): return '1.0'", ["'1.0'"]),
        ("def reward(prompt, completion, row): return [1.0]", ["[1.0]"]),
        ("def reward(completions, **_): return []", ["list", 1]),
        ("def reward(completions, **_): return [1.0, 2.0]", ["list", 1]),
        ("def reward(completions, **_): return 1.0", ["list", 1]),
        ("def reward(completions, **_): return [None]", ["None"]),
        ("def reward(completions, completion_ids): return [1.0]", ["completion_ids"]),
    ],
)
def test_a_bad_reward_is_named_with_its_file_and_row(folder: Path, body: str, names: list):
    task = made(body)
    with pytest.raises(ValueError, match=naming("my_task.py", "reward", "row-17", *names)):
        task.reward({"prompt": "1=", "id": "row-17"}, "x")
    with pytest.raises(ValueError, match="'prompt': '1='"):
        task.reward({"prompt": "1="}, "x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("length = 8", "reward"),
        ("reward = 3", "must be a function"),
        ("def reward(x): return 1", "is not a reward"),
        ("def reward(completion, gold): return 1", "is not a reward"),
        ("def f(completion): pass\nrewards = [f, f]", "same name"),
        ("def reward(completion): pass\nrewards = [reward]", "rewards"),
        ("rewards = []", "functions"),
        ("async def reward(completions): return [1.0]", "asynchronous"),
        ("length = 0\ndef reward(completion): return 1", "length"),
        ("length = '8'\ndef reward(completion): return 1", "length"),
        ("rows = [{'prompt': '1='}]\ndef reward(completion): return 1", "rows must be a function, not a list"),
        ("prompt = '1='\ndef reward(completion): return 1", "prompt must be a function, not a str"),
        ("solved = True\ndef reward(completion): return 1", "solved must be a function, not a bool"),
        ("weights = [1]\ndef reward(completion): return 1", "weights must be a dictionary"),
        ("weights = {'other': 1}\ndef reward(completion): return 1", "'other'"),
        ("weights = {'reward': 'x'}\ndef reward(completion): return 1", "weight of reward"),
        ("def reward(:", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("raise SystemExit(1)", "SystemExit"),
    ],
)
def test_a_file_that_is_not_a_task_is_named(folder: Path, source: str, message: str):
    with pytest.raises(ValueError, match=message) as raised:
        made(source)
    assert "my_task.py" in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("def rows(): return []", "no rows"),
        ("def rows(): return [1]", "row 1 of rows"),
        ("def rows(): return [{'question': 1}]", "'prompt'"),
        ("def rows(): return 1 / 0", "ZeroDivisionError"),
        ("def rows(): return [{'prompt': 'a', 'when': {1, 2}}]", "strings, numbers, lists"),
        ("", "define rows"),
    ],
)
def test_bad_rows_of_the_file_are_named(folder: Path, rows: str, message: str):
    task = made(f"def reward(completion): return 1\n{rows}", data="")
    with pytest.raises(ValueError, match=message) as raised:
        task.rows("train", 1, 0)
    assert "my_task.py" in str(raised.value)


def test_rows_of_the_file_are_converted_like_json(folder: Path):
    rows = "def rows(): return [{'prompt': f'{n}', 'p': (n,)} for n in range(9)]"
    task = made(f"def reward(completion): return 1\n{rows}", data="")
    assert all(row["p"] == [int(row["prompt"])] for row in task.rows("train", 9, 0))


def test_a_file_without_a_length_says_how_to_set_it(folder: Path, unmask):
    """256 tokens are assumed, and the embedded model has room for 128."""
    made("def rows(): return [{'prompt': f'{n}='} for n in range(40)]\ndef reward(completion): return 1.0")
    code, _, error = unmask("train", "--task", "my_task.py", "updates=1")
    assert code == 2 and mentions(error, "256", "128", "rollout.length=125", "length = 125"), error


def test_files_that_are_missing(folder: Path):
    with pytest.raises(ValueError, match=r"none\.py"):
        own.task("none.py")
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        made(PLAIN, data="none.jsonl")
    with pytest.raises(ValueError, match=r"--task my_task\.py"):
        own.task().rows("train", 1, 0)


def test_a_configuration_names_the_file_as_its_task(folder: Path):
    Path("my_task.py").write_text(PLAIN)
    config = parse_config({"task": "my_task.py", "own": {"data": "rows.jsonl"}})
    dumped = config.dump()
    assert dumped["task"] == "own"
    assert dumped["own"] == {"file": "my_task.py", "data": "rows.jsonl", "test_data": "", "weights": None}
    assert parse_config(dumped).build_task().name == "my_task"
    for bad, message in (({"task": "none.py"}, "none.py"), ({"task": "my_task.py", "own": {"dta": ""}}, "own.dta")):
        with pytest.raises(ValueError, match=message):
            parse_config(bad)


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


SHORT = ["updates=3", "prompts=2", "group=4", "eval.prompts=4", "eval.samples=2"]


def test_training_and_evaluating_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (folder / "my_task.py").write_text(PLAIN)
    code = called(monkeypatch, "train", "--task", "my_task.py", "--data", "rows.jsonl", "--out", "run", *SHORT)
    assert code == 0
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum("train/reward" in line for line in metrics) == 3
    assert all(line["train/reward/reward"] == line["train/reward"] for line in metrics if "train/reward" in line)
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert all(s["reward"] == s["completion"].count(s["row"]["answer"]) / 8 for s in samples)
    capsys.readouterr()
    short = ["--problems", "4", "--samples", "2", "--json"]
    assert called(monkeypatch, "eval", "run", *short) == 2  # a folder alone has no file run
    assert "add --task 'my_task.py'" in capsys.readouterr().err
    assert called(monkeypatch, "eval", "run", "--task", "my_task.py", *short) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "my_task"
    assert called(monkeypatch, "eval", "run", "--task", "sudoku", *short) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "sudoku"


def test_what_to_try_next_can_be_copied(folder: Path):
    task = made("def reward(completion): return 1\ndef prompt(row): return row['prompt'] + \"it's $1\"\n")
    evaluated, sampled, _, trained, _ = next_commands(task, "runs/a")
    assert evaluated == "unmask eval runs/a"
    assert trained == "unmask train runs/a/config.yaml --method agrpo --with dispo"
    assert shlex.split(sampled) == ["unmask", "sample", "runs/a", task.prompt(task.rows("test", 1, 0)[0]), "--steps"]
    task = made("def reward(completion): return 1\ndef prompt(row): return row['prompt'] + '\\nin two lines'\n")
    assert not any("sample" in command for command in next_commands(task, "runs/a"))
    assert next_commands(task, "runs/a", "my task.py")[0] == "unmask eval runs/a --task 'my task.py'"


def test_a_run_without_any_gradient_says_so_at_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for reward, learns in ((0.5, False), (1.0, True)):
        Path("my_task.py").write_text(f"length = 8\ndef reward(completion): return {reward}\n")
        assert called(monkeypatch, "train", "--task", "my_task.py", "own.data=rows.jsonl", *SHORT) == 0
        assert ("no update had a gradient" in capsys.readouterr().err) != learns


def test_a_reward_that_fails_stops_the_run_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (folder / "my_task.py").write_text("length = 8\ndef reward(completion): return float('nan')\n")
    assert called(monkeypatch, "train", "--task", "my_task.py", "own.data=rows.jsonl", "--out", "run", *SHORT) == 2
    error = capsys.readouterr().err
    assert mentions(error, "my_task.py", "reward", "nan") and len(error.strip().splitlines()) == 1
    assert not Path("run").exists()


def test_rows_are_streamed_from_a_data_set_of_the_hub(folder: Path):
    pytest.importorskip("datasets", reason="datasets reads data sets of the hub (the extra data)")
    from unmask.tasks import hub_rows

    data = Path("sums").resolve()  # a folder stands for a name on the hub
    (data / "data").mkdir(parents=True)
    lines = "".join(f'{{"question": "{n}+2=", "answer": "{n + 2}"}}\n' for n in range(20))
    (data / "data" / "train-00000-of-00002.jsonl").write_text(lines)
    (data / "data" / "train-00001-of-00002.jsonl").write_text("damaged, and never read\n")
    Path("hub_task.py").write_text(
        "from unmask.tasks import hub_rows\n"
        f"def rows(): return hub_rows({str(data)!r}, limit=20)\n"
        "def prompt(row): return [{'role': 'user', 'content': row['question']}]\n"
        "def reward(completion, row): return float(completion == row['answer'])\n"
    )
    task = own.task("hub_task.py")
    rows = task.rows("train", 16, 0) + task.rows("test", 4, 0)
    assert {row["question"] for row in rows} <= {f"{n}+2=" for n in range(20)}
    assert task.reward(rows[0], rows[0]["answer"]) == 1.0
    with pytest.raises(ValueError, match="cannot be read from the hub"):
        hub_rows(str(data), limit=21)
    first = hub_rows(str(data), limit=2)
    first[0]["question"] = "changed"
    assert hub_rows(str(data), limit=2)[0]["question"] == "0+2="  # everybody gets own copies


def test_data_may_name_a_data_set_of_the_hub(folder: Path, unmask, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def rows_of(name: str, config: str | None, split: str, limit: int) -> tuple[dict, ...]:
        asked.append((name, split, limit))
        first = 100 if split == "test" else 0
        return tuple({"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(first, first + 20))

    monkeypatch.setattr(task_data, "hub_rows", rows_of)
    Path("sums.py").write_text("length = 8\ndef reward(completion, row): return float(completion == row['answer'])\n")
    both = own.task("sums.py", data="org/sums")
    train, test = both.split_rows("train"), both.split_rows("test")
    assert train and test and len(train + test) == 20 and set(asked) == {("org/sums", "train", task_data.STREAMED)}
    assert [row["answer"] for row in own.task("sums.py", "org/sums", "org/sums").rows("test", 2, 0)] == ["102", "103"]
    code, out, err = unmask("eval", "tiny", "--task", "sums.py", "--data", "org/sums", "--samples", "1", "--json")
    assert code == 0 and json.loads(out)["problems"] == len(test)
    assert f"{len(test)} of the 20 rows of org/sums" in err
    monkeypatch.setattr(task_data, "hub_rows", lambda *_: ({"question": "1+2="},))
    with pytest.raises(ValueError, match=r"row 1 of org/sums \(train\): 'prompt' is missing"):
        own.task("sums.py", data="org/sums").rows("test", 1, 0)
    monkeypatch.setattr(task_data, "hub_rows", lambda *_: ({"prompt": b"1+2="},))
    with pytest.raises(ValueError, match=r"row 1 of org/sums \(train\) does not consist of texts"):
        own.task("sums.py", data="org/sums").rows("test", 1, 0)


def test_a_data_set_that_cannot_be_read_is_an_honest_error(folder: Path, unmask, monkeypatch: pytest.MonkeyPatch):
    Path("sums.py").write_text("def reward(completion): return 0.0\n")
    for name in ("data/rows.jsonl", "/rows", "a/b/c", "rows", "./rows"):
        _, _, err = unmask("train", "--task", "sums.py", "--data", name)
        assert mentions(err, f"there is no data file {Path(name)}"), name
    assert mentions(unmask("train", "--task", "gsm8k", "--data", "org/sums")[2], "there is no data file org/sums")
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, err = unmask("eval", "tiny", "--task", "sums.py", "--data", "org/sums")
    assert code == 2 and mentions(err, "org/sums", "pip install 'unmask[data]'")
    broken = ModuleType("datasets")
    broken.load_dataset = lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "datasets", broken)
    code, _, err = unmask("eval", "tiny", "--task", "sums.py", "--data", "org/sums")
    assert code == 2 and mentions(err, "the data set org/sums (train) cannot be read from the hub: no network")
