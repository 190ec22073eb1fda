"""The training loop: one line a stage, no method names in it.

prompts -> sample -> Trace -> (branch) -> reward -> advantage -> credit
        -> probes -> ask the old and the reference policy once
        -> for each inner step: ask the current policy -> objective -> backward -> step
-> log -> evaluate -> save
"""

from pathlib import Path

import torch

from unmask.config import Config
from unmask.config.key_checks import check_trainable
from unmask.config.parse import read_run_config
from unmask.evaluation.evaluate import Evaluation
from unmask.training.batch import Experiment, collect
from unmask.training.loss_terms import Scorer, loss_terms
from unmask.training.optim import learning_rate, make_optimizer, set_learning_rate
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import MakeFolder, RunFolder, lock_run, lock_when_made, with_config
from unmask.training.run.resume import check_start, last_state
from unmask.training.run.state import State
from unmask.training.run.trackers import check_trackers, tracking
from unmask.training.run.training_run import TrainingResult, TrainingRun
from unmask.training.setup import decoding_of, set_up
from unmask.training.update import inner_updates
from unmask.util.metering import Meter, count_passes


def train(
    config: Config, make_folder: MakeFolder, hooks: Hooks = Hooks(), before: Evaluation | None = None
) -> TrainingResult:
    """Train as configured. The folder is created once the model has been loaded, checked and evaluated; `before` is
    that evaluation, if another run has made it. Under torchrun every process calls this, and the first one writes the
    folder and calls the hooks."""
    with lock_when_made(make_folder) as make:
        return _train(config, make, hooks, before)


def resume(folder: Path, hooks: Hooks = Hooks()) -> TrainingResult:
    """Resume an interrupted run from its last saved state, or from the beginning if there is none. The result is that
    of an uninterrupted run: the same log except for times, and the same weights (bit for bit on a CPU)."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not a run folder: there is no config.yaml in it")
    with lock_run(folder):
        config = read_run_config(folder)
        state = last_state(folder, config.user_files)
        lengths = state.facts["lengths"] if state is not None else {}
        return _train(config, lambda: RunFolder.reopen(folder, lengths), hooks, state, folder)


def _train(
    config: Config,
    make_folder: MakeFolder,
    hooks: Hooks,
    start: State | Evaluation | None,
    interrupted: Path | None = None,
) -> TrainingResult:
    """Check everything that can be checked, then load the model and train it. `interrupted` is the folder of a run that
    is resumed."""
    check_trainable(config)
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    task.rows("train", 1, 0)  # a task without training rows raises now, before the model is loaded
    check_trackers(config.track)
    with set_up(config, method.needs_reference, method.needs_teacher) as setup:
        if interrupted is not None:
            check_start(interrupted, setup.policy)
        meter = Meter()
        experiment = Experiment(setup, task, method, config, decoding.for_policy(setup.policy))
        settings, resumed = experiment.settings(), isinstance(start, State)
        make = make_folder if resumed else with_config(make_folder, settings)
        with (
            tracking(settings, make, hooks, resumed) as (make_tracked, hooks),
            count_passes(meter, setup.policy, setup.reference, setup.teacher_model),
        ):
            return run_updates(experiment, make_tracked, start, meter, hooks)


def run_updates(
    experiment: Experiment, make_folder: MakeFolder, start: State | Evaluation | None, meter: Meter, hooks: Hooks
) -> TrainingResult:
    config, setup, method = experiment.config, experiment.setup, experiment.method
    policy, micro_batch, ranks = setup.policy, setup.update_batch, setup.ranks
    optimizer, rng = make_optimizer(policy, config.optimizer), torch.Generator().manual_seed(config.seed)
    scorer = Scorer(policy, setup.reference, micro_batch, ranks, setup.teacher_model)
    run = TrainingRun(experiment, optimizer, rng, meter, hooks)
    run.start(make_folder, start)
    for step in run.remaining_steps():
        with run.save_on_error(step), run.timed("rollout"):
            batch = collect(experiment, step)
        with run.timed("update"):
            set_learning_rate(optimizer, learning_rate(config, step, run.spent))
            if setup.teacher is not None and (step - 1) % method.teacher_every == 0:
                setup.teacher.refresh()
            terms = loss_terms(method, batch, scorer, rng, config.inner_steps) if batch.broken is None else []
            max_grad_norm, on_logprobs = config.optimizer.max_grad_norm, run.recorder.on_logprobs
            update = inner_updates(policy, optimizer, terms, micro_batch, max_grad_norm, ranks, on_logprobs)
        run.log(step, batch, update)
        run.pause_if_requested(step)
        if run.eval_due(step):
            run.evaluate(step)
        if run.save_due(step):
            run.save(step)
    return run.finish()
