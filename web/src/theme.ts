/** Light or dark: the system's setting, unless the reader chooses. */

import { computed, effect, signal } from "@preact/signals";
import type { Theme } from "./colour";

export type Choice = Theme | "auto";

const KEY = "unmask-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", (event) => (systemDark.value = event.matches));

// A page opened as a file may have no storage: then the choice is lost on reload.
function remembered(): Choice {
  try {
    const stored = localStorage.getItem(KEY);
    return stored === "light" || stored === "dark" ? stored : "auto";
  } catch {
    return "auto";
  }
}

export const choice = signal<Choice>(remembered());
export const theme = computed<Theme>(() => (choice.value === "auto" ? (systemDark.value ? "dark" : "light") : choice.value));

export function choose(next: Choice): void {
  choice.value = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    /* no storage */
  }
}

effect(() => {
  document.documentElement.dataset["theme"] = theme.value;
});
