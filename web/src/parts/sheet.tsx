/**
 * A canvas of tokens. It is laid out once; a step changes classes only, so nothing moves. A masked token has the size
 * of its final text.
 */

import { effect, type Signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { GIVEN, positionsByStep, visible } from "../state";
import type { Rollout } from "../types";

/** Keep the classes of the tokens up to date: `on` for written tokens, `now` for those of the last step. */
export function paint(cells: ArrayLike<Element>, rollout: Rollout, steps: number, done: Signal<number>): () => void {
  const byStep = positionsByStep(rollout.filled, steps);
  const each = (step: number, change: (cell: Element) => void) => {
    for (const position of byStep[step] ?? []) change(cells[position]!);
  };
  let shown = 0;
  return effect(() => {
    const to = done.value;
    each(shown - 1, (cell) => cell.classList.remove("now"));
    for (let step = Math.min(shown, to); step < Math.max(shown, to); step++) {
      each(step, (cell) => cell.classList.toggle("on", to > shown));
    }
    each(to - 1, (cell) => cell.classList.add("now"));
    shown = to;
  });
}

/** The classes that no step changes. */
function classOf(rollout: Rollout, position: number, special: ReadonlySet<number>): string {
  const block = rollout.block;
  return [
    "t",
    rollout.filled[position] === GIVEN ? "on given" : "",
    special.has(position) ? "end" : "",
    rollout.counted[position] ? "" : "uncounted",
    rollout.tokens[position]!.includes("\n") ? "broken" : "",
    block && position > 0 && block[position] !== block[position - 1] ? "edge" : "",
  ]
    .filter(Boolean)
    .join(" ");
}

interface SheetProps {
  rollout: Rollout;
  steps: number;
  bins: (number | null)[];
  done: Signal<number>;
}

/** The tokens of a rollout, small. A screen reader reads the text next to it. */
export const Miniature = memo(function Miniature({ rollout, steps, bins, done }: SheetProps) {
  const box = useRef<HTMLDivElement>(null);
  const special = new Set(rollout.special ?? []);
  useLayoutEffect(() => paint(box.current!.children, rollout, steps, done), [rollout, steps, done]);
  return (
    <div class="mini" ref={box} aria-hidden="true">
      {rollout.tokens.map((token, i) => (
        <span class={classOf(rollout, i, special)} data-k={bins[i] ?? undefined}>
          {visible(token)}
        </span>
      ))}
    </div>
  );
});

interface FullProps extends SheetProps {
  id: string;
  label: string;
  cursor: Signal<number | null>;
}

/** The tokens of a rollout, large, with a cursor that follows the pointer and the arrow keys. */
export const Sheet = memo(function Sheet({ rollout, steps, bins, done, id, label, cursor }: FullProps) {
  const box = useRef<HTMLDivElement>(null);
  const special = new Set(rollout.special ?? []);
  useLayoutEffect(() => paint(box.current!.children, rollout, steps, done), [rollout, steps, done]);
  return (
    <Pointed box={box} id={id} label={label} cursor={cursor} length={rollout.tokens.length}>
      {rollout.tokens.map((token, i) => (
        <span role="option" id={`${id}-${i}`} class={classOf(rollout, i, special)} data-i={i} data-k={bins[i] ?? undefined}>
          {visible(token)}
        </span>
      ))}
    </Pointed>
  );
});

/** One token of a fixed state. */
export interface Still {
  text: string;
  class: string;
  bin: number | null;
}

/** A fixed state: a branch or a probe. */
export function StillSheet(props: { tokens: Still[]; id: string; label: string; cursor: Signal<number | null> }) {
  const box = useRef<HTMLDivElement>(null);
  return (
    <Pointed box={box} id={props.id} label={props.label} cursor={props.cursor} length={props.tokens.length}>
      {props.tokens.map((token, i) => (
        <span role="option" id={`${props.id}-${i}`} class={`t ${token.class}`} data-i={i} data-k={token.bin ?? undefined}>
          {visible(token.text)}
        </span>
      ))}
    </Pointed>
  );
}

interface PointedProps {
  box: { current: HTMLDivElement | null };
  id: string;
  label: string;
  cursor: Signal<number | null>;
  length: number;
  children: ComponentChildren;
}

/** Up to this many tokens a completion is set in a larger font. */
const SHORT = 32;

const MOVES: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 };

function Pointed({ box, id, label, cursor, length, children }: PointedProps) {
  useEffect(() => {
    let marked: Element | null = null;
    return effect(() => {
      marked?.removeAttribute("aria-selected");
      marked = cursor.value === null ? null : (box.current?.children[cursor.value] ?? null);
      marked?.setAttribute("aria-selected", "true");
      if (marked) box.current?.setAttribute("aria-activedescendant", marked.id);
    });
  }, [box, cursor, id]);
  const point = (event: Event) => {
    const token = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-i]") : null;
    if (token) cursor.value = Number(token.dataset["i"]);
  };
  const move = (event: KeyboardEvent) => {
    const by = MOVES[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere the arrows go from step to step
    cursor.value = Math.min(length - 1, Math.max(0, (cursor.value ?? -Math.max(by, 0)) + by));
  };
  return (
    <div
      ref={box}
      class={length <= SHORT ? "sheet short" : "sheet"}
      role="listbox"
      tabIndex={0}
      aria-label={label}
      aria-describedby={`${id}-about`}
      onPointerOver={point}
      onClick={point}
      onKeyDown={move}
      onFocus={() => (cursor.value ??= 0)}
    >
      {children}
    </div>
  );
}
