/** How curves are drawn: the reader's choices, kept from page to page, and the arithmetic behind them. */

import { signal } from "@preact/signals";
import type { Run, Series } from "./types";

export type Axis = "updates" | "forwards" | "minutes";

export const AXES: Record<Axis, { label: string; unit: string }> = {
  updates: { label: "updates", unit: "update" },
  forwards: { label: "forward passes", unit: "forward passes" },
  minutes: { label: "minutes of training", unit: "minutes" },
};

/** Points from which on a curve is drawn without dots and may be smoothed. */
export const MANY = 40;
/** Points from which on a curve is smoothed unless the reader chooses otherwise. */
const NOISY = 300;

export const axis = signal<Axis>("updates");
/** Weight of the past in the moving average, as in other dashboards; null: by the length of the curve. */
export const smoothing = signal<number | null>(null);
export const logarithmic = signal(false);
/** The part of the x axis that is shown; null: all. */
export const range = signal<[number, number] | null>(null);

export function chooseAxis(next: Axis): void {
  axis.value = next;
  range.value = null;
}

/** The cost of a run by update, cumulative; null if the run did not record it. */
function costOf(run: Run, by: Axis): Series | null {
  const series = by === "forwards" ? run.metrics["cost/forwards"] : run.clock;
  return series && series.x.length > 0 ? series : null;
}

/** Maps an update to its place on the x axis; null if the run did not record it. Linear between recorded points. */
export function placer(run: Run, by: Axis): ((update: number) => number) | null {
  if (by === "updates") return (update) => update;
  const cost = costOf(run, by);
  if (cost === null) return null;
  const scale = by === "minutes" ? 1 / 60 : 1;
  const [xs, ys] = [[0, ...cost.x], [0, ...cost.y.map((y) => y ?? 0)]];
  return (update) => {
    const next = xs.findIndex((x) => x >= update);
    const after = next < 0 ? xs.length - 1 : Math.max(1, next);
    const [x0, x1, y0, y1] = [xs[after - 1]!, xs[after]!, ys[after - 1]!, ys[after]!];
    return scale * (y0 + ((y1 - y0) * (update - x0)) / (x1 - x0 || 1));
  };
}

/** The exponential moving average, corrected for its start; null where the value is. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** The weight for a curve with this number of points; 0 does not smooth. */
export const weightFor = (points: number): number =>
  points < MANY ? 0 : (smoothing.value ?? (points >= NOISY ? 0.9 : 0));

/** The index of the known value that is nearest to x; null if there is none. `from` is the index of the nearest x. */
export function nearestKnown(xs: ArrayLike<number>, ys: ArrayLike<number | null | undefined>, from: number, x: number): number | null {
  let [left, right] = [from, from];
  while (left >= 0 && ys[left] == null) left--;
  while (right < ys.length && ys[right] == null) right++;
  if (left < 0 || right >= ys.length) return left >= 0 ? left : right < ys.length ? right : null;
  return x - xs[left]! <= xs[right]! - x ? left : right;
}
