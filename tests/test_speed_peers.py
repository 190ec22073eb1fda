"""benchmarks/speed_peers.py: the code of other projects. Here it is stand-ins of ours with the same files and names."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"

D1 = '''
import torch
import torch.distributed as dist
from tqdm import tqdm


def generate(model, prompt, tokenizer, steps=64, gen_length=128, block_length=32, temperature=0.0, cfg_scale=0.0,
             remasking="low_confidence", mask_id=126336):
    """A token a position, from left to right."""
    print("a line that is no result")
    with torch.autocast(device_type="cuda"):
        tokens = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], dim=1)
        for block in tqdm(range(gen_length // block_length), disable=dist.get_rank() != 0):
            for step in range(steps * block_length // gen_length):
                assert model(tokens).logits.shape[:2] == tokens.shape
            tokens[:, prompt.shape[1] + block * block_length :][:, :block_length] = 5
        return tokens
'''

FAST = """
import torch
from model.modeling_llada import LLaDAModelLM


@torch.no_grad()
def generate_with_dual_cache(model, prompt, steps=128, gen_length=128, block_length=128, temperature=0.0,
                             remasking="low_confidence", mask_id=126336, threshold=None, factor=None):
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    tokens, passes = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], dim=1), 0
    for first in range(prompt.shape[1], tokens.shape[1], block_length):
        past = model(tokens, use_cache=True).past_key_values
        place = torch.zeros_like(tokens, dtype=torch.bool)
        place[:, first : first + block_length] = True
        for _ in range(steps * block_length // gen_length - 1):
            model(tokens[place].view(len(tokens), -1), past_key_values=past, use_cache=True, replace_position=place)
        tokens[:, first : first + block_length] = 5
        passes += steps * block_length // gen_length
    return tokens, passes
"""

CONFIGURATION = '''
from types import SimpleNamespace


class ModelConfig(SimpleNamespace):
    """The shape of a network."""


class LLaDAConfig(SimpleNamespace):
    """The same."""
'''

MODELING = '''
from types import SimpleNamespace

import torch
from torch import nn

ROWS = {rows}


class LLaDAModel(nn.Module):
    """Embeddings and the head; the layers are only held."""

    def __init__(self, config):
        super().__init__()
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        width, inner, device = config.d_model, config.mlp_hidden_size, config.init_device

        def linear(outputs, inputs):
            return nn.Linear(inputs, outputs, bias=False, device=device)

        def norm():
            return nn.RMSNorm(width, eps=config.rms_norm_eps, device=device)

        square = ("q_proj", "k_proj", "v_proj", "attn_out")
        blocks = [
            nn.ModuleDict(
                {{name: linear(width, width) for name in square}}
                | {{"ff_proj": linear(inner, width), "up_proj": linear(inner, width), "ff_out": linear(width, inner)}}
                | {{"attn_norm": norm(), "ff_norm": norm()}}
            )
            for _ in range(config.n_layers)
        ]
        parts = {{"wte": nn.Embedding(config.vocab_size, width, device=device), "ln_f": norm()}}
        parts |= {{"blocks": nn.ModuleList(blocks), "ff_out": linear(config.vocab_size, width)}}
        self.transformer = nn.ModuleDict(parts)


class LLaDAModelLM(nn.Module):
    def __init__(self, config, model=None):
        super().__init__()
        self.config, self.model = config, model

    def forward(self, tokens, past_key_values=None, use_cache=None, replace_position=None):
        if len(tokens) > ROWS:
            raise RuntimeError("shape mismatch\\nand more")
        parts = self.model.transformer
        use_cache = self.config.use_cache if use_cache is None else use_cache
        past = [(tokens, tokens)] if use_cache else None
        return SimpleNamespace(logits=parts.ff_out(parts.ln_f(parts.wte(tokens))), past_key_values=past)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkouts of both."""
    llada = tmp_path / "peers" / "Fast-dLLM" / "v1" / "llada"
    for path, text in (
        (tmp_path / "peers" / "d1" / "eval" / "generate.py", D1),
        (llada / "generate.py", FAST),
        (llada / "model" / "configuration_llada.py", CONFIGURATION),
        (llada / "model" / "modeling_llada.py", MODELING.format(rows=99)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "peers"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "speed.py"))


@pytest.fixture
def measured(speed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*options: str) -> list[dict[str, Any]]:
        out = tmp_path / "out.json"
        monkeypatch.setattr("sys.argv", ["speed.py", "peers", "--toy", "--eager", "--out", str(out), *options])
        speed["main"]()
        return json.loads(out.read_text())["peers"]

    return run


def test_peers_and_we_are_timed_in_one_run(measured, folder: Path, capsys: pytest.CaptureFixture) -> None:
    path, rank, kernels = sys.path.copy(), torch.distributed.get_rank, torch.backends.cuda.mem_efficient_sdp_enabled()
    network, commits, *cells = measured("--peers", str(folder))
    assert network["largest_gap_of_logits"] > 0  # that of the stand-in is another model
    assert commits == {"kind": "commits", "d1": None, "Fast-dLLM": None}
    assert [cell["rows"] for cell in cells] == [2, 3]
    for cell in cells:
        ways = ("d1", "Fast-dLLM", "ours, exact", "ours, dual cache")
        rates = {name: cell[name]["tokens_per_second"] for name in ways}
        for name in ways:
            assert cell[name]["fastest"] <= cell[name]["seconds"] <= cell[name]["slowest"]
            assert rates[name] == pytest.approx(cell["rows"] * 32 / cell[name]["seconds"])
        for our, faster in cell["times_as_fast"].items():
            assert faster == {name: pytest.approx(rates[our] / rates[name]) for name in ("d1", "Fast-dLLM")}
        assert cell["reckoned"] == "1 of 4 blocks timed (exact), 2 of 4 blocks timed (dual cache)"
        assert (cell["temperature"], cell["repetitions"]) == (1.0, 3)
    said = capsys.readouterr()
    assert all(line.startswith("peers {") for line in said.out.splitlines()) and "%|" not in said.err
    assert sys.path == path and torch.distributed.get_rank is rank
    assert torch.backends.cuda.mem_efficient_sdp_enabled() == kernels


def test_fast_dllm_has_our_weights_and_ours_stay_frozen(speed, folder: Path) -> None:
    """And a rollout of a peer is asked for the same columns, steps and blocks as ours."""
    import speed_peers

    bench = speed["SpeedBench"](True)
    with speed_peers.importing(folder / "Fast-dLLM" / "v1" / "llada"):
        modeling, configuration = (
            speed_peers.importlib.import_module(f"model.{name}") for name in ("modeling_llada", "configuration_llada")
        )
    with speed_peers.their_surroundings():
        network = speed_peers.fast_network(bench, modeling, configuration)
    ours = bench.policy.lm.model.layers[1]
    block = network.model.transformer.blocks[1]
    pairs = [(ours.self_attn.o_proj, block["attn_out"]), (ours.mlp.down_proj, block["ff_out"])]
    pairs += [(ours.mlp.gate_proj, block["ff_proj"]), (ours.post_attention_layernorm, block["ff_norm"])]
    assert all(one.weight.data_ptr() == two.weight.data_ptr() for one, two in pairs)
    assert not any(weight.requires_grad for model in (bench.policy, network) for weight in model.parameters())
    tokens_BL, passes = speed_peers.fast_dllm(bench, folder).roll(3, 2)
    assert tokens_BL.shape == (3, bench.width) and passes == 8 == bench.roll_blocks(3, 2).trace.steps
    assert (tokens_BL[:, -16:] == 5).all() and speed_peers.d1(bench, folder).roll(3, 1).shape == (3, bench.width)


def test_a_peer_that_takes_one_row_is_timed_with_one(measured, folder: Path) -> None:
    (folder / "Fast-dLLM/v1/llada/model/modeling_llada.py").write_text(MODELING.format(rows=1))
    _, _, *cells = measured("--peers", str(folder))
    assert [cell["rows"] for cell in cells] == [2, 3, 1]
    for cell in cells[:2]:
        assert cell["Fast-dLLM"] == {"failed": f"does not run with {cell['rows']} rows: shape mismatch"}
        assert cell["times_as_fast"]["ours, exact"].keys() == {"d1"}
    assert cells[2]["Fast-dLLM"]["tokens_per_second"] > 0 and "d1" not in cells[2]
    assert cells[2]["times_as_fast"]["ours, dual cache"].keys() == {"Fast-dLLM"}


def test_a_peer_that_needs_too_much_memory_is_left_out(measured, folder: Path) -> None:
    (folder / "d1/eval/generate.py").write_text(D1.replace("print(", "raise torch.OutOfMemoryError("))
    _, _, *cells = measured("--peers", str(folder))
    assert [(cell["rows"], cell["d1"]) for cell in cells] == [(rows, {"failed": "out of memory"}) for rows in (2, 3)]
    assert all(cell["Fast-dLLM"]["tokens_per_second"] > 0 for cell in cells)


def test_a_peer_that_does_not_run_at_all_is_an_error(measured, folder: Path) -> None:
    (folder / "Fast-dLLM/v1/llada/model/modeling_llada.py").write_text(MODELING.format(rows=0))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        measured("--peers", str(folder))


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("d1", None, "there is no folder {path}: git clone https://github.com/dllm-reasoning/d1 {path}"),
        ("Fast-dLLM", None, "there is no folder {path}: git clone https://github.com/NVlabs/Fast-dLLM {path}"),
        ("d1/eval/generate.py", None, "there is no file {path}"),
        ("Fast-dLLM/v1/llada/model/modeling_llada.py", None, "there is no file {path}"),
        ("d1/eval/generate.py", "x = 1", "{path} has no generate"),
        ("Fast-dLLM/v1/llada/generate.py", "x = 1", "{path} has no generate_with_dual_cache"),
        ("Fast-dLLM/v1/llada/model/configuration_llada.py", "x = 1", "{path} has no LLaDAConfig"),
        ("d1/eval/generate.py", "import no_such_module", "cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_what_is_missing_is_named(measured, folder: Path, file: str, text: str | None, told: str) -> None:
    path = folder / file
    if text is None:
        path.rename(folder.parent / "elsewhere")
    else:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        measured("--peers", str(folder))
    assert told.format(path=path) in str(ended.value)


def test_the_section_needs_its_option_and_all_goes_without_it(speed, measured, folder: Path) -> None:
    with pytest.raises(SystemExit, match="peers needs --peers FOLDER"):
        measured()
    assert "peers" not in speed["wanted_sections"](["all"], None)
    assert "peers" in speed["wanted_sections"](["all"], folder)
