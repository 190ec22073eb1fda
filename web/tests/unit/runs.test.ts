import { describe, expect, test } from "vitest";
import { complete } from "../../src/data";
import { sectionsOf } from "../../src/curves";
import { EVERYTHING, type Filter, outcomeOf, passes } from "../../src/filter";
import { duration, number, signed } from "../../src/format";
import { firstPair, pairings } from "../../src/match";
import { msPerStep, playerOf } from "../../src/player";
import { compareLink, routeOf, runsLink, traceLink } from "../../src/route";
import { budgetOf, choose, chosen, secondsLeft, sorted, timeLeft } from "../../src/table";
import { runOf } from "../fixtures";
import type { Entry, Trace } from "../../src/types";

const entry = (id: string, kind: Entry["kind"], step: number, prompt: string, solved: boolean[] = [true]): Entry => ({
  id, kind, step, prompt, rewards: solved.map(Number), solved,
});

describe("the same prompt on both sides", () => {
  const left = runOf("a", [], { traces: [entry("t1-0", "train", 1, "p"), entry("e0-0", "eval", 0, "q"), entry("e9-0", "eval", 9, "q")] });
  const right = runOf("b", [], { traces: [entry("e5-0", "eval", 5, "q"), entry("t3-0", "train", 3, "p"), entry("t4-0", "train", 4, "other")] });

  test("evaluation first, the last of each to begin with", () => {
    const pairs = pairings([left, right], 0, 1);
    expect(pairs.map(({ prompt, kind }) => [prompt, kind])).toEqual([["q", "eval"], ["p", "train"]]);
    expect(firstPair(pairs[0]!).map(({ run, entry }) => [run, entry.id])).toEqual([[0, "e9-0"], [1, "e5-0"]]);
  });

  test("one run with itself: before and after, if a prompt has both", () => {
    const pairs = pairings([left], 0, 0);
    expect(pairs.map(({ prompt }) => prompt)).toEqual(["q"]);
    expect(firstPair(pairs[0]!).map(({ entry }) => entry.id)).toEqual(["e0-0", "e9-0"]);
  });

  test("held-out prompts with the same beginning are distinguished by their number", () => {
    const alike = (step: number) => [0, 1].map((n) => entry(`e${step}-${n}`, "eval", step, "the same 120 characters"));
    const pairs = pairings([runOf("a", [], { traces: alike(1) }), runOf("b", [], { traces: alike(2) })], 0, 1);
    expect(pairs.map((one) => firstPair(one).map(({ entry }) => entry.id))).toEqual([["e1-0", "e2-0"], ["e1-1", "e2-1"]]);
  });
});

describe("filters", () => {
  const all = [
    entry("e0-0", "eval", 0, "Alpha", [false, false]),
    entry("t5-0", "train", 5, "beta", [true, false]),
    entry("t9-0", "train", 9, "alphabet", [true, true]),
  ];
  const ids = (filter: Partial<Filter>) => all.filter((one, i) => passes(one, i, { ...EVERYTHING, ...filter })).map(({ id }) => id);

  test("each alone and together", () => {
    expect(ids({})).toHaveLength(3);
    expect(ids({ kind: "train" })).toEqual(["t5-0", "t9-0"]);
    expect(ids({ outcome: "mixed" })).toEqual(["t5-0"]);
    expect(ids({ outcome: "unsolved" })).toEqual(["e0-0"]);
    expect(ids({ from: 5, to: 5 })).toEqual(["t5-0"]);
    expect(ids({ text: " ALPHA " })).toEqual(["e0-0", "t9-0"]);
    expect(ids({ kind: "train", text: "alpha" })).toEqual(["t9-0"]);
    expect(ids({ run: 1 })).toEqual(["t5-0"]);
    expect(ids({ leastReward: 0.5 })).toEqual(["t5-0", "t9-0"]);
    expect(ids({ mostReward: 0.5 })).toEqual(["e0-0"]);
  });

  test("a run that wrote no outcome down has none", () =>
    expect(outcomeOf({ ...all[0]!, solved: [null, null] })).toBe("unknown"));
});

describe("curves", () => {
  test("every metric is in one chart, is an interval's end or is listed as constant, none twice", () => {
    const run = runOf("a", []);
    const { sections, still } = sectionsOf([run]);
    const lines = sections.flatMap(({ panels }) => panels.flatMap(({ lines }) => lines));
    const seen = [...lines.flatMap((line) => [line.key, line.low, line.high].filter((key) => key !== undefined)), ...still.keys()];
    expect(seen.sort()).toEqual(Object.keys(run.metrics).sort());
    expect(still).toEqual(new Map([["train/skipped", 0], ["train/tokens", 16]]));
    expect(sections.at(-1)!.panels.map(({ title }) => title)).toEqual(["extra/unheard_of"]);
  });

  test("what is constant in each run but not the same in both is drawn", () => {
    const constant = (value: number) => ({ metrics: { "train/tokens": { x: [1, 2], y: [value, value] } } });
    expect(sectionsOf([runOf("a", [], constant(1)), runOf("b", [], constant(2))]).still.size).toBe(0);
    expect(sectionsOf([runOf("a", [], constant(1)), runOf("b", [], constant(1))]).sections).toEqual([]);
  });
});

test("an address leads back to where it came from, or to the runs", () => {
  expect(routeOf(traceLink(1, "t4/0 ?"))).toEqual({ at: "trace", run: 1, id: "t4/0 ?" });
  const [left, right] = [{ run: 0, id: "e0-0" }, { run: 1, id: "e8-0" }];
  expect(routeOf(compareLink(left, right))).toEqual({ at: "compare", runs: [0, 1], left, right });
  expect(routeOf(compareLink())).toEqual({ at: "compare", runs: null, left: null, right: null });
  expect(routeOf(runsLink(3, 7))).toEqual({ at: "compare", runs: [3, 7], left: null, right: null });
  for (const hash of ["", "#", "#/nowhere", "#/trace/x/t1", "#/trace/0", "#/trace/0/%"]) expect(routeOf(hash)).toEqual({ at: "runs" });
});

describe("the table of runs", () => {
  const solved = (...y: number[]) => ({ metrics: { "eval/solved_sampled": { x: y.map((_, i) => i), y } } });
  const runs = [
    runOf("seed10", [], solved(0.4, 0.5)),
    runOf("seed2", [], { ...solved(), finished: { ended: "failed: no" } }),
    runOf("seed1", [], { ...solved(0.4, 0.7), clock: undefined }),
  ];

  test("is sorted by any column; runs without a value come last", () => {
    expect(sorted(runs, { by: "name", descending: false })).toEqual([2, 1, 0]);
    expect(sorted(runs, { by: "sampled", descending: true })).toEqual([2, 0, 1]);
    expect(sorted(runs, { by: "sampled", descending: false })).toEqual([0, 2, 1]);
    expect(sorted(runs, { by: "seconds", descending: true })).toEqual([0, 1, 2]);
    expect(sorted(runs, { by: "status", descending: false })).toEqual([1, 0, 2]);
  });

  test("chooses ten runs at first, and then what the reader chooses", () => {
    const many = Array.from({ length: 12 }, (_, i) => runOf(`run ${i}`, []));
    expect(chosen(many)).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    choose(many, 11, true);
    choose(many, 0, false);
    expect(chosen(many)).toEqual([1, 2, 3, 4, 5, 6, 7, 8, 9, 11]);
  });

  test("says how long an unfinished run still takes, by its last updates", () => {
    const clock = { x: Array.from({ length: 40 }, (_, i) => i + 1), y: Array.from({ length: 40 }, (_, i) => (i < 20 ? 100 * i : 1900 + 2 * (i - 19))) };
    const run = runOf("a", [], { finished: null, done: 40, updates: 100, clock });
    expect(secondsLeft(run)).toBeCloseTo(120, 6); // 60 updates of 2 s
    const forwards = { config: { max_forwards: 6000 }, metrics: { "cost/forwards": { x: [40], y: [4000] } } };
    expect(secondsLeft({ ...run, ...forwards })).toBeCloseTo(40, 6); // 20 more updates of 100 forward passes
    expect(budgetOf({ ...run, ...forwards })).toEqual({ done: 4000, total: 6000, unit: ["forward pass", "forward passes"] });
    expect(budgetOf({ ...run, ...forwards, updates: 50 })!.total).toBe(50); // the updates end it first
    expect(secondsLeft({ ...run, finished: {} })).toBeNull();
    expect(secondsLeft({ ...run, clock: { x: [1], y: [3] } })).toBeNull();
    expect(timeLeft(run, true)).toBe("about 2 min left");
    expect(timeLeft({ ...run, changed: 1000 }, true, 1070)).toBe("about 2 min left");
    expect(timeLeft({ ...run, changed: 1000 }, true, 1300)).toBe("no update for 5 min");
    expect(timeLeft(run, false)).toBe(""); // an exported page follows nothing
    expect([12.4, 200, 7600].map(duration)).toEqual(["12 s", "3 min", "2 h 7 min"]);
  });
});

test("numbers as they are printed", () => {
  expect([0, 1, 0.123456, -2.5, 12345.678, 1e-6, 3e-4, 2.5e7].map(number)).toEqual(
    ["0", "1", "0.1235", "−2.5", "12345.7", "1e−6", "3e−4", "2.5e7"],
  );
  expect([number(null), number(Number.NaN), signed(0.5), signed(0), signed(-1)]).toEqual(["–", "–", "+0.5", "0", "−1"]);
});

test("the player stays between the first and the last state", () => {
  const player = playerOf(8);
  expect(player.done.value).toBe(8);
  player.go(-3);
  expect(player.done.value).toBe(0);
  player.go(99);
  expect(player.done.value).toBe(8);
  player.toggle();
  expect([player.playing.value, player.done.value]).toEqual([true, 0]); // from the end it begins anew
  player.stop();
  expect(player.playing.value).toBe(false);
  expect([1, 128, 4096].map(msPerStep)).toEqual([700, 7000 / 128, 40]);
});

test("a line that leaves things out is completed so that nothing is claimed", () => {
  const bare = { id: "t1-0", kind: "train", step: 1, task: "x", prompt: "", steps: 0, rollouts: [{ tokens: ["said"], reward: 1 }] };
  expect(complete(bare as unknown as Trace).rollouts).toEqual([
    { tokens: ["said"], reward: 1, filled: [-1], p: [null], counted: [1], solved: null },
  ]);
});
