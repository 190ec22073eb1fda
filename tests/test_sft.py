"""Fine-tuning: the loss is the any-order bound, batches change nothing, and no taught problem is a test problem."""

import itertools
import json
import math
import random
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import DREAM, QWEN_SPECIALS, QWEN_TEMPLATE, QWEN_TEXT, qwen, with_tokenizer
from helpers import EOS, MASK, SMALL, Net
from naive import decoder
from unmask.config.sections import OptimizerConfig
from unmask.models import Model, load_model, tiny_policy
from unmask.models.tiny import TinyShape
from unmask.sft.data import load_sft_data
from unmask.sft.diffusion_loss import (
    NoisedBatch,
    add_noise,
    bound,
    mask_ratios,
    mask_tokens,
    quarter_metrics,
    quarter_sums,
    token_losses,
)
from unmask.sft.finetune import annealed_attention, block_length, sft_update
from unmask.sft.packing import Batches, Example, PackedBatch, width_buckets, width_of, width_step
from unmask.sft.sources import SftSource, sft_row
from unmask.tasks import TASKS
from unmask.tasks.puzzles.sudoku import fitting_grids
from unmask.training.optim import make_optimizer
from unmask.util.micro_batch import MicroBatch
from wording import naming

# --- the loss -----------------------------------------------------------------------------------------------


@torch.no_grad()
def any_order_bound(policy: Net, prompt: list[int], completion: list[int]) -> float:
    """The mean over all orders of -log p of the completion written in that order, one token at a time."""
    total, orders = 0.0, list(itertools.permutations(range(len(completion))))
    for order in orders:
        canvas = prompt + [MASK] * len(completion)
        for place in order:
            at = len(prompt) + place
            logits_V = policy(torch.tensor([canvas]), None, torch.tensor([at]))[0].clone()
            logits_V[MASK] = -torch.inf  # no word
            total -= float(logits_V.log_softmax(-1)[completion[place]])
            canvas[at] = completion[place]
    return total / len(orders)


def test_the_expected_loss_is_the_bound_over_all_orders() -> None:
    """Every mask of a completion of three tokens, and the integral over t, which Gauss' rule takes exactly."""
    policy, prompt, completion = Net(seed=3), [3, 4], [5, 3, EOS]
    batch = PackedBatch(torch.tensor([prompt + completion]), torch.tensor([2]), 1)
    expected = 0.0
    for node, weight in ((-math.sqrt(0.6), 5 / 9), (0.0, 8 / 9), (math.sqrt(0.6), 5 / 9)):
        t = (1 + node) / 2
        for hidden in itertools.product((False, True), repeat=3):
            chance = t ** sum(hidden) * (1 - t) ** (3 - sum(hidden))
            noise = mask_tokens(
                batch, torch.tensor([[False, False, *hidden]]), torch.tensor([t], dtype=torch.float64), MASK
            )
            with torch.no_grad():
                expected += weight / 2 * chance * float(bound(token_losses(policy, noise, "cpu"), noise))
    assert expected == pytest.approx(any_order_bound(policy, prompt, completion) / 3, rel=1e-12)


def test_of_a_block_causal_model_it_is_the_bound_over_the_orders_that_finish_one_block_after_the_other() -> None:
    policy = decoder("qwen3", dtype=torch.float64, causal_block=2)
    prompt, completion = [3], [5, 6, 7]  # blocks: the prompt and 5; 6 and 7
    batch = PackedBatch(torch.tensor([prompt + completion]), torch.tensor([1]), 1)
    expected = 0.0
    for node, weight in ((-math.sqrt(0.6), 5 / 9), (0.0, 8 / 9), (math.sqrt(0.6), 5 / 9)):
        t = (1 + node) / 2
        for hidden in itertools.product((False, True), repeat=3):
            chance = t ** sum(hidden) * (1 - t) ** (3 - sum(hidden))
            ratio_B = torch.tensor([t], dtype=torch.float64)
            noise = mask_tokens(batch, torch.tensor([[False, *hidden]]), ratio_B, policy.mask_id)
            with torch.no_grad():
                loss_Q = token_losses(policy, noise._replace(causal_block=2), "cpu")
            expected += weight / 2 * chance * float(bound(loss_Q, noise))

    @torch.no_grad()
    def surprise(canvas: list[int], at: int, word: int) -> float:
        logits_V = policy(torch.tensor([canvas]), None, torch.tensor([at]))[0].clone()
        logits_V[policy.mask_id] = -torch.inf
        return -float(logits_V.log_softmax(-1)[word])

    mask = policy.mask_id
    first = surprise([3, mask], 1, 5)
    rightwards = surprise([3, 5, mask, mask], 2, 6) + surprise([3, 5, 6, mask], 3, 7)
    leftwards = surprise([3, 5, mask, mask], 3, 7) + surprise([3, 5, mask, 7], 2, 6)
    assert expected == pytest.approx((first + (rightwards + leftwards) / 2) / 3, rel=1e-9)
    pieces = list(add_noise(batch, mask, torch.Generator().manual_seed(0), 2).pieces(1))
    assert [piece.causal_block for piece in pieces] == [2]


def test_noise_falls_on_completions_alone_and_as_often_as_its_ratio_says() -> None:
    rng, rows = torch.Generator().manual_seed(0), 4000
    batch = PackedBatch(torch.full((rows, 12), 5), torch.arange(rows) % 5 + 1, rows)
    noise = add_noise(batch, MASK, rng)
    assert not (noise.masked_BW & ~batch.canvas_BW).any() and noise.length_B.tolist() == (12 - batch.given_B).tolist()
    assert torch.equal(noise.states_BW == MASK, noise.masked_BW)
    assert ((noise.ratio_B > 0) & (noise.ratio_B <= 1)).all()
    assert torch.equal((noise.ratio_B * rows).ceil().long().sort().values, torch.arange(rows) + 1)
    share_B = noise.masked_BW.sum(1) / noise.length_B
    spread_B = (noise.ratio_B * (1 - noise.ratio_B) / noise.length_B).sqrt()
    assert abs(float((share_B - noise.ratio_B).sum() / spread_B.square().sum().sqrt())) < 4
    drawn = torch.stack([mask_ratios(2, rng) for _ in range(4000)])
    assert abs(float(drawn[:, 0].mean()) - 0.5) < 4 / math.sqrt(12 * 4000)


def test_losses_are_told_by_the_quarter_of_the_ratio() -> None:
    batch = PackedBatch(torch.full((3, 4), 5), torch.zeros(3, dtype=torch.long), 3)
    masked_BW = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    noise = mask_tokens(batch, masked_BW, torch.tensor([0.25, 0.3, 1.0]), MASK)
    told = quarter_metrics(quarter_sums(torch.tensor([1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 9.0]), noise))
    assert told == {"loss_1/4": 1.0, "loss_2/4": 3.0, "loss_4/4": 6.0}


# --- batches ------------------------------------------------------------------------------------------------

EXAMPLES = [
    Example([3, 4], [5, 6], 4),
    Example([3], [6, 6, 5], 4),
    Example([3, 4, 5, 6], [5], 4),
    Example([6] * 9, [3] * 6, 4),
    Example([4], [3], 30),
]


def gradients(policy: Net) -> list[Tensor]:
    found = [weight.grad.clone() for weight in policy.parameters()]
    policy.zero_grad()
    return found


@pytest.mark.parametrize(("step", "widths"), [(1, [5, 6, 8, 16, 24]), (4, [8, 16, 24]), (16, [16, 24])])
def test_a_canvas_is_its_example_and_end_tokens(step: int, widths: list[int]) -> None:
    buckets = width_buckets(EXAMPLES, EOS, 24, step)
    assert [bucket.width for bucket in buckets] == widths  # the last one wished for 31, and 24 is all there is
    for bucket in buckets:
        for tokens, given, number in zip(*(each.tolist() for each in bucket), strict=True):
            example = EXAMPLES[number]
            ids = example.prompt + example.completion
            assert given == len(example.prompt) and tokens == ids + [EOS] * (bucket.width - len(ids))
    assert width_of(Example([3] * 15, [4] * 8, 1), 24) == 24 and width_of(Example([3] * 15, [4] * 9, 1), 24) is None


def test_widths_are_as_fine_as_full_batches_allow() -> None:
    alike = [Example([3] * 10, [4], 6)] * 20
    assert width_step(alike, 99, 320) == 1 and width_step(alike, 99, 321) == 64
    apart = [Example([3] * (10 + n), [4], 6) for n in range(16)]  # 16 to 31 wide, 376 tokens in all
    assert [width_step(apart, 99, tokens) for tokens in (23, 24, 80, 81, 248, 249)] == [1, 4, 4, 16, 16, 64]


def test_a_batch_is_the_mean_of_its_rows_alone_however_it_is_passed() -> None:
    policy = Net(seed=5)
    bucket = width_buckets(EXAMPLES, EOS, 24, step=16)[0]
    batch = PackedBatch(bucket.tokens_NW.long(), bucket.given_N, len(bucket.given_N))
    noise = add_noise(batch, MASK, torch.Generator().manual_seed(2))
    whole = bound(token_losses(policy, noise, "cpu"), noise) / batch.full
    whole.backward()
    together, alone = gradients(policy), 0.0
    for piece in noise.pieces(1):
        width = int(piece.tokens_BW.shape[1])
        assert piece.states_BW.shape == (1, width)
        loss = bound(token_losses(policy, piece, "cpu"), piece) / batch.full
        loss.backward()
        alone += loss.item()
    assert alone == pytest.approx(whole.item(), rel=1e-12)
    for a, b in zip(gradients(policy), together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_smaller_passes_and_pieces_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackedBatch(
        torch.randint(3, 90, (6, 32), generator=torch.Generator().manual_seed(1)), torch.full((6,), 4), 6
    )
    found = []
    for tokens, piece in ((10_000, 2**27), (32, 2**27), (64, 99 * 7)):
        monkeypatch.setattr("unmask.sft.diffusion_loss.PIECE", piece)
        policy = tiny_policy(SMALL, seed=1).double()
        noise = add_noise(batch, policy.mask_id, torch.Generator().manual_seed(3))
        told = sft_update(policy, make_optimizer(policy, OptimizerConfig()), batch, noise, MicroBatch(tokens), 1.0)
        found.append((told, [weight.detach().clone() for weight in policy.parameters()]))
    for told, weights in found[1:]:
        assert told == pytest.approx(found[0][0], rel=1e-6)
        for a, b in zip(weights, found[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_an_epoch_has_every_example_once_and_an_update_its_batch() -> None:
    examples = [Example([3] * (1 + n % 20), [n + 10], 2) for n in range(57)]
    batches = Batches(width_buckets(examples, EOS, 64, step=16), tokens=70, seed=4)
    seen, weight = list[int](), 0.0
    for update in range(1, batches.count + 1):
        batch = batches.batch(update)
        seen += [int(tokens[given]) - 10 for tokens, given in zip(*batch[:2], strict=True)]
        weight += len(batch.given_B) / batch.full * batch.full
        assert batch.full == 70 // batch.tokens_BW.shape[1] >= len(batch.given_B)
    assert sorted(seen) == list(range(57)) and weight == 57
    again = Batches(batches.buckets, tokens=70, seed=4)
    late = batches.count + 3
    assert torch.equal(again.batch(late).tokens_BW, batches.batch(late).tokens_BW)
    first, second = (range(start, start + batches.count) for start in (1, batches.count + 1))
    assert [batches.batch(u).tokens_BW.tolist() for u in first] != [batches.batch(u).tokens_BW.tolist() for u in second]


# --- attention that is annealed -----------------------------------------------------------------------------------


def test_attention_grows_from_causal_to_all() -> None:
    assert [block_length(step, 10, 32) for step in range(1, 11)] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    assert block_length(1, 5, 1) == 1
    policy = tiny_policy(SMALL, seed=1)
    tokens_SL = torch.arange(3, 19)[None]

    def reach() -> int:
        """The last position that changes what is said at the first."""
        with torch.no_grad():
            before = policy(tokens_SL, None, torch.tensor([0]))
            changed = [
                at
                for at in range(16)
                if not torch.equal(policy(tokens_SL + (torch.arange(16) == at).long(), None, torch.tensor([0])), before)
            ]
        return max(changed)

    for step, wanted in ((1, 0), (2, 1), (3, 3), (4, 7), (5, 15)):
        with annealed_attention(policy, step, 4, 16):
            assert reach() == wanted
    assert reach() == 15


# --- data ------------------------------------------------------------------------------------------------


def test_lines_are_prompts_and_completions_or_messages() -> None:
    plain = {"prompt": "a", "completion": "b", "system": ""}
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert sft_row({"prompt": "a", "completion": "b", "more": 1}) == plain
    assert sft_row({"messages": [user, assistant]}) == {**plain, "prompt": [user]}
    turns = [{"role": "system", "content": "s"}, user, assistant, user]
    assert sft_row({"messages": [*turns, assistant]}) == {**plain, "prompt": turns}
    with pytest.raises(ValueError, match="the prompt ends with a turn of the assistant"):
        sft_row({"messages": [user, assistant, assistant]})
    for wrong in ([user], [], [assistant], "a", [user, "b"], [assistant, user]):
        with pytest.raises(ValueError, match="'messages' must be"):
            sft_row({"messages": wrong})
    for line in ({"prompt": "a"}, {"prompt": 1, "completion": "b"}, {"messages": [user, {**assistant, "content": 3}]}):
        with pytest.raises(ValueError, match="is missing or not text"):
            sft_row(line)


def test_what_is_held_out_of_a_file_is_not_taught(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n:02d}", "completion": f"{n:02d}" * (1 + n % 3)} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy = tiny_policy(SMALL)
    found = load_sft_data(SftSource(file=str(tmp_path / "data.jsonl")), policy, 1, 20_000, held_out=10)
    learnt, kept = ({tuple(example.prompt) for example in part} for part in (found.examples, found.held_out))
    assert len(learnt) == 36 and len(kept) == 4 and not learnt & kept
    assert found.canvas == 16 and found.task is None
    for wished, canvas in ((4, 7), (7, 7), (40, 40)):  # six characters and an end token
        told = pytest.warns(UserWarning, match=r"canvas: 4 .*7")
        with told if wished < 7 else nullcontext():
            again = load_sft_data(
                SftSource(file=str(tmp_path / "data.jsonl"), canvas=wished), policy, 1, 20_000, held_out=10
            )
        assert again.canvas == canvas and {example.canvas for example in again.examples} == {wished}
    short = tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=6))
    with pytest.warns(UserWarning, match=r"26 of 40 examples .*6 tokens"):
        fits = load_sft_data(SftSource(file=str(tmp_path / "data.jsonl"), canvas=3), short, 1, 99, held_out=0)
    assert len(fits.examples) == 14 and fits.canvas == 3  # two characters and an end token: what is left out has no say
    narrow = tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=4))
    with pytest.raises(ValueError, match=r"no example .*4 tokens"):
        load_sft_data(SftSource(file=str(tmp_path / "data.jsonl")), narrow, 1, 99, held_out=0)


SOURCES = {
    "file": lambda path: SftSource(file=str(path)),
    "prefill": lambda _: SftSource(task="word_problems"),
    "system": lambda _: SftSource(task="sudoku_text", options={"protocol": "agrpo"}, canvas=300),
}
LINES = [
    {"prompt": "", "completion": "nothing"},
    {"prompt": "a", "completion": ""},
    {"prompt": "2 + 2?", "system": "Be brief.", "completion": "4 \u00e4"},
    {"messages": [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]},
    {"prompt": "too long" * 500, "completion": "a"},
]


def with_template(folder: Path, template: str = QWEN_TEMPLATE) -> Model:
    made, _, _ = qwen(folder, DREAM, **QWEN_TEXT, max_position_embeddings=2000)
    tokens = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "chat_template": template}
    return load_model(with_tokenizer(made, QWEN_SPECIALS, **tokens))


@pytest.mark.parametrize("kind", SOURCES)
def test_an_example_has_the_tokens_of_its_prompt_and_completion_alone(tmp_path: Path, kind: str) -> None:
    policy, rows = with_template(tmp_path / "model"), [sft_row(line) for line in LINES]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    source, prompt, encode = SOURCES[kind](tmp_path / "data.jsonl"), policy.tokenizer.prompt, policy.tokenizer.encode
    with pytest.warns(UserWarning, match="1 of 5 examples") if kind == "file" else nullcontext():
        data = load_sft_data(source, policy, 3, 20, 4)
    if data.task is None:
        random.Random("unmask lesson data 3").shuffle(rows)
        alone = [(prompt(row["prompt"], row["system"]), encode(row["completion"])) for row in rows]
        assert not data.held_out and min(len(ids) for ids, _ in alone) == len(prompt("")) > 0
    else:
        task, rows = data.task, data.task.rows("train", 20, 3) + data.task.rows("test", 4, 0)
        prefill = encode(task.prefill)
        alone = [(prompt(task.turns(row), task.system) + prefill, encode(task.solution(row))) for row in rows]
        assert bool(task.prefill) == (kind == "prefill") and bool(task.system) == (kind == "system")
        assert [task.prompt_ids(policy.tokenizer, row) for row in rows] == [ids for ids, _ in alone]
    found = [(example.prompt, example.completion) for example in (*data.examples, *data.held_out)]
    assert found == [pair for pair in alone if sum(map(len, pair)) < 2000] and len(found) >= 4


def test_the_template_refuses_one_line_of_a_file_among_many(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no ' ~ messages[0].content) }}{% endif %}"
    policy = with_template(tmp_path / "model", refusal + QWEN_TEMPLATE)
    lines = [{"prompt": str(number), "completion": "a"} for number in range(40)]
    lines[33]["system"] = "turn 33"
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=naming("chat template", "fails", "no turn 33")):
        load_sft_data(SftSource(file=str(tmp_path / "data.jsonl")), policy, 0, 99, held_out=4)


@pytest.mark.parametrize("name", ["sudoku_text", "countdown_text", "word_problems"])
def test_no_taught_problem_is_a_test_problem_and_every_solution_is_right(name: str) -> None:
    """By what makes two problems the same: any grid that fits, the set of numbers, the story and its numbers."""
    task = TASKS[name]()
    same = {
        "sudoku_text": lambda row: fitting_grids(row["puzzle"].replace("0", ".")),
        "countdown_text": lambda row: tuple(sorted(row["numbers"])),
        "word_problems": lambda row: (row["question"].split()[1], *re.findall(r"\d+", row["question"])),
    }[name]
    train, test = task.rows("train", 300, 0), task.rows("test", 300, 0)
    if name == "sudoku_text":  # bit sets of grids
        union = [0, 0]
        for i, rows in enumerate((train, test)):
            for row in rows:
                union[i] |= same(row)
        assert union[0] & union[1] == 0
    else:
        assert not {same(row) for row in train} & {same(row) for row in test}
    assert all(task.solved(row, task.solution(row)) for row in [*train[:60], *test[:60]])
    assert not task.solved(train[0], task.solution(train[1]))


def test_the_steps_of_a_word_problem_are_true_and_end_in_its_answer() -> None:
    signs = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
    for row in TASKS["word_problems"]().rows("train", 200, 3):
        *steps, last = row["answer"].splitlines()
        for step in steps:
            a, sign, b, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            assert signs[sign](int(a), int(b)) == int(result) and a in row["question"] + " ".join(steps)
        assert last == f"#### {result}"


def test_rows_of_a_noised_batch_keep_together() -> None:
    noise = NoisedBatch(*(torch.arange(6).view(3, 2) for _ in range(3)), torch.arange(3), torch.arange(3))
    assert [part.ratio_B.tolist() for part in noise.pieces(2)] == [[0, 1], [2]]
