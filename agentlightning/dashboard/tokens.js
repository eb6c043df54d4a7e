// The tokens of model calls: ids, texts and log-probabilities, and whether they are learned from, or why not.

import { empty, h, linkTo, note, number, unfolding } from "./dom.js";
import { callsOf } from "./traces.js";

const LEVELS = [[-0.05, 0], [-0.35, 1], [-1, 2], [-2.5, 3]]; // how likely a token was, from sure to unlikely
const UNLIKELY = 4;
const MOST_TOKENS = 4000; // of one call

const REASONS = {
  failed: "it did not succeed",
  no_reward: "it has no reward",
  bad_reward: "its reward is not a finite number",
  group_too_small: "too few rollouts of its group have a reward",
  no_variance: "all rewards of its group are the same, so that none is better",
  empty_trace: "no model was called",
  no_tokens: "its calls were recorded without tokens",
  truncated: "an answer was cut off",
  too_long: "it has more tokens than the model takes",
  too_stale: "the weights that sampled it are too old",
  low_reward: "its reward is below the least that is imitated",
  not_best: "others of the same task are better",
  foreign_tokens: "it has tokens that the model does not know",
  other_agent: "its agent is not trained",
  in_reward: "it was made to judge, not to act",
  excluded: "it is excluded from the redirect",
  unused: "the answer came too late to be used",
};

/** A recorded reason in words. */
export function wordsOf(reason) {
  if (Object.hasOwn(REASONS, reason)) return REASONS[reason];
  return String(reason ?? "no reason was recorded").replaceAll("_", " ");
}

/** The tokens of every call, and what trainings made of them; `uses` are those of `usesOf`. */
export function tokenView(spans, uses, rollout) {
  const calls = callsOf(spans);
  if (!calls.length) return [empty("No model was called.")];
  return [
    ...sentencesOf(uses, rollout).map((sentence) => h("p", { class: "fate" }, sentence)),
    legend(),
    ...calls.map((call, i) => tokensOf(call, i, fateOf(call, uses[uses.length - 1]))),
  ];
}

function sentencesOf(uses, rollout) {
  if (!uses.length && rollout.mode === "train") return ["No training has recorded yet what it made of this rollout."];
  if (!uses.length) return [`No training has used it: its mode is ${rollout.mode ?? "not train"}.`];
  return uses.map((use) => {
    const by = [use.model, typeof use.runId === "string" && linkTo("runs", use.runId, { key: `use ${use.runId}` })]
      .filter(Boolean).flatMap((part, i) => (i ? [" in ", part] : [" for ", part]));
    if (!use.isUsed) return ["Dropped", by, `: ${wordsOf(use.reason)}.`];
    const advantage = Number.isFinite(use.advantage) && `, advantage ${number(use.advantage, 3)}`;
    return ["Trained", by, advantage, ". Sampled tokens are trained; what was given to the model is masked."];
  });
}

/** What became of a call: `{name, why}`; null if no training has recorded it. */
function fateOf(call, use) {
  if (!use) return null;
  const why = call.spans.map((span) => use.leftOut.get(span.span_id)).find(Boolean) ?? (use.isUsed ? null : use.reason);
  return use.isUsed && !why ? { name: "trained" } : { name: "dropped", why: wordsOf(why) };
}

function legend() {
  const steps = ["sure", "likely", "so-so", "unlikely", "rare"].map((name, level) =>
    h("li", {}, h("span", { class: `token level-${level}` }, name)));
  return h("ul", { class: "legend", "aria-label": "Colours" }, steps,
    h("li", {}, h("span", { class: "token masked" }, "masked")),
    h("li", {}, h("span", { class: "token dropped" }, "dropped")));
}

function tokensOf(call, index, fate) {
  const head = h("h3", {}, `Call ${index + 1}`, h("span", { class: "quiet" }, aboutOf(call, fate)));
  if (!call.responseIds && !call.logprobs) {
    return h("article", { class: "call" }, head, empty("The call was recorded without tokens: it cannot be trained."));
  }
  const prompt = call.promptIds && unfolding(
    { class: "earlier", "data-key": `ids ${call.span.span_id}` },
    h("summary", {}, `${number(call.promptIds.length)} tokens of the prompt, masked`),
    () => [h("div", { class: "tokens" }, call.promptIds.slice(0, MOST_TOKENS).map((id) =>
      h("span", { class: "token masked", title: "masked: it was given, not sampled" }, String(id))))]);
  const count = Math.max(call.responseIds?.length ?? 0, call.logprobs?.length ?? 0);
  const shown = Array.from({ length: Math.min(count, MOST_TOKENS) }, (_, i) =>
    token(call.responseIds?.[i], call.logprobs?.[i], fate));
  return h("article", { class: "call" }, head, prompt, h("div", { class: "tokens" }, shown),
    count > MOST_TOKENS && note(`The first ${number(MOST_TOKENS)} of ${number(count)}.`));
}

function aboutOf(call, fate) {
  const logprobs = (call.logprobs ?? []).map((one) => one?.logprob).filter(Number.isFinite);
  const mean = logprobs.length && logprobs.reduce((sum, one) => sum + one, 0) / logprobs.length;
  return [
    call.responseIds && `${number(call.responseIds.length)} sampled`,
    logprobs.length > 0 && `mean log-probability ${number(mean, 3)}`,
    call.weights !== undefined && `weights ${call.weights}`,
    fate && (fate.why ? `${fate.name}: ${fate.why}` : fate.name),
  ].filter(Boolean).join(" · ");
}

function token(id, entry, fate) {
  const logprob = entry?.logprob;
  const level = Number.isFinite(logprob) ? LEVELS.find(([least]) => logprob >= least)?.[1] ?? UNLIKELY : null;
  const text = typeof entry?.token === "string" ? entry.token : `${id ?? "?"}`;
  const words = [
    id !== undefined && `id ${id}`,
    Number.isFinite(logprob) && `log-probability ${number(logprob, 3)} (${number(100 * Math.exp(logprob), 3)} %)`,
    fate?.name,
  ];
  const shown = text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  const kind = `token ${level === null ? "" : `level-${level}`} ${fate?.name === "dropped" ? "dropped" : ""}`;
  return h("span", { class: kind, title: words.filter(Boolean).join(", ") }, shown,
    id !== undefined && entry && h("small", {}, String(id)));
}
