/** Keyboard control of a trace. */

import { useEffect } from "preact/hooks";
import { COLOURINGS, colouring } from "./parts/legend";
import { reading } from "./parts/rollout";
import type { Player } from "./player";

export const HELP: [string, string][] = [
  ["Space", "play or pause"],
  ["← →", "one step back or forward"],
  ["Page Up, Page Down", "ten steps"],
  ["Home, End", "first and last state"],
  ["[ ]", "previous or next rollout"],
  ["1 2 3 4, or s p w a", "colour by step, probability, credit, advantage × credit"],
  ["t", "the completion as tokens or as text"],
  ["Tab to the canvas, then arrows", "from token to token"],
  ["Esc", "back to the rollout from a branch or a probe"],
  ["?", "this list"],
];

const TYPING = "input:not([type=range]), select, textarea";
const PRESSED = "button, a, summary, select, input";

export interface Actions {
  player: Player;
  rollout: (by: number) => void;
  reset: () => void;
}

function moveOf(key: string, player: Player): number | null {
  const at = player.done.value;
  const moves: Record<string, number> = {
    ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: player.steps,
  };
  return moves[key] ?? null;
}

/** Do what the key means; returns whether it means anything. */
function act(key: string, { player, rollout, reset }: Actions): boolean {
  const to = moveOf(key, player);
  const colour = COLOURINGS.find(({ letter }, i) => key === letter || key === String(i + 1));
  if (to !== null) {
    player.stop();
    player.go(to);
  } else if (colour) colouring.value = colour.name;
  else if (key === " ") player.toggle();
  else if (key === "t") reading.value = !reading.value;
  else if (key === "[" || key === "]") rollout(key === "]" ? 1 : -1);
  else if (key === "Escape") reset();
  else return false;
  return true;
}

export function useKeys(actions: Actions): void {
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const target = event.target instanceof Element ? event.target : document.body;
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (target.closest(TYPING) || target.closest("dialog") || (event.key === " " && target.closest(PRESSED))) return;
      if (act(event.key, actions)) event.preventDefault();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  });
}
