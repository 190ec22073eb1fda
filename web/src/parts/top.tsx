/** The head of every page: navigation, theme, keys. */

import { useEffect, useRef } from "preact/hooks";
import { index, trouble } from "../data";
import { HELP } from "../keys";
import { compareLink, route, RUNS } from "../route";
import { type Choice, choice, choose } from "../theme";
import { Icon } from "./icons";

const NEXT: Record<Choice, Choice> = { auto: "light", light: "dark", dark: "auto" };
const NAMES: Record<Choice, string> = { auto: "system", light: "light", dark: "dark" };

function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const typing = event.target instanceof Element && event.target.closest("input, select, textarea");
      if (event.key === "?" && !typing && !dialog.current?.open) dialog.current?.showModal();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
  return (
    <>
      <button type="button" class="plain" onClick={() => dialog.current?.showModal()}>Keys</button>
      <dialog ref={dialog} aria-labelledby="help-title">
        <h2 id="help-title">Keys of a trace</h2>
        <dl class="help">
          {HELP.map(([key, what]) => <div><dt>{key}</dt><dd>{what}</dd></div>)}
        </dl>
        <button type="button" onClick={() => dialog.current?.close()}>Close</button>
      </dialog>
    </>
  );
}

export function Top() {
  const runs = index.value?.runs ?? [];
  const at = route.value.at;
  return (
    <header class="top">
      <a class="name" href={RUNS}>unmask</a>
      <nav aria-label="Pages">
        <a href={RUNS} aria-current={at === "runs" ? "page" : undefined}>{runs.length > 1 ? "Runs" : "Run"}</a>
        <a href={compareLink()} aria-current={at === "compare" ? "page" : undefined}>Compare</a>
      </nav>
      {index.value?.live && <span class="live">live</span>}
      <span class="room" />
      <Help />
      <button type="button" class="plain" onClick={() => choose(NEXT[choice.value])} aria-label={`Theme: ${NAMES[choice.value]}`} title={`Theme: ${NAMES[choice.value]}`}>
        <Icon name={choice.value} />
      </button>
      {trouble.value && <p class="trouble" role="alert">{trouble.value}</p>}
    </header>
  );
}
