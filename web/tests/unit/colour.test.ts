import { describe, expect, test } from "vitest";
import { binsOf, certaintyBin, contrast, gainOf, inkOn, limitsOf, missing, PALETTES, stepBin, type Theme } from "../../src/colour";
import type { Rollout } from "../../src/types";

const PAPER = { light: "#ffffff", dark: "#1a1b1f" };

const luminance = (colour: string) => contrast(colour, "#000000");

describe("palettes", () => {
  test("contrast is that of WCAG at its ends and at a published value", () => {
    expect(contrast("#000000", "#ffffff")).toBeCloseTo(21, 10);
    expect(contrast("#777777", "#ffffff")).toBeCloseTo(4.48, 2);
  });

  for (const [name, palette] of Object.entries(PALETTES)) {
    for (const theme of ["light", "dark"] as Theme[]) {
      test(`${name}, ${theme}: text can be read on every colour`, () => {
        for (const colour of palette[theme]) expect(contrast(inkOn(colour), colour)).toBeGreaterThanOrEqual(4.5);
      });

      test(`${name}, ${theme}: lightness alone tells the order, so no hue has to be seen`, () => {
        const levels = palette[theme].map(luminance);
        const arms = levels.length === 9 ? [levels.slice(0, 5).reverse(), levels.slice(4)] : [levels];
        for (const arm of arms) {
          const sign = Math.sign(arm[1]! - arm[0]!);
          for (let i = 1; i < arm.length; i++) expect(sign * Math.log(arm[i]! / arm[i - 1]!)).toBeGreaterThan(0.05);
        }
      });

      test(`${name}, ${theme}: the end that matters stands out from the paper`, () => {
        const loud = name === "step" ? palette[theme].at(-1)! : palette[theme][0]!;
        expect(contrast(loud, PAPER[theme])).toBeGreaterThan(3);
      });
    }
  }
});

const rollout: Rollout = {
  tokens: ["a", "b", "c", "d"],
  filled: [-1, 0, 3, null],
  p: [null, 0, 1, 0.5],
  counted: [1, 1, 1, 0],
  weight: [1, 0.5, 1.5, 1],
  reward: 1,
  solved: true,
  advantage: -2,
};
const limits = limitsOf([rollout], 4);

describe("bins", () => {
  test("ends and middle of each scale", () => {
    expect([0, 3].map((step) => stepBin(step, 4))).toEqual([0, 7]);
    expect(stepBin(0, 1)).toBe(0);
    expect([0, 0.124, 0.125, 0.5, 1].map(certaintyBin)).toEqual([0, 0, 1, 4, 7]);
    expect(limits).toEqual({ steps: 4, weight: 0.5, gain: 3 });
    expect(binsOf(rollout, "step", limits)).toEqual([null, 0, 7, null]);
    expect(binsOf(rollout, "p", limits)).toEqual([null, 0, 7, null]);
    expect(binsOf(rollout, "weight", limits)).toEqual([null, 0, 8, null]);
    expect(binsOf(rollout, "gain", limits)).toEqual([null, 3, 0, null]);
  });

  test("advantage times credit, nothing where a token is not counted", () => {
    expect([0, 1, 2].map((i) => gainOf(rollout, i))).toEqual([-2, -1, -3]);
    expect(gainOf(rollout, 3)).toBeCloseTo(0, 15);
    expect(gainOf({ ...rollout, weight: null }, 1)).toBe(-2);
  });

  test("a colouring that would show nothing says why", () => {
    const bare = { ...rollout, weight: null, advantage: null };
    expect(missing("weight", [bare])).toContain("same credit");
    expect(missing("gain", [bare])).toContain("no advantage");
    expect(missing("weight", [bare, rollout])).toBeNull();
    expect(missing("step", [bare])).toBeNull();
  });
});
