/** A chart of one or more metrics, of one or more runs. */

import { useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import type { Line, Panel } from "../curves";
import { number } from "../format";
import { theme } from "../theme";
import type { Run, Series } from "../types";

const HEIGHT = 190;
const MANY = 40; // points of a line that is drawn without dots

// Distinct in both themes and for colour-blind readers.
const LINES = { light: ["#1f5fa8", "#b04a00", "#2f7d5b", "#7d4a9c", "#6b6f76"], dark: ["#7db4f0", "#f0a05a", "#6fc79c", "#c79be0", "#a8abb2"] };
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 5]];

interface Drawn {
  line: Line;
  run: Run;
  series: Series;
  label: string;
  colour: string;
  dash: number[];
}

/** One line for each metric of each run. Colours are for runs if there are several, else for metrics. */
function drawnOf(panel: Panel, runs: readonly Run[]): Drawn[] {
  const colours = LINES[theme.value];
  return runs.flatMap((run, r) =>
    panel.lines.flatMap((line, l) => {
      const series = run.metrics[line.key];
      if (series === undefined) return [];
      const several = runs.length > 1;
      const label = !several ? line.label : panel.lines.length > 1 ? `${run.name}: ${line.label}` : run.name;
      return [{ line, run, series, label, colour: colours[(several ? r : l) % 5]!, dash: several ? DASHES[l % 5]! : [] }];
    }),
  );
}

/** Lines on one common x, each followed by the ends of its interval, if it has one. */
function tablesOf(drawn: readonly Drawn[]): { data: uPlot.AlignedData; series: uPlot.Series[]; bands: uPlot.Band[] } {
  const tables: uPlot.AlignedData[] = [];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const add = (values: Series, options: uPlot.Series) => {
    tables.push([values.x, values.y]);
    series.push({ spanGaps: true, ...options });
  };
  for (const { line, run, series: values, label, colour, dash } of drawn) {
    add(values, { label, stroke: colour, width: 1.75, dash, points: { show: values.x.length < MANY, size: 5, fill: colour } });
    const [low, high] = [run.metrics[line.low ?? ""], run.metrics[line.high ?? ""]];
    if (low && high) {
      add(high, { label: "", points: { show: false } });
      add(low, { label: "", points: { show: false } });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${colour}22` });
    }
  }
  return { data: uPlot.join(tables), series, bands };
}

function optionsOf(drawn: readonly Drawn[], width: number, onPoint: (x: number | null) => void): [uPlot.Options, uPlot.AlignedData] {
  const { data, series, bands } = tablesOf(drawn);
  const style = getComputedStyle(document.documentElement);
  const [ink, rule] = [style.getPropertyValue("--quiet"), style.getPropertyValue("--rule")];
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const options: uPlot.Options = {
    width,
    height: HEIGHT,
    series,
    bands,
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [
      { ...axis, grid: { show: false }, size: 28 },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) },
    ],
    cursor: { sync: { key: "updates" }, y: false, points: { size: 7 }, drag: { x: false, y: false } },
    hooks: { setCursor: [(plot) => onPoint(plot.cursor.idx == null ? null : (plot.data[0][plot.cursor.idx] ?? null))] },
  };
  return [options, data];
}

/** The value of a series at x: the last one at or before it. */
export function valueAt(series: Series, x: number | null): number | null {
  if (x === null) return series.y.findLast((y) => y !== null) ?? null;
  const at = series.x.findLastIndex((place) => place <= x);
  return at < 0 ? null : (series.y[at] ?? null);
}

const summary = ({ label, series }: Drawn): string =>
  `${label} from ${number(series.y.find((y) => y !== null))} to ${number(valueAt(series, null))}`;

export function Chart({ panel, runs }: { panel: Panel; runs: readonly Run[] }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const at = useSignal<number | null>(null);
  const dark = theme.value;
  const drawn = useMemo(() => drawnOf(panel, runs), [panel, runs, dark]);
  useEffect(() => {
    const place = box.current!;
    const [options, data] = optionsOf(drawn, place.clientWidth, (x) => (at.value = x));
    const made = (plot.current = new uPlot(options, data, place));
    const watch = new ResizeObserver(() => made.setSize({ width: place.clientWidth, height: HEIGHT }));
    watch.observe(place);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [drawn, at]);
  return (
    <figure class="chart">
      <figcaption>
        <b>{panel.title}</b> <span class="quiet">{panel.note}</span>
      </figcaption>
      <div ref={box} class="plot" role="img" aria-label={`${panel.title} over updates: ${drawn.map(summary).join("; ")}`} />
      <ul class="keys">
        {drawn.map((one) => (
          <li>
            <svg viewBox="0 0 24 8" aria-hidden="true">
              <line x1="0" y1="4" x2="24" y2="4" stroke={one.colour} stroke-width="2.5" stroke-dasharray={one.dash.join(" ")} />
            </svg>
            {one.label} <b>{number(valueAt(one.series, at.value))}</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}
