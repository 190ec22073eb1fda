/** The table of runs: its columns, its order, and the runs that are chosen for curves and samples. */

import { signal } from "@preact/signals";
import { duration } from "./format";
import type { Run, Series } from "./types";

/** Runs that are chosen at first, and have colours of their own. */
export const MOST = 10;

export type Column = "name" | "method" | "task" | "sampled" | "greedy" | "done" | "forwards" | "seconds" | "status";
export interface Order {
  by: Column;
  descending: boolean;
}

export const order = signal<Order>({ by: "name", descending: false });
/** Names of the chosen runs; null: the first ones. */
const names = signal<ReadonlySet<string> | null>(null);

/** The numbers of the chosen runs. */
export function chosen(runs: readonly Run[]): number[] {
  const numbers = runs.map((_, i) => i);
  return names.value === null ? numbers.slice(0, MOST) : numbers.filter((i) => names.value!.has(runs[i]!.name));
}

export function choose(runs: readonly Run[], number: number, on: boolean): void {
  const now = new Set(chosen(runs).map((i) => runs[i]!.name));
  if (on) now.add(runs[number]!.name);
  else now.delete(runs[number]!.name);
  names.value = now;
}

export const chooseOnly = (run: Run): void => {
  names.value = new Set([run.name]);
};

/** The first and the last known value. */
export function ends(series: Series | undefined): [number, number] | null {
  const known = (series?.y ?? []).filter((y) => y !== null);
  return known.length ? [known[0]!, known.at(-1)!] : null;
}

export const forwardsOf = (run: Run): number | null => ends(run.metrics["cost/forwards"])?.[1] ?? null;
export const secondsOf = (run: Run): number | null => ends(run.clock)?.[1] ?? null;

export function stateOf(run: Run): string {
  const ended = run.finished?.["ended"];
  if (typeof ended === "string" && ended) return ended;
  return run.finished ? "finished" : "not finished";
}

export interface Budget {
  done: number;
  total: number;
  unit: [string, string];
}

/** What ends a run: its updates or its forward passes, whichever is nearer to the end; null for an evaluation. */
export function budgetOf(run: Run): Budget | null {
  const most = run.config["max_forwards"];
  const updates: Budget | null = run.updates === null ? null : { done: run.done, total: run.updates, unit: ["update", "updates"] };
  if (typeof most !== "number" || most <= 0) return updates;
  const forwards: Budget = { done: forwardsOf(run) ?? 0, total: most, unit: ["forward pass", "forward passes"] };
  return updates !== null && updates.done / updates.total > forwards.done / forwards.total ? updates : forwards;
}

/** Updates whose time is averaged for the time that is left. */
const RECENT = 20;

/** Seconds of an update, over the last ones; null if that is not known. */
function pace(run: Run): number | null {
  const [x, y] = [run.clock?.x ?? [], run.clock?.y ?? []];
  const from = Math.max(0, x.length - 1 - RECENT);
  const [updates, seconds] = [x.at(-1)! - x[from]!, (y.at(-1) ?? 0) - (y[from] ?? 0)];
  return x.length < 2 || updates <= 0 ? null : seconds / updates;
}

/** Seconds that an unfinished run still takes, by its last updates; null if that is not known. */
export function secondsLeft(run: Run): number | null {
  const [budget, each] = [budgetOf(run), pace(run)];
  if (run.finished || budget === null || each === null || budget.done <= 0) return null;
  return Math.max(0, budget.total - budget.done) * (run.done / budget.done) * each;
}

/** How long a run that is being followed still takes, or for how long it has been silent; "" if neither is known. */
export function timeLeft(run: Run, live: boolean, now = Date.now() / 1000): string {
  const left = secondsLeft(run);
  if (!live || left === null) return "";
  const silent = now - (run.changed ?? now);
  return silent > 60 + 10 * (pace(run) ?? 0) ? `no update for ${duration(silent)}` : `about ${duration(left)} left`;
}

function valueOf(run: Run, by: Column): string | number | null {
  if (by === "name" || by === "method" || by === "task") return run[by] ?? "";
  if (by === "sampled" || by === "greedy") return ends(run.metrics[`eval/solved_${by}`])?.[1] ?? null;
  if (by === "done") return run.done;
  if (by === "status") return stateOf(run);
  return by === "forwards" ? forwardsOf(run) : secondsOf(run);
}

/** The numbers of the runs in the order of a column; runs without a value come last. */
export function sorted(runs: readonly Run[], { by, descending }: Order): number[] {
  const values = runs.map((run) => valueOf(run, by));
  const compare = (a: string | number, b: string | number) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return runs.map((_, i) => i).sort((i, j) => {
    const [a, b] = [values[i]!, values[j]!];
    if (a === null || b === null) return Number(a === null) - Number(b === null) || i - j;
    return (descending ? -1 : 1) * compare(a, b) || i - j;
  });
}
