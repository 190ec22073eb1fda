/** The recorded groups of a run, filtered. */

import { signal } from "@preact/signals";
import { EVERYTHING, type Filter, outcomeOf, passes } from "../filter";
import { atUpdate, count, number } from "../format";
import { search } from "../data";
import { traceLink } from "../route";
import type { Entry, Run } from "../types";

const PAGE = 50;

// Kept outside the component, so that the list is unchanged after a visit to a trace.
const filter = signal<Filter>(EVERYTHING);
const shown = signal(PAGE);

const wish = (change: Partial<Filter>) => {
  filter.value = { ...filter.value, ...change };
  shown.value = PAGE;
};
/** The groups that the search in completions found; null: no search. */
const matches = signal<ReadonlySet<string> | null>(null);
const sought = signal("");
const trouble = signal("");
let timer: ReturnType<typeof setTimeout> | undefined;

/** Search a moment after the last key. */
function seek(text: string, runs: readonly Run[]): void {
  sought.value = text;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    try {
      const result = text.trim() === "" ? null : await search(text.trim(), [...runs]);
      if (sought.value === text) [matches.value, trouble.value, shown.value] = [result, "", PAGE];
    } catch (error) {
      trouble.value = `The completions could not be searched. ${(error as Error).message}`;
    }
  }, 250);
}

const numberIn = (event: { currentTarget: HTMLInputElement }) =>
  event.currentTarget.value === "" ? null : Number(event.currentTarget.value);

function Filters({ runs, numbers }: Props) {
  const { kind, outcome, run, from, to, leastReward, mostReward, text } = filter.value;
  return (
    <form class="filters" role="search" aria-label="Samples" onSubmit={(event) => event.preventDefault()}>
      <label>
        From
        <select value={kind} onChange={(event) => wish({ kind: event.currentTarget.value as Filter["kind"] })}>
          <option value="">anywhere</option>
          <option value="eval">held-out problems</option>
          <option value="train">training batches</option>
        </select>
      </label>
      {numbers.length > 1 && (
        <label>
          Run
          <select value={run ?? ""} onChange={(event) => wish({ run: event.currentTarget.value === "" ? null : Number(event.currentTarget.value) })}>
            <option value="">all that are shown</option>
            {numbers.map((i) => <option value={i}>{runs[i]!.name}</option>)}
          </select>
        </label>
      )}
      <label>
        Outcome
        <select value={outcome} onChange={(event) => wish({ outcome: event.currentTarget.value as Filter["outcome"] })}>
          <option value="">any</option>
          <option value="solved">all solved</option>
          <option value="mixed">some solved</option>
          <option value="unsolved">none solved</option>
        </select>
      </label>
      <label>
        Updates from
        <input type="number" min={0} inputMode="numeric" value={from ?? ""} onInput={(event) => wish({ from: numberIn(event) })} />
      </label>
      <label>
        to
        <input type="number" min={0} inputMode="numeric" value={to ?? ""} onInput={(event) => wish({ to: numberIn(event) })} />
      </label>
      <label>
        Best reward from
        <input type="number" step="any" value={leastReward ?? ""} onInput={(event) => wish({ leastReward: numberIn(event) })} />
      </label>
      <label>
        to
        <input type="number" step="any" aria-label="Best reward to" value={mostReward ?? ""} onInput={(event) => wish({ mostReward: numberIn(event) })} />
      </label>
      <label class="wide">
        Prompt contains
        <input type="search" value={text} onInput={(event) => wish({ text: event.currentTarget.value })} />
      </label>
      <label class="wide">
        Completion contains
        <input type="search" value={sought.value} onInput={(event) => seek(event.currentTarget.value, runs)} />
      </label>
    </form>
  );
}

function Row({ entry, run, runs }: { entry: Entry; run: number; runs: readonly Run[] }) {
  const solved = entry.solved.filter(Boolean).length;
  const rewards = entry.rewards.filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const unknown = outcomeOf(entry) === "unknown";
  return (
    <li>
      <a href={traceLink(run, entry.id)} class={outcomeOf(entry)}>
        <span class="when">{atUpdate(runs[run], entry.step)}</span>
        <span class="kind">{entry.kind === "eval" ? "held out" : "training"}{runs.length > 1 && `, ${runs[run]!.name}`}</span>
        <code class="prompt">{entry.prompt}</code>
        <span class="dots" aria-hidden="true">
          {!unknown && entry.solved.slice(0, 16).map((one) => <i class={one ? "solved" : ""} />)}
        </span>
        <span class="sum">{!unknown && `${solved} of ${entry.solved.length} solved, `}reward {number(Number(mean.toPrecision(3)))}</span>
      </a>
    </li>
  );
}

interface Props {
  runs: readonly Run[];
  /** The numbers of the runs that are shown. */
  numbers: readonly number[];
}

export function Samples({ runs, numbers }: Props) {
  const all = numbers.flatMap((run) => runs[run]!.traces.map((entry) => ({ entry, run })));
  const [now, inCompletions] = [filter.value, matches.value];
  const asked = { ...now, run: now.run !== null && numbers.includes(now.run) ? now.run : null };
  const matching = all.filter(({ entry, run }) => passes(entry, run, asked) && (inCompletions?.has(`${run}/${entry.id}`) ?? true));
  if (all.length === 0) return <p class="quiet">No groups were recorded: train with trace_every=10.</p>;
  return (
    <>
      <Filters runs={runs} numbers={numbers} />
      {trouble.value && <p role="alert">{trouble.value}</p>}
      <p class="quiet" role="status">{matching.length === all.length ? count(all.length, "group") : `${matching.length} of ${count(all.length, "group")}`}</p>
      <ol class="samples">
        {matching.slice(0, shown.value).map(({ entry, run }) => <Row key={`${run}/${entry.id}`} entry={entry} run={run} runs={runs} />)}
      </ol>
      {matching.length > shown.value && (
        <button type="button" class="more" onClick={() => (shown.value += 4 * PAGE)}>
          Show {Math.min(4 * PAGE, matching.length - shown.value)} more
        </button>
      )}
    </>
  );
}
