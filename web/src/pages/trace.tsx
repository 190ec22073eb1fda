/** One prompt and its group of rollouts. */

import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import { limitsOf } from "../colour";
import { atUpdate, count, number } from "../format";
import { useKeys } from "../keys";
import { Branches, Probes } from "../parts/asides";
import { Group } from "../parts/group";
import { Choice, Coloured, Legend, usedFor } from "../parts/legend";
import { Prompt, useTrace, Waiting } from "../parts/loaded";
import { Announcer, Controls, type Mark } from "../parts/player";
import { described, Facts, Focus, type Picture, reading, ReadingChoice } from "../parts/rollout";
import { playerOf } from "../player";
import { traceLink } from "../route";
import { firstViolation, puzzleOf } from "../sudoku";
import type { Rollout, Run, Trace } from "../types";

export function TracePage({ runs, run, id }: { runs: readonly Run[]; run: number; id: string }) {
  const ref = useMemo(() => ({ run, id }), [run, id]);
  const loaded = useTrace(ref);
  if (loaded === null || "error" in loaded) return <Waiting loaded={loaded} />;
  return <TraceView key={`${run}/${id}`} trace={loaded.trace} runs={runs} run={run} />;
}

function marksOf(trace: Trace, rollout: Rollout): Mark[] {
  const branches = new Set((rollout.branches ?? []).map((branch) => branch.at));
  const puzzle = puzzleOf(trace, rollout);
  const broken = puzzle && firstViolation(puzzle, rollout);
  return [
    ...[...branches].map((at): Mark => ({ at, kind: "branch", label: `branches after step ${at}` })),
    ...(broken === null ? [] : [{ at: broken, kind: "wrong" as const, label: `first violation at step ${broken}` }]),
  ];
}

/** The rollout that is shown first: one that is solved, if there is one. */
const firstOf = (trace: Trace): number => Math.max(0, trace.rollouts.findIndex((rollout) => rollout.solved));

function TraceView({ trace, runs, run }: { trace: Trace; runs: readonly Run[]; run: number }) {
  const steps = trace.steps;
  const player = useMemo(() => playerOf(steps), [steps]);
  const [focused, setFocused] = useState(() => firstOf(trace));
  const [picture, show] = useState<Picture>({ of: "steps" });
  const limits = useMemo(() => limitsOf(trace.rollouts, steps), [trace, steps]);
  const rollout = trace.rollouts[focused];
  const focus = useCallback((next: number) => {
    setFocused(next);
    show({ of: "steps" });
  }, []);
  const reset = useCallback(() => show({ of: "steps" }), []);
  useEffect(() => player.stop, [player]);
  // A branch belongs to one step: leaving the step leaves the branch.
  useEffect(() => player.done.subscribe((at) => {
    show((now) => {
      const stays = now.of === "steps" || (now.of === "branch" && rollout?.branches?.[now.number]?.at === at);
      return stays ? now : { of: "steps" };
    });
  }), [player, rollout]);
  const total = trace.rollouts.length;
  useKeys({ player, reset, rollout: (by) => focus((focused + by + total) % total) });
  const describe = useCallback((at: number) => (rollout ? described(rollout, at, steps) : ""), [rollout, steps]);
  if (!rollout) return <p>This group has no rollouts.</p>;
  const used = usedFor(trace.rollouts);
  const by = picture.of === "probe" ? "p" : used; // a probe shows probabilities
  return (
    <>
      <Heading trace={trace} runs={runs} run={run} />
      <Prompt text={trace.prompt} />
      <Coloured by={by}>
        <section class="stage" aria-label={`Rollout ${focused + 1}`}>
          <div class="heading">
            <h2>Rollout {focused + 1} <span class="quiet">of {total}</span></h2>
            <Facts rollout={rollout} />
            {steps > 0 && <ReadingChoice />}
          </div>
          <Focus id="focus" trace={trace} rollout={rollout} by={by} limits={limits} player={player} picture={picture} />
          {steps > 0 && !reading.value && <Controls player={player} marks={marksOf(trace, rollout)} />}
          {steps > 0 && !reading.value && (
            <div class="colours">
              <Choice rollouts={trace.rollouts} picture={picture.of} />
              <Legend by={by} limits={limits} picture={picture.of} />
            </div>
          )}
          <Announcer player={player} describe={describe} />
        </section>
      </Coloured>
      <div class="asides">
        <Branches rollout={rollout} picture={picture} show={show} player={player} />
        <Probes rollout={rollout} picture={picture} show={show} player={player} />
      </div>
      <Coloured by={used}>
        <section>
          <h2>The group</h2>
          <Group trace={trace} by={used} limits={limits} steps={steps} done={player.done} focused={focused} focus={focus} />
        </section>
      </Coloured>
    </>
  );
}

function Heading({ trace, runs, run }: { trace: Trace; runs: readonly Run[]; run: number }) {
  const entries = runs[run]?.traces ?? [];
  const here = entries.findIndex((entry) => entry.id === trace.id);
  const [before, after] = [entries[here - 1], here < 0 ? undefined : entries[here + 1]];
  const facts = [
    trace.task,
    trace.steps > 0 ? count(trace.steps, "step") : "steps were not recorded",
    trace.order ? `order ${trace.order}` : "",
    trace.temperature == null ? "" : `temperature ${number(trace.temperature)}`,
    trace.answer ? `expected: ${trace.answer}` : "",
  ].filter(Boolean);
  return (
    <div class="trace-head">
      <div class="heading">
        <h1>
          {trace.kind === "eval" ? "Held-out problem" : "Training group"}, {atUpdate(runs[run], trace.step)}
        </h1>
        <nav aria-label="Groups">
          {before && <a href={traceLink(run, before.id)}>Previous</a>}
          {after && <a href={traceLink(run, after.id)}>Next</a>}
        </nav>
      </div>
      <p class="facts">
        {runs.length > 1 && <span><b>{runs[run]?.name}</b></span>}
        {facts.map((fact) => <span>{fact}</span>)}
      </p>
    </div>
  );
}
