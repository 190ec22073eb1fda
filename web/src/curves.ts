/** Which metrics share a chart. A metric that is not planned here gets its own chart, so no metric is hidden. */

import type { Run, Series } from "./types";

export interface Line {
  key: string;
  label: string;
  /** Metrics with the ends of its interval, if it has one. */
  low?: string;
  high?: string;
}

export interface Panel {
  title: string;
  note: string;
  lines: Line[];
}

export interface Section {
  title: string;
  panels: Panel[];
}

interface Plan {
  title: string;
  note: string;
  /** [metric, label]; a metric that ends in * matches all with that prefix. */
  lines: [string, string][];
}

const PLAN: { title: string; panels: Plan[] }[] = [
  {
    title: "Learning",
    panels: [
      {
        title: "Solved",
        note: "share of completions that solve their problem",
        lines: [
          ["eval/solved_sampled", "held out, sampled"],
          ["eval/solved_greedy", "held out, greedy"],
          ["train/solved", "training batch"],
        ],
      },
      {
        title: "Reward",
        note: "mean over rollouts",
        lines: [["train/reward", "training batch"], ["eval/reward", "held out"], ["train/branch_reward", "branches"]],
      },
      { title: "Pass@k", note: "held out: one of k samples solves", lines: [["eval/pass@*", "k = "]] },
      { title: "Parts of the reward", note: "each without its weight", lines: [["train/reward/*", ""]] },
    ],
  },
  {
    title: "Policy",
    panels: [
      { title: "Entropy", note: "nats of a completion; near 0 all rollouts are the same", lines: [["train/nll", "nats"]] },
      {
        title: "Log-probability",
        note: "of a counted token",
        lines: [["train/sampled_logp", "as sampled"], ["train/logp", "by the estimator"], ["train/elbo", "lower bound"]],
      },
      { title: "KL", note: "to the reference, at the states scored", lines: [["train/kl", "base"], ["train/branch_kl", "branches"]] },
      { title: "Clipped", note: "share of clipped ratios", lines: [["train/clipped", "base"], ["train/branch_clipped", "branches"]] },
      { title: "Ratio", note: "new policy / old policy, mean", lines: [["train/ratio", "base"], ["train/branch_ratio", "branches"]] },
      {
        title: "Cache mismatch",
        note: "nats between the sampler and the policy",
        lines: [
          ["train/cache_mismatch", "mean"],
          ["train/cache_mismatch_max", "largest"],
          ["train/scorer_gap", "without a cache"],
        ],
      },
    ],
  },
  {
    title: "Signal",
    panels: [
      { title: "Groups without signal", note: "all rewards are the same", lines: [["train/idle_groups", "groups"], ["train/branch_idle", "branches"]] },
      { title: "Loss", note: "its scale depends on the method", lines: [["train/loss", "base"], ["train/branch_loss", "branches"]] },
      { title: "Gradient norm", note: "before clipping", lines: [["train/grad_norm", "norm"]] },
      { title: "Tokens", note: "of a rollout", lines: [["train/tokens", "counted"], ["train/length", "to the first end token"]] },
      { title: "Ends", note: "empty completions, late end tokens", lines: [["train/empty", "empty"], ["train/late_eos", "late ends"]] },
      { title: "Learning rate", note: "", lines: [["train/lr", "rate"]] },
    ],
  },
  {
    title: "Cost",
    panels: [
      { title: "Seconds", note: "of an update", lines: [["time/rollout", "rollout"], ["time/update", "update"], ["time/*", ""]] },
      { title: "Throughput", note: "", lines: [["throughput/*", ""], ["speed/*", ""]] },
      { title: "Forward passes", note: "since the start", lines: [["cost/forwards", "passes"]] },
      { title: "Memory", note: "peak of an update, GiB", lines: [["memory/peak_gib", "GiB"]] },
    ],
  },
];

const INTERVAL = /^(.*)_(low|high)$/;

/** A metric that never changed is listed, not drawn; reward and solve rate are always drawn. */
const ALWAYS_DRAWN = /^(train|eval)\/(reward(?!\/)|solved)/;
const constant = (series: Series): boolean => series.y.length > 1 && series.y.every((y) => y === series.y[0]);

function matching(pattern: string, keys: readonly string[]): string[] {
  if (!pattern.endsWith("*")) return keys.includes(pattern) ? [pattern] : [];
  const begin = pattern.slice(0, -1);
  return keys.filter((key) => key.startsWith(begin)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function lineOf(key: string, pattern: string, label: string, every: ReadonlySet<string>): Line {
  const line: Line = { key, label: pattern.endsWith("*") ? label + key.slice(pattern.length - 1) : label };
  return every.has(`${key}_low`) && every.has(`${key}_high`) ? { ...line, low: `${key}_low`, high: `${key}_high` } : line;
}

/** The charts that these runs have data for, and the metrics that are constant and equal in all runs. */
export function sectionsOf(runs: readonly Run[]): { sections: Section[]; still: Map<string, number | null> } {
  const every = new Set(runs.flatMap((run) => Object.keys(run.metrics)));
  const still = new Map<string, number | null>();
  for (const key of every) {
    const present = runs.map((run) => run.metrics[key]).filter((series) => series !== undefined);
    const values = new Set(present.map((series) => series.y[0] ?? null));
    if (!ALWAYS_DRAWN.test(key) && present.every(constant) && values.size === 1) still.set(key, [...values][0]!);
  }
  const isEnd = (key: string) => INTERVAL.test(key) && every.has(key.replace(INTERVAL, "$1"));
  const left = new Set([...every].filter((key) => !isEnd(key) && !still.has(key)));
  const sections: Section[] = PLAN.map(({ title, panels }) => ({
    title,
    panels: panels.flatMap((plan) => {
      const lines = plan.lines.flatMap(([pattern, label]) =>
        matching(pattern, [...left]).map((key) => {
          left.delete(key);
          return lineOf(key, pattern, label, every);
        }),
      );
      return lines.length ? [{ title: plan.title, note: plan.note, lines }] : [];
    }),
  }));
  const rest = [...left].sort().map((key) => ({ title: key, note: "", lines: [lineOf(key, key, key, every)] }));
  return { sections: [...sections, { title: "Other", panels: rest }].filter(({ panels }) => panels.length), still };
}
