/** Icons, in the colour of the text. Their buttons have labels. */

const PATHS = {
  play: "M7 4.5v15l12-7.5z",
  pause: "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z",
  back: "M15 5l-7 7 7 7",
  forward: "M9 5l7 7-7 7",
  first: "M18 5l-7 7 7 7M6.5 5v14",
  last: "M6 5l7 7-7 7M17.5 5v14",
  light: "M12 7.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  dark: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16M12 4v16",
  tick: "M5 12.5l4.5 4.5L19 7",
  cross: "M6.5 6.5l11 11M17.5 6.5l-11 11",
} as const;

const SOLID: ReadonlySet<string> = new Set(["play", "pause"]);

export function Icon({ name }: { name: keyof typeof PATHS }) {
  const solid = SOLID.has(name);
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} fill={solid ? "currentColor" : "none"} stroke={solid ? "none" : "currentColor"} />
    </svg>
  );
}
