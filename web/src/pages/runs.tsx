/** The runs: settings, curves, warnings and samples. */

import { useCallback, useMemo } from "preact/hooks";
import { sectionsOf } from "../curves";
import { index } from "../data";
import { atUpdate, count, duration, number, percent } from "../format";
import { pairings } from "../match";
import { Chart } from "../parts/chart";
import { PlotOptions } from "../parts/options";
import { RunsTable } from "../parts/runs-table";
import { Samples } from "../parts/samples";
import { compareLink } from "../route";
import { budgetOf, chosen, ends, secondsOf, stateOf, timeLeft } from "../table";
import type { Run, Warning } from "../types";

const HEADLINES: [string, string][] = [
  ["eval/solved_greedy", "held out, greedy"],
  ["eval/solved_sampled", "held out, sampled"],
];

function Headline({ run }: { run: Run }) {
  return (
    <dl class="headline">
      {HEADLINES.map(([key, label]) => {
        const values = ends(run.metrics[key]);
        return values && (
          <div>
            <dt>{label}</dt>
            <dd>
              {run.updates !== null && <><span class="quiet">{percent(values[0])}</span> <span aria-label="to">→</span> </>}
              <b>{percent(values[1])}</b>
            </dd>
          </div>
        );
      })}
    </dl>
  );
}

/** How far the run is and, unless it is finished, how long it took and still takes. */
function progressOf(run: Run): string {
  const budget = budgetOf(run);
  if (budget === null) return stateOf(run);
  const left = timeLeft(run, index.value?.live ?? false);
  const times = left ? `: ${duration(secondsOf(run) ?? 0)} of training so far, ${left}` : "";
  return `${budget.done} of ${count(budget.total, ...budget.unit)}, ${stateOf(run)}${times}`;
}

function Card({ run }: { run: Run }) {
  const budget = budgetOf(run);
  return (
    <article class="run">
      <h2>{run.name}</h2>
      <p class="what"><span>{run.method}</span> <span class="quiet">on</span> <span>{run.task}</span></p>
      <Headline run={run} />
      <p class="progress">
        {budget !== null && <progress max={Math.max(1, budget.total)} value={budget.done} aria-label={`Progress of ${run.name}`} />}
        <span>{progressOf(run)}</span>
        {run.errors > 0 && <span>{count(run.errors, "reward")} failed</span>}
      </p>
    </article>
  );
}

/** Sections that are open at first. */
const OPEN: ReadonlySet<string> = new Set(["Learning", "Policy"]);

function Curves({ runs }: { runs: readonly Run[] }) {
  const { sections, still } = useMemo(() => sectionsOf(runs), [runs]);
  const colourOf = useCallback((run: Run) => runs.indexOf(run), [runs]);
  if (sections.length === 0) return <p class="quiet">Nothing has been measured yet.</p>;
  return (
    <>
      <PlotOptions runs={runs} />
      {sections.map((section) => (
        <details class="curves" key={section.title} open={OPEN.has(section.title)}>
          <summary><h3>{section.title}</h3></summary>
          <div class="charts">
            {section.panels.map((panel) => <Chart key={panel.title} panel={panel} runs={runs} colourOf={colourOf} />)}
          </div>
        </details>
      ))}
      {still.size > 0 && (
        <p class="still quiet">
          Constant: {[...still].map(([key, value]) => <span><code>{key}</code> {number(value)}</span>)}
        </p>
      )}
    </>
  );
}

function Warnings({ runs }: { runs: readonly Run[] }) {
  const all = runs.flatMap((run) => run.warnings.map((warning) => ({ run, warning })));
  if (all.length === 0) return null;
  const words = (warning: Warning) =>
    warning.message ?? `${warning.name ?? "warning"}: ${number(warning.value)} past ${number(warning.bound)}`;
  return (
    <section class="warnings">
      <h2>Warnings</h2>
      <ul>
        {all.map(({ run, warning }) => (
          <li>
            <b>{atUpdate(run, warning.step)}{runs.length > 1 && `, ${run.name}`}</b> {words(warning)}
          </li>
        ))}
      </ul>
    </section>
  );
}

/** A configuration as dotted keys, as on the command line. */
export function flat(config: unknown, prefix = ""): [string, string][] {
  if (config === null || typeof config !== "object" || Array.isArray(config)) {
    return prefix ? [[prefix, typeof config === "string" ? config : JSON.stringify(config)]] : [];
  }
  return Object.entries(config).flatMap(([key, value]) => flat(value, prefix ? `${prefix}.${key}` : key));
}

function Configuration({ runs }: { runs: readonly Run[] }) {
  const maps = runs.map((run) => new Map(flat(run.config)));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const differs = (key: string) => new Set(maps.map((map) => map.get(key))).size > 1;
  const ordered = [...keys.filter(differs), ...keys.filter((key) => !differs(key))];
  return (
    <details class="configuration">
      <summary>Configuration <span class="quiet">{runs.length > 1 ? `${count(keys.filter(differs).length, "key")} differ` : count(keys.length, "key")}</span></summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="Configuration">
        <table>
          <thead>
            <tr><th scope="col">key</th>{runs.map((run) => <th scope="col">{run.name}</th>)}</tr>
          </thead>
          <tbody>
            {ordered.map((key) => (
              <tr class={runs.length > 1 && differs(key) ? "differs" : ""}>
                <th scope="row">{key}</th>
                {maps.map((map) => <td>{map.get(key) ?? "–"}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

/** Up to this many runs have a card each; more are in a table. */
const CARDS = 2;

export function RunsPage({ runs: all }: { runs: readonly Run[] }) {
  const numbers = chosen(all);
  const runs = useMemo(() => numbers.map((i) => all[i]!), [all, numbers.join()]);
  const comparable = useMemo(() => runs.length < 3 && pairings(runs, 0, runs.length > 1 ? 1 : 0).length, [runs]);
  return (
    <>
      <h1 class="unseen">Training runs</h1>
      {all.length > CARDS ? <RunsTable runs={all} /> : <div class="runs">{runs.map((run) => <Card key={run.name} run={run} />)}</div>}
      <Warnings runs={runs} />
      <section>
        <h2>Curves</h2>
        <Curves runs={runs} />
      </section>
      <section>
        <div class="heading">
          <h2>Samples</h2>
          {comparable !== false && comparable > 0 && (
            <a href={compareLink()}>{runs.length > 1 ? "Both runs on the same prompts" : "The same prompts before and after training"}</a>
          )}
        </div>
        <Samples runs={all} numbers={numbers} />
      </section>
      <Configuration runs={runs} />
    </>
  );
}
