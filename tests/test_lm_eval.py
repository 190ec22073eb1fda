"""The lm-evaluation-harness with a model of ours: two tasks of this file, without a network."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is an extra: pip install 'unmask[lm-eval]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from unmask.evaluation.likelihood import LikelihoodSettings, log_likelihoods
from unmask.integrations.lm_eval import UnmaskLM
from unmask.models import load_model
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness's own imports

ROWS = [{"question": f"{n}+2=", "answer": str(n + 2), "choices": [str(n), str(n + 2)], "gold": 1} for n in range(4)]
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["="], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: tiny_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def request(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_two_tasks_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    results = lm_eval.simple_evaluate(
        model="unmask",
        model_args="pretrained=tiny,estimator=exact,steps=4",
        tasks=["tiny_generate", "tiny_choose"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )
    policy = load_model("tiny")
    encode = policy.tokenizer.encode
    prompts = [encode(row["question"]) for row in ROWS]
    trace = sample(policy, prompts, row_seeds(0, 4), Decoding(8, 4, 8).greedy()).trace
    texts = [text.split("=")[0] for text in completions(policy, trace, 8)]
    made = {s["doc_id"]: s["resps"][0][0] for s in results["samples"]["tiny_generate"]}
    assert [made[n] for n in range(4)] == texts
    solved = sum(text == row["answer"] for text, row in zip(texts, ROWS, strict=True)) / 4
    assert results["results"]["tiny_generate"]["exact_match,none"] == solved
    pairs = [(encode(row["question"]), encode(choice)) for row in ROWS for choice in row["choices"]]
    wanted = log_likelihoods(policy, pairs, LikelihoodSettings("exact"), "cpu")
    right = sum(wanted[2 * n + 1] > wanted[2 * n] for n in range(4)) / 4
    assert results["results"]["tiny_choose"]["acc,none"] == right
    scored = {s["doc_id"]: [float(r[0][0]) for r in s["resps"]] for s in results["samples"]["tiny_choose"]}
    assert scored[2] == pytest.approx(wanted[4:6], abs=1e-5)
    assert results["config"]["unmask"]["estimator"] == "exact"


def test_likelihoods_and_whether_they_are_greedy() -> None:
    lm = UnmaskLM(pretrained="tiny", device="cpu", batch_size="auto", estimator="left_to_right")
    policy, encode = lm.policy, lm.policy.tokenizer.encode
    trace = sample(policy, [encode("1+1=")], row_seeds(0, 1), Decoding(4, stops=False).greedy()).trace
    greedy = policy.tokenizer.show(trace.tokens_BL[0, -4:].tolist())
    (value, is_greedy), (_, other) = lm.loglikelihood(
        [request("loglikelihood", "1+1=", greedy), request("loglikelihood", "1+1=", "zzzz")]
    )
    assert is_greedy and not other and value < 0
    spaced, plain = lm.loglikelihood([request("loglikelihood", "a ", "b"), request("loglikelihood", "a", " b")])
    assert spaced == plain
    empty = lm.loglikelihood([request("loglikelihood", "", "b")])[0][0]
    settings = LikelihoodSettings("left_to_right")
    assert empty == pytest.approx(log_likelihoods(policy, [([policy.eos_id], encode("b"))], settings, "cpu")[0])
    text = "ab" * 80  # longer than the model's 128 characters: two windows
    (rolling,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    ids = encode(text)
    windows = [([policy.eos_id], ids[:127]), (ids[159 - 127 : 127], ids[127:])]
    assert rolling == pytest.approx(sum(log_likelihoods(policy, windows, settings, "cpu")), abs=1e-3)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="estimator"):
        UnmaskLM(pretrained="tiny", estimator="guess")
    lm = UnmaskLM(pretrained="tiny", device="cpu")
    with pytest.raises(ValueError, match="max_gen_toks"):
        lm.generate_until([request("generate_until", "1", {"until": [], "max_gen_toks": 128})])
    with pytest.raises(ValueError, match="--apply_chat_template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])


def test_the_entry_point_is_the_model() -> None:
    points = [point for point in entry_points(group="lm_eval.models") if point.name == "unmask"]
    if not points:
        pytest.skip("the package is not installed with its current entry points")
    assert points[0].load() is UnmaskLM
