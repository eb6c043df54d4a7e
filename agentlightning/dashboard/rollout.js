// One rollout: its task and output, its attempts side by side, the conversation with its rewards, the tokens, and every
// step with its time. It may be cancelled, tried again or put back into the queue, where the token allows it.

import { get, mayChange, now, post, Refused } from "./api.js";
import { conversation } from "./conversation.js";
import {
  addressOf, ago, asText, badge, block, confirmed, copyButton, duration, empty, facts, firstLine, h, linkTo, note,
  number, panel, rawJson, swap, table, unfolding,
} from "./dom.js";
import { isFinal, stepOf } from "./states.js";
import { tokenView, wordsOf } from "./tokens.js";
import { callsOf, errorOf, finalReward, plainName, rewardsOf, usesOf, waterfallOf } from "./traces.js";

const SPANS = 1000; // read at once
const OVERLAP = 20; // spans read again, for one may come in behind others
const LAST_SPANS = 20;
const MOST_DEPTH = 12; // to which the tree is indented
const ERROR_LETTERS = 300;
const OPEN_LETTERS = 2000; // of an output that is shown without a click
const MOST_ATTEMPTS = 20; // that are compared
const NO_TRACE = { items: [], all: [], total: 0 };

export function rollout(main, route) {
  const id = route.parts[1];
  const title = h("h1", {}, "Rollout ", h("code", {}, id), " ", copyButton(id, "Copy id"));
  const place = h("div");
  const traces = new Map(); // by attempt
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
    const read = async (attempt) => {
      const before = traces.get(attempt.attempt_id) ?? NO_TRACE;
      const trace = await spansOf(id, attempt.attempt_id, spansWanted, before, signal);
      traces.set(attempt.attempt_id, trace);
      return trace;
    };
    const trace = chosen ? await read(chosen) : NO_TRACE;
    if (attempts.length > 1) for (const one of attempts.slice(-MOST_ATTEMPTS)) if (one !== chosen) await read(one);
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
      head(found, chosen, trace, route),
      panel("Task", copyButton(() => asText(found.input)), block(found.input)),
      outputPanel(found.output ?? null),
      attemptsPanel(attempts, chosen, traces, choose),
      ...tracePanels(trace, found, more),
      panel("Raw", rawJson("The rollout as JSON", found, "rollout"),
        trace.items.length > 0 && rawJson("Its spans as JSON", trace.items, "spans")),
    );
  };
  return { kinds: ["rollout", "span"], concerns: (notice) => notice.rollout_id === id, refresh };
}

/**
 * The first spans of an attempt, of which only those are read that are not known; `all` has also the last ones that are
 * not among them, for there its reward is.
 */
async function spansOf(rolloutId, attemptId, limit, before, signal) {
  const asked = { rollout_id: rolloutId, attempt_id: attemptId };
  const keyOf = (span) => `${span.sequence_id} ${span.span_id}`;
  try {
    const kept = before.items.slice(0, Math.max(0, before.items.length - OVERLAP));
    let page = await get("spans", { ...asked, limit: limit - kept.length, offset: kept.length }, signal);
    let items = [...kept, ...page.items];
    if (kept.length && new Set(items.map(keyOf)).size < Math.min(limit, page.total)) {
      page = await get("spans", { ...asked, limit }, signal); // one has come in far behind
      items = page.items;
    }
    const keys = new Set(items.map(keyOf));
    const last = page.total > items.length
      ? (await get("spans", { ...asked, sort_order: "desc", limit: LAST_SPANS }, signal)).items.reverse() : [];
    return { items, total: page.total, all: [...items, ...last.filter((span) => !keys.has(keyOf(span)))] };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { ...NO_TRACE, problem: error.message };
  }
}

function head(found, attempt, trace, route) {
  const reward = finalReward(trace.all) ?? found.reward ?? null;
  const use = usesOf(trace.all).pop();
  const { run_id: run, group } = found.metadata ?? {};
  const step = stepOf(found);
  const isOfGroup = typeof run === "string" && typeof group === "string" && step !== null;
  const groupAddress = isOfGroup && `${addressOf("runs", run)}?step=${step}&group=${encodeURIComponent(group)}`;
  const pairs = [
    ["Status", badge(found.status)],
    ["Reward", h("b", { id: "reward" }, number(reward))],
    ["Mode", found.mode ?? "–"],
    typeof run === "string" && ["Run", linkTo("runs", run)],
    isOfGroup && ["Step and group", h("a", { href: groupAddress }, `${step}, ${group}`)],
    ["Enqueued", ago(found.start_time, now())],
    ["Took", attempt ? duration((attempt.end_time ?? now()) - attempt.start_time) : "–"],
    use && ["In training", use.isUsed ? "used" : `dropped: ${wordsOf(use.reason)}`],
    Number.isFinite(use?.advantage) && ["Advantage", number(use.advantage, 3)],
    ["Resources", found.resources_id ? linkTo("resources", found.resources_id) : "–"],
  ];
  const rest = { config: found.config, metadata: found.metadata };
  return h("section", { class: "panel" },
    facts(pairs.filter(Boolean)),
    mayChange() && actions(found, route),
    h("details", { "data-key": "configuration" }, h("summary", {}, "Configuration and metadata"), block(rest)));
}

// ------------------------------------------------------------------ changes

/** What may be done with it now, as `[name, question, status]`. */
function possible(found) {
  if (!isFinal(found)) {
    const cancel = ["Cancel", "Cancel this rollout? What its agent is doing is not used.", "cancelled"];
    const requeue = ["Requeue", "Put this rollout back at the end of the queue?", "requeuing"];
    return found.status === "queuing" || found.status === "requeuing" ? [cancel] : [cancel, requeue];
  }
  return [["Retry", "Have this rollout tried once more? It goes to the end of the queue.", "requeuing"]];
}

function actions(found, route) {
  const told = h("span", { class: "error", role: "alert" });
  const buttons = possible(found).map(([name, question, status]) =>
    h("button", { type: "button", "data-key": name, onclick: async () => {
      if (!(await confirmed(question, name))) return;
      try {
        await post(`rollouts/${encodeURIComponent(found.rollout_id)}`, { status });
        route.refresh();
      } catch (error) {
        told.textContent = error.message;
      }
    } }, name));
  return h("div", { class: "row actions" }, buttons, told);
}

// ------------------------------------------------------------------ output and attempts

/** What the agent returned, if that is neither a reward nor spans; a long one is folded. */
function outputPanel(output) {
  if (output === null) return null;
  const text = asText(output);
  if (!text) return panel("Output", empty("The agent returned an empty text."));
  if (text.length <= OPEN_LETTERS) return panel("Output", copyButton(text), block(output));
  const summary = h("summary", {}, firstLine(output, ERROR_LETTERS));
  return panel("Output", unfolding({ "data-key": "output" }, summary, () => [copyButton(text), block(output)]));
}

const ATTEMPT_COLUMNS = [
  "Attempt", "Status", ["Reward", "number"], ["Calls", "number"], ["Tokens", "number"], ["Took", "number"], "Worker",
  "Started",
];

function attemptsPanel(attempts, chosen, traces, choose) {
  if (!attempts.length) return panel("Attempts", empty("Nobody has tried it yet."));
  const rows = attempts.map((attempt) => {
    const trace = traces.get(attempt.attempt_id) ?? NO_TRACE;
    const calls = callsOf(trace.all);
    const tokens = calls.map((call) => (call.tokensIn ?? 0) + (call.tokensOut ?? 0)).reduce((a, b) => a + b, 0);
    const button = h("button", {
      type: "button", "aria-pressed": String(attempt === chosen), "data-key": attempt.attempt_id,
      onclick: () => choose(attempt),
    }, `Attempt ${attempt.sequence_id}`);
    return [
      button, badge(attempt.status), number(finalReward(trace.all)), number(calls.length), number(tokens || null),
      duration((attempt.end_time ?? now()) - attempt.start_time), attempt.worker_id ?? "no worker",
      ago(attempt.start_time, now()),
    ];
  });
  const errors = attempts.map((attempt) => [attempt, errorOf(attempt, traces.get(attempt.attempt_id)?.all ?? [])]);
  const why = errors.filter(([, error]) => error).map(([attempt, error]) =>
    h("details", { class: "why", "data-key": `why ${attempt.attempt_id}` },
      h("summary", { class: "error" }, `Attempt ${attempt.sequence_id}: ${firstLine(error.text, ERROR_LETTERS)}`),
      copyButton(() => error.traceback ?? error.text), block(error.traceback ?? error.text)));
  return panel("Attempts", h("div", { class: "attempts" }, table(ATTEMPT_COLUMNS, rows), why));
}

// ------------------------------------------------------------------ the trace

function tracePanels(trace, found, more) {
  if (trace.problem) return [panel("Steps", empty(trace.problem))];
  const isCut = trace.total > trace.items.length;
  const hasTokens = callsOf(trace.items).some((call) => call.responseIds || call.logprobs);
  return [
    panel("Conversation",
      isCut && note(`Of the first ${number(trace.items.length)} spans.`),
      conversation(isCut ? trace.all : trace.items)),
    hasTokens && panel("Tokens", unfolding({ "data-key": "tokens", open: true },
      h("summary", {}, "Ids, log-probabilities, and what is trained"),
      () => tokenView(trace.items, usesOf(trace.all), found))),
    panel("Steps and their times", spanTree(trace, more)),
  ];
}

function spanTree(trace, more) {
  if (!trace.items.length) return empty("No span was recorded.");
  const tree = waterfallOf(trace.items);
  const spans = tree.flatMap((row) => [row.span, ...row.more]);
  const starts = spans.map((span) => span.start_time).filter(Number.isFinite);
  const ends = spans.map((span) => span.end_time).filter(Number.isFinite);
  const from = Math.min(...starts);
  const whole = Math.max(...ends, from) - from || 1e-9;
  const rows = tree.map((row) => spanRow(row, from, whole));
  const rest = trace.total - trace.items.length;
  const button = h("button", { type: "button", onclick: more }, `Show more of the other ${number(rest)}`);
  return h("div", { class: "spans" }, rows, rest > 0 && button);
}

function spanRow({ span, depth, more }, from, whole) {
  const name = h("span", { class: "name" }, plainName(span));
  name.style.paddingInlineStart = `${Math.min(depth, MOST_DEPTH)}em`;
  const lasts = (span.end_time ?? span.start_time) - span.start_time;
  const kind = span.status?.status_code === "ERROR" ? "failed" : rewardsOf(span).length ? "rewarded" : "";
  const bar = h("i", { class: kind });
  bar.style.marginInlineStart = `${(100 * (span.start_time - from)) / whole}%`;
  bar.style.width = `${(100 * lasts) / whole}%`;
  const track = h("span", { class: "track" }, bar);
  const summary = h("summary", {}, name, track, h("span", { class: "time" }, duration(lasts)));
  return unfolding({ class: "span", "data-key": `span ${span.span_id}` }, summary, () => [
    ...spanFacts(span),
    ...more.flatMap((one) => [h("h4", {}, `Recorded by the LLM proxy (${one.name})`), ...spanFacts(one)]),
    copyButton(() => JSON.stringify([span, ...more], null, 2), "Copy JSON"),
  ]);
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
