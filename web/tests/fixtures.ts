/** Runs for the tests, with the shapes of real ones, and hostile completions. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Entry, Index, Rollout, Run, Series, Trace } from "../src/types";

export type Rng = () => number;

/** The same numbers every time. */
export function rngOf(seed: number): Rng {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const round = (value: number) => Number(value.toPrecision(3));
const pick = <T>(rng: Rng, from: readonly T[]): T => from[Math.floor(rng() * from.length)]!;

function shuffled<T>(rng: Rng, items: readonly T[]): T[] {
  return items.map((item) => [rng(), item] as const).sort((a, b) => a[0] - b[0]).map(([, item]) => item);
}

/** Every position is filled once, the same number at each step, block after block. */
function filledBy(rng: Rng, length: number, steps: number, blocks: number): { filled: number[]; block: number[] } {
  const [wide, each] = [length / blocks, steps / blocks];
  const filled = new Array<number>(length);
  for (let block = 0; block < blocks; block++) {
    const positions = shuffled(rng, Array.from({ length: wide }, (_, i) => block * wide + i));
    positions.forEach((position, i) => (filled[position] = block * each + Math.floor((i * each) / wide)));
  }
  return { filled, block: filled.map((_, i) => Math.floor(i / wide)) };
}

const SOLUTION = "1234341221434321";
const PUZZLE = "1...3....1....2.";

function sudokuRollout(rng: Rng, quality: number): Rollout {
  const tokens = [...SOLUTION].map((digit) => (rng() < quality ? digit : pick(rng, ["1", "2", "3", "4"])));
  const solved = tokens.join("") === SOLUTION;
  const right = tokens.filter((digit, i) => digit === SOLUTION[i]).length;
  return {
    tokens,
    special: [],
    ...filledBy(rng, 16, 8, 1),
    block: null,
    p: tokens.map((digit, i) => round(digit === SOLUTION[i] ? 0.6 + 0.4 * rng() : 0.2 + 0.4 * rng())),
    counted: tokens.map(() => 1),
    weight: tokens.map(() => round(0.6 + 0.8 * rng())),
    reward: solved ? 1 : round(0.1 * Math.floor(right / 2)),
    solved,
    advantage: 0,
    verdict: null,
    probes: null,
    branches: null,
    taught: true,
  };
}

function withBranches(rng: Rng, rollout: Rollout, at: number): Rollout {
  const open = rollout.tokens.map((_, i) => i).filter((i) => rollout.filled[i]! >= at);
  const branches = [0, 1].map((z) => ({
    at,
    reward: z,
    advantage: z - 0.5,
    filled: Object.fromEntries(open.map((i) => [i, z ? SOLUTION[i]! : pick(rng, ["1", "2", "3", "4"])])),
  }));
  return { ...rollout, branches };
}

function withProbes(rng: Rng, rollout: Rollout, strata: number): Rollout {
  const every = rollout.tokens.map((_, i) => i);
  const probe = (masked: number[], share: number) => ({
    term: 0,
    masked,
    asked: masked,
    share: masked.map(() => share),
    logp: masked.map(() => round(Math.log(0.2 + 0.8 * rng()))),
    weight: 1,
  });
  const dealt = shuffled(rng, every);
  const dealtInto = Array.from({ length: strata }, (_, k) => dealt.filter((_, i) => i % strata === k).sort((a, b) => a - b));
  return { ...rollout, probes: [probe(every, 0.5), ...dealtInto.map((masked) => probe(masked, 0.5))] };
}

function withAdvantages(rollouts: Rollout[]): Rollout[] {
  const mean = rollouts.reduce((sum, rollout) => sum + rollout.reward!, 0) / rollouts.length;
  return rollouts.map((rollout) => ({ ...rollout, advantage: round(rollout.reward! - mean) }));
}

export function sudokuTrace(seed: number, kind: "train" | "eval", step: number, quality: number, number = 0): Trace {
  const rng = rngOf(seed);
  let rollouts = Array.from({ length: kind === "eval" ? 4 : 8 }, () => sudokuRollout(rng, quality));
  if (kind === "train") {
    rollouts = withAdvantages(rollouts).map((rollout, i) => withProbes(rng, withBranches(rng, rollout, 3 + (i % 4)), 4));
  } else {
    rollouts = rollouts.map((rollout) => ({ ...rollout, weight: null, advantage: null }));
  }
  return {
    id: `${kind === "eval" ? "e" : "t"}${step}-${number}`,
    kind,
    step,
    task: "sudoku",
    prompt: `${PUZZLE}=`,
    steps: 8,
    temperature: 1,
    order: "low_confidence",
    answer: SOLUTION,
    sudoku: { size: 4, puzzle: [...PUZZLE].map((c) => (c === "." ? 0 : Number(c))), cells: [...PUZZLE].map((_, i) => i) },
    rollouts,
  };
}

const WORDS = "the sum of all even numbers below n is found by adding , so we first count them and then multiply . let x be that number ; it follows from this".split(" ");

/** A completion of 256 tokens in 128 steps and 8 blocks: a program between words, ended early. */
function textRollout(rng: Rng): Rollout {
  const code = ["```", "python", "\n", "def", " total", "(", "n", ")", ":", "\n", "    ", "return", " sum", "(", "range", "(", "0", ",", " n", ",", " 2", ")", ")", "\n", "```", "\n"];
  const words = Array.from({ length: 190 }, (_, i) => (i % 23 === 22 ? ".\n" : ` ${pick(rng, WORDS)}`));
  const said = [...words.slice(0, 40), "\n", ...code, ...words.slice(40)];
  const tokens = Array.from({ length: 256 }, (_, i) => said[i] ?? "<eos>");
  const ends = tokens.map((token, i) => (token === "<eos>" ? i : -1)).filter((i) => i >= 0);
  const solved = rng() < 0.5;
  return {
    tokens,
    special: ends,
    ...filledBy(rng, 256, 128, 8),
    p: tokens.map((token) => round(token === "<eos>" ? 0.999 : rng() ** 0.3)),
    counted: tokens.map((_, i) => Number(i <= (ends[0] ?? 256))),
    weight: tokens.map(() => round(0.5 + rng())),
    reward: Number(solved),
    solved,
    advantage: 0,
    verdict: solved ? null : "AssertionError: total(5) is 6, got 10",
    probes: null,
    branches: null,
    taught: true,
  };
}

export function textTrace(seed: number, step: number, group = 8): Trace {
  const rng = rngOf(seed);
  return {
    id: `t${step}-0`,
    kind: "train",
    step,
    task: "mbpp",
    prompt: `Problem ${seed}. Write a function total(n) that returns the sum of the even numbers below n.\n\nassert total(5) == 6`,
    steps: 128,
    temperature: 0.9,
    order: "low_confidence",
    answer: null,
    sudoku: null,
    rollouts: withAdvantages(Array.from({ length: group }, () => textRollout(rng))).map((rollout) => withProbes(rng, rollout, 4)),
  };
}

/** What a model may write, or be made to. */
export const HOSTILE = [
  "</script><script>window.hurt = 1</script>",
  "<img src=x onerror='window.hurt = 2'>",
  "<!--unmask-data--> ]]> <!-- -->",
  "\u2028\u2029\u202e\u0000",
  "javascript:window.hurt=3",
  "<a href='javascript:window.hurt=4'>here</a>",
  "&lt;b&gt; &amp; {{constructor.constructor('window.hurt=5')()}}",
  "🏳️‍🌈𝒳".repeat(30) + "x".repeat(400),
];

export function hostileTrace(): Trace {
  const base = sudokuTrace(5, "train", 1, 0.5);
  const rollout: Rollout = {
    ...base.rollouts[0]!,
    tokens: HOSTILE,
    ...filledBy(rngOf(1), HOSTILE.length, HOSTILE.length, 1),
    p: HOSTILE.map(() => 0.5),
    counted: HOSTILE.map(() => 1),
    weight: null,
    verdict: HOSTILE[1]!,
    probes: null,
    branches: [{ at: 2, reward: 0, advantage: -1, filled: { "3": HOSTILE[0]!, "4": HOSTILE[1]! } }],
  };
  return { ...base, id: "t1-9", prompt: HOSTILE.join("\n"), answer: HOSTILE[0]!, sudoku: null, rollouts: [rollout] };
}

const entryOf = (trace: Trace): Entry => ({
  id: trace.id,
  kind: trace.kind,
  step: trace.step,
  prompt: trace.prompt.slice(0, 120),
  rewards: trace.rollouts.map((rollout) => rollout.reward),
  solved: trace.rollouts.map((rollout) => rollout.solved),
});

function metricsOf(rng: Rng, updates: number, rise: number): Record<string, Series> {
  const x = Array.from({ length: updates }, (_, i) => i + 1);
  const at = Array.from({ length: 9 }, (_, i) => Math.round((i * updates) / 8));
  const grown = (step: number) => 0.15 + rise * (1 - Math.exp((-3 * step) / updates));
  const train = (f: (step: number) => number): Series => ({ x, y: x.map((step) => round(f(step))) });
  const held = (f: (step: number) => number): Series => ({ x: at, y: at.map((step) => round(f(step))) });
  return {
    "train/reward": train((s) => grown(s) + 0.12 + 0.12 * (rng() - 0.5)),
    "train/solved": train((s) => grown(s) + 0.2 * (rng() - 0.5)),
    "eval/reward": held((s) => grown(s) + 0.1),
    ...Object.fromEntries(
      ["sampled", "greedy"].flatMap((how, i) => [
        [`eval/solved_${how}`, held((s) => grown(s) + 0.08 * i)],
        [`eval/solved_${how}_low`, held((s) => grown(s) + 0.08 * i - 0.05)],
        [`eval/solved_${how}_high`, held((s) => grown(s) + 0.08 * i + 0.05)],
      ]),
    ),
    "eval/pass@2": held((s) => grown(s) + 0.12),
    "eval/pass@4": held((s) => grown(s) + 0.2),
    "train/nll": train((s) => 9 * Math.exp((-1.5 * s) / updates) + rng()),
    "train/sampled_logp": train((s) => -0.6 * Math.exp((-1.5 * s) / updates)),
    "train/kl": train((s) => (0.04 * s) / updates + 0.005 * rng()),
    "train/clipped": train(() => 0.06 * rng()),
    "train/ratio": train(() => 1 + 0.04 * (rng() - 0.5)),
    "train/scorer_gap": train(() => 1e-6 * rng()),
    "train/idle_groups": train(() => 0.3 * rng()),
    "train/loss": train(() => 0.1 * (rng() - 0.5)),
    "train/grad_norm": train(() => 0.4 + 0.5 * rng()),
    "train/tokens": train(() => 16),
    "train/skipped": train(() => 0),
    "train/lr": train((s) => 3e-4 * Math.min(1, s / 10)),
    "time/rollout": train(() => 0.4 + 0.1 * rng()),
    "time/update": train(() => 0.6 + 0.1 * rng()),
    "cost/forwards": train((s) => 120 * s),
    "extra/unheard_of": train((s) => Math.sin(s / 6)),
  };
}

export function runOf(name: string, traces: Trace[], options: Partial<Run> = {}, rise = 0.55): Run {
  const updates = options.updates ?? 80;
  return {
    name,
    config: { task: "sudoku", method: "diffu_grpo", updates: 80, seed: 0, optimizer: { lr: 3e-4, max_norm: 1 }, eval: { every: 10 } },
    method: "diffu_grpo + daca + dispo",
    task: "sudoku",
    finished: { seconds: 131 },
    updates,
    done: updates,
    metrics: metricsOf(rngOf(name.length), updates, rise),
    clock: { x: Array.from({ length: updates }, (_, i) => i + 1), y: Array.from({ length: updates }, (_, i) => 1.2 * (i + 1)) },
    warnings: [],
    errors: 0,
    traces: traces.map(entryOf),
    ...options,
  };
}

/** A Sudoku run: evaluations of three problems, and training groups between them. */
export function sudokuTraces(seed: number, best: number): Trace[] {
  const quality = (step: number) => 0.75 + (best - 0.75) * (step / 80);
  const held = [0, 40, 80].flatMap((step) => [0, 1, 2].map((n) => {
    const trace = sudokuTrace(seed + 100 * n + step, "eval", step, quality(step), n);
    return { ...trace, prompt: n === 0 ? trace.prompt : `${"3214".repeat(n)}${trace.prompt}` };
  }));
  const taught = [1, 10, 20, 30, 40, 50, 60, 70, 80].map((step) => sudokuTrace(seed + step, "train", step, quality(step)));
  return [...held, ...taught].sort((a, b) => a.step - b.step);
}

export interface World {
  index: Index;
  /** By run. */
  traces: Trace[][];
}

export function worldOf(...runs: [Run, Trace[]][]): World {
  return { index: { v: 1, live: false, runs: runs.map(([run]) => run) }, traces: runs.map(([, traces]) => traces) };
}

export const PAGE = join(import.meta.dirname, "../../unmask/view/page.html");
const UNSAFE = /[<>&\u2028\u2029]/g;

const block = (id: string, value: unknown) => {
  const text = JSON.stringify(value).replace(UNSAFE, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return `<script type="application/json" id="${id}">${text}</script>\n`;
};

/** The built page with a world in it, as `unmask view --export` writes it; without traces as it is served. */
export function pageOf({ index, traces }: World): string {
  const blocks = traces.flatMap((of, run) => of.map((trace) => block(`trace-${run}-${trace.id}`, trace))).join("");
  return readFileSync(PAGE, "utf-8")
    .replace("<!--unmask-data-->", () => block("unmask-data", index))
    .replace("<!--unmask-traces-->", () => blocks);
}
