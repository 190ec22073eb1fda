"""Model cards and `unmask push`, against an endpoint on this machine."""

import base64
import json
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, constants

from unmask.config import DEMO, read_config
from unmask.integrations.hub import files_to_push
from unmask.models import load_model
from unmask.models.checkpoint import card_metadata
from unmask.training.run.card import HERE, CardFacts, Training, model_card, task_arguments
from wording import mentions

RL = Training(
    command="unmask train config.yaml",
    method="`diffu_grpo` with `daca`",
    tasks=["gsm8k"],
    graded_by="--task gsm8k",
    data="the hub",
    base="GSAI-ML/LLaDA-8B-Instruct",
    tags=("daca", "gsm8k"),
    papers=("2605.16342",),
)
BEFORE = {"eval/solved_greedy": 0.5, "eval/solved_greedy_low": 0.4, "eval/solved_greedy_high": 0.6, "eval/reward": 0.3}
AFTER = {"eval/solved_greedy": 0.75, "eval/solved_greedy_low": 0.65, "eval/solved_greedy_high": 0.83}


def facts(**changes: object) -> CardFacts:
    usual = {
        "name": "my-run",
        "base_model": "GSAI-ML/LLaDA-8B-Instruct",
        "license": "mit",
        "adapter": True,
        "training": RL,
        "config": "task: gsm8k\nseed: 3\n",
        "seed": 3,
        "step": 20,
        "before": BEFORE,
        "after": AFTER,
        "evaluated": 20,
    }
    return CardFacts(**{**usual, **changes})


def test_the_hub_reads_the_metadata_of_a_card() -> None:
    card = ModelCard(model_card(facts()))
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("GSAI-ML/LLaDA-8B-Instruct", "adapter")
    assert (data.library_name, data.license, data.pipeline_tag) == ("peft", "mit", "text-generation")
    assert data.tags == ["unmask", "masked-diffusion", "lora", "daca", "gsm8k"]
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("gsm8k", "accuracy", 75.0)
    assert "| gsm8k | solve rate, greedy | 50.0 % [40.0, 60.0] | 75.0 % [65.0, 83.0] |" in card.text
    assert f'unmask.load_model("{HERE}")' in card.text and "unmask train config.yaml" in card.text
    config = card.text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(config) == {"task": "gsm8k", "seed": 3}
    assert "arxiv.org/abs/2605.16342" in card.text


def test_a_card_leaves_out_what_is_not_known() -> None:
    card = ModelCard(model_card(facts(base_model="", license="", adapter=False, after=None, evaluated=0)))
    assert card.data.library_name == "transformers" and card.data.eval_results is None
    assert not {"base_model", "base_model_relation", "license"} & card.data.to_dict().keys()
    assert "| 50.0 % [40.0, 60.0] | not evaluated yet |" in card.text


TRAIN = ("updates=1", "eval.prompts=2", "eval.samples=2", "prompts=1", "group=2", "trace_every=0", "--out", "run")


@pytest.fixture
def trained(unmask) -> Path:
    assert unmask("train", *TRAIN)[0] == 0
    return Path("run")


def test_every_checkpoint_has_a_card_and_its_data_are_passed_on(unmask, trained: Path) -> None:
    data = ModelCard.load(trained / "checkpoint" / "README.md").data
    final = json.loads((trained / "finished.json").read_text())["after"]
    scores = {result.metric_name: result.metric_value for result in data.eval_results}
    assert scores["solve rate, greedy"] == round(100 * final["eval/solved_greedy"], 2)
    assert data.license == "apache-2.0" and {"raft", "sudoku"} <= {*data.tags}
    base = trained / "checkpoint" / "README.md"  # as if it had been trained from a model on the hub
    base.write_text(base.read_text().replace("library_name", "base_model: org/root\nlibrary_name"))
    tune = ("sft", "run/checkpoint", "--data", "sudoku", "updates=1", "eval.prompts=2", "max_examples=8")
    assert unmask(*tune, "--out", "tuned")[0] == 0
    tuned = ModelCard.load("tuned/checkpoint/README.md")
    assert (tuned.data.base_model, tuned.data.license) == ("org/root", "apache-2.0")
    assert "| sudoku | held-out loss |" in tuned.text and "unmask sft run/checkpoint sft.yaml" in tuned.text


def test_the_card_evaluates_the_same_task(unmask, model: str) -> None:
    Path("tasks").mkdir()
    file = Path("tasks/my_task.py")
    file.write_text("length = 4\ndef reward(completion, row):\n    return float(completion == row['answer'])\n")
    rows = [json.dumps({"prompt": f"{n}+2=", "answer": str(n + 2)}) for n in range(40)]
    Path("my rows.jsonl").write_text("\n".join(rows))
    own = ("--task", str(file), "own.data=my rows.jsonl", "own.weights={reward: 2}", "--model", model)
    assert unmask("train", *own, *TRAIN)[0] == 0
    command = Path("run/checkpoint/README.md").read_text().split("```sh\n")[1].splitlines()[0]
    words = shlex.split(command.replace(HERE, "run/checkpoint"))
    assert words[:5] == ["unmask", "eval", "run/checkpoint", "--task", "my_task.py"]
    assert words[5:] == ['own.data="my rows.jsonl"', 'own.weights={"reward": 2}']
    file.rename("my_task.py")  # a reader has the file at another place
    code, out, err = unmask(*words[1:], "--problems", "2", "--samples", "1", "--json")
    assert code == 0 and json.loads(out)["task"] == "my_task", err
    config = read_config({"task": "gsm8k"}, ["gsm8k.protocol=d1"])
    words = shlex.split(task_arguments(config.task, config.options["gsm8k"]))
    assert words[:2] == ["--task", "gsm8k"]
    assert task_arguments("gsm8k", config.dump()["gsm8k"]) == shlex.join(words)  # defaults are not repeated
    assert read_config(DEMO, words[2:], task=words[1]).options == config.options


def test_a_merged_adapter_has_the_card_of_a_whole_model(unmask) -> None:
    assert unmask("train", "full=false", "lora.rank=2", *TRAIN)[0] == 0
    assert ModelCard.load("run/checkpoint/README.md").data.library_name == "peft"
    assert unmask("merge", "run", "--out", "merged")[0] == 0
    card = ModelCard.load("merged/README.md")
    assert card.data.library_name == "transformers" and "lora" not in card.data.tags
    assert "merged into the weights" in card.text
    config = Path("run/checkpoint/adapter_config.json")
    text = config.read_text()
    for base in (str(Path("merged").resolve()), "merged", "/nowhere/model", "runs/old", "../model", "model"):
        config.write_text(text.replace('"tiny-two"', json.dumps(base)))
        code, _, err = unmask("push", "run", "org/name", "--dry-run")
        assert code == 2 and mentions(err, "adapter", "unmask merge run --out FOLDER"), base
    for base in ("tiny-two", "org/model"):
        config.write_text(text.replace('"tiny-two"', json.dumps(base)))
        code, out, _ = unmask("push", "run", "org/name", "--dry-run")
        assert code == 0 and mentions(out, "adapter_config.json", "adapter_model.safetensors"), base
    Path("run/checkpoint/adapter_model.safetensors").unlink()
    code, _, err = unmask("push", "run", "org/name", "--dry-run")
    assert code == 2 and mentions(err, "adapter_model.safetensors", "missing")


@pytest.mark.parametrize("text", ["", "no metadata", "---\n- a\n---\n", "---\na: [\n---\n", "---\n&a [*a]\n---\n"])
def test_a_card_that_cannot_be_read_has_no_data(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert card_metadata(tmp_path) == {}


class Hub(BaseHTTPRequestHandler):
    """The few routes of the hub that an upload needs. A repository of `strangers` may not be written."""

    calls: list[tuple[str, dict]]
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        route = self.path.partition("?")[0]
        if route.endswith("/commit/main") or route.endswith("/commit/v2"):
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines[1:]:
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.calls.append((route, lines[0]["value"]))
            self.reply({"commitUrl": f"{constants.ENDPOINT}/org/name/commit/1", "commitOid": "1", "hookOutput": ""})
            return
        data = json.loads(body)
        self.calls.append((route, data))
        if route == "/api/repos/create":
            if data.get("organization") == "strangers":
                self.reply({"error": "You don't have the rights"}, 403)
            else:
                self.reply({"url": f"{constants.ENDPOINT}/{data['organization']}/{data['name']}"})
        elif "/preupload/" in route:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in data["files"]]
            self.reply({"files": files})
        else:  # validate-yaml, branch
            self.reply({"errors": [], "warnings": []})

    def reply(self, data: dict, status: int = 200) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.calls, Hub.files = [], {}
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_push_uploads_checkpoint_card_and_curves(unmask, trained: Path, hub: type[Hub]) -> None:
    code, out, _ = unmask("push", "run", "org/name", "--private", "--dry-run")
    assert code == 0 and mentions(out, "would upload", "org/name (private", "README.md") and not hub.calls
    code, out, err = unmask("push", "run", "org/name", "--private", "--revision", "v2")
    assert code == 0 and f"{constants.ENDPOINT}/org/name" in out, err
    created = dict(hub.calls)["/api/repos/create"]
    assert (created["name"], created["organization"]) == ("name", "org")
    assert created.get("private") is True or created.get("visibility") == "private"
    routes = [route for route, _ in hub.calls]
    assert "/api/models/org/name/branch/v2" in routes and routes[-1] == "/api/models/org/name/commit/v2"
    assert {"config.json", "README.md", "config.yaml", "metrics.jsonl"} <= hub.files.keys()
    assert hub.files["model.safetensors"] == (trained / "checkpoint" / "model.safetensors").read_bytes()
    card = ModelCard(hub.files["README.md"].decode())
    assert 'unmask.load_model("org/name")' in card.text and HERE not in card.text
    for name, content in hub.files.items():  # what others download is a model
        Path("copy").mkdir(exist_ok=True)
        (Path("copy") / name).write_bytes(content)
    assert load_model("copy").vocabulary == 99


def test_push_uploads_only_files_of_a_model(unmask, model: str) -> None:
    folder, secret = Path("copy"), Path("secret")
    shutil.copytree(model, folder)
    secret.write_text("token")
    for name in (".env", "notes.txt", "mine.py", "modeling_own.py", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "merges.txt").symlink_to(secret.resolve())
    (folder / "vocab.txt").symlink_to("tokenizer.json")
    (folder / "data").mkdir()
    upload = files_to_push(folder)
    assert {"config.json", "model.safetensors", "modeling_own.py", "tokenizer.json", "vocab.txt"} <= upload.files.keys()
    unwanted = [".env", "data/", "merges.txt", "mine.py", "notes.txt"]
    assert upload.left_out == unwanted and not upload.files.keys() & set(unwanted)
    code, out, _ = unmask("push", "copy", "org/name", "--dry-run")
    assert code == 0 and mentions(out, "not uploaded: .env, data/, merges.txt, mine.py, notes.txt")
    (folder / "model.safetensors").rename("elsewhere")
    assert mentions(unmask("push", "copy", "org/name")[2], "There is no model.safetensors")
    (folder / "model.safetensors").symlink_to(Path("elsewhere").resolve())
    assert mentions(unmask("push", "copy", "org/name")[2], "model.safetensors", "link to a file outside")


def test_push_explains_what_is_missing(unmask, model: str, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = unmask("push", model, "strangers/name")
    assert code == 2 and mentions(err, "the hub refused the upload to strangers/name", "You don't have the rights")
    assert mentions(unmask("push", model, "no name")[2], "'no name'", "ORG/NAME")
    assert mentions(unmask("push", "nowhere", "org/name")[2], "nowhere", "give the folder of a finished run")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert mentions(unmask("push", model, "org/name")[2], "the upload to http://127.0.0.1:1 failed")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert mentions(unmask("push", model, "org/name")[2], "no Hugging Face token", "HF_TOKEN")
