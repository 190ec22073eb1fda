"""DPS on AGRPO in TRL's GRPOTrainer: 4x4 Sudoku with the embedded model. Needs the extra: pip install 'unmask[trl]'

    python examples/dps_in_trl.py

TRL brings the data set, the reward function, the optimiser and the logs; the rollouts, the questions put to the policy,
and what each token is worth are ours. docs/trl.md says what fits into TRL and what does not.
"""

try:
    from datasets import Dataset
    from trl import GRPOConfig
except ImportError as error:
    raise SystemExit(f"this example needs TRL ({error}): pip install 'unmask[trl]'") from None

import unmask
from unmask.integrations.trl import DiffusionGRPOTrainer

UPDATES, PROMPTS, GROUP = 40, 8, 8

policy = unmask.load_model("tiny")
task = unmask.TASKS["sudoku"]()
puzzles = [{"prompt": task.prompt(row), "puzzle": row} for row in task.rows("train", UPDATES * PROMPTS, 0)]


def solved_cells(completions, puzzle, **columns):
    """A reward as TRL wants it: lists in, a list out; `puzzle` is a column of the data set."""
    return [task.reward(row, text) for row, text in zip(puzzle, completions, strict=True)]


trainer = DiffusionGRPOTrainer(
    policy,
    method=unmask.dps(unmask.agrpo(), strength=0.3),
    decoding=unmask.Decoding(length=16, steps=8, block=16),
    reward_funcs=solved_cells,
    args=GRPOConfig(
        "runs/dps_in_trl",
        max_steps=UPDATES,
        per_device_train_batch_size=PROMPTS * GROUP // 2,  # traces in a micro-batch
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        learning_rate=2e-4,
        bf16=False,  # the policy computes in the type it was loaded in
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=Dataset.from_list(puzzles),
    micro_batch_size=512,
)
trainer.train()
trainer.save_model("runs/dps_in_trl/model")

first, *_, last = [row["reward"] for row in trainer.state.log_history if "reward" in row]
print(f"reward {first:.3f} -> {last:.3f}; unmask eval runs/dps_in_trl/model")
