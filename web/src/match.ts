/** Which traces have the same prompt: of two runs, or of one run at different updates. */

import type { Entry, Run } from "./types";

export interface Side {
  run: number;
  entry: Entry;
}

/** One prompt and all its traces on both sides, ordered by step. */
export interface Pairing {
  prompt: string;
  kind: Entry["kind"];
  left: Side[];
  right: Side[];
}

/**
 * The index has only the beginning of a prompt. The number within an evaluation distinguishes held-out problems that
 * begin alike; training prompts are matched by text alone, because every batch draws new ones.
 */
function keyOf(entry: Entry): string {
  const number = entry.kind === "eval" ? entry.id.slice(entry.id.indexOf("-") + 1) : "";
  return JSON.stringify([entry.kind, entry.prompt, number]);
}

function byKey(run: number, entries: readonly Entry[]): Map<string, Side[]> {
  const sidesByKey = new Map<string, Side[]>();
  for (const entry of entries) {
    const key = keyOf(entry);
    sidesByKey.set(key, [...(sidesByKey.get(key) ?? []), { run, entry }]);
  }
  for (const sides of sidesByKey.values()) sides.sort((a, b) => a.entry.step - b.entry.step);
  return sidesByKey;
}

/** Prompts that both runs have traces of, evaluation first. */
export function pairings(runs: readonly Run[], left: number, right: number): Pairing[] {
  const leftSides = byKey(left, runs[left]?.traces ?? []);
  const rightSides = byKey(right, runs[right]?.traces ?? []);
  const shared: Pairing[] = [];
  for (const [key, sides] of leftSides) {
    const others = rightSides.get(key);
    // one run compared with itself: the prompt must have at least two traces
    if (others === undefined || (left === right && sides.length < 2)) continue;
    shared.push({ prompt: sides[0]!.entry.prompt, kind: sides[0]!.entry.kind, left: sides, right: others });
  }
  return shared.sort((a, b) => Number(a.kind === "train") - Number(b.kind === "train"));
}

/** The two traces that are shown first: the last of each of two runs, or the first and the last of one run. */
export function firstPair(pairing: Pairing): [Side, Side] {
  const [left, right] = [pairing.left, pairing.right];
  const sameRun = left[0]!.run === right[0]!.run;
  return [sameRun ? left[0]! : left.at(-1)!, right.at(-1)!];
}
