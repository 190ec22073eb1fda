"""An update that is not finite is skipped and counted; too many in a row stop the run, and the last can be replayed."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks_cases import toy_task

import unmask.training.loop
import unmask.training.run.base_run
import unmask.training.update
from helpers import SMALL, cut_at, sample
from unmask.config import Config, parse_config
from unmask.core.probes import fully_masked
from unmask.models import load_model, tiny_policy
from unmask.models.tiny import Tiny
from unmask.rollout.sample import row_seeds
from unmask.tasks import TASKS
from unmask.training.loop import resume, train
from unmask.training.optim import make_optimizer
from unmask.training.run.broken import FACTS, read_broken
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.progress import Skips
from unmask.training.run.replay import replay
from unmask.training.run.state import newest_state
from unmask.training.update import LossTerm, NotFinite, update
from wording import mentions, naming


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", toy_task)


def config_for(model: str, patience: int = 5, **more: object) -> Config:
    optimizer = {"lr": 1e-2, "max_skipped_updates": patience}
    base = {"model": model, "task": "toy", "updates": 4, "prompts": 2, "group": 3, "save_every": 1}
    base |= {"method": "diffu_grpo", "optimizer": optimizer, "eval": {"prompts": 2, "samples": 1}}
    return parse_config({**base, **more})


def run(config: Config, folder: Path) -> Path:
    train(config, lambda: RunFolder(folder, config.dump()))
    return folder


def strict(folder: Path) -> list[dict[str, float]]:
    """The metrics but for times, as any reader of JSON has them: none knows nan."""

    def refused(word: str) -> float:
        raise AssertionError(f"{word} in metrics.jsonl")

    rows = [json.loads(line, parse_constant=refused) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder / "checkpoint").state_dict()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, set[int]], None]:
    """The model goes wrong in some updates: in what it says when sampled, when scored, or on the way back."""
    now = {"step": 0, "place": ""}

    def among(place: str, plain: Callable, step: bool = False) -> Callable:
        def called(*given: object, **more: object) -> object:
            now["step"] = given[1] if step else now["step"]
            now["place"] = place
            try:
                return plain(*given, **more)
            finally:
                now["place"] = ""

        return called

    def install(where: str, steps: set[int]) -> None:
        plain = Tiny.head

        def head(self: Tiny, hidden_QD: torch.Tensor) -> torch.Tensor:
            logits_QV = plain(self, hidden_QD)
            if now["step"] not in steps or now["place"] != ("collect" if where == "sampled" else "update"):
                return logits_QV
            if where != "gradient":
                return logits_QV * math.nan
            if logits_QV.requires_grad:
                logits_QV.register_hook(lambda slope: slope * math.inf)
            return logits_QV

        monkeypatch.setattr(Tiny, "head", head)
        monkeypatch.setattr(unmask.training.loop, "collect", among("collect", unmask.training.loop.collect, step=True))
        monkeypatch.setattr(unmask.training.update, "update", among("update", unmask.training.update.update))

    return install


@pytest.mark.parametrize("where", ["sampled", "scored", "gradient"])
def test_an_update_that_is_not_finite_leaves_nothing_behind(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable, where: str
) -> None:
    fault(where, {2})
    states: dict[int, tuple[dict[str, torch.Tensor], dict]] = {}
    plain = unmask.training.run.base_run.write_state

    def write(folder: Path, step: int, tensors: dict, facts: dict) -> None:
        states[step] = {name: tensor.clone() for name, tensor in tensors.items()}, facts
        plain(folder, step, tensors, facts)

    monkeypatch.setattr(unmask.training.run.base_run, "write_state", write)
    config = config_for(model, method="agrpo", dtype="bfloat16" if where == "gradient" else None)
    rows = strict(run(config, tmp_path / "run"))[1:-1]
    before, after = states[1][0], states[2][0]
    assert "exp_avg lm.lm_head.weight" in after
    assert all(torch.equal(before[name], after[name]) for name in before if name != "generator")
    assert not torch.equal(after["weight lm.lm_head.weight"], states[3][0]["weight lm.lm_head.weight"])
    assert [row["train/skipped"] for row in rows] == [0, 1, 1, 1] and states[2][1]["skips"] == Skips(1, 1)
    assert states[4][1]["skips"] == Skips(1, 0)
    assert ["train/grad_norm" in row for row in rows] == [True, False, True, True]
    assert ["train/reward" in row for row in rows] == [True] * 4
    assert [row.get("warn/not_finite", 0) for row in rows] == [0, 1, 1, 1]
    (line,) = (tmp_path / "run" / "warnings.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2 and json.loads(line)["name"] == "not_finite"
    assert not (tmp_path / "run" / "broken").exists()


def test_skipped_updates_survive_being_cut_off(model: str, tmp_path: Path, fault: Callable) -> None:
    fault("scored", {2, 3})
    config = config_for(model, save_every=2, inner_steps=2, **{"with": ["dispo"]})
    whole = run(config, tmp_path / "whole")
    for step in (3, 4):  # between two that are skipped, and after them
        folder = tmp_path / str(step)
        with cut_at("collect", step):
            run(config, folder)
        resume(folder)
        assert strict(folder) == strict(whole)
        assert (folder / "warnings.jsonl").read_text() == (whole / "warnings.jsonl").read_text()
        assert all(torch.equal(weight, weights(folder)[name]) for name, weight in weights(whole).items())
    assert strict(whole)[-2]["train/skipped"] == 2


def test_too_many_in_a_row_stop_the_run_and_the_next_try_goes_on(model: str, tmp_path: Path, fault: Callable) -> None:
    fault("gradient", {1, 3, 4})
    config = config_for(model, patience=2, updates=6)
    with pytest.raises(ValueError, match=naming("2 updates", "skipped", "gradient")) as told:
        run(config, tmp_path / "run")
    assert mentions(str(told.value), tmp_path / "run" / "broken" / "4", "replay")
    assert [row["step"] for row in strict(tmp_path / "run")] == [0, 1, 2, 3, 4]
    state, _ = newest_state(tmp_path / "run" / "state")
    assert state.step == 4 and state.facts["skips"] == [3, 2]
    resume(tmp_path / "run")
    assert [row["train/skipped"] for row in strict(tmp_path / "run")[1:-1]] == [1, 1, 2, 3, 3, 3]


SHAPES = {
    "adapter, branches": {"with": ["sml", "dispo"], "sml": {"negative": 1}, "dispo": {"kl": 0.1}, "full": False},
    "visited states, cut laws": {"method": "agrpo", "agrpo": {"kl": 0.1}, "rollout": {"top_k": 5}},
    "half precision": {"method": "espo", "dtype": "bfloat16", "full": True},
    "second turn": {"inner_steps": 2},
}


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    return {key: str(value) for key, value in one.items()} == {key: str(value) for key, value in other.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_can_be_done_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """From what is on disk: the numbers of every part, those that are finite too, bit for bit."""
    config = config_for(model, patience=1, **SHAPES[shape])
    plain = config.build_method()

    def objective(logp_NL: torch.Tensor, old_NL: torch.Tensor, *rest: object) -> tuple:
        loss, metrics = plain.objective(logp_NL, old_NL, *rest)
        unmoved = torch.allclose(logp_NL.detach(), old_NL, rtol=0, atol=1e-6)
        return loss * (1.0 if unmoved else math.nan), metrics

    def credit(trace: object) -> torch.Tensor:  # the first token of the batch is worth more than any number
        return plain.credit(trace).index_fill(0, torch.tensor([0]), math.inf)

    ill = replace(plain, objective=objective) if shape == "second turn" else replace(plain, credit=credit)
    monkeypatch.setattr(Config, "build_method", lambda self: ill)
    with pytest.raises(ValueError, match=naming("1 updates", "skipped")):
        run(config, tmp_path / "run")
    (folder,) = (tmp_path / "run" / "broken").iterdir()
    facts = json.loads((folder / FACTS).read_text())
    recorded = {name: float(value) for name, value in facts["metrics"].items()}
    assert not math.isfinite(recorded["grad_norm"]) and facts["turn"] == int(shape == "second turn")
    assert len(facts["rows"]) == 6 and facts["rows"][0].keys() == {"row", "completion", "reward"}
    assert ("branch_ratio" in recorded) == ("branches" in shape)
    if shape != "second turn":  # nothing of the fault is in the method any more: it is in what was kept
        monkeypatch.setattr(Config, "build_method", lambda self: plain)
    assert same(replay(folder), recorded)


def test_an_update_is_done_again_with_the_teacher_that_it_had(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth update the teacher is the policy after the second."""
    config, calls = config_for(model, patience=1, method="dtm", dtm={"h": 0.5, "teacher_every": 2}), []
    plain = config.build_method()

    def credit(trace: object) -> torch.Tensor:
        calls.append(trace)
        return plain.credit(trace) * (math.inf if len(calls) == 4 else 1.0)

    monkeypatch.setattr(Config, "build_method", lambda self: replace(plain, credit=credit))
    with pytest.raises(ValueError, match=naming("1 updates", "skipped")):
        run(config, tmp_path / "run")
    folder = tmp_path / "run" / "broken" / "4"
    recorded = json.loads((folder / FACTS).read_text())["metrics"]
    assert math.isfinite(float(recorded["cross_entropy"]))
    assert same(replay(folder), {name: float(value) for name, value in recorded.items()})


def test_weights_that_are_not_finite_are_kept_and_seen_again(model: str, tmp_path: Path) -> None:
    config = config_for(model, patience=2, method="agrpo")
    plain = unmask.training.loop.collect

    def collect(source: object, step: int) -> object:
        if step == 2:
            with torch.no_grad():
                source.setup.policy.lm.lm_head.weight[7, 0] = math.nan
        return plain(source, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unmask.training.loop, "collect", collect)
        with pytest.raises(ValueError, match=naming("log-probability", "not finite")):
            run(config, tmp_path / "run")
    found = replay(tmp_path / "run" / "broken" / "3")
    assert found.keys() == {"sampled_logp", "scored_logp"} and not any(map(math.isfinite, found.values()))
    kept = read_broken(tmp_path / "run" / "broken" / "3", config.build_method())
    assert kept.weights["lm.lm_head.weight"].isnan().sum() == 1 and kept.terms == [] and kept.step == 3


def test_what_is_no_broken_update_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RUN/broken/STEP"):
        replay(tmp_path)
    folder = run(config_for(model, updates=1), tmp_path / "run") / "broken" / "1"
    with pytest.raises(ValueError, match=r"batch\.json"):
        replay(folder)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_the_library_raises_before_the_step(what: str) -> None:
    """A loss that is not finite though its gradient is counts too; nothing moves and no gradient is left."""
    policy = tiny_policy(SMALL, seed=1)
    optimizer = make_optimizer(policy, parse_config({}).optimizer)
    probes = fully_masked(sample(policy, [[5], [6]], row_seeds(0, 2), length=3).trace, torch.Generator())
    worth = math.inf if what == "loss" else math.nan

    def objective(logp_NL: torch.Tensor, *rest: object) -> tuple:
        total = (logp_NL * probes.asked_NL).sum()
        return (total + worth if what == "loss" else total * worth), {}

    part = LossTerm(probes, torch.ones(2), torch.ones_like(probes.trace.logp_BL), objective)
    before = [weight.clone() for weight in policy.parameters()]
    with pytest.raises(NotFinite, match=f"the {what} is not finite \\(loss {worth}, grad_norm ") as told:
        update(policy, optimizer, [part], 8, 1.0)
    assert math.isfinite(told.value.metrics["grad_norm"]) == (what == "loss")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(weight.grad is None for weight in policy.parameters()) and not optimizer.state


def test_skips_in_a_row_are_counted_from_the_last_good_update() -> None:
    counts = [Skips()]
    for skipped in (True, True, False, True):
        counts.append(counts[-1].after(skipped))
    assert counts[1:] == [Skips(1, 1), Skips(2, 2), Skips(2, 0), Skips(3, 1)]


def test_a_finite_run_counts_none(model: str, tmp_path: Path) -> None:
    rows = read_metrics(run(config_for(model, updates=2), tmp_path / "run"))
    assert [row["train/skipped"] for row in rows if "train/skipped" in row] == [0, 0]
