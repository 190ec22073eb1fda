/** One rollout, large: its canvas, a line about the selected token, and its board. */

import { signal, type Signal, useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { binsOf, certaintyBin, type Colouring, type Limits } from "../colour";
import { count, number, signed } from "../format";
import type { Player } from "../player";
import { GIVEN, named, plainText, shownAfter, shownInBranch, shownInProbe, written } from "../state";
import { board, firstViolation, puzzleOf } from "../sudoku";
import type { Branch, Probe, Rollout, Sudoku, Trace } from "../types";
import { Board, SteppedBoard } from "./board";
import { Icon } from "./icons";
import { Sheet, type Still, StillSheet } from "./sheet";
import { Values } from "./values";

/** What the large canvas shows: the steps of the rollout, a branch or a probe. */
export type Picture = { of: "steps" } | { of: "branch"; number: number } | { of: "probe"; number: number };

function Outcome({ solved }: { solved: boolean }) {
  return (
    <span class={solved ? "outcome solved" : "outcome"}>
      <Icon name={solved ? "tick" : "cross"} />
      {solved ? "solved" : "not solved"}
    </span>
  );
}

/** Outcome, reward and advantage of a rollout. */
export function Facts({ rollout }: { rollout: Rollout }) {
  return (
    <p class="facts">
      {rollout.solved !== null && <Outcome solved={rollout.solved} />}
      <span>reward <b>{number(rollout.reward)}</b></span>
      {rollout.advantage != null && <span>advantage <b>{signed(rollout.advantage)}</b></span>}
      {rollout.taught === false && rollout.advantage != null && <span class="quiet">took no part in the update</span>}
    </p>
  );
}

function branchTokens(rollout: Rollout, branch: Branch): Still[] {
  return rollout.tokens.map((token, i) => {
    const filled = branch.filled[i];
    if (filled !== undefined) return { text: filled, class: "on updated", bin: null };
    return { text: token, class: written(rollout.filled[i], branch.at) ? "on plain" : "", bin: null };
  });
}

function probeTokens(rollout: Rollout, probe: Probe): Still[] {
  const masked = new Set(probe.masked);
  const asked = new Map(probe.asked.map((position, n) => [position, n]));
  return rollout.tokens.map((text, i) => {
    const n = asked.get(i);
    if (n !== undefined) return { text, class: "on asked", bin: certaintyBin(Math.exp(probe.logp[n] ?? 0)) };
    return { text, class: masked.has(i) ? "" : "on plain", bin: null };
  });
}

/** All facts about a token, for the current picture. */
function about(rollout: Rollout, position: number, done: number, steps: number, picture: Picture): string[] {
  const filled = rollout.filled[position];
  const words = [`position ${position + 1}`];
  if (rollout.block) words.push(`block ${(rollout.block[position] ?? 0) + 1}`);
  if (picture.of === "branch") {
    const branch = rollout.branches![picture.number]!;
    const text = branch.filled[position];
    return [...words, text === undefined ? "written before the branch" : `filled in one shot with “${named(text)}”, updated`];
  }
  if (picture.of === "probe") {
    const probe = rollout.probes![picture.number]!;
    const n = probe.asked.indexOf(position);
    if (n < 0) return [...words, probe.masked.includes(position) ? "masked, not scored" : "visible in this state"];
    const [share, logp] = [probe.share[n], probe.logp[n]];
    return [...words, "scored", `log-probability ${number(logp)}`, `probability ${number(Math.exp(logp ?? 0))}`, `share ${number(share)}`];
  }
  if (filled === null || filled === undefined) return [...words, "never filled"];
  if (filled === GIVEN) return [...words, "given, never masked"];
  words.push(written(filled, done) ? `written at step ${filled + 1} of ${steps}` : `masked until step ${filled + 1}`);
  words.push(`probability ${number(rollout.p[position])}`);
  if (rollout.weight) words.push(`credit ${number(rollout.weight[position])}`);
  words.push(rollout.counted[position] ? "counted" : "not counted");
  if (rollout.special?.includes(position)) words.push("end token");
  return words;
}

function TokenLine(props: { id: string; rollout: Rollout; player: Player; cursor: Signal<number | null>; picture: Picture }) {
  const { rollout, player, cursor, picture } = props;
  const at = cursor.value;
  const known = at !== null && at < rollout.tokens.length;
  return (
    <p class="token-line" id={`${props.id}-about`} aria-live="polite">
      {known ? (
        <>
          <code>{named(rollout.tokens[at]!)}</code>
          {about(rollout, at, player.done.value, player.steps, picture).map((words) => <span>{words}</span>)}
        </>
      ) : (
        <span>Point at a token, or press Tab to reach the canvas and use the arrow keys.</span>
      )}
    </p>
  );
}

function Canvas(props: FocusProps & { cursor: Signal<number | null> }) {
  const { id, rollout, trace, by, limits, player, cursor, picture } = props;
  const bins = useMemo(() => binsOf(rollout, by, limits), [rollout, by, limits]);
  const label = `Canvas of ${rollout.tokens.length} tokens`;
  if (picture.of === "branch") {
    return <StillSheet key="still" id={id} label={label} cursor={cursor} tokens={branchTokens(rollout, rollout.branches![picture.number]!)} />;
  }
  if (picture.of === "probe") {
    return <StillSheet key="still" id={id} label={label} cursor={cursor} tokens={probeTokens(rollout, rollout.probes![picture.number]!)} />;
  }
  return <Sheet key={trace.id + trace.rollouts.indexOf(rollout)} id={id} label={label} rollout={rollout} steps={player.steps} bins={bins} done={player.done} cursor={cursor} />;
}

interface FocusProps {
  id: string;
  trace: Trace;
  rollout: Rollout;
  by: Colouring;
  limits: Limits;
  player: Player;
  picture: Picture;
}

/** Whether completions are shown as plain text instead of a canvas of tokens. */
export const reading = signal(false);

export function ReadingChoice() {
  return (
    <div class="segments" role="group" aria-label="Show the completion as">
      {[["Tokens", false], ["Text", true]].map(([label, on]) => (
        <button type="button" aria-pressed={reading.value === on} title="Key t" onClick={() => (reading.value = on === true)}>{label}</button>
      ))}
    </div>
  );
}

export function Focus(props: FocusProps) {
  const { trace, rollout } = props;
  const puzzle = useMemo(() => puzzleOf(trace, rollout), [trace, rollout]);
  const cursor = useSignal<number | null>(null);
  if (reading.value || trace.steps === 0) {
    return (
      <div class="focus">
        <div class="canvas">
          <article class="reading" aria-label="Completion">{plainText(rollout) || "(empty)"}</article>
          {rollout.verdict && <p class="verdict"><b>Verdict</b> {rollout.verdict}</p>}
        </div>
      </div>
    );
  }
  return (
    <div class={puzzle ? "focus with-board" : "focus"}>
      <div class="canvas">
        <Canvas {...props} cursor={cursor} />
        <TokenLine id={props.id} rollout={rollout} player={props.player} cursor={cursor} picture={props.picture} />
        {rollout.values && <Values values={rollout.values} player={props.player} />}
        {rollout.verdict && <p class="verdict"><b>Verdict</b> {rollout.verdict}</p>}
      </div>
      {puzzle && <BoardOf {...props} sudoku={puzzle} />}
    </div>
  );
}

function BoardOf({ sudoku, rollout, picture, player }: FocusProps & { sudoku: Sudoku }) {
  const first = useMemo(() => firstViolation(sudoku, rollout), [sudoku, rollout]);
  if (picture.of !== "steps") {
    const shown = picture.of === "branch"
      ? shownInBranch(rollout, rollout.branches![picture.number]!)
      : shownInProbe(rollout, rollout.probes![picture.number]!);
    const wrong = board(sudoku, shown).filter((cell) => cell.wrong).length;
    return (
      <div class="board-of">
        <Board sudoku={sudoku} shown={shown} />
        <p class={wrong ? "rule broken" : "rule kept"}>{wrong ? `${count(wrong, "cell")} in conflict` : "No rule broken"}</p>
      </div>
    );
  }
  return (
    <div class="board-of">
      <SteppedBoard sudoku={sudoku} rollout={rollout} done={player.done} />
      <p class={first === null ? "rule kept" : "rule broken"}>
        {first === null ? "No rule broken" : first === 0 ? "The clues break a rule" : (
          <button type="button" class="link" onClick={() => player.go(first)}>First violation at step {first}</button>
        )}
      </p>
    </div>
  );
}

/** A step in words. */
export function described(rollout: Rollout, done: number, steps: number): string {
  const shown = shownAfter(rollout, done);
  const positions = rollout.tokens.map((_, i) => i);
  const fresh = positions.filter((i) => rollout.filled[i] === done - 1).map((i) => named(rollout.tokens[i]!));
  const total = positions.filter((i) => shown(i) !== null).length;
  const wrote = fresh.length === 0 ? "" : ` New: ${fresh.slice(0, 12).join(", ")}${fresh.length > 12 ? " and more" : ""}.`;
  return `Step ${done} of ${steps}. ${total} of ${positions.length} tokens written.${wrote}`;
}
