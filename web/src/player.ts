/** How many denoising steps are shown, and the timer that plays them. */

import { signal, type Signal } from "@preact/signals";

/** The time of a whole trace; a step takes at least 40 and at most 700 ms. */
const WHOLE_MS = 7000;

export interface Player {
  steps: number;
  done: Signal<number>;
  playing: Signal<boolean>;
  go(done: number): void;
  toggle(): void;
  stop(): void;
}

export const msPerStep = (steps: number): number => Math.min(700, Math.max(40, WHOLE_MS / Math.max(1, steps)));

export function playerOf(steps: number): Player {
  const done = signal(steps);
  const playing = signal(false);
  let timer: ReturnType<typeof setInterval> | undefined;

  const stop = () => {
    clearInterval(timer);
    playing.value = false;
  };
  const go = (to: number) => {
    done.value = Math.min(steps, Math.max(0, Math.round(to)));
  };
  const tick = () => {
    go(done.value + 1);
    if (done.value === steps) stop();
  };
  const toggle = () => {
    if (playing.value) return stop();
    if (done.value === steps) go(0);
    playing.value = true;
    timer = setInterval(tick, msPerStep(steps));
  };
  return { steps, done, playing, go, toggle, stop };
}
