/** States that are not steps of the rollout: fillings of a visited state (DiSPO), and the states that the estimator scored. */

import { count, number, signed } from "../format";
import type { Player } from "../player";
import type { Rollout } from "../types";
import type { Picture } from "./rollout";

interface Props {
  rollout: Rollout;
  picture: Picture;
  show: (picture: Picture) => void;
  player: Player;
}

export function Branches({ rollout, picture, show, player }: Props) {
  if (!rollout.branches?.length) return null;
  return (
    <section class="aside">
      <h2>Branches</h2>
      <p class="quiet">One visited state, filled in one shot several times. Only the newly filled tokens were updated.</p>
      <ul class="choices">
        {rollout.branches.map((branch, i) => {
          const chosen = picture.of === "branch" && picture.number === i;
          const go = () => {
            player.stop();
            player.go(branch.at);
            show(chosen ? { of: "steps" } : { of: "branch", number: i });
          };
          return (
            <li>
              <button type="button" aria-pressed={chosen} onClick={go}>
                <b>{String.fromCharCode(65 + (i % 26))}</b>
                <span>after step {branch.at}</span>
                <span>reward {number(branch.reward)}</span>
                {branch.advantage != null && <span>advantage {signed(branch.advantage)}</span>}
                <span>{count(Object.keys(branch.filled).length, "token")} updated</span>
              </button>
            </li>
          );
        })}
      </ul>
    </section>
  );
}

export function Probes({ rollout, picture, show, player }: Props) {
  const probes = rollout.probes;
  if (!probes?.length) return null;
  const chosen = picture.of === "probe" ? picture.number : null;
  const open = (to: number) => {
    player.stop();
    show({ of: "probe", number: (to + probes.length) % probes.length });
  };
  return (
    <section class="aside">
      <h2>States that the estimator scored</h2>
      <p class="quiet">Masked states at which the policy scored its own tokens, in the first inner update.</p>
      <div class="picker">
        <label>
          State{" "}
          <select
            value={chosen ?? ""}
            onChange={(event) => (event.currentTarget.value === "" ? show({ of: "steps" }) : open(Number(event.currentTarget.value)))}
          >
            <option value="">none: show the rollout</option>
            {probes.map((probe, i) => (
              <option value={i}>
                {`${i + 1}: term ${probe.term + 1}, ${probe.masked.length} masked, ${probe.asked.length} scored`}
              </option>
            ))}
          </select>
        </label>
        <button type="button" aria-label="Previous state" onClick={() => open((chosen ?? 0) - 1)}>Previous</button>
        <button type="button" aria-label="Next state" onClick={() => open((chosen ?? -1) + 1)}>Next</button>
      </div>
      {chosen !== null && <ProbeFacts rollout={rollout} number={chosen} />}
    </section>
  );
}

function ProbeFacts(props: { rollout: Rollout; number: number }) {
  const probe = props.rollout.probes![props.number]!;
  const total = probe.asked.reduce((sum, _, n) => sum + (probe.share[n] ?? 0) * (probe.logp[n] ?? 0), 0);
  return (
    <p class="facts">
      <span>{count(probe.masked.length, "position")} masked</span>
      <span>{count(probe.asked.length, "token")} scored</span>
      <span>weight <b>{number(probe.weight)}</b></span>
      <span>sum of share × log-probability <b>{number(total)}</b></span>
    </p>
  );
}
