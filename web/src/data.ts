/** Reads the runs: from the page itself, or from its server. */

import { signal } from "@preact/signals";
import type { Index, Rollout, Trace } from "./types";

const POLL_MS = 3000;

export const index = signal<Index | null>(null);
/** Why there is nothing to show, or no update. */
export const trouble = signal("");

const traces = new Map<string, Promise<Trace>>();

function embedded(id: string): string | null {
  return document.getElementById(id)?.textContent ?? null;
}

/** Read the index from the page; poll the server while a run is live. */
export function start(): void {
  const text = embedded("unmask-data");
  if (text === null) {
    trouble.value = "This page has no run. Make one with `unmask view RUN`.";
    return;
  }
  index.value = JSON.parse(text) as Index;
  if (index.value.live) void poll("");
}

async function poll(tag: string): Promise<void> {
  let next = tag;
  try {
    if (!document.hidden) {
      const answer = await fetch("api/index", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        next = answer.headers.get("ETag") ?? "";
        index.value = (await answer.json()) as Index;
      }
      trouble.value = answer.ok || answer.status === 304 ? "" : `The server answered ${answer.status}.`;
    }
  } catch {
    trouble.value = "The server does not answer. The page shows the last known state and keeps trying.";
  }
  if (index.value?.live) setTimeout(() => void poll(next), POLL_MS);
}

/** One trace; it is read once. */
export function traceOf(run: number, id: string): Promise<Trace> {
  const key = `${run}/${id}`;
  let trace = traces.get(key);
  if (trace === undefined) {
    trace = read(run, id);
    traces.set(key, trace);
    trace.catch(() => traces.delete(key)); // the next visit tries again
  }
  return trace;
}

async function read(run: number, id: string): Promise<Trace> {
  const name = `trace-${run}-${id}`;
  if (embedded(name) === null && document.readyState === "loading") {
    await new Promise((parsed) => addEventListener("DOMContentLoaded", parsed, { once: true }));
  }
  const text = embedded(name);
  if (text !== null) return complete(JSON.parse(text) as Trace);
  if (!location.protocol.startsWith("http")) throw new Error(`This page has no trace ${id}.`);
  const answer = await fetch(`api/trace?run=${run}&id=${encodeURIComponent(id)}`);
  if (!answer.ok) throw new Error(`The server has no trace ${id} (it answered ${answer.status}).`);
  return complete((await answer.json()) as Trace);
}

const EMBEDDED = 'script[id^="trace-"]';
/** Groups of an exported page that are searched before the page is drawn again. */
const AT_ONCE = 20;

/** The groups with a completion that contains a text, as "run/id". */
export async function search(text: string, runs: Index["runs"]): Promise<ReadonlySet<string>> {
  if (document.querySelector(EMBEDDED) === null && location.protocol.startsWith("http")) {
    const answer = await fetch(`api/search?text=${encodeURIComponent(text)}`);
    if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
    return new Set(((await answer.json()) as [number, string][]).map(([run, id]) => `${run}/${id}`));
  }
  const matching = new Set<string>();
  const names = runs.flatMap((run, number) => run.traces.map(({ id }) => [number, id] as const));
  for (const [place, [run, id]] of names.entries()) {
    if (place % AT_ONCE === 0) await new Promise((next) => setTimeout(next));
    const trace = complete(JSON.parse(embedded(`trace-${run}-${id}`) ?? "{}") as Trace);
    if (trace.rollouts.some(({ tokens }) => tokens.join("").toLowerCase().includes(text.toLowerCase()))) matching.add(`${run}/${id}`);
  }
  return matching;
}

/** Fill in keys that a recorder left out. */
export function complete(trace: Trace): Trace {
  return { ...trace, rollouts: (trace.rollouts ?? []).map(completeRollout) };
}

function completeRollout(rollout: Partial<Rollout>): Rollout {
  const tokens = rollout.tokens ?? [];
  return {
    ...rollout,
    tokens,
    filled: rollout.filled ?? tokens.map(() => -1),
    p: rollout.p ?? tokens.map(() => null),
    counted: rollout.counted ?? tokens.map(() => 1),
    reward: rollout.reward ?? null,
    solved: rollout.solved ?? null,
  };
}
