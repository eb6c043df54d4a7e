// The states, modes and steps of rollouts.

export const STATUSES = ["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"];
export const FINAL = ["succeeded", "failed", "cancelled"];
export const MODES = ["train", "val", "test"];

/** Whether nothing happens to it any more. */
export function isFinal(rollout) {
  return FINAL.includes(rollout.status);
}

/** The step of a run that a rollout belongs to, as its curves count: from 1, while rollouts count from 0; or null. */
export function stepOf(rollout) {
  const step = rollout.metadata?.step;
  return Number.isInteger(step) ? step + 1 : null;
}

/** A step of the curves as the rollouts count it; an empty text stays one. */
export function asStored(step) {
  return step === "" ? "" : Number(step) - 1;
}
