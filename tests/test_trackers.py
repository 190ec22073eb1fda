"""Trackers are told every line of metrics.jsonl, once, whatever happens to the run or to them."""

import importlib.util
import json
import re
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from ranks_cases import toy_model, toy_task

import unmask.training.run.trackers
from unmask.config import Config, parse_config
from unmask.models import save
from unmask.tasks import TASKS
from unmask.training.loop import resume, train
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.trackers import TRACKERS, check_trackers
from unmask.util.signals import Paused


class Cut(BaseException):
    """Nothing in the library catches it."""


class Heard:
    """A tracker that writes down what it is told; with `fails`, one that stops working after so many lines."""

    lines: ClassVar[list[tuple[int, dict[str, float]]]]
    tables: ClassVar[list[tuple[int, list[tuple[str, str, float]]]]]
    opened: ClassVar[list[tuple[str, dict[str, Any]]]]
    fails: int | None = None
    starts, closed = True, 0

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        if not self.starts:
            raise RuntimeError("no\nnetwork")
        self.opened.append((number, dict(config)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if len(self.lines) == self.fails:
            raise RuntimeError("the server is gone")
        self.lines.append((step, dict(metrics)))

    def log_samples(self, step: int, rows: Any) -> None:
        self.tables.append((step, rows))

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> type[Heard]:
    class Fresh(Heard):
        lines: ClassVar = []
        tables: ClassVar = []
        opened: ClassVar = []

    monkeypatch.setitem(TRACKERS, "tensorboard", Fresh)
    return Fresh


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """Four updates, a state after the second, an evaluation after each second: eight lines."""
    monkeypatch.setitem(TASKS, "toy", toy_task)
    save(toy_model(), tmp_path / "model")
    base = {"model": str(tmp_path / "model"), "task": "toy", "updates": 4, "prompts": 2, "group": 3, "save_every": 2}
    base["trace_every"] = 2
    return parse_config({**base, "eval": {"prompts": 2, "samples": 1, "every": 2}, "track": "tensorboard"})


def run(config: Config, folder: Path, **more: Any) -> Path:
    train(config, lambda: RunFolder(folder, config.dump()), **more)
    return folder


def cut_at(line: int) -> Any:
    """A report that does not come back: the line has been written down and tracked by then."""
    lines = iter(range(10**6))

    def report(step: int, metrics: dict[str, float]) -> None:
        if metrics and next(lines) == line:
            raise Cut

    return report


def rows(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(int(row.pop("step")), row) for row in read_metrics(folder)]


def samples(folder: Path, step: int) -> list[tuple[str, str, float]]:
    """The rows of the table of samples after an update: its lines of samples.jsonl."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    prompt = toy_task().prompt
    return [(prompt(line["row"]), line["completion"], line["reward"]) for line in lines if line["step"] == step]


def timeless(lines: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    return [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for step, row in lines]


def test_every_line_is_told_at_its_step_and_the_resolved_configuration_with_it(config, heard, tmp_path: Path) -> None:
    folder = run(config, tmp_path / "run")
    assert heard.lines == rows(folder) and [step for step, _ in heard.lines] == [0, 1, 2, 2, 3, 4, 4]
    assert heard.tables == [(step, samples(folder, step)) for step in (1, 2, 4)]
    assert [settings for _, settings in heard.opened] == [yaml.safe_load((folder / "config.yaml").read_text())]
    assert heard.closed == 1


@pytest.mark.parametrize("line", [0, 3, 4])  # before a state; after one, in an evaluation and in an update
def test_no_line_is_told_twice_when_a_run_goes_on(config, heard, tmp_path: Path, line: int) -> None:
    """What is done again is not told again."""
    with pytest.raises(Cut):
        run(config, tmp_path / "run", hooks=Hooks(on_metrics=cut_at(line)))
    assert len(heard.lines) == line + 1 and heard.closed == 1
    resume(tmp_path / "run")
    assert timeless(heard.lines) == timeless(rows(tmp_path / "run"))
    assert [step for step, _ in heard.tables] == [1, 2, 4]
    assert len({number for number, _ in heard.opened}) == 1 and len(heard.opened) == 2


def test_a_pause_before_an_evaluation_loses_none(config, heard, tmp_path: Path) -> None:
    with pytest.raises(Paused):
        run(config, tmp_path / "run", hooks=Hooks(should_stop=iter([False, True]).__next__))
    assert [step for step, _ in heard.lines] == [0, 1, 2]
    resume(tmp_path / "run")
    assert timeless(heard.lines) == timeless(rows(tmp_path / "run")) and len(heard.lines) == 7


def test_one_that_fails_is_warned_of_once_and_told_the_rest_when_the_run_goes_on(config, heard, tmp_path: Path) -> None:
    heard.fails = 1
    with pytest.warns(UserWarning, match=r"tensorboard .*RuntimeError: the server is gone") as warned:
        with pytest.raises(Paused):
            run(config, tmp_path / "run", hooks=Hooks(should_stop=iter([False, False, True]).__next__))
    assert len(warned) == 1 and len(heard.lines) == 1 and len(read_metrics(tmp_path / "run")) == 5
    heard.fails = None
    resume(tmp_path / "run")
    assert heard.lines == rows(tmp_path / "run")


def test_one_that_cannot_start_ends_a_new_run_but_not_one_that_goes_on(config, heard, tmp_path: Path) -> None:
    heard.starts = False
    with pytest.raises(ValueError, match=r"^track: tensorboard .*no network"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    heard.starts = True
    with pytest.raises(Paused):
        resume(tmp_path / "run", hooks=Hooks(should_stop=iter([False, True]).__next__))
    heard.starts = False
    with pytest.warns(UserWarning, match="tensorboard failed"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "finished.json").exists() and len(heard.lines) == 3


def test_a_missing_package_is_a_sentence_before_anything_is_loaded(unmask, tmp_path: Path, monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    monkeypatch.setattr("unmask.training.loop.set_up", None)  # loads the model
    code, _, err = unmask("train", "track=[wandb]", "--out", "run")
    sentence = "track: wandb is not installed; pip install 'unmask[wandb]', or leave it out"
    assert (code, err) == (2, f"unmask: {sentence}\n") and list(tmp_path.iterdir()) == []


def test_a_folder_of_the_same_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="wandb is not installed"):
        check_trackers(["wandb"])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_asks_who_it_is(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(Exception):
        pass

    def login() -> None:
        raise Error("No API key configured.\nUse `wandb login` to log in")

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None, origin="here")
    fake.Error, fake.login = Error, login
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("RANK", rank)
    if rank == "1":
        check_trackers(["wandb"])
    else:
        with pytest.raises(ValueError, match=r"^track: wandb .*No API key configured"):
            check_trackers(["wandb"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [("tb", "track.0: .*'tensorboard', 'wandb' or 'trackio'"), (["wandb"] * 2, "track: .*twice")],
)
def test_other_names_are_refused(wrong: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_config({"track": wrong})


# --- the packages themselves ---------------------------------------------------------------------------------


def paused_and_gone_on_with(config: Config, name: str, folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The lines of a run that was cut off one line after its state, and so did an update again."""
    config = config.model_copy(update={"track": (name,)})
    with pytest.raises(Cut):
        run(config, folder, hooks=Hooks(on_metrics=cut_at(4)))
    resume(folder)
    return timeless(rows(folder))


def test_tensorboard_holds_what_metrics_jsonl_does(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = paused_and_gone_on_with(config, "tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for tag in {tag for _, row in lines for tag in row}:
        wanted = [(step, pytest.approx(row[tag])) for step, row in lines if tag in row]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == wanted, tag
    tables = events.Tensors("samples/text_summary")
    assert [event.step for event in tables] == [1, 2, 4]
    prompt, completion, reward = samples(tmp_path / "run", 4)[0]
    table = tables[-1].tensor_proto.string_val[0].decode().splitlines()
    assert table[:2] == ["| prompt | completion | reward |", "| --- | --- | --- |"] and len(table) == 5
    assert table[2] == f"| {prompt} | {completion} | {reward} |"
    (told,) = events.Tensors("config/text_summary")
    text = re.fullmatch(r"```yaml\n(.*)```", told.tensor_proto.string_val[0].decode(), re.DOTALL)
    assert yaml.safe_load(text[1]) == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


def test_wandb_holds_what_metrics_jsonl_does(config: Config, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'unmask[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    lines = paused_and_gone_on_with(config, "wandb", tmp_path / "run")
    told, settings, ids = [], [], set()
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("history"):
                row = dict[str, Any]()
                for item in record.history.item:
                    name, *inner = item.nested_key or [item.key]
                    value = json.loads(item.value_json)
                    row[name] = {**row.get(name, {}), inner[0]: value} if inner else value
                told.append((row.pop("step"), {k: v for k, v in row.items() if not k.startswith("_")}))
            if record.HasField("run"):
                ids.add(record.run.run_id)
                settings.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
    tables = [(step, row["samples"]) for step, row in told if "samples" in row]
    assert [step for step, _ in tables] == [1, 2, 4]
    assert {(t["_type"], t["ncols"], t["nrows"]) for _, t in tables} == {("table-file", 3, 3)}
    assert timeless([(step, row) for step, row in told if "samples" not in row]) == lines and len(ids) == 1
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {key: settings[0][key] for key in config.dump()} == {key: stored[key] for key in config.dump()}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format behind seven bytes, in blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of one, or its last part
            yield whole
            whole = b""


def test_trackio_holds_what_metrics_jsonl_does(config: Config, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'unmask[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    lines = paused_and_gone_on_with(config, "trackio", tmp_path / "run")
    name = f"run-{json.loads((tmp_path / 'run' / 'tracking.json').read_text())['id']}"
    told = SQLiteStorage.get_logs(unmask.training.run.trackers.PROJECT, name)
    found = [(row.pop("step"), {k: v for k, v in row.items() if k != "timestamp"}) for row in told]
    tables = [(step, row["samples"]) for step, row in found if "samples" in row]
    assert [step for step, _ in tables] == [1, 2, 4]
    keys = ("prompt", "completion", "reward")
    wanted = [dict(zip(keys, row, strict=True)) for row in samples(tmp_path / "run", 4)]
    assert tables[-1][1]["_value"] == wanted
    assert timeless([(step, row) for step, row in found if "samples" not in row]) == lines
    kept = SQLiteStorage.get_run_config(unmask.training.run.trackers.PROJECT, name)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {key: kept[key] for key in config.dump()} == {key: stored[key] for key in config.dump()}
