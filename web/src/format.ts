/** Numbers and words for the page. */

import type { Run } from "./types";

/** Four significant digits, a minus sign, an exponent only for very small and very large numbers. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 0.001 || size >= 1e6) ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
  return text.replaceAll("-", "−").replace("e+", "e");
}

export const signed = (value: number | null | undefined): string =>
  (value ?? 0) > 0 ? `+${number(value)}` : number(value);

export const percent = (value: number): string => `${number(100 * value)} %`;

/** "45 s", "3 min", "2 h 5 min". */
export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const count = (amount: number, one: string, many = `${one}s`): string => `${amount} ${amount === 1 ? one : many}`;

/** "update 40"; step 0 is before training. The results of an evaluation have no updates. */
export function atUpdate(run: Run | undefined, step: number): string {
  if (run?.updates === null) return "evaluation";
  return step === 0 ? "before training" : `update ${step}`;
}
