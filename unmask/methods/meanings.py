"""What every option of a method or plug-in means, in one phrase. schema.json, docs/reference/keys.md and
`unmask methods NAME` show it; docs/methods has a page for each method.
"""

MEANINGS = {
    "advantage": "formula of a rollout's advantage in its group",
    "anchor": "weight of the fully masked state, 0 to below 1; the strata have the rest",
    "baseline": "subtract the group's mean reward first, and put the KL into the loss",
    "beta": "exponent of the upper bound, above 0",
    "branches": "completions of each state that are compared, at least 2",
    "choice": "also score which positions were committed; needs rollout.order=low_confidence",
    "hidden": "share of the tokens before the block that is masked, prompt included",
    "high": "ratios are clipped at 1 + high",
    "kl": "weight of the KL to the reference in the loss",
    "kl_kind": "estimator of the KL",
    "largest": "largest weight of a token",
    "lateness": "exponent that favours late states; 0: all steps are equally likely",
    "layout": "how positions are assigned to strata",
    "low": "ratios are clipped at 1 - low",
    "mix": "share of the upper bound for rollouts with a negative advantage; the lower bound has the rest",
    "negative": "factor of negative advantages; 0: they do not count",
    "normaliser": "formula of a token's weight in the loss",
    "prompt_masking": "probability that a token of the prompt is masked",
    "psi": "factor of the advantage inside the softmax over the group",
    "scope": "rollouts over which progress is standardised",
    "shuffled": "the control: shuffle progress among the steps of a rollout",
    "smallest": "smallest weight of a token",
    "spread": "draw one step from each of `draws` equal parts of the distribution",
    "steps": "distribution from which steps are drawn",
    "strata": "sets of positions; each is masked once and scored with the others visible",
    "strength": "how much progress changes a token's weight; 0: not at all",
    "top": "likeliest tokens that the rollout records at each position",
    "truncate": "leave out the last steps of a rollout that wrote end tokens only",
    "variant": "measure of a step's progress",
    "weight": "weight of the term on branches in the loss",
    "agrpo.draws": "steps of each rollout that are scored",
    "espo.draws": "pairs of complementary masks of each rollout",
    "spg.draws": "masks of each rollout",
    "daca.kl": "smallest weight of the KL to the reference; a larger one of the base stays",
    "sml.kl": "smallest weight of the KL to the reference; a larger one of the base stays",
    "dispo.advantage": "formula of a completion's advantage among those of its state",
    "dispo.kl": "weight of the KL of the branches to the reference; it is multiplied by `weight`",
    "reinforce_pp.kl": "price of the KL to the reference: in the reward, or with `baseline` in the loss",
}
"""`option`, or `method.option` if the option means something else there -> phrase."""


def meaning(method: str, option: str) -> str:
    return MEANINGS.get(f"{method}.{option}") or MEANINGS.get(option, "")
