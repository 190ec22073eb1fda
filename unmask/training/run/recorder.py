"""Writes groups of rollouts down while a run learns, for `unmask view`. It looks at what is there: nothing that is
sampled, learnt or measured depends on it."""

import torch
from torch import Tensor

from unmask.core.trace import Trace, select_traces
from unmask.evaluation.evaluate import WATCHED, OnSamples
from unmask.rollout.sample import completions
from unmask.tasks.scoring import RewardFailure, Scores
from unmask.tasks.task import Row
from unmask.training.batch import Batch, Experiment
from unmask.training.run.records import answer_of, branches_of, rounded, short, taught_of, written
from unmask.training.run.sudoku_board import board_of, cells_of
from unmask.training.update import LossTerm
from unmask.util.trace_lines import VERSION, TraceLine

MOST = 16
"""Rollouts of a group that are written down."""


class TraceRecorder:
    """Holds lines until they are written. Every process has one; the first one's has lines."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.config = experiment, experiment.config
        self.show = experiment.setup.policy.tokenizer.show
        self.waiting = list[TraceLine]()
        self.said = list[tuple[LossTerm, Tensor]]()

    def take_lines(self) -> list[TraceLine]:
        """What has been written down since this was last asked."""
        found, self.waiting = self.waiting, []
        return found

    def on_samples(self, step: int, rows: list[Row]) -> OnSamples | None:
        """What looks on at an evaluation after `step` updates: at its first problems, `rows` being all of them."""
        if not self.config.trace_every or not self.experiment.setup.ranks.first:
            return None

        def seen(trace: Trace, found: Scores) -> None:
            samples = self.config.eval.samples
            for number in range(min(WATCHED, len(trace) // samples)):
                index = number * samples + torch.arange(min(samples, MOST))
                group = select_traces(trace, index)
                self.waiting.append(self._line("eval", step, number, rows[number], group, found, index))

        return seen

    def on_logprobs(self, term: LossTerm, logp_NL: Tensor) -> None:
        """What the policy has said to a part of the first inner update."""
        self.said.append((term, logp_NL))

    def record(self, step: int, batch: Batch, updated: bool) -> None:
        """After an update, or after one that was skipped: write the first group of its batch down."""
        said, self.said = self.said, []
        every, length = self.config.trace_every, self.experiment.decoding.length
        due = every > 0 and (step == 1 or step % every == 0)
        if not due or not self.experiment.setup.ranks.first or not len(batch.trace):
            return
        index = torch.arange(min(self.config.group, MOST))
        group, found = select_traces(batch.trace, index), Scores(batch.reward_B, batch.solved_B, {}, batch.failures)
        line = self._line("train", step, 0, batch.rows[0], group, found, index)
        for part, logp_NL in said:
            if part.probes.trace is batch.trace:
                taught_of(line["rollouts"], part, logp_NL, length, updated)
        branch_part = next((part for part, _ in said if part.probes.trace is batch.branches), None)
        self._add_branches(line["rollouts"], batch, group, branch_part)
        self.waiting.append(line)

    def _line(
        self, kind: str, step: int, number: int, row: Row, trace: Trace, found: Scores, index: Tensor
    ) -> TraceLine:
        """A group of which nothing has been learnt yet; `index` is where its traces are in what was judged."""
        task, policy, length = self.experiment.task, self.experiment.setup.policy, self.experiment.decoding.length
        texts, rollouts = completions(policy, trace, length), written(trace, length, self.show, policy.pad_id)
        cells = [cells_of(task, row, each["tokens"], text) for each, text in zip(rollouts, texts, strict=True)]
        board = board_of(row, cells)
        for i, place in enumerate(index.tolist()):
            rollouts[i] |= {
                "weight": None,
                "reward": rounded(float(found.reward_B[place])),
                "solved": bool(found.solved_B[place]),
                "advantage": None,
                "verdict": self._verdict(row, texts[i], found.failures),
                "probes": None,
                "branches": None,
                "taught": False,
            }
            if board is not None and cells[i] != board["cells"]:
                rollouts[i]["cells"] = cells[i]
        return {
            "v": VERSION,
            "id": f"{kind[0]}{step}-{number}",
            "kind": kind,
            "step": step,
            "task": task.name,
            "prompt": task.prompt(row),
            "steps": 1 + max((step for each in rollouts for step in each["filled"] if step is not None), default=-1),
            "temperature": self.config.rollout.temperature,
            "order": self.config.rollout.order,
            "answer": answer_of(task, row),
            "sudoku": board,
            "rollouts": rollouts,
        }

    def _verdict(self, row: Row, text: str, failures: list[RewardFailure]) -> str | None:
        """The grader's word; where the reward failed, why."""
        for failure in failures:
            if failure.row == row and failure.completion == text:
                return short(failure.error)
        verdict = self.experiment.task.verdict(row, text)
        return None if verdict is None else short(verdict)

    def _add_branches(self, rollouts: list[TraceLine], batch: Batch, group: Trace, part: LossTerm | None) -> None:
        """To each trace of the first group what filled a state of it in one shot."""
        if batch.branches is None or batch.branch_reward_B is None:
            return
        # A branch names its trace as it was numbered before idle groups were left out: whole groups, one after another.
        first, length = int(group.group_B[0]) * self.config.group, self.experiment.decoding.length
        earned = batch.branch_reward_B, None if part is None else part.advantage_B
        for i, rollout in enumerate(rollouts):
            numbers = (batch.branches.group_B == first + i).nonzero().squeeze(1).tolist()
            rollout["branches"] = branches_of(batch.branches, numbers, group.step_BL[i, -length:], *earned, self.show)
