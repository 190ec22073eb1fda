/** What the reader can choose for all charts. */

import { type Axis, AXES, axis, chooseAxis, logarithmic, placer, range, smoothing } from "../plotting";
import type { Run } from "../types";

const WEIGHTS = [0, 0.6, 0.9, 0.97, 0.99];

export function PlotOptions({ runs }: { runs: readonly Run[] }) {
  const missing = (name: Axis) => runs.every((run) => placer(run, name) === null);
  return (
    <form class="filters" aria-label="Curves" onSubmit={(event) => event.preventDefault()}>
      <label>
        x axis
        <select value={axis.value} onChange={(event) => chooseAxis(event.currentTarget.value as Axis)}>
          {Object.entries(AXES).map(([name, { label }]) => (
            <option value={name} disabled={missing(name as Axis)}>{label}</option>
          ))}
        </select>
      </label>
      <label>
        Smoothing
        <select
          value={smoothing.value ?? ""}
          onChange={(event) => (smoothing.value = event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}
        >
          <option value="">automatic</option>
          {WEIGHTS.map((weight) => <option value={weight}>{weight === 0 ? "none" : weight}</option>)}
        </select>
      </label>
      <label>
        y axis
        <select value={logarithmic.value ? "log" : ""} onChange={(event) => (logarithmic.value = event.currentTarget.value === "log")}>
          <option value="">linear</option>
          <option value="log">logarithmic</option>
        </select>
      </label>
      <p class="zoom quiet">
        {range.value === null ? "Drag in a chart to zoom." : <button type="button" onClick={() => (range.value = null)}>Show all (or double click)</button>}
      </p>
    </form>
  );
}
