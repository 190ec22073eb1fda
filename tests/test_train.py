"""The loop: it computes what its stages compute one by one, and says so when something is wrong."""

import copy
import json
import math
import os
import shlex
import stat
import sys
import time
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from task_variants import task_of

import unmask
from unmask.config import Config, parse_config
from unmask.distributed.processes import ALONE
from unmask.models import Tiny, load_model, save, tiny_policy
from unmask.models.tiny import TinyShape
from unmask.tasks import TASKS, Task
from unmask.training.batch import RESAMPLES, Experiment, collect
from unmask.training.loop import train
from unmask.training.optim import learning_rate, make_optimizer
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.setup import Setup, decoding_of
from unmask.util.micro_batch import MicroBatch

SMALL = TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=32)


def _value(text: str) -> float:
    return (sum(map(ord, text)) % 5) / 4


def toy_task(dull: int = 0, broken: float | None = None) -> Task:
    """Four characters; the reward is a hash of the text. Prompts below `dull` earn 0.5 whatever they say."""

    def reward(row: dict, text: str) -> float:
        if broken is not None:
            return broken
        return 0.5 if row["i"] < dull else _value(text)

    return task_of(
        name="toy",
        summary="a hash",
        length=4,
        rows=lambda split, n, seed: [{"i": i, "seed": seed} for i in range(n)],
        prompt=lambda row: "ab"[: 1 + row["i"] % 2] + str(row["seed"] % 10),
        solution=lambda row: "aaaa",
        reward=reward,
        solved=lambda row, text: reward(row, text) == 1,
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    save(tiny_policy(SMALL, seed=1), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", toy_task)


def config_for(model: str, **data: object) -> Config:
    base = {"model": model, "task": "toy", "method": "diffu_grpo", "updates": 3, "prompts": 3, "group": 4}
    return parse_config(base | {"eval": {"prompts": 4, "samples": 2}} | data)


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([p.flatten() for p in load_model(folder / "checkpoint").parameters()]).detach()


def run(config: Config, folder: Path) -> Path:
    train(config, lambda: RunFolder(folder, config.dump()))
    return folder


@pytest.mark.parametrize("plugins", [[], ["daca", "dispo"]])
def test_the_loop_is_its_stages_one_after_the_other(model: str, tmp_path: Path, plugins: list[str]) -> None:
    config = config_for(model, method="diffu_grpo", **{"with": plugins}, inner_steps=2, micro_batch_size=5)
    ended = weights(run(config, tmp_path / "run"))

    policy, method, task = load_model(model), config.build_method(), toy_task()
    reference, rng = copy.deepcopy(policy), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(policy, config.optimizer)
    for step in (1, 2, 3):
        number = step * (1 + RESAMPLES)
        rows = [row for row in task.rows("train", 3, number) for _ in range(4)]
        trace, branches = unmask.sample(
            policy,
            [policy.tokenizer.encode(task.prompt(row)) for row in rows],
            unmask.row_seeds(number, 12),
            unmask.Decoding(length=4, steps=2),
            group_B=torch.arange(12) // 4,
            request=method.request,
        )

        def reward(found: unmask.Trace, policy=policy) -> torch.Tensor:
            texts = [policy.tokenizer.decode(ids) for ids in found.tokens_BL[:, -4:].tolist()]
            return torch.tensor([_value(text) for text in texts], dtype=torch.float64)

        probes = method.probe(trace, rng, 2)
        with torch.no_grad():
            old, known = [unmask.ask(policy, p) for p in probes], [unmask.ask(reference, p) for p in probes]
        old_branches = unmask.ask(policy, unmask.one_shot(branches)).detach() if branches is not None else None
        for turn in range(2):
            optimizer.zero_grad()
            new = unmask.ask(policy, probes[turn])
            advantage, credit = method.advantage(reward(trace), trace.group_B), method.credit(trace)
            loss, _ = method.objective(new, old[turn], probes[turn], advantage, credit)
            loss = loss + method.kl * method.divergence(new, known[turn], probes[turn])
            if branches is not None:
                asked = unmask.one_shot(branches)
                step_advantage = method.further[0].advantage(reward(branches), branches.group_B)
                ones = unmask.uniform_credit(branches)
                new_branches = unmask.ask(policy, asked)
                step_loss, _ = method.further[0].objective(new_branches, old_branches, asked, step_advantage, ones)
                loss = loss + method.further[0].weight * step_loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    expected = torch.cat([p.flatten() for p in policy.parameters()]).detach()
    start = torch.cat([p.flatten() for p in reference.parameters()]).detach()
    assert (expected - start).abs().max() > 1e-4
    # fp32 noise of another order of summation, through Adam's normalisation
    assert (ended - expected).abs().max() < 0.02 * (expected - start).abs().max()


def test_a_seed_repeats_a_run_and_another_does_not(model: str, tmp_path: Path) -> None:
    config = config_for(model, **{"with": ["daca"]})
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    other = run(config_for(model, **{"with": ["daca"]}, seed=1), tmp_path / "c")
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))
    untimed = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)]
        for folder in (first, second)
    ]
    assert untimed[0] == untimed[1]


def written(folder: Path) -> list[list[str]]:
    """The tokens of every rollout that a run has recorded."""
    groups = map(json.loads, (folder / "traces.jsonl").read_text().splitlines())
    return [rollout["tokens"] for group in groups for rollout in group["rollouts"]]


def test_another_splitting_writes_the_same_tokens_and_nearly_the_same_weights(tmp_path: Path) -> None:
    """The embedded model, rolled out and learnt from in passes of other sizes."""
    shared = {"model": "tiny", "task": "sudoku", "with": ["daca", "dispo"], "updates": 3, "trace_every": 1}
    sizes = {"prompts": 3, "group": 4, "eval": {"prompts": 3, "samples": 2}, "optimizer": {"lr": 2e-4}}
    whole = parse_config({**shared, **sizes})
    split = parse_config({**shared, **sizes, "micro_batch_size": 7, "rollout": {"micro_batch_size": 5}})
    one, other = run(whole, tmp_path / "whole"), run(split, tmp_path / "split")
    assert written(one) == written(other) and len(written(one)) == 2 * 3 * 2 + 3 * 4
    start = torch.cat([p.flatten() for p in load_model("tiny").parameters()]).detach()
    assert (weights(one) - start).abs().max() > 5e-4 and (weights(one) - weights(other)).abs().max() < 1e-5


def test_the_run_folder_holds_what_the_docs_say(model: str, tmp_path: Path, drawn: None) -> None:
    umask = os.umask(0o027)
    try:
        folder = run(config_for(model, method="agrpo", eval={"prompts": 4, "samples": 2, "every": 2}), tmp_path / "run")
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {name: 0o750 if name == "checkpoint" else 0o640 for name in modes}
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 3]
    assert "eval/solved_sampled" in rows[0] and "train/reward" not in rows[0]
    assert {"train/reward", "train/loss", "train/grad_norm", "train/ratio", "time/rollout"} <= set(rows[1])
    assert "eval/solved_greedy" in rows[3] and "eval/pass@2" in rows[-1]
    assert rows[1]["train/ratio"] == pytest.approx(1)
    names = {path.name for path in folder.iterdir()}
    logs = {"metrics.jsonl", "samples.jsonl", "traces.jsonl"}
    assert names == logs | {"config.yaml", "run.jsonl", "finished.json", "curves.png", "checkpoint"}
    (start,) = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    assert start["command"].endswith(shlex.join(sys.argv[1:])) and start["versions"]["torch"] == version("torch")
    assert start["hardware"]["cpu"] and start["hardware"]["cores"] > 0 and start["hardware"]["memory_gib"] > 0
    assert abs(time.time() - datetime.fromisoformat(start["started"]).timestamp()) < 600
    finished = json.loads((folder / "finished.json").read_text())
    assert finished["before"] == {k: v for k, v in rows[0].items() if k.startswith("eval/")}
    assert finished["after"] == {k: v for k, v in rows[-1].items() if k.startswith("eval/")}
    kept = {path.name for path in (folder / "checkpoint").iterdir()}
    assert kept == {"config.json", "model.safetensors", "SHA256SUMS", "README.md"}
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == _value(sample["completion"]) and sample["step"] == 1


def _collected(model: str, monkeypatch: pytest.MonkeyPatch, dull: int, idle_groups: str):
    monkeypatch.setitem(TASKS, "toy", lambda: toy_task(dull))
    config = config_for(model, idle_groups=idle_groups, **{"with": ["dispo"]})
    return collect(_source(config, load_model(model)), 1)


def _source(config: Config, policy: Tiny) -> Experiment:
    setup = Setup(policy, None, None, "cpu", ALONE, MicroBatch(512), MicroBatch(512))
    return Experiment(
        setup, config.build_task(), config.build_method(), config, decoding_of(config, config.build_task())
    )


def test_idle_groups_are_kept_left_out_or_replaced(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _collected(model, monkeypatch, 2, "keep")
    assert (len(kept.trace), kept.idle, kept.groups) == (12, 2, 3)
    skipped = _collected(model, monkeypatch, 2, "skip")
    assert (len(skipped.trace), skipped.idle, skipped.groups) == (4, 2, 3)
    assert {row["i"] for row in skipped.rows} == {2}
    assert torch.equal(skipped.trace.tokens_BL, kept.trace.tokens_BL[8:])
    assert len(skipped.branches) == len(kept.branches)  # branches have groups of their own
    assert skipped.reward == kept.reward  # what is reported is what was sampled
    replaced = _collected(model, monkeypatch, 2, "resample")
    assert len(replaced.trace) == 12 and {row["i"] for row in replaced.rows} == {2}
    assert (replaced.idle, replaced.groups) == (6, 9)
    assert len(replaced.trace.group_B.unique()) == 3
    assert replaced.reward_B.tolist() == [_value(text) for text in replaced.texts]
    sources = replaced.branches.group_B
    assert len(sources.unique()) == len(replaced.branches) // 2  # numbered apart over the batches


def test_equal_completions_of_the_states_of_a_prompt_are_scored_once(model: str, monkeypatch) -> None:
    scored = list[tuple[int, str]]()
    task = toy_task().variant(reward=lambda row, text: scored.append((row["i"], text)) or _value(text))
    monkeypatch.setitem(TASKS, "toy", lambda: task)
    sharp = load_model(model)
    for weight in sharp.parameters():
        weight.data *= 3  # few different completions
    batch = collect(_source(config_for(model, method="vine"), sharp), 1)
    rollouts, completed = scored[:12], scored[12:]
    assert [text for _, text in rollouts] == batch.texts
    assert 0 < len(completed) == len(set(completed)) < 96  # four completions of both states of every rollout
    value_BT = batch.trace.seen["state_value"]
    assert set((4 * 4 * value_BT[value_BT.isfinite()]).tolist()) <= set(map(float, range(17)))


def test_a_batch_without_any_signal_changes_nothing(model: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "toy", lambda: toy_task(dull=99))
    folder = run(config_for(model, method="agrpo", idle_groups="resample"), tmp_path / "run")
    start = torch.cat([p.flatten() for p in load_model(model).parameters()])
    assert torch.equal(weights(folder), start)
    row = read_metrics(folder)[1]
    assert row["train/idle_groups"] == 1 and row["train/traces"] == 0 and row["train/reward"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_stops_the_run(model: str, tmp_path: Path, monkeypatch, value: float) -> None:
    monkeypatch.setitem(TASKS, "toy", lambda: toy_task(broken=value))
    with pytest.raises(ValueError, match=r"reward .*'toy'.*(nan|inf)"):
        run(config_for(model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("guilty", ["reward", "solved"])
def test_a_reward_that_raises_is_named_with_the_completion(model, tmp_path: Path, monkeypatch, guilty: str) -> None:
    broken = toy_task().variant(**{guilty: lambda row, text: 1 / 0})
    monkeypatch.setitem(TASKS, "toy", lambda: broken)
    with pytest.raises(ValueError, match=r"reward .*'toy'.*ZeroDivisionError: division by zero"):
        run(config_for(model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_greedy_run_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.temperature: 0 is greedy"):
        run(config_for(model, rollout={"temperature": 0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_question_is_answered_with_nothing(model: str) -> None:
    """UniGRPO can draw an empty mask for every trace of a small batch; a real network takes no empty batch."""
    policy = load_model(model)
    trace = unmask.sample(policy, [[5]] * 2, unmask.row_seeds(0, 2), unmask.Decoding(4)).trace
    nothing = torch.zeros(1, 2, 5, dtype=torch.bool)
    probes = unmask.views(trace, nothing, nothing)
    assert unmask.ask(policy, probes).shape == (0, 5)


def test_a_checkpoint_is_saved_on_the_way(model: str, tmp_path: Path, monkeypatch) -> None:
    saved = []

    def save(self: RunFolder, policy: Tiny, card: str) -> None:
        saved.append(policy.lm.lm_head.weight.clone())
        (self.path / "checkpoint").mkdir(exist_ok=True)

    monkeypatch.setattr(RunFolder, "save", save)
    run(config_for(model, updates=3, save_every=2), tmp_path / "run")
    assert len(saved) == 2 and not torch.equal(*saved)


def test_a_bad_model_leaves_no_folder(tmp_path: Path) -> None:
    config = config_for(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"nothing"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_not_written_over(model: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    with pytest.raises(ValueError, match="not an empty folder"):
        run(config_for(model), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_the_price_of_kl_is_taken_off_the_reward_before_the_advantage(model: str) -> None:
    from unmask.core.objective import reward_divergence
    from unmask.training.loss_terms import Scorer, loss_terms

    config = config_for(model, method="reinforce_pp", reinforce_pp={"kl": 0.3, "prompt_masking": 0.0})
    method, policy = config.build_method(), load_model(model)
    reference = tiny_policy(SMALL, seed=2)
    batch = collect(_source(config, policy), 1)
    rng = torch.Generator().manual_seed(0)
    ((part,),) = loss_terms(method, batch, Scorer(policy, reference), rng)
    with torch.no_grad():
        old, known = unmask.ask(policy, part.probes), unmask.ask(reference, part.probes)
    price_B = reward_divergence(old, known, part.probes).double()
    by_hand_B = torch.stack([(old - known)[b][batch.trace.counted_BL[b]].sum() for b in range(12)]).double()
    assert torch.allclose(price_B, by_hand_B, atol=1e-5) and price_B.abs().max() > 0.01
    priced_B = batch.reward_B - 0.3 * price_B
    expected_B = (priced_B - priced_B.mean()) / (priced_B.std(correction=0) + 1e-6)
    assert torch.allclose(part.advantage_B, expected_B, atol=1e-9)
    assert part.reference_NL is None  # the KL is in the reward, not in the loss as well


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(model: str, schedule: str, expected: list[float]) -> None:
    settings = {"schedule": schedule, "warmup": 2, "lr": 2.0}
    config = config_for(model, updates=6, optimizer=settings)
    assert [learning_rate(config, step) / 2 for step in range(1, 7)] == pytest.approx(expected)


def test_a_gradient_that_is_not_finite_stops_before_the_step(model: str, tmp_path: Path, monkeypatch) -> None:
    config = config_for(model, method="agrpo", optimizer={"max_skipped_updates": 1})
    broken = replace(config.build_method(), credit=lambda trace: torch.full_like(trace.logp_BL, math.nan))
    monkeypatch.setattr(Config, "build_method", lambda self: broken)
    with pytest.raises(ValueError, match=r"gradient .*ratio 1, clipped 0, loss nan"):
        run(config, tmp_path / "run")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]
    assert torch.equal(weights(tmp_path / "run"), torch.cat([p.flatten() for p in load_model(model).parameters()]))


def test_branch_metrics_keep_their_name_where_every_group_is_idle(model: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "toy", lambda: toy_task(dull=99))
    folder = run(config_for(model, idle_groups="skip", **{"with": ["dispo"]}), tmp_path / "run")
    row = read_metrics(folder)[1]
    assert "train/branch_loss" in row and "train/loss" not in row
