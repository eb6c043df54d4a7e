// One rollout: its task, its output, its attempts, what was said to models and by them, and every span with its time.

import { get, now, Refused } from "./api.js";
import {
  addressOf, ago, asText, badge, block, duration, empty, facts, firstLine, h, note, number, panel, swap, unfolding,
} from "./dom.js";
import { lastSpans } from "./rewards.js";
import { callsOf, errorOf, finalReward, repeated, rewardsOf, shownName, treeOf } from "./traces.js";

const SPANS = 1000; // read at once
const MOST_DEPTH = 12; // to which the tree is indented
const ERROR_LETTERS = 300;
const OPEN_LETTERS = 2000; // of an output that is shown without a click
const NO_TRACE = { items: [], all: [], total: 0 };

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
      swap(place, empty("There is no such rollout."));
      return;
    }
    const attempts = (await get(`rollouts/${encodeURIComponent(id)}/attempts`, {}, signal)).items;
    const asked = attempts.find((one) => one.attempt_id === route.query.get("attempt"));
    const chosen = asked ?? attempts[attempts.length - 1];
    const trace = chosen ? await spansOf(id, chosen.attempt_id, spansWanted, signal) : NO_TRACE;
    const state = JSON.stringify([found, attempts, chosen?.attempt_id, trace.total, trace.items.length]);
    if (state === shown) return;
    shown = state;
    const choose = (attempt) =>
      route.go(`${addressOf("rollouts", id)}?attempt=${encodeURIComponent(attempt.attempt_id)}`);
    const more = () => {
      spansWanted += SPANS;
      route.refresh();
    };
    swap(
      place,
      head(found, trace),
      panel("Task", block(found.input)),
      outputPanel(found.output ?? null),
      attemptsPanel(attempts, chosen, trace, choose),
      ...tracePanels(trace, more),
    );
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
    return { ...NO_TRACE, problem: error.message };
  }
}

function head(found, trace) {
  const reward = finalReward(trace.all);
  const pairs = [
    ["Status", badge(found.status)],
    ["Reward", h("b", { id: "reward" }, number(reward))],
    ["Mode", found.mode ?? "–"],
    ["Enqueued", ago(found.start_time, now())],
    ["Ended", found.end_time ? ago(found.end_time, now()) : "–"],
    ["Resources", found.resources_id ?? "–"],
  ];
  const rest = { config: found.config, metadata: found.metadata };
  return h("section", { class: "panel" },
    facts(pairs),
    h("details", { "data-key": "configuration" }, h("summary", {}, "Configuration and metadata"), block(rest)));
}

/** What the agent returned, if that is neither a reward nor spans; a long one is folded. */
function outputPanel(output) {
  if (output === null) return null;
  const text = asText(output);
  if (!text) return panel("Output", empty("The agent returned an empty text."));
  if (text.length <= OPEN_LETTERS) return panel("Output", block(output));
  const summary = h("summary", {}, firstLine(output, ERROR_LETTERS));
  return panel("Output", unfolding({ "data-key": "output" }, summary, () => [block(output)]));
}

function attemptsPanel(attempts, chosen, trace, choose) {
  const items = attempts.map((attempt) => {
    const isChosen = attempt === chosen;
    const error = errorOf(attempt, isChosen ? trace.all : []);
    const lasted = (attempt.end_time ?? now()) - attempt.start_time;
    const button = h("button", {
      type: "button",
      "aria-pressed": String(isChosen),
      "data-key": attempt.attempt_id,
      onclick: () => choose(attempt),
    }, `Attempt ${attempt.sequence_id}`);
    const line = h("div", { class: "row" },
      button,
      badge(attempt.status),
      h("span", {}, duration(lasted)),
      h("span", { class: "quiet" }, attempt.worker_id ?? "no worker"),
      ago(attempt.start_time, now()));
    const why = error && h("details", { class: "why", "data-key": `why ${attempt.attempt_id}` },
      h("summary", { class: "error" }, firstLine(error.text, ERROR_LETTERS)),
      block(error.traceback ?? error.text));
    return h("li", {}, line, why);
  });
  return panel("Attempts", items.length ? h("ul", { class: "attempts" }, items) : empty("Nobody has tried it yet."));
}

function tracePanels(trace, more) {
  if (trace.problem) return [panel("Spans", empty(trace.problem))];
  const rewards = trace.all.flatMap(rewardsOf);
  const calls = callsOf(trace.items);
  const isCut = trace.total > trace.items.length;
  return [
    rewards.length ? panel("Rewards", facts(rewards.map(([name, value]) => [name, number(value)]))) : null,
    panel("Conversation",
      isCut && note(`Of the first ${number(trace.items.length)} spans.`),
      calls.length ? calls.map((call, i) => conversation(call, calls[i - 1], i)) : empty("No model was called.")),
    panel("Spans", spanTree(trace, more)),
  ];
}

// ------------------------------------------------------------------ conversation

function conversation(call, before, index) {
  const known = repeated(call, before);
  const hasTokens = (call.tokensIn ?? call.tokensOut) !== undefined;
  const about = [
    call.model ?? "a model",
    call.weights !== undefined && `weights ${call.weights}`,
    hasTokens && `${number(call.tokensIn)} tokens in, ${number(call.tokensOut)} out`,
    duration((call.span.end_time ?? NaN) - call.span.start_time),
    call.finish,
  ];
  const earlier = known > 0 && unfolding(
    { class: "earlier", "data-key": `earlier ${call.span.span_id}` },
    h("summary", {}, known === 1 ? "1 message as before" : `${known} messages as before`),
    () => call.prompt.slice(0, known).map((one) => message(one)),
  );
  return h("article", { class: "call" },
    h("h3", {}, `Call ${index + 1}`, h("span", { class: "quiet" }, about.filter(Boolean).join(" · "))),
    earlier,
    call.prompt.slice(known).map((one) => message(one)),
    call.answers.map((one) => message(one, "answer")));
}

function message(one, kind = "") {
  const calls = one.calls.map((call) => {
    const given = h("code", {}, asText(call.arguments ?? ""));
    return h("div", { class: "toolcall" }, h("b", {}, call.name ?? "a tool"), given);
  });
  const content = one.content === null || one.content === "" ? null : h("div", { class: "said" }, asText(one.content));
  const nothing = !content && !calls.length && h("span", { class: "quiet" }, "nothing");
  return h("div", { class: `message ${kind}` },
    h("span", { class: "role" }, one.role),
    h("div", {}, content, calls, nothing));
}

// ------------------------------------------------------------------ spans

function spanTree(trace, more) {
  if (!trace.items.length) return empty("No span was recorded.");
  const starts = trace.items.map((span) => span.start_time).filter(Number.isFinite);
  const ends = trace.items.map((span) => span.end_time).filter(Number.isFinite);
  const from = Math.min(...starts);
  const whole = Math.max(...ends, from) - from || 1e-9;
  const rows = treeOf(trace.items).map(({ span, depth }) => spanRow(span, depth, from, whole));
  const rest = trace.total - trace.items.length;
  const button = h("button", { type: "button", onclick: more }, `Show more of the other ${number(rest)}`);
  return h("div", { class: "spans" }, rows, rest > 0 && button);
}

function spanRow(span, depth, from, whole) {
  const name = h("span", { class: "name" }, shownName(span));
  name.style.paddingInlineStart = `${Math.min(depth, MOST_DEPTH)}em`;
  const lasts = (span.end_time ?? span.start_time) - span.start_time;
  const bar = h("i", { class: span.status?.status_code === "ERROR" ? "failed" : "" });
  bar.style.marginInlineStart = `${(100 * (span.start_time - from)) / whole}%`;
  bar.style.width = `${(100 * lasts) / whole}%`;
  const track = h("span", { class: "track" }, bar);
  const summary = h("summary", {}, name, track, h("span", { class: "time" }, duration(lasts)));
  return unfolding({ class: "span", "data-key": `span ${span.span_id}` }, summary, () => spanFacts(span));
}

function spanFacts(span) {
  const pairs = [
    ["name", span.name],
    ["span_id", span.span_id],
    ["parent_id", span.parent_id],
    ["status", joinedStatus(span.status)],
    ...Object.entries(span.attributes ?? {}),
  ];
  const known = pairs.filter(([, value]) => value !== null && value !== undefined);
  const events = span.events?.length ? [h("h4", {}, "Events"), block(span.events)] : [];
  return [facts(known.map(([name, value]) => [name, asText(value)]), "attributes"), ...events];
}

function joinedStatus(status) {
  return [status?.status_code, status?.description].filter(Boolean).join(": ") || null;
}
