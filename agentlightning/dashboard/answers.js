// What agents answered, for lists of rollouts: their output, or else the last answer in their spans, which is kept.

import { get, inParallel, Refused } from "./api.js";
import { firstLine } from "./dom.js";
import { isFinal } from "./states.js";
import { lastAnswer } from "./traces.js";

const MOST_KEPT = 5000;
const LAST_SPANS = 8;
const kept = new Map(); // what is finished does not change any more

/** The answer of a rollout in one line; null if it is not known. */
export function answerOf(rollout) {
  if (rollout.output !== undefined && rollout.output !== null) return firstLine(rollout.output, 200);
  const found = kept.get(keyOf(rollout));
  return found ? firstLine(found, 200) : null;
}

/** Read the answers of finished rollouts that are not known yet; `told` is called for each. */
export async function learnAnswers(rollouts, signal, told) {
  const wanted = rollouts.filter((one) => isFinal(one) && (one.output ?? null) === null && !kept.has(keyOf(one)));
  await inParallel(wanted, async (rollout) => {
    const asked = { rollout_id: rollout.rollout_id, attempt_id: "latest", sort_order: "desc", limit: LAST_SPANS };
    const spans = await get("spans", asked, signal).then((page) => page.items.reverse(), (error) => {
      if (error instanceof Refused) return []; // the store has dropped the spans to save memory
      throw error;
    });
    if (kept.size >= MOST_KEPT) kept.delete(kept.keys().next().value);
    kept.set(keyOf(rollout), lastAnswer(spans));
    told(rollout);
  });
}

function keyOf(rollout) {
  return `${rollout.rollout_id} ${rollout.status} ${rollout.end_time}`;
}
