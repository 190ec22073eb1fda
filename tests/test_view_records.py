"""What a run writes down for the viewer is what happened, and writing it down changes nothing."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unmask
import unmask.training.loop
from unmask import sandbox
from unmask.config import Config, parse_config
from unmask.core.advantage import group_mean
from unmask.core.method import Method
from unmask.core.probes import ask
from unmask.core.shapes import NEVER
from unmask.methods import BASES
from unmask.methods.daca import progress_credit
from unmask.models import load_model, save, tiny_policy
from unmask.models.tiny import EOS, PAD, CharacterTokenizer, TinyShape
from unmask.rollout.sample import row_seeds
from unmask.tasks import TASKS
from unmask.training.batch import Batch, Experiment
from unmask.training.loop import resume, train
from unmask.training.loss_terms import Scorer
from unmask.training.run.base_run import EVAL_SEED
from unmask.training.run.folder import RunFolder
from unmask.training.run.records import expected_answer, short_number, short_text
from unmask.training.setup import decoding_of
from unmask.training.update import LossTerm
from unmask.util.micro_batch import MicroBatch

SMALL = TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48)
FEW = {"updates": 2, "prompts": 2, "group": 3, "eval": {"prompts": 2, "samples": 2}, "optimizer": {"lr": 1e-2}}
FEW |= {"method": "diffu_grpo"}
ONE = {"updates": 1, "eval": {"prompts": 1, "samples": 1}}
BOTH = {
    "with": ["daca", "dispo"],
    "daca": {"negative": 1.0, "kl": 0.05, "anchor": 0.5},
    "dispo": {"lateness": 0.0},
    "rollout": {"steps": 8, "block": 4},
}

Line = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(SMALL, seed=1), folder)
    return str(folder)


def config_for(model: str, **more: object) -> Config:
    return parse_config({**FEW, "model": model, "trace_every": 1, "sudoku": {"partial": 0.5}, **more})


def run(config: Config, folder: Path) -> Path:
    train(config, lambda: RunFolder(folder, config.dump()))
    return folder


def lines(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]


class Seen:
    """What the only update was about to do, and what the policy says of all its questions."""

    varied = False
    """Have no two rewards be alike."""
    batch: Batch
    parts: list[LossTerm]
    logp: list[Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    record, collect, plain = Seen(), unmask.training.loop.collect, unmask.training.loop.loss_terms

    def collected(source: Experiment, step: int) -> Batch:
        batch = collect(source, step)
        if record.varied:
            batch = replace(batch, reward_B=torch.arange(len(batch.reward_B), dtype=torch.float64) ** 2)
        record.batch = batch
        return batch

    def asked(method: Method, batch: Batch, scorer: Scorer, *given: Any) -> list[list[LossTerm]]:
        steps = plain(method, batch, scorer, *given)
        record.parts = steps[0]
        with torch.no_grad():
            record.logp = [ask(scorer.policy, term.probes) for term in record.parts]
        return steps

    monkeypatch.setattr(unmask.training.loop, "collect", collected)
    monkeypatch.setattr(unmask.training.loop, "loss_terms", asked)
    yield record


def near(stored: list[float], wanted: Tensor, digits: int = 4) -> bool:
    """Equal but for the digits that are not written down."""
    values = torch.tensor(stored, dtype=torch.float64).view_as(wanted)
    return torch.allclose(values, wanted.double(), rtol=10.0 ** (1 - digits), atol=1e-6)


def taught(config: Config, folder: Path) -> Line:
    """The first group of the first batch, as it was written down."""
    return next(line for line in lines(run(config, folder)) if line["kind"] == "train")


def test_every_field_of_a_taught_group_is_what_the_update_had(tmp_path: Path, seen: Seen) -> None:
    line = taught(config_for("tiny", **BOTH, **ONE, group=6), tmp_path / "run")
    trace, row, decode = seen.batch.trace, seen.batch.rows[0], CharacterTokenizer().decode
    assert (line["v"], line["id"], line["step"], line["task"], line["steps"]) == (1, "t1-0", 1, "sudoku", 8)
    assert (line["prompt"], line["answer"], line["temperature"]) == (row["puzzle"] + "=", row["solution"], 1.0)
    assert line["order"] == "low_confidence" and len(line["rollouts"]) == 6
    task, credit_BL = TASKS["sudoku"](partial=0.5), progress_credit(trace)
    advantage_B = group_mean(seen.batch.reward_B, trace.group_B)
    for i, rollout in enumerate(line["rollouts"]):
        ids, step = trace.tokens_BL[i, -16:], trace.step_BL[i, -16:]
        ends = [place for place, token in enumerate(ids.tolist()) if token in (EOS, PAD)]
        assert rollout["special"] == ends and rollout["taught"]
        assert all(decode([int(ids[place])]) == rollout["tokens"][place] for place in range(16) if place not in ends)
        assert rollout["filled"] == [None if value == NEVER else value for value in step.tolist()]
        assert rollout["block"] == [place // 4 for place in range(16)]
        written = step < NEVER
        assert near([p for p in rollout["p"] if p is not None], trace.logp_BL[i, -16:][written].exp(), 3)
        assert [p is not None for p in rollout["p"]] == written.tolist()
        assert rollout["counted"] == trace.counted_BL[i, -16:].int().tolist()
        assert near(rollout["weight"], credit_BL[i, -16:]) and near([rollout["advantage"]], advantage_B[i])
        assert rollout["reward"] == short_number(task.reward(row, decode(ids.tolist())))
        assert rollout["solved"] == task.solved(row, decode(ids.tolist())) and rollout["verdict"] is None
    assert any(rollout["advantage"] for rollout in line["rollouts"]) and credit_BL.std() > 0
    check_probes(line, seen)
    check_branches(line, task.reward, row)


def check_probes(line: Line, seen: Seen) -> None:
    """They are the questions of the update, with what the policy that sampled says of them."""
    probes, logp_NL = seen.parts[0].probes, seen.logp[0]
    for i, rollout in enumerate(line["rollouts"]):
        questions = (probes.trace_N == i).nonzero().squeeze(1).tolist()
        assert len(rollout["probes"]) == len(questions) >= 4  # strata, of which a block may part one
        for probe, n in zip(rollout["probes"], questions, strict=True):
            state, asked = probes.states_SL[probes.state_N[n], -16:], probes.asked_NL[n, -16:]
            assert probe["masked"] == (state == probes.trace.mask_id).nonzero().squeeze(1).tolist()
            assert probe["asked"] == asked.nonzero().squeeze(1).tolist() and set(probe["asked"]) <= set(probe["masked"])
            assert near(probe["logp"], logp_NL[n, -16:][asked])
            assert near(probe["share"], probes.share_NL[n, -16:][asked])
            assert (probe["term"], probe["weight"]) == (0, 1.0)
        # SML asks every token once: the shares of a position add up to one
        shares = dict.fromkeys(range(16), 0.0)
        for probe in rollout["probes"]:
            for place, share in zip(probe["asked"], probe["share"], strict=True):
                shares[place] += share
        assert all(shares[place] == 1 for place, step in enumerate(rollout["filled"]) if step is not None)


def check_branches(line: Line, reward: Callable[[Any, str], float], row: Any) -> None:
    """Each is a filling of the state before its step, and has the reward of what is then written."""
    steps, branched = set(), 0
    for rollout in line["rollouts"]:
        rewards = [branch["reward"] for branch in rollout["branches"]]
        for branch in rollout["branches"]:
            later = [place for place, step in enumerate(rollout["filled"]) if step is None or step >= branch["at"]]
            assert [int(place) for place in branch["filled"]] == later
            canvas = [branch["filled"].get(str(place), token) for place, token in enumerate(rollout["tokens"])]
            assert branch["reward"] == short_number(reward(row, "".join(canvas).partition("¶")[0]))
            assert branch["advantage"] == pytest.approx(branch["reward"] - sum(rewards) / len(rewards), abs=1e-4)
            steps.add(branch["at"])
            branched += 1
    assert branched >= 4 and len(steps) > 1


def test_branches_find_their_rollouts_where_idle_groups_were_left_out(tmp_path: Path, seen: Seen) -> None:
    config = config_for("tiny", **BOTH, **ONE, idle_groups="resample", prompts=3, sudoku={})
    line = taught(config, tmp_path / "run")
    assert int(seen.batch.trace.group_B[0]) > 0  # so that they are numbered apart
    assert line["prompt"] == seen.batch.rows[0]["puzzle"] + "="
    check_branches(line, TASKS["sudoku"]().reward, seen.batch.rows[0])


def test_an_evaluation_writes_its_first_problems_down_as_they_were_sampled(model: str, tmp_path: Path) -> None:
    config = config_for(model, updates=1, eval={"prompts": 5, "samples": 2})
    groups = [line for line in lines(run(config, tmp_path / "run")) if line["kind"] == "eval"]
    assert [line["id"] for line in groups] == [f"e{step}-{number}" for step in (0, 1) for number in range(3)]
    task, rows = config.build_task(), config.build_task().rows("test", 5, 0)
    for home, step in ((model, 0), (tmp_path / "run" / "checkpoint", 1)):
        policy = load_model(home)
        prompts = [policy.tokenizer.encode(task.prompt(row)) for row in rows for _ in range(2)]
        trace = unmask.sample(
            policy, prompts, row_seeds(EVAL_SEED, 10), decoding_of(config, task), micro_batch=MicroBatch(512)
        ).trace
        for number, line in enumerate(groups[3 * step : 3 * step + 3]):
            assert line["prompt"] == task.prompt(rows[number])
            for i, rollout in enumerate(line["rollouts"]):
                ids = trace.tokens_BL[2 * number + i, -16:].tolist()
                assert "".join(rollout["tokens"]) == policy.tokenizer.show(ids)
                steps = trace.step_BL[2 * number + i, -16:].tolist()
                assert rollout["filled"] == [None if step == NEVER else step for step in steps]
                assert rollout["solved"] == task.solved(rows[number], policy.tokenizer.decode(ids))
                blank = ("weight", "advantage", "probes", "branches")
                assert not rollout["taught"] and all(rollout[key] is None for key in blank)


@pytest.mark.parametrize("method", [name for name in BASES if name not in ("raft", "vine")])
def test_the_answers_of_every_method_are_those_of_the_policy_that_sampled(
    model: str, tmp_path: Path, seen: Seen, method: str
) -> None:
    by_threshold = {"rollout": {"order": "left_to_right", "threshold": 0.99}}
    more = {"agrpo": {"agrpo": {"choice": True}}, "fork": by_threshold, "dtm": {"dtm": {"h": 0.1}}}.get(method, {})
    config, seen.varied = config_for(model, method=method, **ONE, seed=2, **more), True
    check_answers(taught(config, tmp_path / "run"), seen)


@pytest.mark.parametrize("method", ["agrpo", "diffu_grpo"])
def test_of_several_inner_updates_the_answers_to_the_first_are_told(
    model: str, tmp_path: Path, seen: Seen, method: str
) -> None:
    config, seen.varied = config_for(model, method=method, **ONE, seed=2, inner_steps=2), True
    check_answers(taught(config, tmp_path / "run"), seen)


def check_answers(line: Line, seen: Seen) -> None:
    """They are what the policy said before the first inner update, to the questions of that update."""
    probes, logp_NL = seen.parts[0].probes, seen.logp[0]
    for i, rollout in enumerate(line["rollouts"]):
        questions = (probes.trace_N == i).nonzero().squeeze(1).tolist()
        assert len(questions) == len(rollout["probes"] or [])
        if not questions:  # a mask at random may have masked nothing
            assert not rollout["taught"]
            continue
        for probe, n in zip(rollout["probes"], questions, strict=True):
            assert near(probe["logp"], logp_NL[n, -16:][probes.asked_NL[n, -16:]])
            assert probe["weight"] == short_number(float(probes.weight_M[probes.unit_N[n]]))
        assert {probe["term"] for probe in rollout["probes"]} <= set(range(int((probes.trace_M == i).sum())))
        assert rollout["weight"] is None  # no base weighs its tokens
    assert any(rollout["taught"] for rollout in line["rollouts"])


def test_a_rollout_that_could_teach_nothing_was_not_asked(model: str, tmp_path: Path) -> None:
    line = taught(config_for(model, method="agrpo", **ONE, sudoku={}), tmp_path / "run")  # of which none is right
    for rollout in line["rollouts"]:
        assert (rollout["reward"], rollout["advantage"], rollout["probes"], rollout["taught"]) == (0, 0, None, False)


def test_of_a_large_group_the_first_are_written_down(model: str, tmp_path: Path) -> None:
    config = config_for(model, updates=1, prompts=1, group=18, eval={"prompts": 2, "samples": 18}, rollout={"steps": 2})
    groups = lines(run(config, tmp_path / "run"))
    assert [line["id"] for line in groups] == ["e0-0", "e0-1", "t1-0", "e1-0", "e1-1"]
    assert all(len(line["rollouts"]) == 16 for line in groups)


def left_by(folder: Path) -> dict[str, object]:
    """What a run leaves behind, but for times, and for what is in question."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_model(folder / "checkpoint").state_dict()
    return {
        "metrics": [{key: v for key, v in row.items() if not key.startswith("time/")} for row in metrics],
        "samples": (folder / "samples.jsonl").read_text(),
        "weights": {name: weight.numpy().tobytes() for name, weight in weights.items()},
    }


def test_writing_down_changes_no_token_no_metric_and_no_weight(model: str, tmp_path: Path) -> None:
    for number, more in enumerate((BOTH, {"method": "agrpo", "inner_steps": 2})):
        outcomes = [left_by(run(config_for(model, **more, trace_every=n), tmp_path / f"{number}-{n}")) for n in (0, 1)]
        assert outcomes[0] == outcomes[1]
        assert not (tmp_path / f"{number}-0" / "traces.jsonl").exists()
        assert len(lines(tmp_path / f"{number}-1")) == 6


def test_groups_are_written_down_at_the_first_update_and_every_so_many(model: str, tmp_path: Path) -> None:
    config = config_for(model, updates=5, trace_every=2, eval={"prompts": 1, "samples": 1})
    assert [line["id"] for line in lines(run(config, tmp_path / "run"))] == ["e0-0", "t1-0", "t2-0", "t4-0", "e5-0"]


class Cut(BaseException):
    """Nothing in the library catches it."""


def test_a_resumed_run_has_the_lines_of_one_that_was_never_cut_off(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model, **BOTH, updates=4, save_every=2, eval={"prompts": 1, "samples": 2, "every": 2})
    whole = (run(config, tmp_path / "whole") / "traces.jsonl").read_bytes()
    plain, calls = unmask.training.loop.inner_updates, iter(range(1, 100))

    def cut(*given: Any) -> Any:
        if next(calls) == 4:
            raise Cut
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(unmask.training.loop, "inner_updates", cut)
        with pytest.raises(Cut):
            run(config, tmp_path / "cut")
    assert b"t3-0" in (tmp_path / "cut" / "traces.jsonl").read_bytes()  # which the state that is left knows nothing of
    resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "traces.jsonl").read_bytes() == whole and whole.count(b"\n") == 3 + 4


def skipped(turn: int, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """The group of an update of two turns, of which one is not finite."""
    plain = unmask.training.loop.loss_terms

    def broken(*given: Any) -> Any:
        turns = plain(*given)
        for i, part in enumerate(turns[turn]):
            credit_BL = part.credit_BL.clone()
            credit_BL[0, -1] = math.nan
            turns[turn][i] = replace(part, credit_BL=credit_BL)
        return turns

    monkeypatch.setattr(unmask.training.loop, "loss_terms", broken)
    run(config_for(model, updates=1, inner_steps=2), folder)
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])["train/skipped"] == 1
    line = lines(folder)[2]
    assert line["id"] == "t1-0"
    return line


def test_an_update_that_is_skipped_taught_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = skipped(0, model, tmp_path / "run", monkeypatch)
    assert not any(rollout["taught"] for rollout in line["rollouts"])
    assert line["rollouts"][0]["weight"][-1] is None  # JSON has no nan


def test_an_update_that_breaks_off_after_its_first_turn_has_taught(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(rollout["taught"] for rollout in skipped(1, model, tmp_path / "run", monkeypatch)["rollouts"])


def test_a_failed_reward_is_the_verdict(model: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(row, completion):\n    raise KeyError('no such thing')\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}="}) + "\n" for n in range(8)))
    own = {"task": str(tmp_path / "mine.py"), "own": {"data": str(tmp_path / "rows.jsonl")}}
    settings = {"model": model, **own, "reward": {"on_error": "zero", "timeout": None}, "rollout": {"length": 4}}
    config = parse_config({**FEW, **settings, "updates": 1, "trace_every": 1})
    for line in lines(run(config, tmp_path / "run")):
        assert all("no such thing" in rollout["verdict"] for rollout in line["rollouts"]) and line["answer"] is None


def test_graders_say_what_is_wrong() -> None:
    mini = TASKS["json_mini"]()
    row, right = mini.rows("train", 1, 0)[0], mini.solution(mini.rows("train", 1, 0)[0])
    verdict, key = mini.verdict, next(iter(row["reference"]))
    assert verdict is not None and verdict(row, right) == "follows the schema and agrees with the reference"
    assert verdict(row, right[:-1]) == "no JSON value was found"
    assert verdict(row, "{}") == f'against the schema: "{key}" is a required property'
    other = json.dumps({**row["reference"], key: row["reference"][key] + 1})
    assert verdict(row, other) == "follows the schema; 50% of the fields agree with the reference"
    if problem := sandbox.problem():
        pytest.skip(f"programs cannot be run: {problem}")
    code = TASKS["code_mini"]()
    row = code.rows("train", 1, 0)[0]
    assert code.verdict is not None and code.verdict(row, code.solution(row)) == "13 of 13 tests pass"
    text = code.verdict(row, "1/x-1/x*")
    assert text.startswith("0 of 13 tests pass; the program raised SyntaxError") and "\n" not in text
    assert code.verdict(row, "import os") == "not run: not a short expression in x"


def test_a_task_of_ones_own_is_no_sudoku_whatever_its_name(model: str, tmp_path: Path) -> None:
    for name, built in TASKS.items():
        assert built().board == name.startswith("sudoku")
    for name in ("sudoku", "sudoku_text"):
        (tmp_path / f"{name}.py").write_text("def reward(row, completion):\n    return 0.0\n")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}="}) + "\n" for n in range(8)))
        own = {"task": str(tmp_path / f"{name}.py"), "own": {"data": str(tmp_path / "rows.jsonl")}}
        settings = {"model": model, **own, "reward": {"timeout": None}, "rollout": {"length": 16, "steps": 2}}
        config = parse_config({**FEW, **settings, "updates": 1, "trace_every": 1})
        groups = lines(run(config, tmp_path / f"run of {name}"))
        assert groups and all((line["task"], line["sudoku"]) == (name, None) for line in groups)


def test_answers_are_short_and_without_their_reasoning() -> None:
    grid = "1234341221434321"
    assert expected_answer(TASKS["sudoku_text"](), {"puzzle": "1" + "0" * 15, "solution": grid}) == grid
    unsolvable = {"numbers": [2, 2], "target": 90, "prompt": ""}
    assert expected_answer(TASKS["countdown_text"](), unsolvable) is None
    assert short_text("a\n b" + "c" * 999) == "a b" + "c" * 194 + "..." and short_number(math.inf) is None
    assert short_number(0.123456) == 0.1235 and short_number(1234567.0) == 1235000.0
