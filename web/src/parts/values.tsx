/** The value of a rollout's states, where a credit audit recorded it: the expected reward after each step. */

import { number, signed } from "../format";
import type { Player } from "../player";

/** The points of a line 100 wide and 20 high; values beyond the steps are left out. */
export function valuePoints(values: (number | null)[], steps: number): string {
  const shown = values.slice(0, steps + 1);
  const numbers = shown.filter((value): value is number => value !== null);
  const [low, high] = [Math.min(0, ...numbers), Math.max(1, ...numbers)];
  return shown
    .map((value, i) => (value === null ? "" : `${(100 * i) / Math.max(1, steps)},${20 - (20 * (value - low)) / (high - low)}`))
    .filter((point) => point !== "")
    .join(" ");
}

export function Values({ values, player }: { values: (number | null)[]; player: Player }) {
  const [at, steps] = [player.done.value, player.steps];
  const [now, before] = [values[at], values[at - 1]];
  const x = (100 * at) / Math.max(1, steps);
  return (
    <figure class="values">
      <svg viewBox="-1 -2 102 24" preserveAspectRatio="none" aria-hidden="true">
        <line class="now" x1={x} x2={x} y1={-2} y2={22} />
        <polyline points={valuePoints(values, steps)} />
      </svg>
      <figcaption>
        expected reward <b>{number(now)}</b>
        {now != null && before != null && <span> ({signed(now - before)} by step {at})</span>}
      </figcaption>
    </figure>
  );
}
