"""Evaluations of one model of the study of a real language model: see language.py."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from language_worlds import Ask


def measure(model: str, asks: Sequence[Ask], device: str) -> dict[str, Any]:
    """The answers of a model; runs in a process of the pool."""
    import torch

    from unmask.core.order import ORDERS
    from unmask.core.token_sampling import TokenSampling
    from unmask.evaluation.evaluate import Evaluator
    from unmask.evaluation.prompt_variants import PromptVariant, task_in_variant
    from unmask.models import load_model
    from unmask.models.fp8 import Fp8Layers
    from unmask.rollout.cache import cache_of
    from unmask.rollout.decoding import Decoding
    from unmask.rollout.graphs import Graphs
    from unmask.tasks import TASKS
    from unmask.util.metering import Meter, count_passes
    from unmask.util.micro_batch import MicroBatch

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    policy, found, batch = load_model(model, dtype=dtype, device=device), {}, MicroBatch(288)
    for ask in asks:
        task = TASKS[ask.task](**ask.options)
        if ask.template:
            task = task_in_variant(task, PromptVariant("", ask.template, ""))
        shape, cache = (ask.length, ask.steps, ask.block), cache_of(ask.cache)
        sampling, order = TokenSampling(ask.temperature), ORDERS[ask.order]
        how = Decoding(*shape, sampling, order, threshold=ask.threshold, cache=cache, graphs=Graphs(False))
        rows, begun, meter = task.rows("test", ask.problems, 0), time.perf_counter(), Meter()
        layers = Fp8Layers(policy).used() if ask.fp8 else nullcontext()
        with torch.no_grad(), count_passes(meter, policy), layers:
            if ask.values:
                found[ask.name] = state_curve(policy, task, rows, how, ask.values, batch)
            else:
                found[ask.name] = Evaluator(policy, task, how, ask.samples, -1, device, batch).evaluate(rows).data()
        found[ask.name] |= {"seconds": time.perf_counter() - begun, "forwards": meter.forwards}
    return found


def state_curve(policy: Any, task: Any, rows: Sequence[Any], how: Any, draws: int, batch: Any) -> dict[str, Any]:
    """The mean value of the state before every step of a rollout of each row, and the behaviours of its completions."""
    from unmask.rollout.sample import row_seeds, sample
    from unmask.studies.credit.study import task_score
    from unmask.studies.credit.values import ValueSettings, state_values

    device = next(policy.parameters()).device
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in rows]
    trace = sample(policy, prompts, row_seeds(0, len(rows)).to(device), how, micro_batch=batch).trace
    settings = ValueSettings(how, batch, draws)
    values = state_values(policy, trace, task_score(policy, task, rows, how.length), settings)
    shown = dict(zip(values.behaviours, values.shown_BTN.mean(0).T.tolist(), strict=True))
    return {
        "value": values.value_HBT.mean((0, 1)).tolist(),
        "decided": ((values.value_HBT == 0).all(0) | (values.value_HBT == 1).all(0)).double().mean(0).tolist(),
        "shown": shown,
    }


def shown(found: dict[str, Any]) -> str:
    """Sampled, greedy, samples that differ and careful answers, in percent."""
    return "; ".join(
        f"{name} {100 * each['sampled'][0]:.0f} / {100 * each['greedy'][0]:.0f}"
        + (f", differ {100 * each['mixed'][0]:.0f}" if each.get("mixed") else "")
        + "".join(f", {kind} {100 * share:.0f}" for kind, share in each["behaviours"].items())
        for name, each in found.items()
        if "sampled" in each
    )
