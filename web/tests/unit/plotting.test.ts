import { describe, expect, test } from "vitest";
import { nearestKnown, placer, smoothed, smoothing, weightFor } from "../../src/plotting";
import { runOf } from "../fixtures";

test("the nearest known value, on either side", () => {
  const [xs, ys] = [[0, 1, 5, 6, 10], [1, null, null, undefined, 2]];
  expect([0, 1, 2, 3, 4].map((i) => nearestKnown(xs, ys, i, xs[i]!))).toEqual([0, 0, 0, 4, 4]);
  expect(nearestKnown(xs, [null, null, null, 7, null], 0, 0)).toBe(3);
  expect(nearestKnown(xs, [null, null, null, null, null], 2, 5)).toBeNull();
});

describe("the place of an update on the x axis", () => {
  const run = runOf("a", [], {
    metrics: { "cost/forwards": { x: [1, 2, 4], y: [100, 250, 400] } },
    clock: { x: [1, 2], y: [60, 180] },
  });
  test("is linear between recorded updates, from 0, and beyond the last", () => {
    expect([0, 1, 2, 3, 4, 6].map(placer(run, "forwards")!)).toEqual([0, 100, 250, 325, 400, 550]);
    expect([0, 0.5, 1, 2, 3].map(placer(run, "minutes")!)).toEqual([0, 0.5, 1, 3, 5]);
    expect([0, 7].map(placer(run, "updates")!)).toEqual([0, 7]);
  });
  test("is unknown if the run did not record it", () => {
    expect(placer({ ...run, metrics: {} }, "forwards")).toBeNull();
    expect(placer({ ...run, clock: undefined }, "minutes")).toBeNull();
  });
});

describe("smoothing", () => {
  test("is a weighted mean of the past: constant stays constant, the first value stays", () => {
    expect(smoothed([3, 3, null, 3], 0.9)).toEqual([3, expect.closeTo(3, 12), null, expect.closeTo(3, 12)]);
    expect(smoothed([1, 4], 0.5)).toEqual([1, 3]); // (0.5 * 1 * 0.5 + 0.5 * 4) / 0.75
    expect(smoothed([1, 4, -2], 0)).toEqual([1, 4, -2]);
  });
  test("is automatic for long curves only, and never for a few points", () => {
    expect([9, 80, 3000].map(weightFor)).toEqual([0, 0, 0.9]);
    smoothing.value = 0.6;
    expect([9, 80, 3000].map(weightFor)).toEqual([0, 0.6, 0.6]);
    smoothing.value = null;
  });
});
