/** The rollouts of one prompt, side by side. */

import type { Signal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { binsOf, type Colouring, type Limits } from "../colour";
import type { Rollout, Trace } from "../types";
import { Facts } from "./rollout";
import { Miniature } from "./sheet";

interface Props {
  trace: Trace;
  by: Colouring;
  limits: Limits;
  steps: number;
  done: Signal<number>;
  focused: number;
  focus: (rollout: number) => void;
}

export function Group(props: Props) {
  return (
    <ol class="group">
      {props.trace.rollouts.map((rollout, i) => <Card key={i} {...props} rollout={rollout} number={i} />)}
    </ol>
  );
}

function Card({ rollout, number, by, limits, steps, done, focused, focus }: Props & { rollout: Rollout; number: number }) {
  const bins = useMemo(() => binsOf(rollout, by, limits), [rollout, by, limits]);
  return (
    <li class={focused === number ? "card chosen" : "card"} onClick={() => focus(number)}>
      <h3>
        <button type="button" aria-pressed={focused === number} onClick={() => focus(number)}>Rollout {number + 1}</button>
      </h3>
      <Facts rollout={rollout} />
      <Miniature rollout={rollout} steps={steps} bins={bins} done={done} />
    </li>
  );
}

/** The choice of a rollout, in little space. */
export function Tabs({ trace, focused, focus }: { trace: Trace; focused: number; focus: (rollout: number) => void }) {
  return (
    <div class="segments tabs" role="group" aria-label="Rollout">
      {trace.rollouts.map((rollout, i) => (
        <button
          type="button"
          aria-pressed={focused === i}
          aria-label={`Rollout ${i + 1}, ${rollout.solved ? "solved" : "not solved"}`}
          class={rollout.solved ? "solved" : ""}
          onClick={() => focus(i)}
        >
          {i + 1}
        </button>
      ))}
    </div>
  );
}
