/** The page's address: links, the back button and reload work. */

import { signal } from "@preact/signals";

export type Route =
  | { at: "runs" }
  | { at: "trace"; run: number; id: string }
  | { at: "compare"; runs: [number, number] | null; left: Ref | null; right: Ref | null };

export interface Ref {
  run: number;
  id: string;
}

const encode = (ref: Ref) => `${ref.run}/${encodeURIComponent(ref.id)}`;

export const traceLink = (run: number, id: string): string => `#/trace/${encode({ run, id })}`;
export const compareLink = (left?: Ref, right?: Ref): string =>
  left && right ? `#/compare/${encode(left)}/${encode(right)}` : "#/compare";
/** Two runs side by side, at their first common prompt. */
export const runsLink = (left: number, right: number): string => `#/compare/${left}/${right}`;
export const RUNS = "#/";

function decode(text: string): string | null {
  try {
    return decodeURIComponent(text);
  } catch {
    return null;
  }
}

function refOf(run: string | undefined, id: string | undefined): Ref | null {
  const name = id === undefined ? null : decode(id);
  return run !== undefined && /^\d{1,4}$/.test(run) && name ? { run: Number(run), id: name } : null;
}

/** An unknown address leads to the runs. */
export function routeOf(hash: string): Route {
  const [place, ...rest] = hash.replace(/^#\/?/, "").split("/");
  const ref = refOf(rest[0], rest[1]);
  if (place === "trace" && ref) return { at: "trace", ...ref };
  if (place === "compare") {
    const [left, right] = [ref, refOf(rest[2], rest[3])];
    const numbers = left && right ? [left.run, right.run] : rest.filter((text) => /^\d{1,4}$/.test(text)).map(Number);
    const runs: [number, number] | null = numbers.length === 2 ? [numbers[0]!, numbers[1]!] : null;
    return left && right ? { at: "compare", runs, left, right } : { at: "compare", runs, left: null, right: null };
  }
  return { at: "runs" };
}

export const route = signal<Route>({ at: "runs" });

/** Follow the address bar. Going back restores the scroll position. */
export function follow(): void {
  history.scrollRestoration = "manual";
  const places = new Map<string, number>();
  let here = location.hash;
  let back = false;
  const go = () => {
    places.set(here, scrollY);
    here = location.hash;
    route.value = routeOf(here);
    const top = back ? (places.get(here) ?? 0) : 0;
    back = false;
    requestAnimationFrame(() => scrollTo({ top, behavior: "instant" }));
  };
  // A link fires popstate too; the browser's history fires it without a click before it.
  let clicked = false;
  addEventListener("click", (event) => (clicked = event.target instanceof Element && event.target.closest("a") !== null), true);
  addEventListener("popstate", () => {
    back = !clicked;
    clicked = false;
  });
  addEventListener("hashchange", go);
  route.value = routeOf(here);
}
