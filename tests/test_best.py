"""The best weights of a run, and runs that end with them: early, or because they have collapsed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_cases import toy_model, toy_task

from helpers import cut_at
from unmask.config import Config, parse_config
from unmask.config.sections import EvalConfig
from unmask.evaluation.evaluate import Evaluation, Evaluator
from unmask.models import load_model, save
from unmask.tasks import TASKS
from unmask.training.loop import resume, train
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.progress import Best, best_of, reason_to_end
from unmask.training.run.state import newest_state
from unmask.training.run.training_run import TrainingResult
from unmask.util.statistics import Proportion
from wording import mentions


class Cut(BaseException):
    """Nothing in the library catches it."""


def evaluation(solved: float) -> Evaluation:
    share = Proportion(solved, solved, solved)
    return Evaluation(share, share, {1: share}, reward=solved, problems=2, samples=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", toy_task)


def config_for(folder: Path, **held_out: Any) -> Config:
    if not (folder / "model").exists():
        save(toy_model(), folder / "model")
    base = {"model": str(folder / "model"), "task": "toy", "updates": 6, "prompts": 2, "group": 3, "method": "agrpo"}
    held_out = {"prompts": 2, "samples": 1, "every": 1, **held_out}
    return parse_config({**base, "optimizer": {"lr": 0.01}, "save_every": 3, "eval": held_out})


class Script:
    """Evaluations that find what the script says: by the order in which weights are first seen, then by the weights."""

    def __init__(self, patch: pytest.MonkeyPatch, *solved: float) -> None:
        self.left, self.known, self.seen = list(solved), dict[bytes, float](), list[dict[str, torch.Tensor]]()
        self.cut = 99
        patch.setattr(Evaluator, "evaluate", lambda evaluator, *given: self.evaluate(evaluator.policy))

    def evaluate(self, policy: torch.nn.Module) -> Evaluation:
        self.cut -= 1
        if not self.cut:
            raise Cut
        state = {name: weight.clone() for name, weight in policy.state_dict().items()}
        key = b"".join(weight.numpy().tobytes() for weight in state.values())
        if key not in self.known:
            self.known[key] = self.left.pop(0)
            self.seen.append(state)
        return evaluation(self.known[key])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder).state_dict()


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(config: Config, folder: Path) -> TrainingResult:
    return train(config, lambda: RunFolder(folder, config.dump()))


def test_the_best_weights_are_kept_beside_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, 0.1, 0.3, 0.2, 0.5, 0.5, 0.4, 0.2)
    result = run(config_for(tmp_path, best=True), tmp_path / "run")
    assert alike(weights(tmp_path / "run" / "checkpoint-best"), script.seen[3])  # the first of two that are as good
    assert alike(weights(tmp_path / "run" / "checkpoint"), script.seen[6])
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert finished["best"] == 3 and finished["after"]["eval/solved_sampled"] == 0.2 and "ended" not in finished
    assert result.after == evaluation(0.2) and result.ended == ""


def test_the_last_evaluation_and_the_first_can_be_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, 0.4, 0.3, 0.5)
    config = config_for(tmp_path, best=True, every=3)
    run(config, tmp_path / "last")
    assert alike(weights(tmp_path / "last" / "checkpoint-best"), script.seen[2])
    script = Script(monkeypatch, 0.4, 0.3, 0.4)
    run(config, tmp_path / "first")
    assert alike(weights(tmp_path / "first" / "checkpoint-best"), script.seen[0])


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    run(config_for(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-best").exists()
    assert json.loads((tmp_path / "run" / "finished.json").read_text()).keys() == {"before", "after"}
    assert read_metrics(tmp_path / "run")[-1]["step"] == 6


ENDS = {
    "early": ({"early_stop": 2}, [0.1, 0.3, 0.2, 0.3], 1, "ended after update 3: no better than after update 1 in 2 "),
    "collapse": ({"collapse": 0.2}, [0.1, 0.3, 0.5, 0.3, 0.2], 2, "ended after update 4: it solves 30.0 points fewer"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_run_that_ends_has_the_best_weights_and_the_log_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings, solved, best, told = ENDS[kind]
    config, script = config_for(tmp_path, **settings), Script(monkeypatch, *solved)
    result = run(config, tmp_path / "run")
    assert result.ended.startswith(told) and result.after == evaluation(solved[best])
    assert alike(weights(tmp_path / "run" / "checkpoint"), script.seen[best])
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert finished["ended"] == result.ended and finished["best"] == best
    assert finished["after"]["eval/solved_sampled"] == solved[best] and not (tmp_path / "run" / "state").exists()
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == len(solved) - 1 and rows[-1]["eval/solved_sampled"] == solved[-1]
    with pytest.raises(ValueError, match="is finished"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("kind", ENDS)
def test_it_ends_so_too_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    settings, solved, _, _ = ENDS[kind]
    config, script = config_for(tmp_path, **settings), Script(monkeypatch, *solved)
    whole = run(config, tmp_path / "whole")
    for cut in range(2, len(solved) + 1):
        folder = tmp_path / str(cut)
        script.cut = cut
        with pytest.raises(Cut):
            run(config, folder)
        script.cut = 99
        result = resume(folder)
        assert (result.before, result.after, result.ended) == (whole.before, whole.after, whole.ended)
        for name in ("finished.json", "samples.jsonl"):
            assert (folder / name).read_text() == (tmp_path / "whole" / name).read_text()
        logs = [read_metrics(path) for path in (folder, tmp_path / "whole")]
        logs = [[{key: value for key, value in row.items() if "time/" not in key} for row in log] for log in logs]
        assert logs[0] == logs[1]
        assert alike(weights(folder / "checkpoint"), weights(tmp_path / "whole" / "checkpoint"))


def test_a_run_that_is_wrecked_ends_with_the_model_it_began_with(tmp_path: Path, unmask) -> None:
    """For real: the embedded model, at a learning rate no model survives."""
    options = ["updates=4", "prompts=2", "group=4", "optimizer.lr=0.1", "eval.prompts=8", "eval.every=2"]
    code, out, _ = unmask("train", *options, "eval.collapse=0.1", "--out", "run")
    assert code == 0 and "after update 2" in out and "best evaluation" in out
    assert alike(weights(tmp_path / "run" / "checkpoint"), load_model("tiny-two").state_dict())


def test_when_a_run_ends() -> None:
    best = Best(4, evaluation(0.5), since=3)
    assert reason_to_end(best, 7, evaluation(0.1), EvalConfig()) == ""
    assert reason_to_end(best, 7, evaluation(0.5), EvalConfig(early_stop=4)) == ""
    assert reason_to_end(best, 7, evaluation(0.5), EvalConfig(early_stop=3)).endswith("after update 4 in 3 evaluations")
    assert reason_to_end(best, 7, evaluation(0.25), EvalConfig(collapse=0.25)) == ""  # more than that much
    fallen = reason_to_end(best, 7, evaluation(0.125), EvalConfig(collapse=0.25))
    assert mentions(fallen, "update 7", "37.5 points", "update 4")


def test_the_best_evaluation_survives_json() -> None:
    best = Best(4, evaluation(0.5), since=3)
    assert best_of(json.loads(json.dumps(best.data()))) == best


def test_ending_early_needs_evaluations(tmp_path: Path) -> None:
    for settings in ({"early_stop": 1}, {"collapse": 0.1}):
        with pytest.raises(ValueError, match=r"eval\.every"):
            config_for(tmp_path, every=0, **settings)


def test_a_resumed_run_is_ended_only_by_an_evaluation_of_its_own_step(tmp_path: Path, monkeypatch) -> None:
    """The state is of update 3; the evaluation after update 2 was bad, and the best weights are lost: it goes on."""
    config = config_for(tmp_path, every=2, collapse=0.3, best=True)
    Script(monkeypatch, 0.5, 0.25, 0.9, 0.9, 0.9, 0.9, 0.9)
    with cut_at("collect", 4):
        run(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-best")
    with pytest.warns(UserWarning, match="checkpoint-best"):
        result = resume(tmp_path / "run")
    assert not result.ended and (tmp_path / "run" / "finished.json").is_file()


def test_an_evaluation_that_is_cut_off_loses_no_update(tmp_path: Path, monkeypatch) -> None:
    """A state that is due after an update is there before the evaluation after it: also after the last update."""
    config = config_for(tmp_path, every=3)
    for calls, step in ((2, 3), (3, 6)):
        script = Script(monkeypatch, *[0.5] * 9)
        script.cut = calls
        with pytest.raises(Cut):
            run(config, tmp_path / f"run{step}")
        assert newest_state(tmp_path / f"run{step}" / "state")[0].step == step
