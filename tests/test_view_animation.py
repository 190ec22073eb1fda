"""The animated SVG of a rollout: every token appears at its step, in the colour of its credit."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from unmask.view import animate
from unmask.view.denoising_svg import CREDIT, HOLD, START, STEP, denoising_svg
from wording import mentions

SVG = "{http://www.w3.org/2000/svg}"
GRID = "1234341221434321"
HOSTILE = ("</style><script>alert(1)</script>", "&amp; ]]> <!--", "\ud800\x00\u202e", "日本", "x" * 500, "", "\n\t")


def group_line(name: str = "t40-0", **more: Any) -> dict[str, Any]:
    """Five tokens in three steps: one is given, one is never filled."""
    rollout = {"tokens": list("abcde"), "filled": [-1, 2, 0, None, 2], "weight": [1.0, 0.5, 1.25, 1.0, 1.5]}
    line = {"v": 1, "id": name, "kind": "train", "step": 40, "task": "words", "prompt": "Say <it> & go", "steps": 3}
    rollouts = [{**rollout, "reward": reward, "solved": False, "advantage": 0.5} for reward in (0.0, 0.75, 0.75)]
    return {**line, "sudoku": None, "rollouts": rollouts, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: words\nmethod: diffu_grpo\nwith: [daca]\nupdates: 80\n")
    lines = [group_line("e0-0", kind="eval", step=0, prompt="p" * 200 + "end"), group_line("t1-0", step=1)]
    lines += [group_line("t40-0"), group_line("e80-0", kind="eval", step=80)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn(text: str) -> dict[str, tuple[int, str]]:
    """The step of the group of elements that each token is in, -1 for none, and the colour behind it."""
    tokens = {}
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        kind = group.get("class", "")
        if kind and not kind.startswith("s "):
            continue
        step = int(kind.removeprefix("s s")) if kind else -1
        for rectangle, label in zip(group.findall(f"{SVG}rect"), group.findall(f"{SVG}text"), strict=False):
            tokens[label.text or ""] = step, rectangle.get("fill", "")
    return tokens


def appearances(text: str) -> dict[int, float]:
    """The second at which each step appears, by its keyframes."""
    (total,) = re.findall(r"\.s,\.c,\.r\{animation:([\d.]+)s step-end infinite\}", text)
    frames = re.findall(r"@keyframes s(\d+)\{0%\{opacity:0\}([\d.]+)%\{opacity:1;", text)
    assert all(f".s{step}{{animation-name:s{step}}}" in text for step, _ in frames)
    return {int(step): float(percent) / 100 * float(total) for step, percent in frames}


def test_every_token_appears_at_its_step_in_the_colour_of_its_credit() -> None:
    text = denoising_svg(group_line(), 1, "diffu_grpo + daca")
    steps = drawn(text)
    assert steps == {"a": (-1, "#ffffff"), "b": (2, CREDIT[0]), "c": (0, CREDIT[6]), "e": (2, CREDIT[8])}
    assert appearances(text) == pytest.approx({step: START + 0.7 * step for step in range(3)}, abs=1e-3)
    assert f"animation:{START + 3 * 0.7 + HOLD:.3f}s" in text
    words = "".join(ElementTree.fromstring(text).itertext())
    assert mentions(words, "diffu_grpo + daca on words, update 40", "Say <it> & go", "reward 0.75", "advantage +0.5")
    assert mentions(words, "credit of the token", "1.5", "step 3 of 3")


def test_a_rollout_without_credit_is_coloured_by_its_steps() -> None:
    line = group_line()
    line["rollouts"][0]["weight"] = None
    text = denoising_svg(line, 0, "wd1")
    assert drawn(text) == {"a": (-1, "#ffffff"), "b": (2, STEP[7]), "c": (0, STEP[0]), "e": (2, STEP[7])}
    assert "step that wrote the token" in text


def test_the_colours_are_those_of_the_page() -> None:
    source = (Path(__file__).parents[1] / "web" / "src" / "colour.ts").read_text()
    for palette in (CREDIT, STEP):
        assert f"light: {json.dumps(palette)}" in source


def test_a_sudoku_is_a_board_with_its_clues() -> None:
    puzzle = {"size": 4, "puzzle": [1, 0, 0, 0] * 4, "cells": list(range(16))}
    rollout = {"tokens": list(GRID), "filled": [i // 2 for i in range(16)], "weight": [1.0] * 16, "reward": 1.0}
    line = group_line(sudoku=puzzle, rollouts=[rollout])
    root = ElementTree.fromstring(denoising_svg(line, 0, "wd1"))
    labels = [(e.text, e.get("x"), e.get("y")) for e in root.iter(f"{SVG}text") if e.get("class", "").startswith("k")]
    columns, rows = (sorted({float(label[n] or 0) for label in labels}) for n in (1, 2))
    assert len(columns) == len(rows) == 4 and len(labels) == 4 + 16
    assert labels[0][0] == "1" and len({label[1] for label in labels[:4]}) == 1  # the clues, in the first column
    written = {(float(x or 0), float(y or 0)): text for text, x, y in labels[4:]}
    assert "".join(written[x, y] or "" for y in rows for x in columns) == GRID
    line["sudoku"]["cells"] = line["rollouts"][0]["cells"] = list(range(1, 17))
    line["rollouts"][0]["tokens"], line["rollouts"][0]["filled"] = [">", *GRID], [0] * 17
    line["rollouts"][0]["weight"] = None
    labels = [e.text for e in ElementTree.fromstring(denoising_svg(line, 0, "wd1")).iter(f"{SVG}text")]
    assert labels.count(">") == 1 and labels.count("4") == 2 * 4  # as text, and on the board


def test_whatever_a_model_wrote_it_is_an_image_of_bounded_size_without_scripts() -> None:
    tokens = [*HOSTILE, *(" word" for _ in range(256 - len(HOSTILE)))]
    rollout = {"tokens": tokens, "filled": [i // 2 for i in range(256)], "weight": [1.0 + i / 256 for i in range(256)]}
    text = denoising_svg(group_line(prompt="".join(HOSTILE), rollouts=[rollout]), 0, HOSTILE[0])
    assert len(text.encode()) < 300_000
    root = ElementTree.fromstring(text)
    assert not list(root.iter(f"{SVG}script")) and "<script" not in text and "\u202e" not in text
    width = float(root.get("width") or 0)
    for rectangle in root.iter(f"{SVG}rect"):
        assert float(rectangle.get("x") or 0) + float(rectangle.get("width") or 0) < width


def test_update_prompt_and_rollout_are_chosen(run: Path, tmp_path: Path) -> None:
    def title_of(**choice: Any) -> str:
        return animate(run, tmp_path / "out.svg", **choice).read_text().split("<title>")[1].split(":")[0]

    assert title_of() == "diffu_grpo + daca on words, update 40"  # the last with credit
    assert title_of(update=1).endswith("update 1") and title_of(update=80).endswith("update 80")
    assert title_of(prompt="pend").endswith("update 0")  # beyond what the index has of it
    assert "reward 0.75" in animate(run, tmp_path / "out.svg").read_text()
    assert "reward 0," in animate(run, tmp_path / "out.svg", rollout=1).read_text()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--update", "7"], ("--update", "0, 1, 40, 80")),
        (["--prompt", "nowhere"], ("--prompt", "nowhere")),
        (["--rollout", "4"], ("--rollout", "1 to 3")),
        (["--animate", "out.gif"], ("--animate", ".svg")),
        (["--animate", "none/out.svg"], ("none", "out.svg")),
        (["--export", "page.html"], ("--animate", "--export")),
    ],
)
def test_a_wrong_choice_is_named(unmask, run: Path, options: list[str], names: tuple[str, ...]) -> None:
    code, out, err = unmask("view", str(run), *([] if "--animate" in options else ["--animate", "out.svg"]), *options)
    assert (code, out) == (2, "") and mentions(err, *names) and err.count("\n") == 1


def test_the_command_says_which_key_records_rollouts(unmask, run: Path, tmp_path: Path) -> None:
    code, out, _ = unmask("view", str(run), "--animate", "out.svg", "--update", "1")
    assert code == 0 and out.startswith("out.svg: ") and (tmp_path / "out.svg").is_file()
    code, _, err = unmask("view", str(run), "--update", "1")
    assert code == 2 and mentions(err, "--update", "--animate")
    (run / "traces.jsonl").unlink()
    code, _, err = unmask("view", str(run), "--animate", "out.svg")
    assert code == 2 and mentions(err, str(run), "trace_every") and err.count("\n") == 1
    for broken in ({"tokens": 5}, {"filled": [None] * 5}, {"filled": []}):
        line = group_line()
        line["rollouts"][1] |= broken
        (run / "traces.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(ValueError, match="t40-0"):
            animate(run, tmp_path / "out.svg")
