/** All runs in a table that can be sorted. The chosen ones are drawn and listed below it. */

import { index } from "../data";
import { count, duration, number, percent } from "../format";
import { runsLink } from "../route";
import { budgetOf, choose, chooseOnly, chosen, type Column, ends, forwardsOf, order, secondsOf, sorted, stateOf, timeLeft } from "../table";
import type { Run } from "../types";
import { lineColour } from "./chart";

const COLUMNS: [Column, string][] = [
  ["name", "run"],
  ["method", "method"],
  ["task", "task"],
  ["sampled", "solved, sampled"],
  ["greedy", "solved, greedy"],
  ["done", "updates"],
  ["forwards", "forward passes"],
  ["seconds", "training"],
  ["status", "status"],
];

/** Columns whose largest values are shown first. */
const LARGEST_FIRST: ReadonlySet<Column> = new Set(["sampled", "greedy"]);

function sortBy(by: Column): void {
  const now = order.value;
  order.value = { by, descending: now.by === by ? !now.descending : LARGEST_FIRST.has(by) };
}

function Head({ by, label }: { by: Column; label: string }) {
  const now = order.value.by === by ? (order.value.descending ? "descending" : "ascending") : undefined;
  return (
    <th scope="col" aria-sort={now ?? "none"}>
      <button type="button" class="link" onClick={() => sortBy(by)}>{label}<span aria-hidden="true">{now === undefined ? "" : now === "ascending" ? " ↑" : " ↓"}</span></button>
    </th>
  );
}

function Solved({ run, metric }: { run: Run; metric: string }) {
  const values = ends(run.metrics[metric]);
  if (values === null) return <td>–</td>;
  const [before, after] = values;
  const several = run.metrics[metric]!.x.length > 1;
  return <td>{several && <><span class="quiet">{percent(before)}</span> → </>}<b>{percent(after)}</b></td>;
}

export function RunsTable({ runs }: { runs: readonly Run[] }) {
  const now = chosen(runs);
  return (
    <>
      <div class="heading">
        <p class="quiet">{count(runs.length, "run")}, {now.length} shown below</p>
        {now.length === 2 && <a href={runsLink(now[0]!, now[1]!)}>The two chosen runs side by side</a>}
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Runs">
        <table class="all-runs">
          <thead>
            <tr><th scope="col"><span class="unseen">show</span></th>{COLUMNS.map(([by, label]) => <Head by={by} label={label} />)}</tr>
          </thead>
          <tbody>
            {sorted(runs, order.value).map((i) => <Row key={runs[i]!.name} runs={runs} i={i} place={now.indexOf(i)} />)}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Row({ runs, i, place }: { runs: readonly Run[]; i: number; place: number }) {
  const run = runs[i]!;
  const budget = budgetOf(run);
  const inUpdates = budget?.unit[0] === "update";
  const left = timeLeft(run, index.value?.live ?? false);
  return (
    <tr>
      <td>
        <label class="choice">
          <input type="checkbox" checked={place >= 0} aria-label={`Show ${run.name}`} onChange={(event) => choose(runs, i, event.currentTarget.checked)} />
          <svg viewBox="0 0 16 8" aria-hidden="true">{place >= 0 && <line x1="0" y1="4" x2="16" y2="4" stroke={lineColour(place)} stroke-width="4" />}</svg>
        </label>
      </td>
      <th scope="row"><button type="button" class="link" title="Show this run only" onClick={() => chooseOnly(run)}>{run.name}</button></th>
      <td>{run.method}</td>
      <td>{run.task}</td>
      <Solved run={run} metric="eval/solved_sampled" />
      <Solved run={run} metric="eval/solved_greedy" />
      <td>{budget === null ? "–" : inUpdates ? `${run.done} of ${budget.total}` : run.done}</td>
      <td>{number(forwardsOf(run))}{budget !== null && !inUpdates && ` of ${number(budget.total)}`}</td>
      <td>{secondsOf(run) === null ? "–" : duration(secondsOf(run)!)}</td>
      <td>{stateOf(run)}{left && `, ${left}`}</td>
    </tr>
  );
}
