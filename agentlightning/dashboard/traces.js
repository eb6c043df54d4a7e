// Reading spans: rewards, errors, model calls as conversations, and the tree. Pure functions of plain data.

// The LLM proxy's spans, whose names are those of earlier releases, and what they are called here.
const PROXY_SPANS = new Map([
  ["litellm_request", "model call (LLM proxy)"],
  ["raw_gen_ai_request", "model call as sent and received"],
]);

export const shownName = (span) => PROXY_SPANS.get(span.name) ?? span.name;

// ------------------------------------------------------------------ rewards and errors

/** The rewards of a span as `[name, value]`, the primary one first. */
export function rewardsOf(span) {
  return statedBy(span).filter(([, value]) => typeof value === "number");
}

/** What a span states as rewards, numbers or not; the three formats of `types/rewards.py`. */
function statedBy(span) {
  const found = [];
  const attributes = span.attributes ?? {};
  for (let i = 0; `agentlightning.reward.${i}.value` in attributes; i++) {
    const name = attributes[`agentlightning.reward.${i}.name`] ?? "primary";
    found.push([String(name), attributes[`agentlightning.reward.${i}.value`]]);
  }
  if (!found.length) {
    const outputs = ["agentops.task.output", "agentops.entity.output"].map((key) => parsed(attributes[key]));
    const output = outputs.find(hasFields);
    if (output?.type === "reward") found.push(["primary", output.value]);
    else if (!output && span.name === "agentlightning.reward") found.push(["primary", attributes.reward]);
  }
  return found.map(([name, value]) => [name, typeof value === "boolean" ? Number(value) : value]);
}

function hasFields(output) {
  return output !== null && !Array.isArray(output) && Object.keys(output).length > 0;
}

/** The last reward, of several in one span the primary one; null if there is none. */
export function finalReward(spans) {
  const values = spans.map((span) => statedBy(span)[0]?.[1]).filter((value) => typeof value === "number");
  return values.pop() ?? null;
}

/** What went wrong in an attempt, in words, and the traceback if there is one; null if nothing did. */
export function errorOf(attempt, spans = []) {
  const noted = attempt?.metadata?.error;
  if (noted && typeof noted === "object") {
    return { text: joined(noted.type, noted.message), traceback: noted.traceback };
  }
  const recorded = spans.filter((span) => span.name === "agentlightning.exception").pop()?.attributes;
  if (recorded) {
    const text = joined(recorded["exception.type"], recorded["exception.message"]);
    return { text, traceback: recorded["exception.stacktrace"] };
  }
  const endedBadly = ["failed", "timeout", "unresponsive"].includes(attempt?.status);
  return endedBadly ? { text: `The attempt ended as '${attempt.status}'.` } : null;
}

function joined(kind, message) {
  return [kind, message].filter(Boolean).map(String).join(": ");
}

function parsed(value) {
  if (typeof value !== "string") return value && typeof value === "object" ? value : null;
  try {
    const read = JSON.parse(value);
    return read && typeof read === "object" ? read : null;
  } catch {
    return null;
  }
}

// ------------------------------------------------------------------ conversations

/** The model calls of an attempt. One that the tracer and the LLM proxy both recorded is the tracer's. */
export function callsOf(spans) {
  const calls = spans.map(callOf).filter(Boolean);
  const traced = calls.filter((call) => !PROXY_SPANS.has(call.span.name));
  const answers = new Set(traced.map((call) => call.responseId).filter(Boolean));
  const ids = new Set(traced.map((call) => call.span.span_id));
  const isTraced = (call) => answers.has(call.responseId) || ids.has(call.span.parent_id);
  return calls
    .filter((call) => !PROXY_SPANS.has(call.span.name) || !isTraced(call))
    .sort((one, other) => (one.span.start_time ?? 0) - (other.span.start_time ?? 0));
}

function callOf(span) {
  const attributes = span.attributes ?? {};
  const prompt = messagesBelow(attributes, "gen_ai.prompt.");
  const answers = messagesBelow(attributes, "gen_ai.completion.");
  if (!prompt.length && !answers.length) return null;
  const first = (...names) => names.map((name) => attributes[name]).find((value) => value !== undefined);
  return {
    span,
    prompt,
    answers,
    responseId: first("gen_ai.response.id"),
    model: first("gen_ai.response.model", "gen_ai.request.model"),
    weights: first("agentlightning.weights_version"),
    tokensIn: first("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"),
    tokensOut: first("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
    finish: first("gen_ai.completion.0.finish_reason", "gen_ai.response.finish_reason"),
  };
}

/** `gen_ai.prompt.0.role` and the like, put together again. */
function messagesBelow(attributes, prefix) {
  const messages = [];
  for (const [name, value] of Object.entries(attributes)) {
    if (!name.startsWith(prefix)) continue;
    const [index, field, callIndex, callField] = name.slice(prefix.length).split(".");
    if (!/^\d{1,5}$/.test(index)) continue;
    const message = (messages[index] ??= { role: "assistant", content: null, calls: [] });
    if (field === "tool_calls" && /^\d{1,4}$/.test(callIndex)) (message.calls[callIndex] ??= {})[callField] = value;
    else if (field === "role") message.role = String(value);
    else if (field === "content") message.content = spoken(value);
  }
  return messages.filter(Boolean).map((message) => ({ ...message, calls: message.calls.filter(Boolean) }));
}

/** Content that was written in parts, as the text of them; images and the like are named. */
function spoken(content) {
  const parts = typeof content === "string" && content.startsWith("[{") ? parsed(content) : content;
  if (!Array.isArray(parts) || !parts.every((part) => typeof part?.type === "string")) return content;
  return parts.map((part) => part.text ?? `[${part.type}]`).join("\n");
}

/** How many messages at the beginning of a call were said in the call before. */
export function repeated(call, before) {
  if (!before) return 0;
  const said = [...before.prompt, ...before.answers].map(key);
  const now = call.prompt.map(key);
  let count = 0;
  while (count < now.length && now[count] === said[count]) count++;
  return count;
}

function key(message) {
  return JSON.stringify([message.role, message.content, message.calls.map((call) => [call.name, call.arguments])]);
}

// ------------------------------------------------------------------ the tree

/** Spans with their depth, parents before children, siblings by time. One without a known parent is a root. */
export function treeOf(spans) {
  const known = new Set(spans.map((span) => span.span_id));
  const children = new Map();
  for (const span of spans) {
    const parent = known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(span);
  }
  const byTime = (one, other) => (one.start_time ?? 0) - (other.start_time ?? 0) || one.sequence_id - other.sequence_id;
  const below = (parent, depth) => (children.get(parent) ?? []).sort(byTime).map((span) => ({ span, depth })).reverse();
  const rows = [];
  const seen = new Set();
  const waiting = below(null, 0);
  while (waiting.length) {
    const { span, depth } = waiting.pop();
    if (seen.has(span)) continue;
    seen.add(span);
    rows.push({ span, depth });
    for (const child of below(span.span_id, depth + 1)) waiting.push(child);
  }
  for (const span of spans) if (!seen.has(span)) rows.push({ span, depth: 0 }); // in a circle of parents
  return rows;
}
