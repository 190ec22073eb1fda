/** Two completions of one prompt, side by side: of two runs, or of one run before and after training. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { limitsOf, type Colouring, type Limits } from "../colour";
import { atUpdate, number } from "../format";
import { useKeys } from "../keys";
import { firstPair, pairings, type Pairing, type Side } from "../match";
import { Tabs } from "../parts/group";
import { Choice, Coloured, Legend, usedFor } from "../parts/legend";
import { Prompt, useTrace, Waiting } from "../parts/loaded";
import { Controls } from "../parts/player";
import { Facts, Focus, reading, ReadingChoice } from "../parts/rollout";
import { type Player, playerOf } from "../player";
import { compareLink, type Ref, runsLink } from "../route";
import { chosen as chosenRuns } from "../table";
import type { Run, Trace } from "../types";

const refOf = ({ run, entry }: Side): Ref => ({ run, id: entry.id });
const linkOf = ([left, right]: [Side, Side]): string => compareLink(refOf(left), refOf(right));
const is = (side: Side, ref: Ref | null): boolean => ref !== null && side.run === ref.run && side.entry.id === ref.id;

interface PageProps {
  all: readonly Run[];
  pair: [number, number] | null;
  left: Ref | null;
  right: Ref | null;
}

/** The two runs to compare: as the address says, else the first two that are chosen, else one run with itself. */
function pairOf(runs: readonly Run[], pair: PageProps["pair"]): [number, number] {
  if (pair && runs[pair[0]] && runs[pair[1]]) return pair;
  const [first, second] = chosenRuns(runs);
  return [first ?? 0, second ?? (runs.length === 2 ? 1 : (first ?? 0))];
}

export function ComparePage({ all: runs, pair, left, right }: PageProps) {
  const [one, other] = pairOf(runs, pair);
  const all = useMemo(() => pairings(runs, one, other), [runs, one, other]);
  return (
    <>
      <h1>{one === other ? "Before and after training" : `${runs[one]!.name} and ${runs[other]!.name}`}</h1>
      {runs.length > 1 && <RunPickers runs={runs} pair={[one, other]} />}
      {all.length > 0 ? (
        <Compared runs={runs} all={all} left={left} right={right} />
      ) : (
        <p>{one === other ? "No prompt of this run has two recorded groups. To compare two runs: unmask view A B." : "The two runs have no recorded prompt in common."}</p>
      )}
    </>
  );
}

function RunPickers({ runs, pair }: { runs: readonly Run[]; pair: [number, number] }) {
  return (
    <p class="picker">
      {(["Left", "Right"] as const).map((label, side) => (
        <label>
          {label}{" "}
          <select
            value={pair[side]}
            onChange={(event) => {
              const to = Number(event.currentTarget.value);
              location.hash = side === 0 ? runsLink(to, pair[1]) : runsLink(pair[0], to);
            }}
          >
            {runs.map((run, i) => <option value={i}>{run.name}</option>)}
          </select>
        </label>
      ))}
    </p>
  );
}

function Compared({ runs, all, left, right }: { runs: readonly Run[]; all: Pairing[]; left: Ref | null; right: Ref | null }) {
  const chosen = all.findIndex((one) => one.left.some((side) => is(side, left)) && one.right.some((side) => is(side, right)));
  const pairing = all[Math.max(0, chosen)]!;
  const [one, other] = chosen < 0 ? firstPair(pairing).map(refOf) : [left!, right!];
  return (
    <>
      <Problems all={all} at={Math.max(0, chosen)} />
      <SideBySide runs={runs} pairing={pairing} left={one!} right={other!} />
    </>
  );
}

function Problems({ all, at }: { all: Pairing[]; at: number }) {
  return (
    <p class="picker">
      <label>
        Prompt{" "}
        <select value={at} onChange={(event) => (location.hash = linkOf(firstPair(all[Number(event.currentTarget.value)]!)))}>
          {all.map((one, i) => <option value={i}>{`${one.kind === "eval" ? "held out" : "training"}: ${one.prompt}`}</option>)}
        </select>
      </label>
    </p>
  );
}

function SideBySide({ runs, pairing, left, right }: { runs: readonly Run[]; pairing: Pairing; left: Ref; right: Ref }) {
  const sides = [useTrace(left), useTrace(right)];
  const missing = sides.find((loaded) => loaded === null || "error" in loaded);
  if (missing !== undefined) return <Waiting loaded={missing} />;
  const [one, other] = sides.map((loaded) => (loaded as { trace: Trace }).trace);
  return <Stage key={`${left.run}/${left.id}/${right.run}/${right.id}`} runs={runs} pairing={pairing} refs={[left, right]} traces={[one!, other!]} />;
}

function Stage(props: { runs: readonly Run[]; pairing: Pairing; refs: [Ref, Ref]; traces: [Trace, Trace] }) {
  const { runs, pairing, refs, traces } = props;
  const steps = Math.max(traces[0].steps, traces[1].steps);
  const player = useMemo(() => playerOf(steps), [steps]);
  const rollouts = useMemo(() => traces.flatMap((trace) => trace.rollouts), traces);
  const limits = useMemo(() => limitsOf(rollouts, steps), [rollouts, steps]);
  const [focused, setFocused] = useState<[number, number]>([0, 0]);
  useEffect(() => player.stop, [player]);
  const turn = (side: number, to: number) => setFocused(([a, b]) => (side === 0 ? [to, b] : [a, to]));
  useKeys({
    player,
    reset: () => {},
    rollout: (by) => setFocused(([a, b]) => [a + by, b + by].map((n, i) => {
      const total = traces[i]!.rollouts.length;
      return (n + total) % total;
    }) as [number, number]),
  });
  const by = usedFor(rollouts);
  return (
    <Coloured by={by}>
      <Prompt text={traces[0].prompt} />
      {traces[0].prompt !== traces[1].prompt && <p role="alert">These two prompts have the same beginning but differ later.</p>}
      <div class="side-by-side">
        {([0, 1] as const).map((side) => (
          <SideOf
            key={side}
            runs={runs}
            trace={traces[side]}
            at={refs[side]}
            choices={side === 0 ? pairing.left : pairing.right}
            link={(to) => compareLink(side === 0 ? to : refs[0], side === 1 ? to : refs[1])}
            focused={focused[side]}
            focus={(to) => turn(side, to)}
            by={by}
            limits={limits}
            player={player}
          />
        ))}
      </div>
      <section class="stage" aria-label="Steps of both">
        {steps > 0 && <ReadingChoice />}
        {steps > 0 && !reading.value && <Controls player={player} marks={[]} />}
        {steps > 0 && !reading.value && (
          <div class="colours">
            <Choice rollouts={rollouts} />
            <Legend by={by} limits={limits} picture="steps" />
          </div>
        )}
      </section>
    </Coloured>
  );
}

interface SideProps {
  runs: readonly Run[];
  trace: Trace;
  at: Ref;
  choices: Side[];
  link: (to: Ref) => string;
  focused: number;
  focus: (rollout: number) => void;
  by: Colouring;
  limits: Limits;
  player: Player;
}

function SideOf({ runs, trace, at, choices, link, focused, focus, by, limits, player }: SideProps) {
  const rollout = trace.rollouts[focused];
  const name = runs[at.run]?.name ?? "";
  const solved = trace.rollouts.filter((one) => one.solved).length;
  return (
    <section class="side" aria-label={`${name}, ${atUpdate(runs[at.run], trace.step)}`}>
      <div class="heading">
        <h2>{name}</h2>
        <label>
          <span class="unseen">Time, {name}</span>
          <select value={at.id} onChange={(event) => (location.hash = link({ run: at.run, id: event.currentTarget.value }))}>
            {choices.map(({ entry }) => <option value={entry.id}>{atUpdate(runs[at.run], entry.step)}</option>)}
          </select>
        </label>
      </div>
      <p class="facts"><span>{solved} of {trace.rollouts.length} solved</span>{trace.order && <span>{trace.order}</span>}{trace.temperature != null && <span>temperature {number(trace.temperature)}</span>}</p>
      <Tabs trace={trace} focused={focused} focus={focus} />
      {rollout && (
        <>
          <Facts rollout={rollout} />
          <Focus id={`side-${at.run}-${at.id}`} trace={trace} rollout={rollout} by={by} limits={limits} player={player} picture={{ of: "steps" }} />
        </>
      )}
    </section>
  );
}
