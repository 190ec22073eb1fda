/** A trace that may still be loading. */

import { useEffect, useState } from "preact/hooks";
import { traceOf } from "../data";
import type { Ref } from "../route";
import type { Trace } from "../types";

export type Loaded = { trace: Trace } | { error: string } | null;

export function useTrace(ref: Ref | null): Loaded {
  const [state, set] = useState<{ key: string; loaded: Loaded }>({ key: "", loaded: null });
  const key = ref ? `${ref.run}/${ref.id}` : "";
  useEffect(() => {
    if (!ref) return;
    let wanted = true;
    const keep = (loaded: Loaded) => wanted && set({ key, loaded });
    traceOf(ref.run, ref.id).then(
      (trace) => keep({ trace }),
      (error: Error) => keep({ error: error.message }),
    );
    return () => {
      wanted = false;
    };
  }, [key]);
  return state.key === key ? state.loaded : null;
}

export function Waiting({ loaded }: { loaded: Loaded }) {
  return loaded && "error" in loaded ? <p role="alert">{loaded.error}</p> : <p class="quiet">Loading the trace …</p>;
}

/** The prompt as text; a long one is folded. */
export function Prompt({ text }: { text: string }) {
  const body = <pre class="prompt-text" tabIndex={0} role="region" aria-label="Prompt">{text}</pre>;
  if (text.length <= 500 && text.split("\n").length <= 12) return body;
  return (
    <details class="long-prompt">
      <summary>Prompt <span class="quiet">{text.slice(0, 90)} …</span></summary>
      {body}
    </details>
  );
}
