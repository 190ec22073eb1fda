/** Which groups the list shows. */

import type { Entry, Kind } from "./types";

export type Outcome = "solved" | "unsolved" | "mixed" | "unknown";

export interface Filter {
  kind: Kind | "";
  outcome: Outcome | "";
  /** The number of a run; null: all. */
  run: number | null;
  from: number | null;
  to: number | null;
  /** The highest reward of the group is within these. */
  leastReward: number | null;
  mostReward: number | null;
  text: string;
}

export const EVERYTHING: Filter = { kind: "", outcome: "", run: null, from: null, to: null, leastReward: null, mostReward: null, text: "" };

export function outcomeOf(entry: Entry): Outcome {
  if (entry.solved.every((one) => one === null)) return "unknown";
  const solved = entry.solved.filter(Boolean).length;
  return solved === 0 ? "unsolved" : solved === entry.solved.length ? "solved" : "mixed";
}

/** The highest reward of a group; null if no reward is known. */
export function bestReward(entry: Entry): number | null {
  const known = entry.rewards.filter((reward) => reward !== null);
  return known.length ? known.reduce((best, reward) => Math.max(best, reward)) : null;
}

export function passes(entry: Entry, run: number, filter: Filter): boolean {
  const best = bestReward(entry);
  return (
    (filter.run === null || run === filter.run) &&
    (filter.leastReward === null || (best !== null && best >= filter.leastReward)) &&
    (filter.mostReward === null || (best !== null && best <= filter.mostReward)) &&
    (filter.kind === "" || entry.kind === filter.kind) &&
    (filter.outcome === "" || outcomeOf(entry) === filter.outcome) &&
    (filter.from === null || entry.step >= filter.from) &&
    (filter.to === null || entry.step <= filter.to) &&
    `${entry.prompt}\n${entry.id}`.toLowerCase().includes(filter.text.trim().toLowerCase())
  );
}
