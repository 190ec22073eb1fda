"""Every example runs, at a size that takes a second; what one claims to teach is learnt."""

import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import unmask
from helpers import assert_identical
from unmask.config import read_config
from unmask.core.probes import ask
from unmask.models import TinyShape, tiny_policy
from unmask.training.update import LossTerm, term_loss

EXAMPLES = Path(__file__).parent.parent / "examples"
OWN = EXAMPLES / "own_method.py"


def run(path, monkeypatch, folder, **sizes):
    """The example as `python` would run it in a folder of its own, with other sizes; its names."""
    source = path.read_text()
    (before,) = re.findall(r"^[A-Z]+(?:, [A-Z]+)* = .*$", source, re.MULTILINE)
    names, values = (re.findall(r"\w+", side) for side in before.split("="))
    assert set(sizes) <= set(names)
    values = [sizes.get(name, value) for name, value in zip(names, values, strict=True)]
    source = source.replace(before, f"{', '.join(names)} = {', '.join(map(str, values))}")
    monkeypatch.chdir(folder)
    space = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), space)
    return space


def test_credit_in_a_loop_of_ones_own_takes_sixty_lines_and_no_trainer(monkeypatch, tmp_path, capsys):
    source = (EXAMPLES / "own_loop.py").read_text()
    assert "unmask.training.loop" not in source and "config" not in source.replace("configuration", "")
    assert len(source.splitlines()) <= 60
    space = run(EXAMPLES / "own_loop.py", monkeypatch, tmp_path, UPDATES=2, PROMPTS=2, GROUP=2)
    assert len(capsys.readouterr().out.splitlines()) == 2
    for now, then in zip(space["policy"].parameters(), space["reference"].parameters(), strict=True):
        assert not torch.equal(now, then)


def test_your_own_task_is_learnt(monkeypatch, tmp_path, capsys):
    run(EXAMPLES / "own_task.py", monkeypatch, tmp_path, UPDATES=12, PROMPTS=12, GROUP=8, PROBLEMS=16)
    before, after = map(float, re.findall(r"reward (\S+) -> (\S+)", capsys.readouterr().out)[0])
    assert after > before


def test_its_reward_is_the_share_of_correct_rows_and_columns():
    task = SimpleNamespace(**read(EXAMPLES / "own_task.py"))
    empty, grid = "." * 16 + "=", "1234214334124321"
    assert task.reward(empty, grid) == task.reward(grid + "=", grid) == 1 and len(task.rows()) == 1000
    assert task.reward(empty, "1234" * 4) == 0.5  # rows only
    assert task.reward("4" + empty[1:], grid) == task.reward(empty, grid + "1") == task.reward(empty, "") == 0


def read(path):
    space = {"__name__": "example", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space


def test_the_method_of_ones_own_trains_from_python_and_from_the_command_line(monkeypatch, tmp_path, capsys, unmask):
    run(OWN, monkeypatch, tmp_path, UPDATES=1, PROMPTS=1, GROUP=2, PROBLEMS=1)
    assert capsys.readouterr().out.startswith("halves+early: solved ")
    few = ["updates=1", "prompts=1", "group=2", "eval.prompts=1", "eval.samples=1", "trace_every=0"]
    methods = ["--method", f"{OWN}:halves", "--with", f"dps,{OWN}:early", "halves.low=0.1", "early.strength=1e-1"]
    code, _, err = unmask("train", *methods, *few)
    assert code == 0, err
    (folder,) = Path("runs").glob("sudoku-halves*")
    kept = read_config(folder / "config.yaml")
    assert kept.method == f"{OWN}:halves" and kept.build_method().name == "halves+dps+early"
    assert kept.dump()["halves"] == {"low": 0.1, "high": 0.2, "advantage": "leave_one_out", "normaliser": "token_mean"}
    assert kept.dump()["early"] == {"strength": 0.1}
    assert (
        read_config(folder / "config.yaml", method="diffu_grpo", **{"with": []})
        .dump()
        .keys()
        .isdisjoint({"halves", "early"})
    )


def test_a_loop_of_verls_shape_takes_the_steps_of_our_own(monkeypatch, tmp_path, capsys):
    space = run(EXAMPLES / "dps_in_verl.py", monkeypatch, tmp_path, UPDATES=1, PROMPTS=2, GROUP=2, MINIBATCH=2)
    first = re.findall(r"(\S+)  update   0  reward \S+  ratios 1\.000 \S+", capsys.readouterr().out)
    assert first == list(space["methods"]) == ["agrpo+dps", "diffu_grpo+sml+dps"]
    space["MINIBATCH"] = 4  # one mini-batch, as in our loop
    prompts, reward_B = [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]], torch.tensor([1.0, 0.0, 0.0, 2.0])
    for method in space["methods"].values():
        ours = tiny_policy(TinyShape(width=8, layers=1, heads=2, hidden=8, max_length=24)).double()
        policy, reference = copy.deepcopy(ours), copy.deepcopy(ours)
        uid_B = torch.arange(4) // 2
        data = space["RolloutWorker"](policy, method).generate_sequences(prompts, uid_B, seed=3)
        actor = space["ActorWorker"](policy, method)
        data.batch["old_log_probs"] = actor.compute_log_prob(data, policy)
        data.batch["ref_log_prob"] = actor.compute_log_prob(data, reference)
        data.batch["advantages"] = method.advantage(reward_B, uid_B)
        actor.update_actor(data)

        decoding, seeds = unmask.Decoding(space["LENGTH"], space["STEPS"]), unmask.row_seeds(3, 4)
        rollouts = unmask.sample(ours, prompts, seeds, decoding, group_B=uid_B, request=method.request)
        optimizer, rng = torch.optim.AdamW(ours.parameters(), lr=2e-4), torch.Generator().manual_seed(3000)
        scorer = unmask.Scorer(ours, reference)
        ((term,),) = unmask.loss_terms(method, unmask.ScoredRollouts(rollouts, reward_B), scorer, rng)
        unmask.accumulate(ours, term, micro_batch=256)
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        for now, then, start in zip(policy.parameters(), ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(now, then, rtol=0, atol=1e-12)
            assert not torch.equal(now, start)


@pytest.fixture
def trace():
    policy = tiny_policy(TinyShape(width=8, layers=1, heads=2, hidden=8, max_length=24)).double()
    prompts, groups = [[5, 6], [7, 8, 9]] * 2, torch.tensor([0, 1] * 2)
    return policy, unmask.sample(policy, prompts, unmask.row_seeds(0, 4), unmask.Decoding(7), group_B=groups).trace


def loss_and_slope(policy, method, trace):
    (probes,) = method.probe(trace, torch.Generator().manual_seed(0), 1)
    advantage_B = method.advantage(torch.tensor([1.0, 0, 0, 2]), trace.group_B)
    loss, _ = term_loss(LossTerm(probes, advantage_B, method.credit(trace), method.objective), ask(policy, probes))
    return loss.detach(), torch.autograd.grad(loss, list(policy.parameters()))


def test_halves_asks_each_token_once_with_the_other_half_in_sight(trace):
    _, trace = trace
    (probes,) = read(OWN)["halves"]().probe(trace, torch.Generator(), 1)
    assert len(probes.states_SL) == 8
    assert torch.equal(probes.asked_NL, probes.states_SL[probes.state_N] == trace.mask_id)
    assert torch.equal(probes.asked_NL.long().sum(0) // 4, trace.canvas_BL.all(0).long())
    assert sorted(probes.asked_NL.sum(-1).tolist()) == [3] * 4 + [4] * 4


def test_early_with_strength_zero_is_its_base_and_otherwise_has_mean_one(trace):
    policy, trace = trace
    own, base = read(OWN), unmask.coupled_grpo()
    assert_identical(*(loss_and_slope(policy, method, trace) for method in (base, own["early"](base, strength=0.0))))
    credit_BL = own["early"](base, strength=0.5).credit(trace)
    early_BL = trace.filled_BL & (trace.step_BL < 3.5)
    assert torch.allclose(credit_BL.sum(-1), trace.counted_BL.sum(-1).double())
    ratio = credit_BL[early_BL].min() / credit_BL[trace.filled_BL & ~early_BL].max()
    assert float(ratio) == pytest.approx(3.0)  # (1 + 0.5) / (1 - 0.5)


def test_the_notebook_runs_as_it_is_and_its_stored_outputs_are_what_it_prints(monkeypatch, tmp_path, capsys):
    """The cells in order, in one namespace. Outputs of cells tagged "stable" do not depend on how a machine rounds."""
    shown = []
    display = SimpleNamespace(SVG=shown.append, IFrame=lambda *given, **size: shown.extend(given))
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # not IPython: matplotlib asks for its version
    monkeypatch.chdir(tmp_path)
    space, compared = {"__name__": "__main__"}, 0
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        exec(compile(source, cell["id"], "exec"), space)
        printed, stored = (
            capsys.readouterr().out,
            "".join(line for out in cell["outputs"] for line in out.get("text", "")),
        )
        assert bool(cell["outputs"]) == ("import" not in source), source
        if "stable" in cell["metadata"].get("tags", ()):
            assert printed == stored
            compared += 1
    assert compared == 1 and shown == ["notebook.svg", "notebook.html"]
    assert "unmask-data" in Path("notebook.html").read_text()
    assert space["run"].after.sampled.value > space["run"].before.sampled.value + 0.05


def test_dps_in_trl_trains_and_saves(monkeypatch, tmp_path, capsys):
    pytest.importorskip("trl", reason="the extra trl is not installed")
    space = run(EXAMPLES / "dps_in_trl.py", monkeypatch, tmp_path, UPDATES=10, PROMPTS=2, GROUP=2)
    again = unmask.load_model(tmp_path / "runs" / "dps_in_trl" / "model")
    for kept, trained in zip(again.parameters(), space["policy"].parameters(), strict=True):
        assert torch.equal(kept, trained)
