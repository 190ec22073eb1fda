/** A chart of one or more metrics, of one or more runs. */

import { effect, useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { Line, Panel } from "../curves";
import { number } from "../format";
import { AXES, axis, logarithmic, MANY, nearestKnown, placer, range, smoothed, smoothing, weightFor } from "../plotting";
import { theme } from "../theme";
import type { Run, Series } from "../types";

const HEIGHT = { small: 190, large: 380 };

// Distinct in both themes and for colour-blind readers.
const LINES = {
  light: ["#1f5fa8", "#b04a00", "#2f7d5b", "#7d4a9c", "#b3261e", "#007a87", "#b0307c", "#6f6a00", "#7a4b2a", "#5f6368"],
  dark: ["#7db4f0", "#f0a05a", "#6fc79c", "#c79be0", "#f28b82", "#5fc9d6", "#f08fc7", "#c9c35a", "#c9a27e", "#a8abb2"],
};
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3], [1, 5]];

/** The colour of the n-th run or metric. */
export const lineColour = (n: number): string => LINES[theme.value][n % LINES.light.length]!;

interface Drawn {
  line: Line;
  run: Run;
  series: Series;
  /** The values that are drawn: smoothed, or as measured. */
  y: (number | null)[];
  label: string;
  colour: string;
  dash: number[];
  place: (update: number) => number;
}

/** A point of a chart that the pointer is near: the x of the pointer and, for each line, its nearest point. */
interface Pointed {
  x: number;
  values: { x: number; y: number | null }[];
}

/** One line for each metric of each run. Colours are for runs if there are several, else for metrics. */
function drawnOf(panel: Panel, runs: readonly Run[], colourOf: (run: Run) => number): Drawn[] {
  const several = runs.length > 1;
  return runs.flatMap((run) =>
    panel.lines.flatMap((line, l) => {
      const [series, place] = [run.metrics[line.key], placer(run, axis.value)];
      if (series === undefined || place === null) return [];
      const label = !several ? line.label : panel.lines.length > 1 ? `${run.name}: ${line.label}` : run.name;
      const n = several ? colourOf(run) : l;
      const dash = DASHES[(several ? l + Math.floor(n / LINES.light.length) : 0) % DASHES.length]!;
      const y = smoothed(series.y, weightFor(series.x.length));
      return [{ line, run, series, y, label, colour: lineColour(n), dash, place }];
    }),
  );
}

interface Tables {
  data: uPlot.AlignedData;
  series: uPlot.Series[];
  bands: uPlot.Band[];
  /** The series of each drawn line: the line itself, then what belongs to it. */
  groups: number[][];
}

/** Lines on one common x. A smoothed line has the measured values behind it; an interval is a band. */
function tablesOf(drawn: readonly Drawn[], log: boolean): Tables {
  const tables: uPlot.AlignedData[] = [];
  const [series, bands, groups]: [uPlot.Series[], uPlot.Band[], number[][]] = [[{}], [], []];
  const add = (x: number[], y: readonly (number | null)[], options: uPlot.Series) => {
    tables.push([x, log ? y.map((value) => (value !== null && value > 0 ? value : null)) : [...y]]);
    series.push({ spanGaps: true, points: { show: false }, ...options });
    return series.length - 1;
  };
  for (const { line, run, series: { x, y: measured }, y, label, colour, dash, place } of drawn) {
    const [places, parts]: [number[], number[]] = [x.map(place), []];
    if (weightFor(x.length) > 0) parts.push(add(places, measured, { label: "", stroke: `${colour}40`, width: 1 }));
    const points = { show: x.length < MANY, size: 5, fill: colour };
    const number = add(places, y, { label, stroke: colour, width: 1.75, dash, points });
    const [low, high] = [run.metrics[line.low ?? ""], run.metrics[line.high ?? ""]];
    if (low && high) {
      const ends = [high, low].map((end) => add(end.x.map(place), end.y, { label: "" }));
      bands.push({ series: ends as [number, number], fill: `${colour}22` });
      parts.push(...ends);
    }
    groups.push([number, ...parts]);
  }
  return { data: uPlot.join(tables), series, bands, groups };
}

function optionsOf(tables: Tables, size: { width: number; height: number }, log: boolean, onPoint: (at: Pointed | null) => void): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const [ink, rule] = [style.getPropertyValue("--quiet"), style.getPropertyValue("--rule")];
  const shared = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const values = (_: uPlot, ticks: (number | null)[]) => ticks.map((tick) => (tick === null ? "" : number(tick)));
  const lines = tables.groups.map(([line]) => line!);
  const hovered = new Set(lines);
  const nearest = (plot: uPlot, s: number, from: number, x: number) =>
    hovered.has(s) ? nearestKnown(plot.data[0], plot.data[s]!, from, x) : null;
  const report = (plot: uPlot) => {
    const { idx, idxs } = plot.cursor;
    if (idx == null) return onPoint(null);
    const points = lines.map((s) => {
      const i = idxs?.[s] ?? null;
      return i === null ? { x: 0, y: null } : { x: plot.data[0][i]!, y: plot.data[s]![i] ?? null };
    });
    onPoint({ x: plot.data[0][idx]!, values: points });
  };
  const zoom = (plot: uPlot) => {
    const { left, width } = plot.select;
    if (width < 5) return;
    range.value = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  };
  return {
    ...size,
    series: tables.series,
    bands: tables.bands,
    legend: { show: false },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...shared, grid: { show: false }, size: 28, values }, { ...shared, size: 52, values }],
    cursor: {
      sync: { key: "curves", scales: ["x", null], filters: { pub: (type) => type.startsWith("mousemove") || type === "mouseleave", sub: () => true } },
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: false },
      dataIdx: nearest,
      bind: { dblclick: () => () => ((range.value = null), null) },
    },
    hooks: { setCursor: [report], setSelect: [zoom] },
  };
}

const lastOf = (values: readonly (number | null)[]): number | null => values.findLast((y) => y !== null) ?? null;

const summary = ({ label, series }: Drawn): string =>
  `${label} from ${number(series.y.find((y) => y !== null))} to ${number(lastOf(series.y))}`;

interface Props {
  panel: Panel;
  runs: readonly Run[];
  colourOf: (run: Run) => number;
}

export function Chart({ panel, runs, colourOf }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const at = useSignal<Pointed | null>(null);
  const [large, enlarge] = useState(false);
  const [hidden, hide] = useState<ReadonlySet<string>>(new Set());
  const by = axis.value;
  const drawn = useMemo(() => drawnOf(panel, runs, colourOf), [panel, runs, colourOf, by, theme.value, smoothing.value]);
  const positive = drawn.some(({ series }) => series.y.some((y) => y !== null && y > 0));
  const log = logarithmic.value && positive;
  const height = large ? HEIGHT.large : HEIGHT.small;
  const tables = useMemo(() => tablesOf(drawn, log), [drawn, log]);
  useEffect(() => {
    const place = box.current;
    if (place === null) return;
    const made = (plot.current = new uPlot(optionsOf(tables, { width: place.clientWidth, height }, log, (to) => (at.value = to)), tables.data, place));
    const watch = new ResizeObserver(() => made.setSize({ width: place.clientWidth, height }));
    watch.observe(place);
    const stop = effect(() => {
      if (range.value === null) made.setData(made.data, true);
      else made.setScale("x", { min: range.value[0], max: range.value[1] });
    });
    return () => {
      stop();
      watch.disconnect();
      made.destroy();
    };
  }, [tables, log, height, at]);
  useEffect(() => {
    plot.current?.batch((made: uPlot) => {
      drawn.forEach((one, i) => tables.groups[i]!.forEach((s) => made.setSeries(s, { show: !hidden.has(one.label) })));
    });
  }, [tables, log, height, hidden]);
  const toggle = (label: string) => hide(hidden.has(label) ? new Set([...hidden].filter((one) => one !== label)) : new Set([...hidden, label]));
  if (drawn.length === 0) return null;
  return (
    <figure class={large ? "chart large" : "chart"}>
      <figcaption>
        <b>{panel.title}</b> <span class="quiet">{panel.note}{logarithmic.value && !positive && " (no positive values: linear axis)"}</span>
        <button type="button" class="plain enlarge" aria-pressed={large} aria-label={`${large ? "Smaller" : "Larger"}: ${panel.title}`} onClick={() => enlarge(!large)}>
          {large ? "Smaller" : "Larger"}
        </button>
      </figcaption>
      <div class="plot-box">
        <div ref={box} class="plot" role="img" aria-label={`${panel.title} over ${AXES[by].label}: ${drawn.map(summary).join("; ")}`} />
        {at.value && <output class="x">{AXES[by].unit} {number(at.value.x)}</output>}
      </div>
      <ul class="keys">
        {drawn.map((one, i) => (
          <li>
            <button type="button" aria-pressed={!hidden.has(one.label)} title="Show or hide" onClick={() => toggle(one.label)}>
              <svg viewBox="0 0 24 8" aria-hidden="true">
                <line x1="0" y1="4" x2="24" y2="4" stroke={one.colour} stroke-width="2.5" stroke-dasharray={one.dash.join(" ")} />
              </svg>
              {one.label}
            </button>{" "}
            <ValueOf point={at.value?.values[i]} x={at.value?.x} last={lastOf(one.y)} />
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** The value of the point that is marked in the chart, with its x if it is not that of the pointer; else the last value. */
function ValueOf({ point, x, last }: { point: Pointed["values"][number] | undefined; x: number | undefined; last: number | null }) {
  if (point === undefined) return <b>{number(last)}</b>;
  return <><b>{number(point.y)}</b>{point.y !== null && point.x !== x && <span class="quiet"> at {number(point.x)}</span>}</>;
}
