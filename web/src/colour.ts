/** How tokens are coloured. Every palette is ordered by lightness, so a reader does not need to see hue. */

import { GIVEN } from "./state";
import type { Rollout } from "./types";

export type Theme = "light" | "dark";
export type Colouring = "step" | "p" | "weight" | "gain";

export interface Palette {
  light: readonly string[];
  dark: readonly string[];
}

// Early steps are near the background colour in both themes; late steps stand out.
const STEP: Palette = {
  light: ["#fbf3c4", "#dcedbd", "#afdbb9", "#79c4bd", "#4aa8c0", "#338cbb", "#28599b", "#22326f"],
  dark: ["#3a3470", "#31508c", "#2a6d93", "#33949c", "#4cad93", "#7cc27f", "#bcd974", "#f5ea90"],
};
// Tokens that the sampler was unsure of stand out.
const CERTAINTY: Palette = {
  light: ["#8f3800", "#b25208", "#e0812f", "#ef9a4f", "#f6b67b", "#fad0a8", "#fae4ce", "#f4efe7"],
  dark: ["#ffbb7a", "#f5a253", "#df8a38", "#9c5715", "#804a19", "#633e1c", "#49331f", "#332c25"],
};
const DIVERGING: Palette = {
  light: ["#9c4300", "#d97a28", "#eca463", "#f7d2ac", "#efeeea", "#c1d8ee", "#88b6e1", "#5c9bd4", "#1d5596"],
  dark: ["#ffb169", "#de8937", "#94551c", "#5c4027", "#36373d", "#2b4560", "#2d6092", "#6fa8e2", "#a9cfff"],
};

export const PALETTES: Record<Colouring, Palette> = { step: STEP, p: CERTAINTY, weight: DIVERGING, gain: DIVERGING };

function luminance(hex: string): number {
  const channels = [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16) / 255);
  const [r, g, b] = channels.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!;
}

/** Contrast of two colours as WCAG defines it, 1 to 21. */
export function contrast(one: string, other: string): number {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high! + 0.05) / (low! + 0.05);
}

const INKS = ["#17181c", "#ffffff"] as const;

/** The text colour that is easier to read on a background. */
export const inkOn = (background: string): string =>
  contrast(INKS[0], background) >= contrast(INKS[1], background) ? INKS[0] : INKS[1];

/** The largest distance from the middle of a diverging palette, over all rollouts on the page. */
export interface Limits {
  steps: number;
  weight: number;
  gain: number;
}

/** Advantage times credit: what the update did with a token; 0 if the token was not counted. */
export const gainOf = (rollout: Rollout, position: number): number =>
  (rollout.advantage ?? 0) * (rollout.weight?.[position] ?? 1) * (rollout.counted[position] ?? 0);

export function limitsOf(rollouts: readonly Rollout[], steps: number): Limits {
  const most = (values: number[]) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  return {
    steps,
    weight: most(rollouts.flatMap((rollout) => (rollout.weight ?? []).map((weight) => (weight ?? 1) - 1))),
    gain: most(rollouts.flatMap((rollout) => rollout.tokens.map((_, position) => gainOf(rollout, position)))),
  };
}

const within = (bin: number, bins: number) => Math.min(bins - 1, Math.max(0, bin));
const divergingBin = (value: number, limit: number) => within(Math.round((value / limit) * 4) + 4, 9);

export const stepBin = (step: number, steps: number): number => within(Math.round((step / Math.max(1, steps - 1)) * 7), 8);
export const certaintyBin = (p: number): number => within(Math.floor(p * 8), 8);

/** The palette bin of each position; null for no colour: the token was given, or its value is not known. */
export function binsOf(rollout: Rollout, colouring: Colouring, limits: Limits): (number | null)[] {
  return rollout.tokens.map((_, position) => {
    const filled = rollout.filled[position] ?? GIVEN;
    const p = rollout.p[position];
    if (filled === GIVEN) return null;
    if (colouring === "step") return stepBin(filled, limits.steps);
    if (colouring === "p") return p === null || p === undefined ? null : certaintyBin(p);
    if (colouring === "weight") return divergingBin((rollout.weight?.[position] ?? 1) - 1, limits.weight);
    return divergingBin(gainOf(rollout, position), limits.gain);
  });
}

/** Why a colouring shows nothing for these rollouts; null if it shows something. */
export function missing(colouring: Colouring, rollouts: readonly Rollout[]): string | null {
  if (colouring === "weight" && rollouts.every((rollout) => !rollout.weight)) return "every token had the same credit";
  if (colouring === "gain" && rollouts.every((rollout) => rollout.advantage == null)) return "these rollouts had no advantage";
  return null;
}
