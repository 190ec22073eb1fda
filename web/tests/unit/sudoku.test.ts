import { describe, expect, test } from "vitest";
import { board, firstViolation, puzzleOf, units } from "../../src/sudoku";
import { shownAfter } from "../../src/state";
import type { Rollout, Sudoku, Trace } from "../../src/types";

const GRID = "1234341221434321";
const sudoku: Sudoku = {
  size: 4,
  puzzle: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  cells: [...GRID].map((_, i) => i),
};

function written(grid: string, filled: number[] = [...grid].map((_, i) => i)): Rollout {
  return { tokens: [...grid], filled, p: [...grid].map(() => 1), counted: [...grid].map(() => 1), reward: 0, solved: false };
}
const wrongIn = (rollout: Rollout, done: number, of = sudoku) =>
  board(of, shownAfter(rollout, done)).flatMap((cell, i) => (cell.wrong ? [i] : []));

describe("units", () => {
  for (const size of [4, 6, 9]) {
    test(`${size}: three times as many units as digits, every cell in three of them`, () => {
      const all = units(size);
      expect(all).toHaveLength(3 * size);
      for (const unit of all) expect(new Set(unit).size).toBe(size);
      for (let cell = 0; cell < size * size; cell++) expect(all.filter((unit) => unit.includes(cell))).toHaveLength(3);
    });
  }
  test("4: boxes by hand", () => expect(units(4).slice(8)).toEqual([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]));
});

describe("violations", () => {
  test("a right grid never has one", () => expect(firstViolation(sudoku, written(GRID))).toBeNull());

  test("a duplicate in a row, a column and a box, at the step it appears, both cells", () => {
    const row = written("1224341221434321"); // cell 2 is 2 as cell 1: row; column 2 holds no other 2
    expect(firstViolation(sudoku, row)).toBe(3);
    expect(wrongIn(row, 2)).toEqual([]);
    expect(wrongIn(row, 3)).toEqual([1, 2]);
    expect(wrongIn(written("12342"), 5)).toEqual([1, 4]); // the first box
    expect(wrongIn(written("123434121"), 9)).toEqual([0, 8]); // the first column
  });

  test("the step is that of the writing, not of the place", () => {
    expect(firstViolation(sudoku, written("122", [2, 0, 1]))).toBe(2);
  });

  test("a clue that is overwritten, and what is no digit of the board", () => {
    expect(wrongIn(written("2"), 1)).toEqual([0]);
    expect(wrongIn(written("15"), 2)).toEqual([1]);
    expect(wrongIn(written("1x"), 2)).toEqual([1]);
    expect(wrongIn(written("1 "), 2)).toEqual([1]);
  });

  test("a clue is shown before the completion repeats it, and if the completion does not have the cell", () => {
    const unsaid = { ...sudoku, cells: sudoku.cells.map((_, i) => (i === 0 ? -1 : i)) };
    expect(wrongIn(written("41"), 2, unsaid)).toEqual([0, 1]);
    expect(board(sudoku, () => null)[0]).toEqual({ text: "1", clue: true, written: false, wrong: false });
  });
});

test("a rollout that wrote its board elsewhere has its own cells", () => {
  const trace = { sudoku: { ...sudoku, cells: sudoku.cells.map(() => -1) } } as Trace;
  const moved: Rollout = { ...written(`so: ${"1224341221434321"}`), cells: sudoku.cells.map((cell) => cell + 4) };
  expect(firstViolation(puzzleOf(trace, moved)!, moved)).toBe(7);
  expect(puzzleOf(trace, written(GRID))!.cells).toEqual(trace.sudoku!.cells);
  expect(puzzleOf({ sudoku: null } as Trace, moved)).toBeNull();
});
