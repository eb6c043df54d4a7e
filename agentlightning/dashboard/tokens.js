// The tokens of model calls: ids, texts and log-probabilities, and whether they are learned from, or why not.

import { get } from "./api.js";
import { empty, h, note, number, unfolding } from "./dom.js";
import { callsOf } from "./traces.js";

const LEVELS = [[-0.05, 0], [-0.35, 1], [-1, 2], [-2.5, 3]]; // how likely a token was, from sure to unlikely
const UNLIKELY = 4;
const MOST_TOKENS = 4000; // of one call

/** Why a rollout is not learned from, in words; null if nothing speaks against it. */
export async function whyLeftOut(rollout, signal) {
  if (rollout.mode !== "train") return `It is not trained on: its mode is ${rollout.mode ?? "not train"}.`;
  if (rollout.status !== "succeeded") return `It is dropped: it is ${rollout.status}.`;
  if (typeof rollout.reward !== "number") return "It is dropped: it has no reward.";
  const { run_id: run, group, step } = rollout.metadata ?? {};
  if (typeof run !== "string" || typeof group !== "string") return null;
  const asked = { run_id_in: run, group_id_in: group, step_in: Number.isInteger(step) ? step : null, limit: 200 };
  const siblings = (await get("rollouts", asked, signal)).items;
  const rewards = siblings.filter((one) => one.status === "succeeded").map((one) => one.reward);
  if (rewards.length > 1 && rewards.every((one) => one === rewards[0])) {
    const all = `all ${rewards.length} rollouts of its group have the reward ${number(rewards[0])}`;
    return `It is dropped: ${all}, so that none is better.`;
  }
  return null;
}

/** The tokens of every call; `reason` is why the rollout is left out. */
export function tokenView(spans, reason) {
  const calls = callsOf(spans);
  if (!calls.length) return empty("No model was called.");
  const hasIds = calls.some((call) => call.responseIds);
  const verdict = reason ?? (hasIds ? "Sampled tokens are trained; what was given to the model is masked." : null);
  return [
    verdict && h("p", { class: "fate" }, verdict),
    legend(),
    calls.map((call, i) => tokensOf(call, i, reason)),
  ];
}

function legend() {
  const steps = ["sure", "likely", "so-so", "unlikely", "rare"].map((name, level) =>
    h("li", {}, h("span", { class: `token level-${level}` }, name)));
  return h("ul", { class: "legend", "aria-label": "Colours" }, steps,
    h("li", {}, h("span", { class: "token masked" }, "masked")));
}

function tokensOf(call, index, reason) {
  const head = h("h3", {}, `Call ${index + 1}`, h("span", { class: "quiet" }, fateOf(call, reason)));
  if (!call.responseIds && !call.logprobs) {
    return h("article", { class: "call" }, head, empty("The call was recorded without tokens: it is dropped."));
  }
  const prompt = call.promptIds && unfolding(
    { class: "earlier", "data-key": `ids ${call.span.span_id}` },
    h("summary", {}, `${number(call.promptIds.length)} tokens of the prompt, masked`),
    () => [h("div", { class: "tokens" }, call.promptIds.slice(0, MOST_TOKENS).map((id) =>
      h("span", { class: "token masked", title: "masked: it was given, not sampled" }, String(id))))]);
  const count = Math.max(call.responseIds?.length ?? 0, call.logprobs?.length ?? 0);
  const shown = Array.from({ length: Math.min(count, MOST_TOKENS) }, (_, i) =>
    token(call.responseIds?.[i], call.logprobs?.[i], reason));
  return h("article", { class: "call" }, head, prompt, h("div", { class: "tokens" }, shown),
    count > MOST_TOKENS && note(`The first ${number(MOST_TOKENS)} of ${number(count)}.`));
}

function fateOf(call, reason) {
  const logprobs = (call.logprobs ?? []).map((one) => one?.logprob).filter(Number.isFinite);
  const mean = logprobs.length && logprobs.reduce((sum, one) => sum + one, 0) / logprobs.length;
  const cut = call.finish === "length" && "cut off, so that it may be dropped";
  return [
    call.responseIds && `${number(call.responseIds.length)} sampled`,
    logprobs.length > 0 && `mean log-probability ${number(mean, 3)}`,
    call.weights !== undefined && `weights ${call.weights}`,
    reason ? "dropped" : call.responseIds ? "trained" : "no token ids: dropped",
    cut,
  ].filter(Boolean).join(" · ");
}

function token(id, entry, reason) {
  const logprob = entry?.logprob;
  const level = Number.isFinite(logprob) ? LEVELS.find(([least]) => logprob >= least)?.[1] ?? UNLIKELY : null;
  const text = typeof entry?.token === "string" ? entry.token : `${id ?? "?"}`;
  const words = [
    id !== undefined && `id ${id}`,
    Number.isFinite(logprob) && `log-probability ${number(logprob, 3)} (${number(100 * Math.exp(logprob), 3)} %)`,
    reason ? "dropped" : "trained",
  ];
  const shown = text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  const kind = `token ${level === null ? "" : `level-${level}`} ${reason ? "dropped" : ""}`;
  return h("span", { class: kind, title: words.filter(Boolean).join(", ") }, shown,
    id !== undefined && entry && h("small", {}, String(id)));
}
