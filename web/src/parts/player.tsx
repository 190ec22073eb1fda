/** Play, pause, and the slider of steps. */

import { useEffect, useState } from "preact/hooks";
import { effect } from "@preact/signals";
import { Icon } from "./icons";
import type { Player } from "../player";

/** A marked step on the slider. */
export interface Mark {
  at: number;
  kind: "branch" | "wrong";
  label: string;
}

export function Controls({ player, marks }: { player: Player; marks: Mark[] }) {
  const { done, playing, steps } = player;
  const go = (to: number) => {
    player.stop();
    player.go(to);
  };
  const at = done.value;
  return (
    <div class="player" role="group" aria-label="Denoising steps">
      <div class="buttons">
        <button type="button" onClick={() => go(0)} aria-label="To the start" title="Home"><Icon name="first" /></button>
        <button type="button" onClick={() => go(at - 1)} aria-label="One step back" title="Left arrow"><Icon name="back" /></button>
        <button type="button" class="main" onClick={player.toggle} aria-label={playing.value ? "Pause" : "Play"} title="Space">
          <Icon name={playing.value ? "pause" : "play"} />
        </button>
        <button type="button" onClick={() => go(at + 1)} aria-label="One step forward" title="Right arrow"><Icon name="forward" /></button>
        <button type="button" onClick={() => go(steps)} aria-label="To the end" title="End"><Icon name="last" /></button>
      </div>
      <div class="track">
        <input
          type="range"
          min={0}
          max={steps}
          step={1}
          value={at}
          aria-label="Steps done"
          aria-valuetext={`${at} of ${steps} steps done`}
          onInput={(event) => go(Number(event.currentTarget.value))}
        />
        <div class="marks" aria-hidden="true">
          {marks.map((mark) => (
            <span class={mark.kind} title={mark.label} style={{ left: `${(100 * mark.at) / Math.max(1, steps)}%` }} />
          ))}
        </div>
      </div>
      <output class="at">
        <b>{at}</b> <span>of {steps} steps</span>
      </output>
    </div>
  );
}

/** Announces steps to a screen reader, not while playing. */
export function Announcer({ player, describe }: { player: Player; describe: (done: number) => string }) {
  const [said, say] = useState("");
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let first = true;
    const dispose = effect(() => {
      const [at, moving] = [player.done.value, player.playing.value];
      clearTimeout(timer);
      if (!moving && !first) timer = setTimeout(() => say(describe(at)), 600);
      first = false;
    });
    return () => {
      clearTimeout(timer);
      dispose();
    };
  }, [player, describe]);
  return <div class="unseen" role="status" aria-live="polite">{said}</div>;
}
