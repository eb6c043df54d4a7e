// The rewards and errors of rollouts, read from their spans and kept: what is finished does not change any more.

import { get, inParallel, Refused } from "./api.js";
import { isFinal } from "./states.js";
import { errorOf, finalReward } from "./traces.js";

const MOST_KEPT = 5000;
const LAST_SPANS = 20;

const kept = new Map();

/** `{reward, error}` of a rollout if it is known already. */
export function known(rollout) {
  return kept.get(keyOf(rollout));
}

/** Read those of the finished rollouts that are not known yet; `told` is called for each. */
export async function learn(rollouts, signal, told = () => {}) {
  const wanted = rollouts.filter((rollout) => isFinal(rollout) && !known(rollout));
  await inParallel(wanted, async (rollout) => {
    const spans = await lastSpans(rollout.rollout_id, "latest", signal);
    if (kept.size >= MOST_KEPT) kept.delete(kept.keys().next().value);
    kept.set(keyOf(rollout), { reward: finalReward(spans), error: errorOf(rollout.attempt, spans) });
    told(rollout);
  });
}

function keyOf(rollout) {
  return `${rollout.rollout_id} ${rollout.status} ${rollout.end_time}`;
}

/** The newest spans of an attempt, in which a reward may be: our own, which are small, or else the last of all. */
export async function lastSpans(rolloutId, attemptId, signal) {
  const asked = { rollout_id: rolloutId, attempt_id: attemptId, sort_order: "desc", limit: LAST_SPANS };
  try {
    const own = (await get("spans", { ...asked, name_contains: "agentlightning." }, signal)).items.reverse();
    if (finalReward(own) !== null) return own;
    const others = (await get("spans", asked, signal)).items.reverse();
    return [...others, ...own];
  } catch (error) {
    if (error instanceof Refused) return []; // the store has dropped the spans to save memory
    throw error;
  }
}
