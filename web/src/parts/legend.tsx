/** The colours of tokens: choice and legend. */

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { type Colouring, inkOn, type Limits, missing, PALETTES } from "../colour";
import { number, signed } from "../format";
import { theme } from "../theme";
import type { Rollout } from "../types";

/** The reader's choice, kept from trace to trace. */
export const colouring = signal<Colouring>("step");

export const COLOURINGS: { name: Colouring; label: string; letter: string }[] = [
  { name: "step", label: "Step", letter: "s" },
  { name: "p", label: "Probability", letter: "p" },
  { name: "weight", label: "Credit", letter: "w" },
  { name: "gain", label: "Advantage × credit", letter: "a" },
];

/** The colouring in use: the reader's choice, or the step if these rollouts have no such values. */
export const usedFor = (rollouts: readonly Rollout[]): Colouring =>
  missing(colouring.value, rollouts) === null ? colouring.value : "step";

/** A part of the page with one colouring. */
export function Coloured({ by, children }: { by: Colouring; children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const colours = PALETTES[by][theme.value];
  useLayoutEffect(() => {
    colours.forEach((colour, i) => {
      box.current!.style.setProperty(`--k${i}`, colour);
      box.current!.style.setProperty(`--i${i}`, inkOn(colour));
    });
  }, [colours]);
  return <div ref={box} class="coloured">{children}</div>;
}

const MEANING: Record<Colouring, string> = {
  step: "when the token was written",
  p: "probability of the token when it was sampled",
  weight: "credit of the token, mean 1",
  gain: "how much the update raised or lowered the token",
};

function ends(by: Colouring, limits: Limits): [string, string, string] {
  if (by === "step") return ["step 1", "", `step ${limits.steps}`];
  if (by === "p") return ["0", "0.5", "1"];
  if (by === "weight") return [number(1 - limits.weight), "1", number(1 + limits.weight)];
  return [signed(-limits.gain), "0", signed(limits.gain)];
}

/** Why a colouring cannot be chosen in this picture; null if it can. */
function unavailable(name: Colouring, rollouts: readonly Rollout[], picture: Picture): string | null {
  if (picture === "branch") return "the colours of a branch show which tokens were filled";
  if (picture === "probe" && name !== "p") return "a scored state is coloured by probability";
  return missing(name, rollouts);
}

export function Choice({ rollouts, picture = "steps" }: { rollouts: readonly Rollout[]; picture?: Picture }) {
  const used = picture === "branch" ? null : picture === "probe" ? "p" : usedFor(rollouts);
  return (
    <div class="segments" role="group" aria-label="Colour tokens by">
      {COLOURINGS.map(({ name, label, letter }, i) => {
        const why = unavailable(name, rollouts, picture);
        return (
          <button
            type="button"
            aria-pressed={used === name}
            disabled={why !== null}
            title={why ?? `Keys ${i + 1} and ${letter}`}
            onClick={() => (colouring.value = name)}
          >
            {label}
          </button>
        );
      })}
    </div>
  );
}

type Picture = "steps" | "branch" | "probe";

interface LegendProps {
  by: Colouring;
  limits: Limits;
  picture: Picture;
}

export function Legend({ by, limits, picture }: LegendProps) {
  const [low, middle, high] = ends(by, limits);
  if (picture === "branch") {
    return (
      <ul class="legend signs">
        <li><span class="t on plain">x</span> written before</li>
        <li><span class="t on updated">x</span> filled in one shot, updated</li>
      </ul>
    );
  }
  return (
    <div class="legend">
      <div class="scale">
        <div class="swatches" aria-hidden="true">
          {PALETTES[by][theme.value].map((_, i) => <span class="t on" data-k={i} />)}
        </div>
        <div class="ends"><span>{low}</span><span>{middle}</span><span>{high}</span></div>
      </div>
      <p class="meaning">{picture === "probe" ? "probability of the token in this masked state" : MEANING[by]}</p>
      <ul class="signs">
        <li><span class="t">x</span> masked</li>
        {picture === "probe" ? <li><span class="t on asked">x</span> scored</li> : <Signs />}
      </ul>
    </div>
  );
}

function Signs() {
  return (
    <>
      <li><span class="t on now">x</span> this step</li>
      <li><span class="t on given">x</span> given</li>
      <li><span class="t on end">end</span> end token</li>
      <li><span class="t on uncounted">x</span> not counted</li>
    </>
  );
}
