"""The meter against a model that counts for itself: canvases through its first layer, and gradients back out of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_variants import task_of

from checkpoints import A2D, DREAM, TOKENS, bert, loaded, modernbert, qwen
from unmask.config import Config, parse_config
from unmask.distributed.processes import Ranks
from unmask.evaluation.evaluate import Evaluator
from unmask.methods import BASES
from unmask.models import load_model, save, tiny_policy
from unmask.models.tiny import TinyShape
from unmask.rollout.engine import Engine
from unmask.studies.compare.cells import cost_of
from unmask.tasks import TASKS, Task
from unmask.training import batch as batch_module, loop as train_module
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.util.metering import Meter, PassCounterMixin, count_passes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder)
    return str(folder)


def toy_task() -> Task:
    """Eight characters; the reward is a hash of them. The first prompt of a batch earns nothing: its group is idle."""

    def reward(row: dict[str, Any], text: str) -> float:
        return (sum(map(ord, text)) % 5) / 4 if row["i"] else 0.0

    return task_of(
        name="toy",
        summary="a hash",
        length=8,
        rows=lambda split, n, seed: [{"i": i, "seed": seed} for i in range(n)],
        prompt=lambda row: "ab"[: 1 + row["i"] % 2] + str(row["seed"] % 10),
        solution=lambda row: "a" * 8,
        reward=reward,
        solved=lambda row, text: reward(row, text) == 1,
    )


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", toy_task)


class Counting:
    """Counts what goes through the first layer of every model that is loaded, and what comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = 0.0
        self.evaluating = False
        monkeypatch.setattr("unmask.training.setup.load_model", self.load)
        monkeypatch.setattr(Engine, "_merges_for_free", False)  # equal canvases are charged for each
        monkeypatch.setattr("unmask.rollout.sample.prompt_rows", lambda prompts, device: None)  # and equal prompts
        # What is measured is no part of what it costs to learn.
        for where, name in ((Evaluator, "evaluate"), (batch_module, "scorer_gap")):
            monkeypatch.setattr(where, name, self.uncounted(getattr(where, name)))

    def uncounted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **more: Any) -> Any:
            self.evaluating = True
            try:
                return plain(*arguments, **more)
            finally:
                self.evaluating = False

        return measured

    def __deepcopy__(self, memo: Any) -> "Counting":
        """The reference is a copy of the policy, hook and all, and is to count here too."""
        return self

    def load(self, *arguments: Any, **more: Any) -> Any:
        policy = load_model(*arguments, **more)
        policy.lm.model.layers[0].register_forward_hook(self.seen)
        return policy

    def seen(self, layer: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if self.evaluating:
            return
        rows, columns, _ = inputs[0].shape
        memory = inputs[4] if len(inputs) > 4 else None
        share = rows * columns / (columns if memory is None else memory.key_SHLD.shape[2])
        self.forward += share
        if output.requires_grad:
            output.register_hook(lambda gradient: self.returned(share))

    def returned(self, share: float) -> None:
        self.backward += share

    @property
    def total(self) -> float:
        """The way back costs two forwards."""
        return self.forward + 2 * self.backward


def config_for(model: str, **data: Any) -> Config:
    base = {"model": model, "task": "toy", "updates": 2, "prompts": 3, "group": 3}
    return parse_config({**base, "eval": {"prompts": 2, "samples": 1, "every": 1}, **data})


def trained(config: Config, folder: Path) -> list[dict[str, float]]:
    train_module.train(config, lambda: RunFolder(folder, config.dump()))
    return read_metrics(folder)


BY_THRESHOLD = {"rollout": {"order": "left_to_right", "threshold": 0.8}}
CASES: dict[str, dict[str, Any]] = {}
for method in BASES:
    both = ["dispo"] if method == "vine" else ["daca", "dispo"]  # vine refuses daca
    for plugins in ([], both):
        name = "+".join([method, *plugins])
        CASES[name] = {"method": method, "with": plugins} | (BY_THRESHOLD if method == "fork" else {})
CASES |= {
    "coupled_grpo+dispo": {"method": "coupled_grpo", "with": ["dispo"]},
    "inner updates": {"method": "unigrpo", "inner_steps": 3},
    "both signs": {"method": "diffu_grpo", "with": ["daca"], "daca": {"negative": 1.0, "kl": 0.1}},
    "more views than a pass holds": {"method": "agrpo", "agrpo": {"draws": 5}, "micro_batch_size": 3},
    "an adapter": {"method": "diffu_grpo", "full": False, "lora": {"rank": 2}},
    "groups drawn again": {"method": "agrpo", "idle_groups": "resample"},
    "a tenth of the columns": {"method": "wd1", "rollout": {"block": 4, "cache": "dual", "mismatch": 0.5}},
    "a prefix cache": {"method": "wd1", "with": ["dispo"], "rollout": {"block": 4, "cache": "prefix", "refresh": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_charged_for_what_its_model_did(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    counting = Counting(monkeypatch)
    rows = trained(config_for(small, **CASES[case]), tmp_path / "run")
    charged = [row["cost/forwards"] for row in rows if "cost/forwards" in row]
    exact = "rollout" not in CASES[case]  # shares of a canvas are rounded
    assert len(charged) == 2 and 0 < charged[0] < charged[1] and counting.backward > 0
    assert charged[-1] == (counting.total if exact else pytest.approx(counting.total, rel=1e-12))


@pytest.mark.parametrize("case", ["both signs", "coupled_grpo+dispo", "spg+daca+dispo", "a prefix cache"])
def test_what_was_reckoned_is_charged_where_nothing_ends_early_or_is_idle(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config = config_for(small, updates=1, **CASES[case])
    plain = train_module.collect

    def collect(source: Any, step: int) -> Any:
        """The batch with rewards that differ."""
        batch, branch_reward_B = plain(source, step), None
        if batch.branch_reward_B is not None:
            branch_reward_B = torch.arange(len(batch.branch_reward_B), dtype=torch.float64)
        return replace(
            batch, reward_B=torch.arange(len(batch.reward_B), dtype=torch.float64), branch_reward_B=branch_reward_B
        )

    monkeypatch.setattr(train_module, "collect", collect)
    policy_head = type(load_model(small)).head
    monkeypatch.setattr(
        "unmask.models.decoder.Decoder.head",
        lambda policy, hidden_QD: (
            policy_head(policy, hidden_QD) - 1e4 * (torch.arange(policy.vocabulary) == policy.eos_id)
        ),
    )
    charged = trained(config, tmp_path / "run")[1]["cost/forwards"]
    assert charged == pytest.approx(cost_of(config).update, rel=1e-12)


def test_an_evaluation_is_reckoned_as_it_is_made(small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_for(small, updates=1)
    meter, plain = Meter(), Evaluator.evaluate

    def evaluate(self: Evaluator, *arguments: Any) -> Any:
        with count_passes(meter, self.policy):
            return plain(self, *arguments)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    trained(config, tmp_path / "run")
    assert 0 < meter.forwards <= 2 * cost_of(config).evaluation == 2 * 2 * (1 + 1) * 4


@torch.no_grad()
@pytest.mark.parametrize("make", [bert, modernbert])
def test_encoders_are_counted(tmp_path: Path, make: Any) -> None:
    policy, meter = load_model(make(tmp_path)), Meter()
    seen: list[torch.Size] = []
    policy.lm.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with count_passes(meter, policy):
        policy.hidden(torch.tensor([TOKENS, TOKENS[::-1], TOKENS]) % 32, None, torch.arange(5))
    assert [shape[:2] for shape in seen] == [(3, 13)] and meter.forwards == 3.0


@torch.no_grad()
@pytest.mark.parametrize(("fields", "columns"), [(DREAM, 5), (A2D, 4)])
def test_a_shifted_model_is_charged_for_the_column_before_its_window(
    tmp_path: Path, fields: dict[str, Any], columns: int
) -> None:
    """The logits of a Dream model stand one place earlier, so a window of four columns takes five."""
    policy, seen = loaded(qwen(tmp_path, fields)[0]), list[int]()
    tokens_SL, at_Q, meter = torch.tensor([TOKENS[:12], TOKENS[1:13]]), torch.tensor([4, 7, 16]), Meter()
    _, memory = policy.remember(tokens_SL, None, at_Q)
    policy.lm.model.layers[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.shape[1]))
    with count_passes(meter, policy):
        policy.hidden_window(memory, tokens_SL, 4, 8, at_Q)
    assert seen == [columns] and meter.forwards == pytest.approx(2 * columns / 12, rel=1e-12)


def test_meters_nest_and_count_on() -> None:
    canvas_SL, outer, inner, model = torch.zeros(3, 8), Meter(100.0), Meter(), PassCounterMixin()
    model.record_pass(canvas_SL, 8)  # nobody is counting
    with torch.no_grad(), count_passes(outer, model, None):
        model.record_pass(canvas_SL, 8)
        PassCounterMixin().record_pass(canvas_SL, 8)  # another model
        with count_passes(None, model):
            model.record_pass(canvas_SL, 8)
        with count_passes(inner, model):
            model.record_pass(canvas_SL, 2)
        with torch.enable_grad():
            model.record_pass(canvas_SL, 8)
    assert (outer.forwards, inner.forwards, model.meter) == (100 + 3 + 9, 0.75, None)


def test_processes_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda self, value: value + 2.5)  # what another process has counted
    assert Ranks(0, 2).total(4.0, "cpu") == 6.5
