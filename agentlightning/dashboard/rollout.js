// One rollout: its task, its attempts, what was said to models and by them, and every span with its time.

import { get, now, Refused } from "./api.js";
import { ago, asText, badge, block, duration, firstLine, h, number, panel, swap, unfolding } from "./dom.js";
import { lastSpans } from "./rewards.js";
import { callsOf, errorOf, finalReward, repeated, rewardsOf, treeOf } from "./traces.js";

const SPANS = 1000;
const MOST_DEPTH = 12;

export function rollout(main, route) {
  const id = route.parts[1];
  const title = h("h1", {}, "Rollout ", h("code", {}, id));
  const place = h("div");
  let spansWanted = SPANS;
  let shown = "";
  swap(main, h("p", { class: "path" }, h("a", { href: "#/rollouts" }, "Rollouts"), " / ", id), title, place);
  const refresh = async (signal) => {
    const found = await get(`rollouts/${encodeURIComponent(id)}`, {}, signal);
    if (found === null) {
      swap(place, h("p", { class: "empty" }, "There is no such rollout."));
      return;
    }
    const attempts = (await get(`rollouts/${encodeURIComponent(id)}/attempts`, {}, signal)).items;
    const chosen = attempts.find((one) => one.attempt_id === route.query.get("attempt")) ?? attempts[attempts.length - 1];
    const trace = chosen ? await spansOf(id, chosen.attempt_id, spansWanted, signal) : { items: [], all: [], total: 0 };
    const state = JSON.stringify([found, attempts, chosen?.attempt_id, trace.total, trace.items.length]);
    if (state === shown) return;
    shown = state;
    const choose = (attempt) => route.go(`#/rollouts/${encodeURIComponent(id)}?attempt=${encodeURIComponent(attempt.attempt_id)}`);
    const more = () => {
      spansWanted += SPANS;
      route.refresh();
    };
    swap(place, head(found, trace), panel("Task", block(found.input)), attemptsPanel(attempts, chosen, trace, choose), ...tracePanels(trace, more));
  };
  return { kinds: ["rollout", "span"], concerns: (notice) => notice.rollout_id === id, refresh };
}

/** The first spans of an attempt; `all` has also the last ones that are not among them, for there its reward is. */
async function spansOf(rolloutId, attemptId, limit, signal) {
  try {
    const page = await get("spans", { rollout_id: rolloutId, attempt_id: attemptId, limit }, signal);
    const last = page.total > page.items.length ? await lastSpans(rolloutId, attemptId, signal) : [];
    const keyOf = (span) => `${span.sequence_id} ${span.span_id}`;
    const keys = new Set(page.items.map(keyOf));
    return { ...page, all: [...page.items, ...last.filter((span) => !keys.has(keyOf(span)))] };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { items: [], all: [], total: 0, problem: error.message };
  }
}

function head(found, trace) {
  const reward = finalReward(trace.all);
  const facts = [
    ["Status", badge(found.status)],
    ["Reward", h("b", { id: "reward" }, number(reward))],
    ["Mode", found.mode ?? "–"],
    ["Enqueued", ago(found.start_time, now())],
    ["Ended", found.end_time ? ago(found.end_time, now()) : "–"],
    ["Resources", found.resources_id ?? "–"],
  ];
  const rest = { config: found.config, metadata: found.metadata };
  return h("section", { class: "panel" },
    h("dl", { class: "figures" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("details", { "data-key": "configuration" }, h("summary", {}, "Configuration and metadata"), block(rest)));
}

function attemptsPanel(attempts, chosen, trace, choose) {
  const items = attempts.map((attempt) => {
    const isChosen = attempt === chosen;
    const error = errorOf(attempt, isChosen ? trace.all : []);
    const lasted = (attempt.end_time ?? now()) - attempt.start_time;
    const button = h("button", { type: "button", "aria-pressed": String(isChosen), "data-key": attempt.attempt_id, onclick: () => choose(attempt) }, `Attempt ${attempt.sequence_id}`);
    const line = h("div", { class: "row" }, button, badge(attempt.status), h("span", {}, duration(lasted)), h("span", { class: "quiet" }, attempt.worker_id ?? "no worker"), ago(attempt.start_time, now()));
    const why = error && h("details", { class: "why", "data-key": `why ${attempt.attempt_id}` }, h("summary", { class: "error" }, firstLine(error.text, 300)), block(error.traceback ?? error.text));
    return h("li", {}, line, why);
  });
  return panel("Attempts", items.length ? h("ul", { class: "attempts" }, items) : h("p", { class: "empty" }, "Nobody has tried it yet."));
}

function tracePanels(trace, more) {
  if (trace.problem) return [panel("Spans", h("p", { class: "empty" }, trace.problem))];
  const rewards = trace.all.flatMap(rewardsOf);
  const calls = callsOf(trace.items);
  const isCut = trace.total > trace.items.length;
  return [
    rewards.length ? panel("Rewards", h("dl", { class: "figures" }, rewards.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value)))))) : null,
    panel("Conversation", isCut && h("p", { class: "note" }, `Of the first ${number(trace.items.length)} spans.`), calls.length ? calls.map((call, i) => conversation(call, calls[i - 1], i)) : h("p", { class: "empty" }, "No model was called.")),
    panel("Spans", spanTree(trace, more)),
  ];
}

// ------------------------------------------------------------------ conversation

function conversation(call, before, index) {
  const known = repeated(call, before);
  const facts = [
    call.model ?? "a model",
    call.weights !== undefined && `weights ${call.weights}`,
    (call.tokensIn ?? call.tokensOut) !== undefined && `${number(call.tokensIn)} tokens in, ${number(call.tokensOut)} out`,
    duration((call.span.end_time ?? NaN) - call.span.start_time),
    call.finish,
  ];
  const earlier = known > 0 && unfolding({ class: "earlier", "data-key": `earlier ${call.span.span_id}` },
    h("summary", {}, known === 1 ? "1 message as before" : `${known} messages as before`), () => call.prompt.slice(0, known).map((one) => message(one)));
  return h("article", { class: "call" },
    h("h3", {}, `Call ${index + 1}`, h("span", { class: "quiet" }, facts.filter(Boolean).join(" · "))),
    earlier, call.prompt.slice(known).map((one) => message(one)), call.answers.map((one) => message(one, "answer")));
}

function message(one, kind = "") {
  const calls = one.calls.map((call) => h("div", { class: "toolcall" }, h("b", {}, call.name ?? "a tool"), h("code", {}, asText(call.arguments ?? ""))));
  const content = one.content === null || one.content === "" ? null : h("div", { class: "said" }, asText(one.content));
  return h("div", { class: `message ${kind}` }, h("span", { class: "role" }, one.role), h("div", {}, content, calls, !content && !calls.length && h("span", { class: "quiet" }, "nothing")));
}

// ------------------------------------------------------------------ spans

function spanTree(trace, more) {
  if (!trace.items.length) return h("p", { class: "empty" }, "No span was recorded.");
  const starts = trace.items.map((span) => span.start_time).filter(Number.isFinite);
  const ends = trace.items.map((span) => span.end_time).filter(Number.isFinite);
  const from = Math.min(...starts);
  const whole = Math.max(...ends, from) - from || 1e-9;
  const rows = treeOf(trace.items).map(({ span, depth }) => spanRow(span, depth, from, whole));
  const rest = trace.total - trace.items.length;
  return h("div", { class: "spans" }, rows, rest > 0 && h("button", { type: "button", onclick: more }, `Show more of the other ${number(rest)}`));
}

function spanRow(span, depth, from, whole) {
  const name = h("span", { class: "name" }, span.name);
  name.style.paddingInlineStart = `${Math.min(depth, MOST_DEPTH)}em`;
  const lasts = (span.end_time ?? span.start_time) - span.start_time;
  const bar = h("i", { class: span.status?.status_code === "ERROR" ? "failed" : "" });
  bar.style.marginInlineStart = `${(100 * (span.start_time - from)) / whole}%`;
  bar.style.width = `${(100 * lasts) / whole}%`;
  const summary = h("summary", {}, name, h("span", { class: "track" }, bar), h("span", { class: "time" }, duration(lasts)));
  return unfolding({ class: "span", "data-key": `span ${span.span_id}` }, summary, () => spanFacts(span));
}

function spanFacts(span) {
  const facts = [["span_id", span.span_id], ["parent_id", span.parent_id], ["status", joinedStatus(span.status)], ...Object.entries(span.attributes ?? {})];
  const rows = facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, asText(value))));
  const events = span.events?.length ? [h("h4", {}, "Events"), block(span.events)] : [];
  return [h("dl", { class: "attributes" }, rows), ...events];
}

function joinedStatus(status) {
  return [status?.status_code, status?.description].filter(Boolean).join(": ") || null;
}
