// The states and modes of a rollout.

export const STATUSES = ["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"];
export const FINAL = ["succeeded", "failed", "cancelled"];
export const MODES = ["train", "val", "test"];

/** Whether nothing happens to it any more. */
export function isFinal(rollout) {
  return FINAL.includes(rollout.status);
}
