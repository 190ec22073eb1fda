"""Stores groups of rollouts during training, for `unmask view`. It does not change what a run computes."""

import torch
from torch import Tensor

from unmask.core.trace import Trace, select_traces
from unmask.evaluation.evaluate import TRACED_PROBLEMS, OnSamples
from unmask.rollout.sample import completions
from unmask.tasks.scoring import RewardFailure, Scores
from unmask.tasks.task import Row
from unmask.training.batch import Batch, Experiment
from unmask.training.run import records
from unmask.training.run.sudoku_board import board_line, cell_positions
from unmask.training.update import LossTerm
from unmask.util.trace_lines import VERSION, TraceLine

MOST = 16
"""The most rollouts of a group that are stored."""


class TraceRecorder:
    """Collects lines until they are written. Every process has one; only the first process collects lines."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.config = experiment, experiment.config
        self.show = experiment.setup.policy.tokenizer.show
        self.waiting = list[TraceLine]()
        self.logprobs = list[tuple[LossTerm, Tensor]]()

    def take_lines(self) -> list[TraceLine]:
        """The lines since the last call."""
        lines, self.waiting = self.waiting, []
        return lines

    def on_samples(self, step: int, rows: list[Row]) -> OnSamples | None:
        """A callback that stores the first problems of an evaluation; `rows` are all of its problems."""
        if not self.config.trace_every or not self.experiment.setup.ranks.first:
            return None

        def record_samples(trace: Trace, scores: Scores) -> None:
            samples = self.config.eval.samples
            for number in range(min(TRACED_PROBLEMS, len(trace) // samples)):
                index = number * samples + torch.arange(min(samples, MOST))
                group = select_traces(trace, index)
                self.waiting.append(self.group_line("eval", step, number, rows[number], group, scores, index))

        return record_samples

    def on_logprobs(self, term: LossTerm, logp_NL: Tensor) -> None:
        """Store the policy's log-probabilities of a term of the first inner update."""
        self.logprobs.append((term, logp_NL))

    def record(self, step: int, batch: Batch, updated: bool) -> None:
        """Store the first group of the batch, after an update or a skipped update."""
        logprobs, self.logprobs = self.logprobs, []
        length, due = self.experiment.decoding.length, records.trace_due(step, self.config.trace_every)
        if not due or not self.experiment.setup.ranks.first or not len(batch.trace):
            return
        index = torch.arange(min(self.config.group, MOST))
        group, scores = select_traces(batch.trace, index), Scores(batch.reward_B, batch.solved_B, {}, batch.failures)
        line = self.group_line("train", step, 0, batch.rows[0], group, scores, index)
        for term, logp_NL in logprobs:
            if term.probes.trace is batch.trace:
                records.add_training_info(line["rollouts"], term, logp_NL, length, updated)
        branch_term = next((term for term, _ in logprobs if term.probes.trace is batch.branches), None)
        self._add_branches(line["rollouts"], batch, group, branch_term)
        self.waiting.append(line)

    def group_line(
        self, kind: str, step: int, number: int, row: Row, trace: Trace, scores: Scores, index: Tensor
    ) -> TraceLine:
        """A group without its training information; `index` is where its traces are in the scores."""
        task, policy, length = self.experiment.task, self.experiment.setup.policy, self.experiment.decoding.length
        texts = completions(policy, trace, length)
        rollouts = records.rollout_lines(trace, length, self.show, policy.pad_id)
        cells = [cell_positions(task, row, each["tokens"], text) for each, text in zip(rollouts, texts, strict=True)]
        board = board_line(row, cells)
        for i, place in enumerate(index.tolist()):
            rollouts[i] |= {
                "weight": None,
                "reward": records.short_number(float(scores.reward_B[place])),
                "solved": bool(scores.solved_B[place]),
                "advantage": None,
                "verdict": self._verdict(row, texts[i], scores.failures),
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
            "answer": records.expected_answer(task, row),
            "sudoku": board,
            "rollouts": rollouts,
        }

    def _verdict(self, row: Row, text: str, failures: list[RewardFailure]) -> str | None:
        """The grader's verdict, or the error of a reward that failed."""
        for failure in failures:
            if failure.row == row and failure.completion == text:
                return records.short_text(failure.error)
        verdict = self.experiment.task.verdict(row, text)
        return None if verdict is None else records.short_text(verdict)

    def _add_branches(self, rollouts: list[TraceLine], batch: Batch, group: Trace, term: LossTerm | None) -> None:
        """Add the branches of each trace of the first group."""
        branches, reward_B = batch.branches, batch.branch_reward_B
        if branches is None or reward_B is None:
            return
        # A branch refers to the number of its trace before idle groups were left out: whole groups, one after another.
        first, length = int(group.group_B[0]) * self.config.group, self.experiment.decoding.length
        advantage_B = None if term is None else term.advantage_B
        for i, rollout in enumerate(rollouts):
            numbers = (branches.group_B == first + i).nonzero().squeeze(1).tolist()
            step_C = group.step_BL[i, -length:]
            rollout["branches"] = records.branch_lines(branches, numbers, step_C, reward_B, advantage_B, self.show)
