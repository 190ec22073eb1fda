"""The picture of a rollout being denoised, as an animated SVG.

The animation is CSS without scripts, so it plays inside an <img>. Programs without CSS animations, and readers who
prefer reduced motion, see the finished canvas.
"""

import math
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from xml.sax.saxutils import escape

from pydantic import BaseModel, Field, ValidationError

# The light palettes of web/src/colour.ts: credit below, at and above its mean; early to late steps.
CREDIT = ["#9c4300", "#d97a28", "#eca463", "#f7d2ac", "#efeeea", "#c1d8ee", "#88b6e1", "#5c9bd4", "#1d5596"]
STEP = ["#fbf3c4", "#dcedbd", "#afdbb9", "#79c4bd", "#4aa8c0", "#338cbb", "#28599b", "#22326f"]
DARK = {"#9c4300", "#1d5596", "#28599b", "#22326f"}
"""Colours with white text on them."""
PLAY, START, HOLD = 8.0, 1.0, 3.5
"""Seconds of all steps (each takes 0.05 to 0.7), of the masked canvas before and of the finished canvas after them."""
MARGIN, WIDTH, COLUMN = 24.0, 712.0, 232.0
"""Pixels around the picture, width of text, and width of a column of the panel."""
CHARACTER, LINE, PAD, GAP = 8.43, 25.0, 3.0, 2.0
"""Pixels of text: a character, a line, space inside a cell, space between cells."""
MASK = "unmask-mask"
"""The name of the stripes of a masked cell."""
UNSAFE = re.compile("[^\x20-\x7e\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow, or that change the direction of text."""


class RolloutLine(BaseModel):
    """The keys of a rollout in traces.jsonl that the picture shows."""

    tokens: list[str]
    filled: list[int | None]
    weight: list[float | None] | None = None
    reward: float | None = None
    solved: bool | None = None
    advantage: float | None = None
    cells: list[int] | None = None


class BoardLine(BaseModel):
    """The Sudoku of a group in traces.jsonl: 0 is a hole, cells are positions of the completion or -1."""

    size: Annotated[int, Field(ge=1, le=25)]
    puzzle: list[int]
    cells: list[int]


class Box(NamedTuple):
    """A cell of the picture and the position of its token; None if the completion does not have the cell."""

    position: int | None
    x: float
    y: float
    width: float
    height: float
    text: str
    clue: str = ""


class Timing(NamedTuple):
    """When things appear, in percent of one loop."""

    steps: int

    @property
    def step_seconds(self) -> float:
        return min(0.7, max(0.05, PLAY / self.steps))

    @property
    def total_seconds(self) -> float:
        return START + self.steps * self.step_seconds + HOLD

    def percent(self, step: int) -> str:
        """The moment at which a step, from 0, writes its tokens. Step `steps` is the end of the last one."""
        return f"{100 * (START + step * self.step_seconds) / self.total_seconds:.3f}%"


def denoising_svg(group: Mapping[str, Any], number: int, method: str) -> str:
    """The picture of a rollout of a group; `group` is a line of traces.jsonl (docs/viewer.md)."""
    try:
        rollout = RolloutLine.model_validate(group["rollouts"][number])
        board = None if group.get("sudoku") is None else BoardLine.model_validate(group["sudoku"])
    except (ValidationError, LookupError):
        raise ValueError(f"group {group.get('id')} of traces.jsonl is damaged: choose another --update") from None
    steps = max((step + 1 for step in rollout.filled if step is not None), default=0)
    if steps < 1 or len(rollout.filled) != len(rollout.tokens):
        raise ValueError(f"group {group.get('id')} of traces.jsonl has no recorded steps: choose another --update")
    header = textwrap.wrap(str(group.get("prompt")), 90, max_lines=3, placeholder=" …")
    top = MARGIN + 34 + 18 * len(header)
    boxes = list(_text_boxes(rollout, board, top))
    bottom = max((box.y + box.height for box in boxes), default=top - 16) + 16
    cells = [] if board is None else _board_boxes(board, rollout, bottom)
    side = max((box.x + box.width for box in cells), default=0.0)
    width = 2 * MARGIN + (WIDTH if boxes or board is None else max(side + 12 + COLUMN, 480.0))
    height = max(bottom + 70, *(box.y + box.height for box in cells), bottom + 178 if cells else 0) + MARGIN
    columns = [(side + 36, bottom + 62 * n) if cells else (MARGIN + (COLUMN + 8) * n, bottom) for n in range(3)]
    timing, title = Timing(steps), f"{method} on {group.get('task')}, update {group.get('step')}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" xml:space="preserve" role="img">',
        f"<title>{_xml(title)}: a completion is denoised in {steps} steps</title>",
        f"<style>{_style(timing)}</style>",
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10" fill="#fbfaf7" stroke="#cdcac0"/>',
        f'<pattern id="{MASK}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0h6v6h-6z" fill="#ebe9e2"/><path d="M0 0v6" stroke="#cfccc2" stroke-width="4"/></pattern>',
        _text(MARGIN, MARGIN + 16, title, "h"),
        *(_text(MARGIN, MARGIN + 40 + 18 * n, line, "q m") for n, line in enumerate(header)),
        *_masks([*boxes, *cells]),
        *_written([*boxes, *cells], rollout, steps),
        *([] if board is None else [_board_lines(board, bottom)]),
        *_panel(rollout, timing, columns),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _text_boxes(rollout: RolloutLine, board: BoardLine | None, top: float) -> Iterator[Box]:
    """The completion as text that wraps; nothing if every position is a cell of the board."""
    cells = set() if board is None else set(rollout.cells or board.cells)
    if set(range(len(rollout.tokens))) <= cells:
        return
    x, y, widest = MARGIN, top, int((WIDTH - 2 * PAD) / CHARACTER)
    for position, token in enumerate(rollout.tokens):
        text = token.replace("\n", "↵").replace("\t", "→") or " "
        text = text if len(text) <= widest else text[: widest - 1] + "…"
        width = CHARACTER * sum(map(_columns, text)) + 2 * PAD
        if x > MARGIN and x + width > MARGIN + WIDTH:
            x, y = MARGIN, y + LINE
        yield Box(position, x, y, width, LINE - 4, text)
        x += width + GAP
        if "\n" in token:
            x, y = MARGIN, y + LINE


def _columns(character: str) -> int:
    return 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _board_boxes(board: BoardLine, rollout: RolloutLine, top: float) -> list[Box]:
    edge = _edge(board)
    boxes = []
    for index, (clue, position) in enumerate(zip(board.puzzle, rollout.cells or board.cells, strict=False)):
        row, column = divmod(index, board.size)
        known = 0 <= position < len(rollout.tokens)
        x, y = MARGIN + edge * column + 2, top + edge * row + 2
        text = rollout.tokens[position].strip()[:2] if known else ""
        boxes.append(Box(position if known else None, x, y, edge - 4, edge - 4, text, str(clue or "")))
    return boxes


def _edge(board: BoardLine) -> float:
    return 48.0 if board.size <= 6 else 34.0


def _board_lines(board: BoardLine, top: float) -> str:
    """The frame of the board, and the walls of its boxes: 2 x 2, 2 x 3, 3 x 3, ..."""
    edge, high = _edge(board), math.isqrt(board.size)
    span = edge * board.size
    path = f"M{MARGIN:g} {top:g}h{span:g}v{span:g}h{-span:g}z"
    for n in range(high, board.size, high):
        path += f"M{MARGIN:g} {top + n * edge:g}h{span:g}"
    for n in range(board.size // high, board.size, board.size // high):
        path += f"M{MARGIN + n * edge:g} {top:g}v{span:g}"
    return f'<path d="{path}" fill="none" stroke="#1b1c20" stroke-width="2"/>'


def _masks(boxes: Sequence[Box]) -> Iterator[str]:
    """All cells as they are before the first step, with the clues of a Sudoku."""
    yield f'<g fill="url(#{MASK})">'
    yield from map(_rectangle, boxes)
    yield "</g>"
    yield from (_label(box, box.clue, "q b") for box in boxes if box.clue)


def _written(boxes: Sequence[Box], rollout: RolloutLine, steps: int) -> Iterator[str]:
    """The tokens, one group of elements for each step; tokens that were given are visible from the start."""
    colours = colours_of(rollout, steps)
    for step in range(-1, steps):
        of_step = [box for box in boxes if box.position is not None and rollout.filled[box.position] == step]
        if of_step:
            yield f'<g class="s s{step}">' if step >= 0 else "<g>"
            for box in of_step:
                fill = colours[box.position or 0]
                yield _rectangle(box, "#ffffff" if step < 0 else fill)
                yield _label(box, box.text, "w" if step >= 0 and fill in DARK else "")
            yield "</g>"


def colours_of(rollout: RolloutLine, steps: int) -> list[str]:
    """The colour of each position: by credit, or by the step if all tokens have the same credit."""
    if rollout.weight is None:
        last = max(1, steps - 1)
        return [STEP[max(0, math.floor(7 * (step or 0) / last + 0.5))] for step in rollout.filled]
    deviations = [0.0 if weight is None else weight - 1 for weight in rollout.weight]
    largest = _largest(rollout)
    return [CREDIT[math.floor(4 * deviation / largest + 0.5) + 4] for deviation in deviations]


def _largest(rollout: RolloutLine) -> float:
    return max((abs(weight - 1) for weight in rollout.weight or () if weight is not None), default=0.0) or 1.0


def _panel(rollout: RolloutLine, timing: Timing, columns: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Progress, legend and, at the end, the outcome."""
    (x, y), legend, outcome = columns
    for step in range(timing.steps + 1):
        kind = f"c c{step}" + (" z" if step == timing.steps else "")
        yield _text(x, y + 14, f"step {step} of {timing.steps}", kind)
    bar = f'x="{x:g}" y="{y + 24:g}" height="6" rx="3"'
    yield f'<rect {bar} width="{COLUMN - 8:g}" fill="#e4e2db"/>'
    yield f'<rect {bar} width="{COLUMN - 8:g}" fill="#1f5fa8" class="p"/>'
    x, y = legend
    palette, ends = STEP, ("step 1", "", f"step {timing.steps}")
    if rollout.weight is not None:
        palette, ends = CREDIT, (f"{1 - _largest(rollout):.3g}", "1", f"{1 + _largest(rollout):.3g}")
    edge = (COLUMN - 8) / len(palette)
    yield _text(x, y + 14, "credit of the token" if rollout.weight is not None else "step that wrote the token")
    yield f'<rect x="{x + COLUMN - 76:g}" y="{y + 4:g}" width="12" height="12" rx="2" fill="url(#{MASK})"/>'
    yield _text(x + COLUMN - 8, y + 14, "masked", "q f")
    for n, colour in enumerate(palette):
        yield f'<rect x="{x + n * edge:.1f}" y="{y + 22:g}" width="{edge:.1f}" height="10" fill="{colour}"/>'
    for text, place, anchor in zip(ends, (0.0, 0.5, 1.0), ("", "e", "f"), strict=True):
        yield _text(x + place * (COLUMN - 8), y + 46, text, f"q {anchor}")
    x, y = outcome
    yield '<g class="r">'
    facts = [f"reward {rollout.reward:g}"] if rollout.reward is not None else []
    facts += [] if rollout.solved is None else ["solved" if rollout.solved else "not solved"]
    yield _text(x, y + 16, ", ".join(facts), "h")
    if rollout.advantage is not None:
        yield _text(x, y + 36, f"advantage {rollout.advantage:+.3g}", "q")
    yield "</g>"


def _style(timing: Timing) -> str:
    """Fonts, and the moment at which each step appears: `s` are tokens, `c` the counter, `r` the outcome."""
    sans = 'system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif'
    mono = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace'
    end = timing.percent(timing.steps)
    rules = [
        f"text{{font:14px {sans};fill:#1b1c20;stroke:none;white-space:pre}}",
        f".k,.m{{font-family:{mono}}}.k{{text-anchor:middle}}.q{{fill:#5a5d65;font-size:13px}}.b{{font-weight:700}}",
        ".h{font-size:16px;font-weight:600}.w{fill:#fff}.e{text-anchor:middle}.f{text-anchor:end}.c{opacity:0}",
        ".z{opacity:1}.s{stroke-width:2.5}.p{transform-box:fill-box;transform-origin:left}",
        f".s,.c,.r{{animation:{timing.total_seconds:.3f}s step-end infinite}}",
        f".p{{animation:p {timing.total_seconds:.3f}s linear infinite}}",
        f"@keyframes p{{0%,{timing.percent(0)}{{transform:scaleX(0)}}{end}{{transform:scaleX(1)}}}}",
        f".r{{animation-name:r}}@keyframes r{{0%{{opacity:0}}{end}{{opacity:1}}}}",
    ]
    for step in range(timing.steps):
        now, after = timing.percent(step), timing.percent(step + 1)
        rules.append(
            f".s{step}{{animation-name:s{step}}}@keyframes s{step}"
            f"{{0%{{opacity:0}}{now}{{opacity:1;stroke:#1b1c20}}{after}{{stroke:none}}}}"
        )
    for step in range(timing.steps + 1):
        shown = "0%{opacity:1}" if step == 0 else f"0%{{opacity:0}}{timing.percent(step - 1)}{{opacity:1}}"
        hidden = "" if step == timing.steps else f"{timing.percent(step)}{{opacity:0}}"
        rules.append(f".c{step}{{animation-name:c{step}}}@keyframes c{step}{{{shown}{hidden}}}")
    return "\n".join([*rules, "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"])


def _rectangle(box: Box, fill: str = "") -> str:
    colour = f' fill="{fill}"' if fill else ""
    rx = "" if box.height == box.width else ' rx="4"'
    return f'<rect x="{box.x:.6g}" y="{box.y:g}" width="{box.width:.4g}" height="{box.height:g}"{rx}{colour}/>'


def _label(box: Box, text: str, kind: str) -> str:
    """Text in the middle of a box; larger on a board."""
    x, y = box.x + box.width / 2, box.y + box.height / 2
    size = ' style="font-size:20px"' if box.height == box.width else ""
    shift = 7 if size else 5
    return f'<text x="{x:.5g}" y="{y + shift:g}" class="{f"k {kind}".strip()}"{size}>{_xml(text)}</text>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.5g}" y="{y:g}"' + (f' class="{kind}"' if kind else "") + f">{_xml(text)}</text>"


def _xml(text: str) -> str:
    return escape(UNSAFE.sub("\ufffd", text))
