/** The data of the page: the index of one or more runs, and traces, which are read one at a time. */

export interface Index {
  v: number;
  live: boolean;
  runs: Run[];
}

export interface Run {
  name: string;
  config: Record<string, unknown>;
  method: string;
  task: string;
  finished: Record<string, unknown> | null;
  /** Null for an evaluation. */
  updates: number | null;
  done: number;
  metrics: Record<string, Series>;
  /** Seconds of training by update, cumulative. */
  clock?: Series | undefined;
  /** When the metrics were last written, in seconds since 1970. */
  changed?: number | null;
  warnings: Warning[];
  errors: number;
  traces: Entry[];
}

export interface Series {
  x: number[];
  y: (number | null)[];
}

export interface Warning {
  step: number;
  name?: string;
  value?: number;
  bound?: number;
  message?: string;
}

export type Kind = "train" | "eval";

/** A trace as the index lists it. */
export interface Entry {
  id: string;
  kind: Kind;
  step: number;
  prompt: string;
  rewards: (number | null)[];
  /** Null if a run stored completions only. */
  solved: (boolean | null)[];
}

export interface Trace {
  id: string;
  kind: Kind;
  step: number;
  task: string;
  prompt: string;
  steps: number;
  temperature?: number | null;
  order?: string | null;
  answer?: string | null;
  sudoku?: Sudoku | null;
  rollouts: Rollout[];
}

export interface Sudoku {
  size: number;
  /** 0 for a hole. */
  puzzle: number[];
  /** The completion position of each cell; -1 if the completion does not have it. */
  cells: number[];
}

export interface Rollout {
  tokens: string[];
  special?: number[] | null;
  /** The step that filled it, from 0; -1: given; null: never filled. */
  filled: (number | null)[];
  block?: number[] | null;
  p: (number | null)[];
  counted: number[];
  weight?: (number | null)[] | null;
  reward: number | null;
  solved: boolean | null;
  advantage?: number | null;
  verdict?: string | null;
  /** Positions of Sudoku cells, if they differ from those of the other rollouts. */
  cells?: number[] | null;
  probes?: Probe[] | null;
  branches?: Branch[] | null;
  taught?: boolean | null;
  /** The expected reward before step 0, 1, ... and at the end; of credit audits. */
  values?: (number | null)[] | null;
}

/** A masked state at which the policy was scored, with its log-probabilities before the update. */
export interface Probe {
  term: number;
  masked: number[];
  asked: number[];
  share: (number | null)[];
  logp: (number | null)[];
  weight: number | null;
}

/** A one-shot filling of the state before step `at`. */
export interface Branch {
  at: number;
  reward: number | null;
  advantage: number | null;
  filled: Record<string, string>;
}
