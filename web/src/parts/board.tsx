/** The Sudoku board of a canvas. */

import type { Signal } from "@preact/signals";
import { board, type Cell } from "../sudoku";
import { shownAfter, type Shown } from "../state";
import type { Rollout, Sudoku } from "../types";

const spoken = (cell: Cell) =>
  cell.text === "" ? "empty" : `${cell.text}${cell.clue ? ", clue" : ""}${cell.wrong ? ", breaks a rule" : ""}`;

export function Board({ sudoku, shown }: { sudoku: Sudoku; shown: Shown }) {
  const cells = board(sudoku, shown);
  const wrong = cells.filter((cell) => cell.wrong).length;
  const wide = sudoku.size / Math.floor(Math.sqrt(sudoku.size));
  const high = Math.floor(Math.sqrt(sudoku.size));
  const rows = Array.from({ length: sudoku.size }, (_, row) => cells.slice(row * sudoku.size, (row + 1) * sudoku.size));
  return (
    <table class="board" data-size={sudoku.size}>
      <caption class="unseen">{`The board; ${wrong} cells break a rule`}</caption>
      <tbody>
        {rows.map((row, r) => (
          <tr class={(r + 1) % high === 0 ? "under" : ""}>
            {row.map((cell, c) => (
              <td
                class={[
                  cell.clue ? "clue" : "",
                  cell.wrong ? "wrong" : "",
                  (c + 1) % wide === 0 ? "wall" : "",
                ].join(" ")}
                aria-label={spoken(cell)}
              >
                {[...cell.text].slice(0, 2).join("")}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The board after the steps shown. */
export function SteppedBoard({ sudoku, rollout, done }: { sudoku: Sudoku; rollout: Rollout; done: Signal<number> }) {
  return <Board sudoku={sudoku} shown={shownAfter(rollout, done.value)} />;
}
