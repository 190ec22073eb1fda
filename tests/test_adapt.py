"""An autoregressive checkpoint becomes a masked diffusion model: the same weights, read both ways; then it learns."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unmask.sft.finetune as unmask_sft
from checkpoints import QWEN_SPECIALS, QWEN_TEMPLATE, qwen, with_tokenizer
from helpers import sample
from unmask.config import read_config
from unmask.core.order import ORDERS
from unmask.methods import BASES
from unmask.models import load_model
from unmask.models.checkpoint import open_safetensors
from unmask.rollout.cache import Cache
from unmask.rollout.sample import row_seeds
from unmask.sft.adapt import EVEN, MASK, adapt, base_metadata
from unmask.sft.config import read_sft_config
from unmask.sft.finetune import sft_update
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.run.folder import read_metrics
from unmask.training.update import update
from unmask.util.files import check_folder
from unmask.util.micro_batch import MicroBatch
from wording import mentions, naming

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reserved>"]  # 256 to 259, behind the bytes


def source(
    folder: Path,
    kind: dict[str, Any] = LLAMA,
    specials: list[str] | None = None,
    template: str = QWEN_TEMPLATE,
    **changes: Any,
) -> Path:
    """A random autoregressive checkpoint with one token a byte."""
    text = {"vocab_size": 260, "mask_token_id": "absent", "eos_token_id": 258, "pad_token_id": 258}
    folder, _, _ = qwen(folder, kind, **{**text, **changes})
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": template}
    return with_tokenizer(folder, specials or SPECIALS, **tokens)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with open_safetensors(folder / "model.safetensors") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


@torch.no_grad()
def test_the_base_of_an_adapted_model_is_known_by_its_card_its_name_or_its_package(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n")
    assert base_metadata(str(tmp_path), tmp_path) == {"license": "mit"}
    assert base_metadata("org/name", tmp_path) == {"license": "mit", "base_model": "org/name"}
    assert base_metadata("smollm2", tmp_path)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def last_changes_first(folder: Path) -> bool:
    policy = load_model(folder)
    rows = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    one, other = policy(rows, None, torch.tensor([0, 4]))
    return not torch.equal(one, other)


@pytest.mark.parametrize("head", [False, True], ids=["tied", "head of its own"])
def test_weights_stay_and_a_mask_is_added(tmp_path: Path, head: bool) -> None:
    folder = source(tmp_path / "source", head=head, tie_word_embeddings=not head)
    with pytest.raises(ValueError, match="no mask token"):
        load_model(folder)
    done = adapt(folder, tmp_path / "start")
    assert done == {"mask_token": MASK, "mask_id": 260, "new": True, "rows": 320} and done["rows"] % EVEN == 0
    before, after = tensors(folder), tensors(tmp_path / "start")
    assert before.keys() == after.keys() and ("lm_head.weight" in after) == head
    for name, weight in before.items():
        assert torch.equal(after[name][: len(weight)], weight)
    embedding = after["model.embed_tokens.weight"]
    torch.testing.assert_close(embedding[260], before["model.embed_tokens.weight"].mean(0))
    policy = load_model(tmp_path / "start")
    assert (policy.mask_id, policy.eos_id, policy.vocabulary) == (260, 258, 320)
    assert policy.tokenizer.encode(MASK) == [260] and policy.tokenizer.encode("<|im_end|>") == [258]
    assert policy.tokenizer.decode(policy.tokenizer.prompt("hé")).startswith("user\nhé")
    assert last_changes_first(tmp_path / "start")
    assert not (tmp_path / "source" / "adapted.json").exists()


def test_an_unused_token_or_a_spare_row_can_be_the_mask(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    done = adapt(folder, tmp_path / "reserved", mask_token="<reserved>")
    assert done == {"mask_token": "<reserved>", "mask_id": 259, "new": True, "rows": 260}
    assert load_model(tmp_path / "reserved").mask_id == 259
    with pytest.raises(ValueError, match="'<nothing>'"):
        adapt(folder, tmp_path / "other", mask_token="<nothing>")
    spare = source(tmp_path / "spare", QWEN2, vocab_size=272, tie_word_embeddings=True, head=False)
    assert adapt(spare, tmp_path / "spared")["rows"] == 272 and load_model(tmp_path / "spared").mask_id == 260
    weights = tensors(tmp_path / "spared")["model.embed_tokens.weight"]
    torch.testing.assert_close(weights[260], tensors(spare)["model.embed_tokens.weight"][:260].mean(0))
    own = source(tmp_path / "own", QWEN2, QWEN_SPECIALS, vocab_size=272)  # whose tokenizer has a <|mask|>
    done = adapt(own, tmp_path / "owned")
    assert done["mask_id"] == 260 and not done["new"]
    before, after = (tensors(folder)["model.embed_tokens.weight"] for folder in (own, tmp_path / "owned"))
    assert torch.equal(before, after)


def test_what_is_a_diffusion_model_already_is_not_adapted(tmp_path: Path) -> None:
    done = source(tmp_path / "source", is_causal=False, mask_token_id=259)
    with pytest.raises(ValueError, match=naming("masked diffusion model", "unmask sft")):
        adapt(done, tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_a_random_llama_adapted_to_a_toy_learns_it_and_is_a_model_like_others(unmask, tmp_path: Path) -> None:
    """The letter after the one that is asked, seven times and then the end: none right before, all letters after."""
    folder = source(tmp_path / "source", template="", rope_theta=100.0)
    weights = tensors(folder)  # of a size from which little models learn quickly
    save_file({name: w * 0.4 if w.dim() > 1 else w for name, w in weights.items()}, folder / "model.safetensors")
    lines = [{"prompt": chr(n), "completion": chr(n + 1) * 7} for n in range(97, 105)] * 12
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = "data: [{file: toy.jsonl, canvas: 8}]"
    (tmp_path / "toy.yaml").write_text(f"{data}\nattention_annealing: 10\neval: {{prompts: 6}}\n")
    code, out, err = unmask(
        *("adapt", "source", "toy.yaml", "--out", "run", "updates=80", "batch_tokens=512", "optimizer.lr=1e-2"),
        *("optimizer.warmup=5", "optimizer.schedule=cosine"),
    )
    assert code == 0 and mentions(out, "<|mask|>", "new", 260), err
    assert "unmask train --model run --task TASK --full" in out
    told = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    made = {step: [(line["completion"], line["wanted"]) for line in told if line["step"] == step] for step in (0, 80)}
    assert not any(made == wanted for made, wanted in made[0])
    assert all(set(made) == set(wanted) for made, wanted in made[80])
    ends = json.loads(Path("run/finished.json").read_text())
    assert ends["before"]["eval/toy/loss"] > 4 and ends["after"]["eval/toy/loss"] < 0.1
    assert last_changes_first(Path("run/checkpoint")) and last_changes_first(Path("run/start"))
    assert json.loads(Path("run/start/adapted.json").read_text())["model"] == "source"
    card = Path("run/checkpoint/README.md").read_text()
    assert "| base model | source |" in card and "unmask adapt source sft.yaml" in card
    code, out, _ = unmask("sample", "run", "c", "--task", "countdown_text", "--greedy", "rollout.length=8")
    assert code == 0 and set(out.strip()) == {"d"}
    code, _, err = unmask("adapt", "run", "toy.yaml")
    assert code == 2 and mentions(err, "run", "masked diffusion model", "unmask sft") and err.count("\n") == 1
    (tmp_path / "mask.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b<|mask|>"}) + "\n")
    code, _, err = unmask("sft", "run", "--data", "mask.jsonl")
    assert code == 2 and mentions(err, "mask", "MASK token")
    code, _, err = unmask("adapt", "run/checkpoint", "toy.yaml", "--out", "again")
    assert code == 2 and "already a masked diffusion model" in err and not Path("again").exists()


def test_in_blocks_it_is_sampled_and_trained_from_the_adaptation_to_reinforcement_learning(
    unmask, tmp_path: Path
) -> None:
    source(tmp_path / "source", template="")
    lines = [{"prompt": chr(n) * (n % 3 + 1), "completion": chr(n + 1) * 5} for n in range(97, 103)] * 4
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ("updates=6", "batch_tokens=128", "optimizer.lr=1e-2", "eval.prompts=2")
    code, _, err = unmask("adapt", "source", "--data", "toy.jsonl", "--out", "run", *few, "causal_block=4")
    assert code == 2 and mentions(err, "causal_block", "--block N")
    code, _, err = unmask("adapt", "source", "--data", "toy.jsonl", "--block", "4096", "--out", "run", *few)
    assert code == 2 and mentions(err, "--block 4096", "tokens") and not Path("run").exists()
    code, out, err = unmask("adapt", "source", "--data", "toy.jsonl", "--block", "4", "--out", "run", *few)
    assert code == 0 and mentions(out, "blocks of 4"), err
    assert json.loads(Path("run/checkpoint/config.json").read_text())["causal_block"] == 4
    assert json.loads(Path("run/start/adapted.json").read_text())["block"] == 4
    ends = json.loads(Path("run/finished.json").read_text())
    assert ends["after"]["eval/toy/loss"] < ends["before"]["eval/toy/loss"]
    policy = load_model(Path("run/checkpoint"))
    rows = torch.tensor([[5] * 8, [5] * 7 + [9]])
    with torch.no_grad():
        first, other = policy(rows, None, torch.tensor([3, 11]))
    assert policy.causal_block == 4 and torch.equal(first, other)  # the first block does not see the second
    # The reward is the share of odd tokens (the end token is even). Prompts end at different places of a block.
    prompts = [[97 + n % 5] * (n % 4 + 1) for n in range(8) for _ in range(4)]
    group_B = torch.arange(len(prompts)) // 4
    for method in (BASES["raft"](), BASES["agrpo"]()):
        policy = load_model(Path("run/checkpoint"))
        optimizer, rng, means = torch.optim.Adam(policy.parameters(), lr=3e-2), torch.Generator().manual_seed(0), []
        for number in range(4):
            seed_B = row_seeds(number, len(prompts))
            how = {"length": 6, "cache": Cache(), "order": ORDERS["random"], "record": method.record, "micro_batch": 12}
            rollouts = sample(policy, prompts, seed_B, group_B=group_B, **how)
            reward_B = (rollouts.trace.tokens_BL[:, -6:] % 2).double().mean(-1)
            means.append(float(reward_B.mean()))
            correct_B = (reward_B > reward_B.median()).double() if method.counts_ones else reward_B
            batch = ScoredRollouts(rollouts, correct_B, None)
            for terms in loss_terms(method, batch, Scorer(policy, None, MicroBatch(64)), rng, 1):
                update(policy, optimizer, terms, 64, 1.0)
        assert means[-1] > means[0] + 0.3


# --- runs that are killed, cut off or refused ---------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path) -> tuple[str, ...]:
    """`unmask adapt` of a random Llama and ten lines, but for --out."""
    source(tmp_path / "source", template="")
    lines = [{"prompt": chr(n), "completion": chr(n + 1)} for n in range(97, 107)]
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ("updates=4", "batch_tokens=64", "eval.prompts=1", "save_every=2", "optimizer.lr=1e-3")
    return ("adapt", "source", "--data", "toy.jsonl", *few)


class Killed(Exception):
    pass


def moments(call: Callable[[], object], here: Path, aside: Path) -> list[Path]:
    """Copies of what a kill leaves of `here/run`, and beside it, just before each time that a file or folder is made or
    renamed; up to the first that has something in it."""
    found, hearing = list[Path](), True

    def hear(event: str, given: tuple[Any, ...]) -> None:
        nonlocal hearing
        if not hearing:
            return
        writes = event in ("os.mkdir", "os.rename") or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and os.path.abspath(str(given[0])).startswith(str(here)):
            hearing = False  # copying makes files too
            found.append(Path(shutil.copytree(here, aside / str(len(found)))))
            if (here / "run").is_dir() and any((here / "run").iterdir()):
                raise Killed
            hearing = True

    sys.addaudithook(hear)  # for good: there is no way to take one back
    with pytest.raises(Killed):
        call()
    return found


def test_killed_at_any_moment_nothing_is_in_the_way_or_it_can_be_gone_on_with(
    unmask, toy: tuple[str, ...], tmp_path: Path
) -> None:
    here = tmp_path / "deep"
    here.mkdir()
    *before, last = moments(lambda: unmask(*toy, "--out", "deep/run"), here, tmp_path / "left")
    assert len(before) > 5
    for left in before:
        check_folder(left / "run")
    shutil.rmtree(here)
    last.rename(here)
    code, _, err = unmask("adapt", "--resume", "deep/run")
    assert code == 0 and Path("deep/run/finished.json").is_file(), err


def test_an_adaptation_that_was_cut_off_ends_as_if_it_had_not_been(
    unmask, toy: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unmask(*toy, "--out", "whole")[0] == 0
    left = [4]

    def cut(*given: Any) -> dict[str, float]:
        left[0] -= 1
        if not left[0]:
            raise OSError("cut")
        return sft_update(*given)

    with monkeypatch.context() as patch:
        patch.setattr(unmask_sft, "sft_update", cut)
        code, _, err = unmask(*toy, "--out", "cut")
    assert code == 2 and err == "unmask: cut\n" and [path.name for path in Path("cut/state").iterdir()] == ["2"]
    code, _, err = unmask("adapt", "--resume", "cut")
    assert code == 0, err

    def logged(folder: str) -> list[dict[str, float]]:
        rows = read_metrics(Path(folder))
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    assert logged("cut") == logged("whole") and len(logged("whole")) == 6
    for file in ("samples.jsonl", "checkpoint/model.safetensors", "start/model.safetensors", "finished.json"):
        assert Path("cut", file).read_bytes() == Path("whole", file).read_bytes()
    assert Path("cut/checkpoint/model.safetensors").read_bytes() != Path("cut/start/model.safetensors").read_bytes()


WRONG = {
    "a line that is none": ('{"prompt": "a"}', "toy.jsonl line 11: 'completion' is missing"),
    "a text with the new MASK": ('{"prompt": "a", "completion": "<|mask|>"}', "a text contains the MASK token"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refused_rows_leave_nothing_and_the_corrected_command_runs(unmask, toy: tuple[str, ...], kind: str) -> None:
    line, told = WRONG[kind]
    right = Path("toy.jsonl").read_text()
    Path("toy.jsonl").write_text(right + line + "\n")
    before = set(Path().iterdir())
    code, _, err = unmask(*toy, "--out", "deep/run")
    assert code == 2 and told in err and set(Path().iterdir()) == before
    Path("toy.jsonl").write_text(right)
    Path("deep/run").mkdir(parents=True)  # an empty folder is as good as none
    code, _, err = unmask(*toy, "updates=1", "--out", "deep/run")
    assert code == 0 and [path.name for path in Path("deep").iterdir()] == ["run"], err


def test_the_shipped_configurations_can_be_used_one_after_the_other() -> None:
    folder = Path(__file__).parent.parent / "unmask" / "config" / "recipes"
    config = read_sft_config(folder / "adapt_smollm2.yaml", model="start", device="cpu")
    assert [lesson.name for lesson in config.data] == ["countdown_text", "sudoku_text", "word_problems"]
    then = read_config(folder / "smollm2_rl.yaml", device="cpu")
    planted = Path(__file__).parents[1] / "benchmarks" / "starts" / "smollm2_two.yaml"
    two, chosen = read_sft_config(planted, model="start", device="cpu"), read_config(folder / "smollm2_two.yaml")
    for start, run in ((config, then), (two, chosen)):
        (source,) = (lesson for lesson in start.data if lesson.task == run.task)
        assert run.rollout.length == source.canvas and run.full
        assert source.options == run.options.get(run.task, {})
    assert config.optimizer.lr == 3e-4 and config.optimizer.betas == (0.9, 0.95) and config.full is None
