/** The Sudoku board of a completion, and the rules that it breaks. */

import { shownAfter, stepsTaken, type Shown } from "./state";
import type { Rollout, Sudoku, Trace } from "./types";

export interface Cell {
  /** The written token, else the clue, else "". */
  text: string;
  clue: boolean;
  written: boolean;
  /** It occurs twice in its row, column or box, is not a digit of this board, or contradicts a clue. */
  wrong: boolean;
}

/** Rows, columns and boxes as lists of cells. Boxes are as square as the size allows: 2 x 2, 2 x 3, 3 x 3. */
export function units(size: number): number[][] {
  const range = Array.from({ length: size }, (_, i) => i);
  const high = Math.floor(Math.sqrt(size));
  const wide = size / high;
  const rows = range.map((row) => range.map((column) => row * size + column));
  const columns = range.map((column) => range.map((row) => row * size + column));
  if (!Number.isInteger(wide)) return [...rows, ...columns];
  const boxes = range.map((box) => {
    const top = Math.floor(box / (size / wide)) * high;
    const left = (box % (size / wide)) * wide;
    return range.map((i) => (top + Math.floor(i / wide)) * size + left + (i % wide));
  });
  return [...rows, ...columns, ...boxes];
}

/** The board of a canvas. Clues are shown from the start, whether or not the completion repeats them. */
export function board(sudoku: Sudoku, shown: Shown): Cell[] {
  const cells = sudoku.puzzle.map((clue, index): Cell => {
    const position = sudoku.cells[index] ?? -1;
    const token = position < 0 ? null : shown(position);
    const text = token === null ? (clue === 0 ? "" : String(clue)) : token.trim();
    const digit = /^[1-9]\d*$/.test(text) && Number(text) <= sudoku.size;
    const wrong = token !== null && (!digit || (clue !== 0 && Number(text) !== clue));
    return { text, clue: clue !== 0, written: token !== null, wrong };
  });
  for (const unit of units(sudoku.size)) {
    for (const index of unit) {
      const cell = cells[index]!;
      if (cell.text !== "" && unit.some((other) => other !== index && cells[other]!.text === cell.text)) {
        cell.wrong = true;
      }
    }
  }
  return cells;
}

/** The puzzle with the cell positions of this rollout; null if the trace has no puzzle. */
export function puzzleOf(trace: Trace, rollout: Rollout): Sudoku | null {
  return trace.sudoku ? { ...trace.sudoku, cells: rollout.cells ?? trace.sudoku.cells } : null;
}

/** The number of steps after which the board first breaks a rule; null if it never does. */
export function firstViolation(sudoku: Sudoku, rollout: Rollout): number | null {
  const last = stepsTaken(rollout);
  for (let done = 0; done <= last; done++) {
    if (board(sudoku, shownAfter(rollout, done)).some((cell) => cell.wrong)) return done;
  }
  return null;
}
