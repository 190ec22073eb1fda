import { describe, expect, test } from "vitest";
import { named, plainText, positionsByStep, shownAfter, shownInBranch, shownInProbe, stepsTaken, visible } from "../../src/state";
import { sudokuTrace, textTrace } from "../fixtures";
import { valuePoints } from "../../src/parts/values";
import type { Rollout } from "../../src/types";

const rollout: Rollout = {
  tokens: ["a", "b", "c", "d", "e"],
  filled: [-1, 1, 0, null, 1],
  p: [null, 0.5, 0.9, null, 0.1],
  counted: [1, 1, 1, 0, 1],
  reward: 0,
  solved: false,
};
const text = (shown: (position: number) => string | null) => rollout.tokens.map((_, i) => shown(i) ?? "_").join("");

describe("the canvas after so many steps", () => {
  test("every state, by hand", () => {
    expect([0, 1, 2, 9].map((done) => text(shownAfter(rollout, done)))).toEqual(["a____", "a_c__", "abc_e", "abc_e"]);
    expect(stepsTaken(rollout)).toBe(2);
    expect(positionsByStep(rollout.filled, 3)).toEqual([[2], [1, 4], []]);
  });

  test("each step adds exactly the positions it filled", () => {
    for (const one of [...sudokuTrace(1, "train", 1, 0.8).rollouts, ...textTrace(2, 1, 2).rollouts]) {
      const byStep = positionsByStep(one.filled, 128);
      for (let done = 0; done < 128; done++) {
        const [before, after] = [shownAfter(one, done), shownAfter(one, done + 1)];
        const added = one.tokens.map((_, i) => i).filter((i) => before(i) === null && after(i) !== null);
        expect(added).toEqual(byStep[done]);
      }
    }
  });

  test("a branch fills the state before its step and leaves what stood", () => {
    expect(text(shownInBranch(rollout, { at: 1, filled: { "1": "x", "3": "", "4": "z" } }))).toBe("axcz");
    expect(shownInBranch(rollout, { at: 1, filled: { "3": "" } })(3)).toBe("");
  });

  test("a probe masks what it says and shows the rest as finally written", () => {
    expect(text(shownInProbe(rollout, { masked: [0, 4] }))).toBe("_bcd_");
  });
});

test("plain text has no masks, no end tokens, and line breaks", () => {
  const tokens = ["So", "↵", " x", "↵\n", "y", "¶", "·"];
  expect(plainText({ ...rollout, tokens, special: [5], filled: [0, 0, 0, 0, -1, 0, null] })).toBe("So\n x\ny");
});

test("white space is named and still breaks lines", () => {
  expect(visible("a\n")).toBe("a↵\n");
  expect(named("\n")).toBe('"\\n"');
  expect(named(' say "so"')).toBe(' say "so"');
  expect(named("")).toBe("(empty)");
});

describe("the value along a rollout", () => {
  test("the line goes from the first state to the last step, 1 on top, and skips what is not known", () => {
    expect(valuePoints([0, 0.5, null, 1, 1], 4)).toBe("0,20 25,10 75,0 100,0");
    expect(valuePoints([0.25, 1, 1, 1], 1)).toBe("0,15 100,0");
    expect(valuePoints([-1, 3], 1)).toBe("0,20 100,0");
  });
});
