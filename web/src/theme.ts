/** Light or dark: the system's wish, until the reader says otherwise. */

import { computed, effect, signal } from "@preact/signals";
import type { Theme } from "./colour";

export type Choice = Theme | "auto";

const KEY = "unmask-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);
system.addEventListener("change", (event) => (systemDark.value = event.matches));

// A page opened as a file may have no storage: the choice then lasts as long as the page.
function remembered(): Choice {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "auto";
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
    /* as above */
  }
}

effect(() => {
  document.documentElement.dataset["theme"] = theme.value;
});
