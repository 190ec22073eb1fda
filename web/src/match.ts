/** Which traces answer the same prompt: of two runs, or of one run at different times. */

import type { Entry, Run } from "./types";

export interface Side {
  run: number;
  entry: Entry;
}

/** One prompt, and every trace of it on either side, in the order of their steps. */
export interface Pairing {
  prompt: string;
  kind: Entry["kind"];
  left: Side[];
  right: Side[];
}

/**
 * Prompts are cut in the index, so some begin alike; their number within an evaluation tells those apart.
 * Training prompts are drawn anew for every batch: there the text has to do.
 */
function keyOf(entry: Entry): string {
  const number = entry.kind === "eval" ? entry.id.slice(entry.id.indexOf("-") + 1) : "";
  return JSON.stringify([entry.kind, entry.prompt, number]);
}

function byKey(run: number, entries: readonly Entry[]): Map<string, Side[]> {
  const found = new Map<string, Side[]>();
  for (const entry of entries) {
    const key = keyOf(entry);
    found.set(key, [...(found.get(key) ?? []), { run, entry }]);
  }
  for (const sides of found.values()) sides.sort((a, b) => a.entry.step - b.entry.step);
  return found;
}

/** Prompts that both runs have traces of, evaluation first. */
export function pairings(runs: readonly Run[], left: number, right: number): Pairing[] {
  const ours = byKey(left, runs[left]?.traces ?? []);
  const theirs = byKey(right, runs[right]?.traces ?? []);
  const found: Pairing[] = [];
  for (const [key, sides] of ours) {
    const others = theirs.get(key);
    // a run beside itself: only prompts that were answered more than once have a before and an after
    if (others === undefined || (left === right && sides.length < 2)) continue;
    found.push({ prompt: sides[0]!.entry.prompt, kind: sides[0]!.entry.kind, left: sides, right: others });
  }
  return found.sort((a, b) => Number(a.kind === "train") - Number(b.kind === "train"));
}

/** The two traces to begin with: of two runs the last of each, of one run the first and the last. */
export function firstPair(pairing: Pairing): [Side, Side] {
  const [left, right] = [pairing.left, pairing.right];
  const sameRun = left[0]!.run === right[0]!.run;
  return [sameRun ? left[0]! : left.at(-1)!, right.at(-1)!];
}
