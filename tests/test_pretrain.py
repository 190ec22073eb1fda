"""Pre-training: reproducible, its loss what it says, its mistakes where they belong, its product on board."""

import hashlib
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from unmask import sandbox
from unmask.models import TinyShape, load_model, tiny_policy
from unmask.models.known import EMBEDDED
from unmask.models.tiny import EOS, CharacterTokenizer
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample
from unmask.sft.pretrain import (
    RECORD,
    WRONG,
    PretrainConfig,
    PretrainTask,
    cosine,
    diffusion_loss,
    masked_positions,
    mixture_tokens,
    pretrain,
    read_pretrain_config,
    wrong_arithmetic,
    wrong_code_mini,
    wrong_countdown,
    wrong_json_mini,
    wrong_sudoku,
)
from unmask.tasks import TASKS
from unmask.tasks.puzzles import code_mini

CONFIGS = Path(__file__).parents[1] / "unmask" / "config" / "recipes"
CONFIG, MINIS = CONFIGS / "pretrain_tiny.yaml", CONFIGS / "pretrain_minis.yaml"
SMALL = TinyShape(width=16, layers=2, heads=2, hidden=32, max_length=40)
MICRO = PretrainConfig(
    seed=1,
    threads=1,
    steps=4,
    learning_rate=1e-3,
    warmup=2,
    weight_decay=0.01,
    shape=SMALL,
    mixture=[
        PretrainTask(task="sudoku", batch=6, wrong=0.5, noise=0.3),
        PretrainTask(task="countdown", batch=4, wrong=0.5, noise=0.3),
    ],
)


def test_the_same_config_gives_the_same_bits(tmp_path):
    before = torch.get_num_threads()
    steps = []
    pretrain(MICRO, tmp_path / "a", progress=lambda step, metrics: steps.append((step, metrics)))
    torch.rand(7)  # whatever else happens in the process
    pretrain(MICRO, tmp_path / "b")
    pretrain(MICRO.model_copy(update={"seed": 2}), tmp_path / "c")
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert torch.get_num_threads() == before
    assert [step for step, _ in steps] == [0, 1, 2, 3]
    assert all(metrics.keys() == {"loss/sudoku", "loss/countdown"} for _, metrics in steps)
    assert PretrainConfig.model_validate_json((tmp_path / "a" / RECORD).read_text()) == MICRO


def test_it_learns(tmp_path):
    losses = []
    config = MICRO.model_copy(update={"steps": 30, "learning_rate": 1e-2, "mixture": MICRO.mixture[:1]})
    pretrain(config, tmp_path, progress=lambda step, metrics: losses.append(metrics["loss/sudoku"]))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_the_loss_is_the_plain_one():
    policy = tiny_policy(SMALL, seed=4).double()
    rng = torch.Generator().manual_seed(0)
    prompt_BP = torch.randint(3, 90, (5, 4), generator=rng)
    completion_BC = torch.randint(2, 90, (5, 6), generator=rng)
    masked_BC = masked_positions(5, 6, rng)

    expected = 0.0
    for b in range(5):
        masked = [c for c in range(6) if masked_BC[b, c]]
        tokens = prompt_BP[b].tolist() + [policy.mask_id if c in masked else int(completion_BC[b, c]) for c in range(6)]
        logits_LV = policy(torch.tensor([tokens]), None, torch.arange(len(tokens))).detach()
        for c in masked:
            logp_V = logits_LV[4 + c].log_softmax(dim=0)
            expected -= float(logp_V[completion_BC[b, c]]) / len(masked) / 5
    loss = diffusion_loss(policy, prompt_BP, completion_BC, masked_BC)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-10)


def test_masks_have_every_size_and_every_place_alike():
    rng = torch.Generator().manual_seed(0)
    masked_BC = torch.cat([masked_positions(8, 8, rng) for _ in range(500)])
    # Eight rows, eight sizes: a stratified batch holds each exactly once.
    assert (masked_BC.sum(dim=1).bincount() == torch.tensor([0] + [500] * 8)).all()
    torch.testing.assert_close(masked_BC.float().mean(dim=0), torch.full((8,), 9 / 16), atol=0.03, rtol=0)
    sizes_B = torch.cat([masked_positions(3, 16, rng) for _ in range(4000)]).sum(dim=1)
    share_C = sizes_B.bincount(minlength=17)[1:] / len(sizes_B)
    torch.testing.assert_close(share_C, torch.full((16,), 1 / 16), atol=0.01, rtol=0)


def test_short_answers_end_in_eos_and_prompts_are_whole():
    task, part = TASKS["countdown"](), PretrainTask(task="countdown", batch=1, wrong=0, noise=0)
    rows = task.rows("train", 30, 0)
    prompt_BP, completion_BC = mixture_tokens(part, task, rows, random.Random(0))
    tokenizer = CharacterTokenizer()
    assert completion_BC.shape == (30, task.length)
    assert (completion_BC == EOS).any()
    for row, prompt, completion in zip(rows, prompt_BP.tolist(), completion_BC.tolist(), strict=True):
        assert tokenizer.decode(prompt) == task.prompt(row)
        assert tokenizer.decode(completion) == task.solution(row)
        assert set(completion[len(task.solution(row)) :]) <= {EOS}


def test_wrong_sudoku_solutions_keep_the_givens():
    rng, changed, holes = random.Random(0), 0, 0
    for row in TASKS["sudoku"]().rows("train", 500, 0):
        text = wrong_sudoku(row, row["solution"], 0.3, rng)
        for given, digit, drawn in zip(row["puzzle"], row["solution"], text, strict=True):
            assert drawn == given if given != "." else drawn in "1234"
            holes += given == "."
            changed += drawn != digit
    assert changed / holes == pytest.approx(0.3 * 3 / 4, abs=0.02)


def test_wrong_countdown_solutions_keep_all_but_the_signs():
    rng, changed, signs = random.Random(0), 0, 0
    for row in TASKS["countdown"](signs="+-*/").rows("train", 500, 0):
        text = wrong_countdown(row, row["solution"], 0.3, rng)
        for character, drawn in zip(row["solution"], text, strict=True):
            assert drawn in "+-*/" if character in "+-*/" else drawn == character
            signs += character in "+-*/"
            changed += drawn != character
    assert changed / signs == pytest.approx(0.3 * 3 / 4, abs=0.04)


def test_wrong_sums_slip_and_go_on_from_there():
    rng, slips, steps = random.Random(0), 0, 0
    task = TASKS["arithmetic"]()
    for row in task.rows("train", 500, 0):
        text, total = wrong_arithmetic(row, task.solution(row), 0.3, rng), row["terms"][0]
        assert len(text) == task.length
        for step, term in zip(text.split(";"), row["terms"][1:], strict=True):
            asked, result = step.replace(" ", "").split("=")
            assert asked == f"{total}{term:+d}"
            off = int(result) - (total + term)
            assert abs(off) in (0, 1, 10) or result == "0"
            slips, steps, total = slips + (off != 0), steps + 1, int(result)
        assert task.solved(row, text) == (total == row["answer"])
    assert slips / steps == pytest.approx(0.3, abs=0.03)


def test_sums_without_room_for_a_slip_keep_their_width():
    task = TASKS["arithmetic"](largest=33, signs="+")
    rng = random.Random(0)
    texts = [wrong_arithmetic(row, task.solution(row), 1.0, rng) for row in task.rows("train", 3000, 0)]
    assert {len(text) for text in texts} == {task.length} and any(text.endswith("=99") for text in texts)


def test_wrong_objects_have_quotes_where_none_belong_or_none_where_they_do():
    task, rng, wrong, seen = TASKS["json_mini"](), random.Random(0), 0, 0
    for row in task.rows("train", 500, 0):
        text = wrong_json_mini(row, task.solution(row), 0.3, rng)
        asked = [field.replace("=", ":").split(":") for field in row["request"].split(" ")]
        mistakes = 0
        for (key, kind, value), field in zip(asked, text[1:-1].split(","), strict=True):
            bare = {"yes": "true", "no": "false"}[value] if kind == "b" else value
            right, other = (f'"{value}"', value) if kind == "s" else (bare, f'"{value}"')
            assert field in (f'"{key}":{right}', f'"{key}":{other}')
            mistakes += field == f'"{key}":{other}'
        assert text[0] + text[-1] == "{}" and task.solved(row, text) == (mistakes == 0)
        wrong, seen = wrong + mistakes, seen + len(asked)
    assert wrong / seen == pytest.approx(0.3, abs=0.04)


def test_wrong_expressions_keep_their_form():
    rng, changed, places = random.Random(0), {"digit": 0, "sign": 0}, {"digit": 0, "sign": 0}
    for a, b, c in itertools.product(range(2), range(-9, 10), range(-9, 10)):
        solution = code_mini.expression_of((a, b, c))
        for character, drawn in zip(solution, wrong_code_mini({}, solution, 0.3, rng), strict=True):
            kind = "digit" if character.isdigit() else "sign" if character in "+-" else None
            if kind is None:
                assert drawn == character
                continue
            assert drawn in ("123456789" if kind == "digit" else "+-")
            places[kind] += 1
            changed[kind] += drawn != character
    assert changed["digit"] / places["digit"] == pytest.approx(0.3 * 8 / 9, abs=0.04)
    assert changed["sign"] / places["sign"] == pytest.approx(0.3 / 2, abs=0.04)


@pytest.mark.parametrize("name", WRONG)
def test_without_noise_a_wrong_solution_is_the_solution_and_with_all_of_it_it_fits(name, monkeypatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "")  # rows need no sandbox, only answers do
    task, rng = TASKS[name](), random.Random(0)
    for row in task.rows("train", 200, 0):
        solution = task.solution(row)
        assert WRONG[name](row, solution, 0.0, rng) == solution
        assert len(WRONG[name](row, solution, 1.0, rng)) <= task.length


def test_the_share_of_wrong_solutions():
    task = TASKS["sudoku"]()
    rows = task.rows("train", 600, 0)
    part = PretrainTask(task="sudoku", batch=1, wrong=0.5, noise=1.0)
    _, completion_BC = mixture_tokens(part, task, rows, random.Random(0))
    texts = [CharacterTokenizer().decode(completion) for completion in completion_BC.tolist()]
    kept = sum(text == row["solution"] for text, row in zip(texts, rows, strict=True))
    assert kept / 600 == pytest.approx(0.5, abs=0.06)


def test_the_learning_rate_rises_and_falls():
    rates = [cosine(step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.001


def test_unknown_keys_and_tasks_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(ValueError, match="no file"):
        read_pretrain_config(path)
    path.write_text(yaml.safe_dump(MICRO.model_dump()))
    assert read_pretrain_config(path) == MICRO
    path.write_text(yaml.safe_dump({**MICRO.model_dump(), "stpes": 3}))
    with pytest.raises(ValueError, match="stpes"):
        read_pretrain_config(path)
    path.write_text("steps: [")
    with pytest.raises(ValueError, match="not YAML"):
        read_pretrain_config(path)
    path.write_text("")
    with pytest.raises(ValueError, match="the file"):
        read_pretrain_config(path)
    part = PretrainTask(task="chess", batch=1, wrong=0, noise=0)
    with pytest.raises(ValueError, match="chess"):
        pretrain(MICRO.model_copy(update={"mixture": [part]}), tmp_path)


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_shipped_model_is_the_one_of_the_config(name):
    config = read_pretrain_config(CONFIG.with_stem(f"pretrain_{name.replace('-', '_')}"))
    assert PretrainConfig.model_validate_json((EMBEDDED[name] / RECORD).read_text()) == config
    assert (EMBEDDED[name] / "model.safetensors").stat().st_size <= 4_000_000
    policy, untrained = load_model(name), tiny_policy(config.shape, config.seed)
    assert policy.home == name
    assert {n: p.shape for n, p in policy.named_parameters()} == {n: p.shape for n, p in untrained.named_parameters()}


def test_the_lessons_of_the_shipped_model_never_move():
    # Else the same config would no longer give the same model.
    config = read_pretrain_config(CONFIG)
    rng, digest = random.Random(f"unmask pretrain {config.seed}"), hashlib.sha256()
    for part in config.mixture:
        task = TASKS[part.task](**part.options)
        for tokens in mixture_tokens(part, task, task.rows("train", 300, config.seed), rng):
            digest.update(bytes(tokens.flatten().tolist()))
    assert digest.hexdigest()[:16] == "3bf1eff98da7d2e6"


def test_the_config_of_the_minis_can_be_used(monkeypatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "")
    config = read_pretrain_config(MINIS)
    assert {part.task for part in config.mixture} == {"arithmetic", "json_mini", "code_mini"}
    for part in config.mixture:
        task = TASKS[part.task](**part.options)
        prompt_BP, completion_BC = mixture_tokens(part, task, task.rows("train", 200, 0), random.Random(0))
        assert prompt_BP.shape[1] + completion_BC.shape[1] <= config.shape.max_length


def test_the_model_of_two_behaviours_gives_both_answers():
    policy, task = load_model("tiny-two"), TASKS["sudoku"]()
    rows = [row for row in task.rows("test", 32, 0) for _ in range(2)]
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in rows]
    trace = sample(policy, prompts, row_seeds(0, len(rows)), Decoding(task.length, task.length // 2)).trace
    texts = completions(policy, trace, task.length)
    shown = Counter(task.behaviour(row, text, task.solved(row, text)) for row, text in zip(rows, texts, strict=True))
    assert shown["careless"] > 20 and shown["careful"] > 4  # of 64; of 1,024 samples 59 % and 20 %


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_shipped_model_knows_its_tasks(name):
    policy = load_model(name)
    config = PretrainConfig.model_validate_json((EMBEDDED[name] / RECORD).read_text())
    for part in config.mixture:
        task = TASKS[part.task](**part.options)
        right = PretrainTask(task=part.task, batch=1, wrong=0, noise=0)
        prompt_BP, completion_BC = mixture_tokens(right, task, task.rows("test", 64, 0), random.Random(0))
        masked_BC = masked_positions(64, task.length, torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert diffusion_loss(policy, prompt_BP, completion_BC, masked_BC) < 0.8
