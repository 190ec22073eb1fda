"""What a person sees in a terminal: the live panel, and the denoising played; and what must never reach it."""

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks_cases import toy_model
from rich.cells import cell_len
from rich.color import ColorTriplet
from rich.console import Console

import unmask.cli.display
from helpers import sample
from unmask.cli.display import canvases, live, play, training_display
from unmask.cli.panel import STOPS, Completion, Panel, canvas, clean, completion_of, sparkline, step_style
from unmask.config import Config, parse_config
from unmask.core.shapes import NEVER
from unmask.core.trace import Trace, state_before
from unmask.models import save, tiny_policy
from unmask.models.tiny import CharacterTokenizer, TinyShape

HOSTILE = ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "[bold red]x[/]", "\u202e", "\r", "\n", "\x1b_G\x1b\\", "[/]"]
SAFE = re.compile(r"\x1b\[[\d;]*m|\x1b\[\??\d*[hlAKG]|[\r\n]")  # colours, cursor, lines: what the panel itself sends


def terminal(width: int = 80, **more: object) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system="truecolor", **more)


def shown(console: Console) -> str:
    return console.file.getvalue()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """The display believes that it is in a terminal."""
    console = terminal()
    monkeypatch.setattr(unmask.cli.display, "console", console)
    monkeypatch.setattr(unmask.cli.display, "live", lambda: True)
    return console


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48), seed=1), folder)
    return str(folder)


def rolled() -> Trace:
    return sample(toy_model(), [[5, 6]] * 8, torch.arange(8), length=12, steps=8, block=3).trace


# --- what a model writes -------------------------------------------------------------------------------------


def test_no_character_but_a_printable_one_is_left() -> None:
    every = "".join(map(chr, (c for c in range(0x110000) if not 0xD800 <= c < 0xE000)))
    found = clean(every)
    assert found.isprintable() and len(found) == len(every)
    assert all(after == before for before, after in zip(every, found, strict=True) if before.isprintable())
    assert clean("a\n\tb\x1b[2J\r", keep="\n\t") == "a\n\tb\ufffd[2J "


@pytest.mark.parametrize("width", [24, 80])
def test_a_hostile_completion_is_shown_and_not_obeyed(width: int) -> None:
    class Hostile(CharacterTokenizer):
        def show(self, ids: list[int]) -> str:
            return "".join(HOSTILE[token % len(HOSTILE)] for token in ids)

    trace = rolled()
    found = completion_of(Hostile(), trace, 12)
    panel, console = Panel(parse_config({}), "a [bold]name[/]"), terminal(width)
    panel.sample = clean("".join(HOSTILE)), found, 0.5
    console.print(panel)
    console.print(canvas(found, 2))
    assert SAFE.sub("", shown(console)).isprintable()
    assert SAFE.sub("", shown(console)).count("[bold]name[/]") == 1 and "[bold red]x[/]" in canvas(found).plain
    assert all(line.isprintable() for line in canvases(found))


def test_the_command_keeps_control_characters_from_a_terminal_only(unmask, model: str, monkeypatch) -> None:
    monkeypatch.setattr(CharacterTokenizer, "decode", lambda self, ids: "1\x1b[2J\n2")
    assert unmask("sample", model, "1.=")[1] == "1\x1b[2J\n2\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert unmask("sample", model, "1.=")[1] == "1\ufffd[2J\n2\n"


# --- canvases ------------------------------------------------------------------------------------------------


def test_a_canvas_is_the_state_before_its_step_in_the_colours_of_the_steps() -> None:
    trace, tokenizer = rolled(), CharacterTokenizer()
    assert (trace.step_BL == NEVER).any() and (trace.filled_BL.sum(-1) == 12).any()
    for row in range(len(trace)):
        found = completion_of(tokenizer, trace, 12, row)
        for step in range(found.steps + 1):
            state = tokenizer.show(state_before(trace, step)[row, -12:].tolist())
            assert canvas(found, step).plain == state.replace("\n", "↵")
        text = canvas(found)
        for place, step in enumerate(found.step):
            color = text.get_style_at_offset(Console(), place).color
            assert color == (step_style(step, found.steps).color if step is not None else None)


def test_colours_run_from_the_first_stop_to_the_last() -> None:
    ends = [step_style(step, 9).color.triplet for step in (0, 4, 8)]
    assert ends == [ColorTriplet(*stop) for stop in STOPS]
    assert len({step_style(step, 64).color.triplet for step in range(64)}) == 64
    assert step_style(0, 1).color.triplet == ColorTriplet(*STOPS[0])


def test_the_denoising_is_played_at_its_speed_and_skipped_by_an_interrupt(screen: Console, monkeypatch) -> None:
    found, slept = Completion([*"abcd"], [1, 0, 2, 1]), []
    monkeypatch.setattr(time, "sleep", slept.append)
    play(found, speed=4)
    assert slept == [0.25] * 3
    plain = SAFE.sub("", shown(screen))
    assert "step 0····step 1·b··step 2ab·d3 stepsabcd" in plain

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    screen.file.truncate(0)
    monkeypatch.setattr(time, "sleep", interrupted)
    play(found, speed=4)
    plain = SAFE.sub("", shown(screen))
    assert "step 0····" in plain and "step 1" not in plain and "3 stepsabcd" in plain


# --- the panel -----------------------------------------------------------------------------------------------


def events(config: Config) -> Iterator[tuple[str, int, dict[str, float]]]:
    """What a run reports, in order, with what it was doing before."""
    held = {"eval/solved_sampled": 0.4, "eval/solved_greedy": 0.9}
    yield "evaluating", 0, held
    for step in range(1, config.updates + 1):
        yield "training", step, {"train/reward": step / 10, "train/solved": 0.5, "time/rollout": 0.5}
        if step == config.updates or (config.eval.every and step % config.eval.every == 0):
            yield "evaluating", step, held


@pytest.mark.parametrize("every", [0, 1, 3, 4])
def test_phase_and_time_left_are_those_of_a_steady_run(every: int) -> None:
    config = parse_config({"updates": 8, "eval": {"every": every}})
    took = {"training": 2.0, "evaluating": 7.0}
    script = list(events(config))
    now, end = [0.0], sum(took[what] for what, _, _ in script)
    panel = Panel(config, "name", clock=lambda: now[0])
    assert panel.phase() == "starting" and panel.left() is None
    for place, (what, step, metrics) in enumerate(script):
        now[0] += took[what]
        panel.report(step, metrics)
        coming = script[place + 1][0] if place + 1 < len(script) else "finished"
        assert panel.phase() == coming, (step, what)
        if place:
            assert panel.left() == pytest.approx(end - now[0])
    assert "30 updates/min" in panel._speed() and "192 completions/s" in panel._speed()


def test_it_fits_every_width() -> None:
    config = parse_config({"updates": 8, "eval": {"every": 4}})
    panel = Panel(config, "sudoku-diffu_grpo+daca-seed0", clock=lambda: 1.0)
    for count, (_, step, metrics) in enumerate(events(config)):
        panel.report(step, metrics, ["entropy_collapse"] if count % 3 else [])
    panel.sample = "a prompt " * 30, Completion(["字", "ab", "·"] * 99, [*range(99)] * 3), 1.0
    for width in (*range(1, 44), 80, 200):
        console = terminal(width)
        console.print(panel)
        lines = SAFE.sub(lambda m: m[0] if m[0] == "\n" else "", shown(console)).splitlines()
        assert max(map(cell_len, lines)) <= width and (width < 40 or len(lines) <= 24), width
    assert "reward" in shown(console) and "entropy_collapse, update 8 (and 6 before)" in shown(console)


def test_a_curve_reaches_from_its_least_to_its_largest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 9, 0, 1], 2) == "▁█" and sparkline([3, 3], 9) == "▁▁" and sparkline([1], 0) == ""


def test_a_curve_of_what_is_not_finite_is_drawn_all_the_same() -> None:
    inf, nan = float("inf"), float("nan")
    assert sparkline([nan, 0, inf, 7, -inf, 1], 9) == "▁▁▁█▁▂"  # the others keep their places
    assert sparkline([nan], 1) == sparkline([inf], 1) == "▁"
    assert sparkline([1e308, -1e308], 2) == "▁▁" and sparkline([0.0, 5e-324], 2) == "▁█"


def test_a_run_in_a_terminal(unmask, model: str, screen: Console) -> None:
    short = ["updates=2", "prompts=2", "group=2", "eval.prompts=4", "eval.samples=1"]
    code, _, _ = unmask("train", "--model", model, "--method", "agrpo", *short, "--out", "run")
    said = shown(screen)
    assert code == 0 and "update    1/2" not in said and "finished" in said and "2/2" in said
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
    (drawn,) = re.findall(r"sample +(.*?) *│", SAFE.sub("", said).rpartition("╭─")[2])
    rows = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    first = next(row["completion"] for row in rows if row["step"] == 2)
    assert drawn == first.replace("\n", "↵") and len(drawn) == 16


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError])
def test_the_cursor_comes_back_whatever_ends_a_run_and_warnings_stay_above(screen: Console, ending, capsys) -> None:
    with pytest.raises(ending):
        with training_display(parse_config({"updates": 9}), "name", lambda: False) as hooks:
            hooks.on_metrics(0, {})
            hooks.on_metrics(1, {"train/reward": 0.0, "train/solved": 0.0, "warn/idle_groups": 1.0})
            raise ending
    assert shown(screen).rindex("\x1b[?25h") > shown(screen).rindex("\x1b[?25l")
    assert "idle_groups, update 1" in shown(screen)
    assert capsys.readouterr().err.startswith("update 1: warning: idle_groups: ")


def test_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal()
    console.print(canvas(Completion([*"ab"], [0, 1]), 2))
    assert "ab" in SAFE.sub("", shown(console)) and not re.search(r"\x1b\[[\d;]*3[0-9]", shown(console))


@pytest.mark.parametrize(
    ("tty", "term", "encoding", "drawn"),
    [(True, "xterm", "utf-8", True), (False, "xterm", "utf-8", False), (True, "dumb", "utf-8", False),
     (True, "xterm", "iso-8859-1", False)],
)  # fmt: skip
def test_nothing_is_drawn_over_where_it_cannot_be(tty, term, encoding, drawn, monkeypatch) -> None:
    class Out(io.StringIO):
        def isatty(self) -> bool:
            return tty

    Out.encoding = encoding
    monkeypatch.setattr(sys, "stdout", Out())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(unmask.cli.display, "console", Console(_environ={"TERM": term, "FORCE_COLOR": "1"}))
    assert live() is drawn
