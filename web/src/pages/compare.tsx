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
import { Facts, Focus } from "../parts/rollout";
import { type Player, playerOf } from "../player";
import { compareLink, type Ref } from "../route";
import type { Run, Trace } from "../types";

const refOf = ({ run, entry }: Side): Ref => ({ run, id: entry.id });
const linkOf = ([left, right]: [Side, Side]): string => compareLink(refOf(left), refOf(right));
const is = (side: Side, ref: Ref | null): boolean => ref !== null && side.run === ref.run && side.entry.id === ref.id;

export function ComparePage({ runs, left, right }: { runs: readonly Run[]; left: Ref | null; right: Ref | null }) {
  const all = useMemo(() => pairings(runs, 0, runs.length > 1 ? 1 : 0), [runs]);
  const chosen = all.findIndex((one) => one.left.some((side) => is(side, left)) && one.right.some((side) => is(side, right)));
  if (all.length === 0) {
    return <p>{runs.length > 1 ? "The two runs have no recorded prompt in common." : "No prompt of this run has two recorded groups. To compare two runs: unmask view A B."}</p>;
  }
  const pairing = all[Math.max(0, chosen)]!;
  const [one, other] = chosen < 0 ? firstPair(pairing).map(refOf) : [left!, right!];
  return (
    <>
      <h1>{runs.length > 1 ? `${runs[0]!.name} and ${runs[1]!.name}` : "Before and after"}</h1>
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
        <Controls player={player} marks={[]} />
        <div class="colours">
          <Choice rollouts={rollouts} />
          <Legend by={by} limits={limits} picture="steps" />
        </div>
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
    <section class="side" aria-label={`${name}, ${atUpdate(trace.step)}`}>
      <div class="heading">
        <h2>{name}</h2>
        <label>
          <span class="unseen">Time, {name}</span>
          <select value={at.id} onChange={(event) => (location.hash = link({ run: at.run, id: event.currentTarget.value }))}>
            {choices.map(({ entry }) => <option value={entry.id}>{atUpdate(entry.step)}</option>)}
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
