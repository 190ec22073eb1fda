/** How many steps of the denoising are done on the screen, and the clock that moves it. */

import { signal, type Signal } from "@preact/signals";

/** A whole trace plays in about this time, but no step is faster than a frame or slower than the eye likes. */
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
