/** Which groups the list shows. */

import type { Entry, Kind } from "./types";

export type Outcome = "solved" | "unsolved" | "mixed" | "unknown";

export interface Filter {
  kind: Kind | "";
  outcome: Outcome | "";
  from: number | null;
  to: number | null;
  text: string;
}

export const EVERYTHING: Filter = { kind: "", outcome: "", from: null, to: null, text: "" };

export function outcomeOf(entry: Entry): Outcome {
  if (entry.solved.every((one) => one === null)) return "unknown";
  const solved = entry.solved.filter(Boolean).length;
  return solved === 0 ? "unsolved" : solved === entry.solved.length ? "solved" : "mixed";
}

export function passes(entry: Entry, filter: Filter): boolean {
  return (
    (filter.kind === "" || entry.kind === filter.kind) &&
    (filter.outcome === "" || outcomeOf(entry) === filter.outcome) &&
    (filter.from === null || entry.step >= filter.from) &&
    (filter.to === null || entry.step <= filter.to) &&
    `${entry.prompt}\n${entry.id}`.toLowerCase().includes(filter.text.trim().toLowerCase())
  );
}
