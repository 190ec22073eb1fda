"""TRL's trainer with our rollouts and losses walks the path of our own: losses, gradients, weights, step by step."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl is not installed")

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

import unmask
from checkpoints import LLADA_SPECIALS, LLADA_TEMPLATE, LLADA_TEXT, bert, llada, with_tokenizer
from helpers import ON_ROLLOUTS, assert_close
from unmask.core.options import LoraOptions
from unmask.core.order import left_to_right
from unmask.core.probes import ask, at_states
from unmask.integrations.trl import DiffusionGRPOTrainer, fast_tokenizer, prompt_ids, rows_loss
from unmask.models import TinyShape, load_model, tiny_policy
from unmask.models.lora import ReferencePolicy, add_adapter, trainable_parameters
from unmask.rollout.decoding import Decoding
from unmask.training.update import LossTerm, term_loss, update

SEED, GROUP, UPDATES, RATE = 3, 4, 4, 1e-3
HOW = Decoding(length=6, steps=3, block=6)
PROMPTS = ["1+1=", "22=", "3", "40-4="]  # of different lengths: some rows are padded


def small():
    return tiny_policy(TinyShape(width=16, layers=2, heads=2, hidden=16, max_length=24)).double()


def digits(completions, wanted, **columns):
    """TRL's form. A share of characters, so that an untrained model has something to gain."""
    return [sum(c in w for c in text) / len(text or " ") for text, w in zip(completions, wanted, strict=True)]


def short(prompts, completions, **columns):
    """Says nothing of some prompts, as TRL allows where another function does."""
    return [None if len(p) == 1 else float(len(c) < 6) for p, c in zip(prompts, completions, strict=True)]


DATA = Dataset.from_list([{"prompt": prompt, "wanted": "0123456789abcdefghijklm"} for prompt in PROMPTS])


TALK = Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in PROMPTS])


def odd_characters(prompts, completions, **columns):
    """Conversations in, conversations out."""
    assert all(turn["role"] == "user" for (turn,) in prompts)
    return [float(sum(ord(c) % 2 for c in turn["content"])) for (turn,) in completions]


def settings(folder, **more):
    """Two prompts a batch, four rollouts each, in two micro-batches that cut through the groups."""
    plain = {
        "bf16": False, "seed": SEED, "max_steps": UPDATES, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "adam_beta2": 0.99, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_generations": GROUP, "num_iterations": 2, "shuffle_dataset": False, "reward_weights": [1.0, 0.5],
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return GRPOConfig(str(folder), **(plain | more))


def trainer_of(folder, policy, method, callbacks=(), eval_dataset=None, **more):
    return DiffusionGRPOTrainer(
        policy, method, HOW, reward_funcs=[digits, short], args=settings(folder, **more), train_dataset=DATA,
        eval_dataset=eval_dataset, callbacks=list(callbacks), micro_batch_size=3,
    )  # fmt: skip


class Gradients(TrainerCallback):
    """What TRL's optimiser is given, step by step."""

    def __init__(self, policy):
        self.policy, self.found = policy, []

    def on_pre_optimizer_step(self, *_, **__):
        self.found.append([p.grad.clone() for p in trainable_parameters(self.policy)])


def own_path(policy, method, reference):
    """Our trainer's steps on the same prompts, by `sample`, `loss_terms` and `update` alone."""
    optimizer = torch.optim.AdamW(trainable_parameters(policy), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    gradients, found = [], []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in trainable_parameters(policy)])
    )
    for done in range(0, UPDATES, 2):
        pair = PROMPTS[done % 4 : done % 4 + 2]
        prompts = [prompt for prompt in pair for _ in range(GROUP)]
        rollouts = unmask.sample(
            policy, [policy.tokenizer.encode(p) for p in prompts], unmask.row_seeds(SEED * 2**24 + done, 2 * GROUP),
            HOW, group_B=torch.arange(2 * GROUP) // GROUP, request=method.request,
        )  # fmt: skip
        texts = [policy.tokenizer.decode(ids) for ids in rollouts.trace.tokens_BL[:, -6:].tolist()]
        length_B = [0.0 if x is None else x for x in short(prompts, texts)]
        share_B = torch.tensor(digits(texts, ["0123456789abcdefghijklm"] * len(texts)))  # in fp32, as TRL has them
        reward_B = share_B.double() + 0.5 * torch.tensor(length_B).double()
        assert unmask.rewards_differ(reward_B, rollouts.trace.group_B).any()  # or there would be nothing to compare
        rng = torch.Generator().manual_seed(SEED * 2**24 + done)
        batch, scorer = unmask.ScoredRollouts(rollouts, reward_B), unmask.Scorer(policy, reference)
        for terms in unmask.loss_terms(method, batch, scorer, rng, inner_steps=2):
            found.append(update(policy, optimizer, terms, micro_batch=64, max_grad_norm=1.0))
    return found, gradients


def assert_same_path(folder, policy, method, reference_of, **more):
    mine = copy.deepcopy(policy)
    seen = Gradients(policy)
    trainer = trainer_of(folder, policy, method, [seen], **more)
    losses, compute_loss = [], trainer.compute_loss

    def heard(model, *rest, **named):
        loss = compute_loss(model, *rest, **named)
        losses.extend([loss.detach().item()] if model.training else [])
        return loss

    trainer.compute_loss = heard
    trainer.train()
    expected, gradients = own_path(mine, method, reference_of(mine) if method.needs_reference else None)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == len(seen.found) == len(expected) == UPDATES
    halves = [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert halves == pytest.approx([float(own["loss"]) for own in expected], rel=1e-9, abs=1e-12)
    for row, one, other, own in zip(logs, seen.found, gradients, expected, strict=True):
        for name, value in own.items():  # TRL adds losses up in fp32
            assert row[name] == pytest.approx(float(value), rel=1e-9, abs=1e-6 if name == "loss" else 1e-12), name
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, 1e-9)
    for a, b in zip(trainable_parameters(policy), trainable_parameters(mine), strict=True):
        assert_close(a.data, b.data, 1e-9)
    return trainer


def frozen(policy):
    return copy.deepcopy(policy).requires_grad_(False)


def untrained(policy):
    return [p for p in policy.parameters() if not p.requires_grad]


METHODS = {name: base() for name, base in ON_ROLLOUTS.items() if not base().needs_teacher} | {
    "raft": unmask.raft(advantage=unmask.every_sample),  # no reward here is 1
    "step_merge": unmask.step_merge(segments=2),
    "diffu_grpo+daca": unmask.daca(unmask.diffu_grpo(), strata=3, strength=0.8),
    "coupled_grpo+dps": unmask.dps(unmask.coupled_grpo(kl=0.1), strength=0.8),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_loss_gradient_and_weight_is_our_own_trainers(name, tmp_path):
    assert_same_path(tmp_path, small(), METHODS[name], frozen)


def test_an_adapter_is_trained_alone_with_its_base_as_the_reference(tmp_path):
    policy = small()
    add_adapter(policy, LoraOptions(rank=2), seed=0)
    base = [p.clone() for p in untrained(policy)]
    assert_same_path(tmp_path, policy, METHODS["diffu_grpo+daca"], ReferencePolicy)
    assert all(torch.equal(a, b) for a, b in zip(base, untrained(policy), strict=True))


def test_an_evaluation_in_the_middle_of_a_batch_changes_nothing_and_is_the_same_for_the_same_weights(tmp_path):
    trainer = assert_same_path(
        tmp_path, small(), METHODS["diffu_grpo+daca"], frozen,
        eval_dataset=DATA, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
    )  # fmt: skip
    rewards = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert len(rewards) == UPDATES
    assert trainer.evaluate()["eval_reward"] == rewards[-1]


def test_a_batch_without_a_question_moves_nothing():
    """Every draw reaches the threshold, so fork has no step to train on."""
    policy, method = small(), unmask.fork()
    decoding = Decoding(length=6, order=left_to_right, threshold=1e-9)
    rollouts = unmask.sample(policy, [[5], [6]], unmask.row_seeds(0, 2), decoding, request=method.request)
    trace = replace(rollouts.trace, group_B=torch.zeros(2, dtype=torch.long))
    batch = unmask.ScoredRollouts(rollouts._replace(trace=trace), torch.tensor([0.0, 1.0]))
    ((term,),) = unmask.loss_terms(method, batch, unmask.Scorer(policy), torch.Generator())
    loss, number_N, _ = rows_loss(policy, term, torch.tensor([0]))
    loss.backward()
    assert loss == 0 and not len(number_N) and all(weight.grad is None for weight in policy.parameters())


def llada_of(folder):
    if not folder.is_dir():
        settings = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "chat_template": LLADA_TEMPLATE}
        with_tokenizer(llada(folder, **LLADA_TEXT)[0], LLADA_SPECIALS, **settings)
    return load_model(folder, dtype=torch.float64)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
def test_what_is_saved_is_a_checkpoint_of_ours_and_a_run_goes_on_from_trls(adapter, tmp_path):
    def trainer(**more):
        policy = llada_of(tmp_path / "base")
        if adapter:
            add_adapter(policy, LoraOptions(rank=2), seed=0)
        return DiffusionGRPOTrainer(
            policy, unmask.wd1(), HOW, reward_funcs=odd_characters, train_dataset=TALK,
            args=settings(tmp_path / "run", reward_weights=None, num_iterations=1, **more),
        )  # fmt: skip

    whole = trainer(save_strategy="steps", save_steps=2)
    whole.train()
    whole.save_model(str(tmp_path / "kept"))
    again = load_model(tmp_path / "kept", dtype=torch.float64)
    for a, b in zip(whole.policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for a, b in zip(trainable_parameters(whole.policy), trainable_parameters(resumed.policy), strict=True):
        assert_close(a.data, b.data, 1e-9)
    start = trainer().policy
    moved = [
        not torch.equal(a, b)
        for a, b in zip(trainable_parameters(start), trainable_parameters(whole.policy), strict=True)
    ]
    assert any(moved)


def test_a_run_goes_on_between_batches_and_never_inside_one(tmp_path):
    whole = trainer_of(tmp_path, small(), unmask.wd1(), save_strategy="steps", save_steps=1)
    whole.train()
    for step in (1, 3):
        with pytest.raises(ValueError, match=f"checkpoint-{step} is in the middle .* a multiple of num_iterations=2"):
            trainer_of(tmp_path, small(), unmask.wd1()).train(str(tmp_path / f"checkpoint-{step}"))
    resumed = trainer_of(tmp_path, small(), unmask.wd1())
    resumed.train(str(tmp_path / "checkpoint-2"))
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert_close(a.data, b.data, 1e-9)


def test_a_micro_batch_of_which_nothing_is_asked_adds_nothing_and_can_be_gone_back_through():
    policy, method = small(), unmask.diffu_grpo(kl=0)
    prompts, group_B = [[5], [6, 7]], torch.tensor([0, 0])
    trace, _ = unmask.sample(policy, prompts, unmask.row_seeds(0, 2), Decoding(4), group_B=group_B)
    (probes,) = method.probe(trace, torch.Generator().manual_seed(0), 1)
    probes, credit_BL = at_states(probes, probes.trace_N == 1), method.credit(trace)
    part = LossTerm(probes, torch.tensor([1.0, -1.0]), credit_BL, method.objective)
    whole, _ = term_loss(part, ask(policy, probes))
    for rows, expected in (([0], 0.0), ([1], whole.item()), ([0, 1], whole.item())):
        policy.zero_grad()
        loss, _, _ = rows_loss(policy, part, torch.tensor(rows))
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-15)
        assert any(p.grad.any() for p in policy.parameters()) == (1 in rows)


def test_prompts_and_texts_are_read_by_the_policys_own_tokenizer():
    tokenizer = small().tokenizer
    fast, text = fast_tokenizer(tokenizer), " a\nb  ~=\t"[:-1]
    assert fast(text)["input_ids"] == tokenizer.encode(text) == prompt_ids(tokenizer, text)
    assert fast.decode(tokenizer.encode(text) + [policy_end := 2], skip_special_tokens=True) == text
    assert fast.eos_token_id == policy_end and fast.mask_token_id == 1 and fast.pad_token_id == 0
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompt_ids(tokenizer, turns) == tokenizer.prompt("u", "s") != prompt_ids(tokenizer, turns[1:])
    with pytest.raises(ValueError, match="a prompt ends with a turn of the assistant"):
        prompt_ids(tokenizer, [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}])


REFUSED = {
    "epsilon": (0.1, "epsilon=0.1: "),
    "beta": (0.04, "beta=0.04: "),
    "temperature": (0.7, "temperature=0.7: "),
    "max_completion_length": (6, "max_completion_length=6: "),
    "use_vllm": (True, "use_vllm=True: "),
    "bf16": (True, "set bf16=False"),
    "steps_per_generation": (4, "steps_per_generation=4: .* gradient_accumulation_steps=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_would_be_ignored_is_refused(name, tmp_path):
    value, told = REFUSED[name]
    with pytest.raises(ValueError, match=told):
        trainer_of(tmp_path, small(), unmask.diffu_grpo(), **{name: value})


def test_branches_encoders_and_completions_without_a_reward_are_refused(tmp_path):
    with pytest.raises(ValueError, match="branches"):
        trainer_of(tmp_path, small(), unmask.dispo(unmask.diffu_grpo()))
    with pytest.raises(ValueError, match="completes states again"):
        trainer_of(tmp_path, small(), unmask.vine())
    with pytest.raises(ValueError, match="follows a teacher"):
        trainer_of(tmp_path, small(), unmask.dtm())
    with pytest.raises(ValueError, match="has several terms"):
        trainer_of(tmp_path, small(), unmask.keep_correct(unmask.diffu_grpo()))
    with pytest.raises(ValueError, match="works with decoders"):
        trainer_of(tmp_path, load_model(bert(tmp_path / "bert")), unmask.wd1())
    trainer = DiffusionGRPOTrainer(
        small(), unmask.wd1(), HOW, reward_funcs=[short], args=settings(tmp_path, reward_weights=None),
        train_dataset=Dataset.from_list([{"prompt": "3"}] * 2),
    )  # fmt: skip
    with pytest.raises(ValueError, match="every reward function returned None"):
        trainer.train()


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "trl.md").read_text()
    source = "\n".join(re.findall(r"```py\n(.*?)```", page, re.DOTALL))
    assert "DiffusionGRPOTrainer" in source
    exec(compile(source, "docs/trl.md", "exec"), {"__name__": "__docs__"})
