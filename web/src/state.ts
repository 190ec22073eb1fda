/** The canvas of a rollout after some steps, derived from the step that filled each position. */

import type { Rollout } from "./types";

export const GIVEN = -1;

/** Whether a position is written after `done` steps. */
export const written = (filled: number | null | undefined, done: number): boolean =>
  filled !== null && filled !== undefined && filled < done;

/** The positions that each step filled. */
export function positionsByStep(filled: readonly (number | null)[], steps: number): number[][] {
  const positions: number[][] = Array.from({ length: steps }, () => []);
  filled.forEach((step, position) => {
    if (step !== null && step >= 0) positions[step]?.push(position);
  });
  return positions;
}

/** The number of steps up to the last that filled a position. */
export const stepsTaken = (rollout: Rollout): number =>
  rollout.filled.reduce<number>((most, step) => Math.max(most, (step ?? GIVEN) + 1), 0);

export const countWritten = (rollout: Rollout, done: number): number =>
  rollout.filled.filter((step) => written(step, done)).length;

/** The token that the canvas shows at a position; null if it is masked. */
export type Shown = (position: number) => string | null;

export const shownAfter =
  (rollout: Rollout, done: number): Shown =>
  (position) =>
    written(rollout.filled[position], done) ? (rollout.tokens[position] ?? null) : null;

/** The state before step `at`, with the masked positions filled by a branch. */
export function shownInBranch(rollout: Rollout, branch: { at: number; filled: Record<string, string> }): Shown {
  const before = shownAfter(rollout, branch.at);
  return (position) => branch.filled[position] ?? before(position);
}

export function shownInProbe(rollout: Rollout, probe: { masked: readonly number[] }): Shown {
  const masked = new Set(probe.masked);
  return (position) => (masked.has(position) ? null : (rollout.tokens[position] ?? null));
}

/** The completion as plain text: without masks and end tokens, and with line breaks. */
export function plainText(rollout: Rollout): string {
  const special = new Set(rollout.special ?? []);
  const written = rollout.tokens.filter((_, i) => !special.has(i) && rollout.filled[i] !== null);
  return written.join("").replaceAll("↵\n", "\n").replaceAll("↵", "\n").trim();
}

/** A token with visible white space; a line break still breaks the line. */
export const visible = (token: string): string =>
  token.replace(/\r/g, "␍").replace(/\t/g, "→\t").replace(/\n/g, "↵\n");

/** A token in one line, for lists and screen readers. */
export function named(token: string): string {
  if (token === "") return "(empty)";
  return token.trim() === "" ? JSON.stringify(token) : JSON.stringify(token).slice(1, -1).replaceAll('\\"', '"');
}
