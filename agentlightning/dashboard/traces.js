// Reading spans: rewards, errors, model calls as conversations, and the tree. Pure functions of plain data.

// The LLM proxy's spans, whose names are those of earlier releases.
const PROXY_SPANS = ["litellm_request", "raw_gen_ai_request"];
const PLAIN_NAMES = new Map([
  ["litellm_request", "Model call"],
  ["raw_gen_ai_request", "Model call as sent and received"],
  ["agentlightning.annotation", "Annotation"],
  ["agentlightning.exception", "Error"],
  ["agentlightning.message", "Message"],
  ["agentlightning.object", "Object"],
  ["agentlightning.reward", "Reward"],
]);

const isProxySpan = (span) => PROXY_SPANS.includes(span.name);
const TRAINING = "agentlightning.training.";
const isUse = (span) => `${TRAINING}is_used` in (span.attributes ?? {});

/**
 * What trainings made of an attempt, as they have written it behind its spans, the latest last: `{isUsed, reason,
 * advantage, model, runId, leftOut}`, the last by the spans of single calls.
 */
export function usesOf(spans) {
  return spans.filter(isUse).map(({ attributes }) => {
    const own = Object.entries(attributes).filter(([name]) => name.startsWith(TRAINING));
    const named = new Map(own.map(([name, value]) => [name.slice(TRAINING.length), value]));
    const calls = [...named].filter(([name]) => name.startsWith("left_out."));
    return {
      isUsed: named.get("is_used") === true, reason: named.get("reason"), advantage: named.get("advantage"),
      model: named.get("model"), runId: named.get("run_id"),
      leftOut: new Map(calls.map(([name, reason]) => [name.slice("left_out.".length), reason])),
    };
  });
}

/** A span's name for people: what it is, and of a model call which model. */
export function plainName(span) {
  const attributes = span.attributes ?? {};
  const model = attributes["gen_ai.response.model"] ?? attributes["gen_ai.request.model"];
  const [reward] = rewardsOf(span);
  if (reward) return `Reward ${reward[1]}`;
  if (span.name.endsWith(".chat.completion") || span.name === "litellm_request" || (model && isCall(attributes))) {
    return model ? `Model call · ${model}` : "Model call";
  }
  const tool = attributes["gen_ai.tool.name"] ?? attributes["tool.name"];
  return tool ? `Tool · ${tool}` : PLAIN_NAMES.get(span.name) ?? span.name;
}

const CALL_MARKS = ["gen_ai.response.id", "gen_ai.prompt.0.role", "gen_ai.completion.0.role"];
const isCall = (attributes) => CALL_MARKS.some((name) => name in attributes);

// ------------------------------------------------------------------ rewards and errors

/** The rewards of a span as `[name, value]`, the primary one first. */
export function rewardsOf(span) {
  return statedBy(span).filter(([, value]) => typeof value === "number");
}

/** What a span states as rewards, numbers or not; the three formats of `types/rewards.py`. */
function statedBy(span) {
  const found = [];
  const attributes = span.attributes ?? {};
  if ("agentlightning.late" in attributes) return found; // it came after its rollout had ended
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

/**
 * The model calls of an attempt, each once: the span of the SDK says when, the LLM proxy's span beneath it, or with the
 * same answer, may hold the content; `spans` are all that tell of the call.
 */
export function callsOf(spans) {
  const calls = [];
  const owners = new Map(); // the call of a span, and of an answer
  const order = [...spans].sort((one, other) => isProxySpan(one) - isProxySpan(other));
  for (const span of order) {
    const call = callOf(span);
    const owner = owners.get(span.parent_id) ?? (call?.responseId && owners.get(`answer ${call.responseId}`));
    if (owner && isProxySpan(span)) {
      merge(owner, call, span);
      owners.set(span.span_id, owner);
    } else if (call) {
      calls.push(call);
      owners.set(span.span_id, call);
      if (call.responseId) owners.set(`answer ${call.responseId}`, call);
    }
  }
  return calls.sort((one, other) => (one.span.start_time ?? 0) - (other.span.start_time ?? 0));
}

function merge(owner, call, span) {
  owner.spans.push(span);
  if (!call) return;
  for (const [name, value] of Object.entries(call)) {
    const own = owner[name];
    if (Array.isArray(own) ? !own.length : own === undefined || own === null) owner[name] = value;
  }
}

function callOf(span) {
  const attributes = span.attributes ?? {};
  const prompt = messagesBelow(attributes, "gen_ai.prompt.");
  const answers = messagesBelow(attributes, "gen_ai.completion.");
  if (!prompt.length && !answers.length && !isCall(attributes)) return null;
  const first = (...names) => names.map((name) => attributes[name]).find((value) => value !== undefined);
  return {
    span,
    spans: [span],
    prompt,
    answers,
    responseId: first("gen_ai.response.id"),
    model: first("gen_ai.response.model", "gen_ai.request.model"),
    weights: first("agentlightning.weights_version"),
    tokensIn: first("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"),
    tokensOut: first("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
    finish: first("gen_ai.completion.0.finish_reason", "gen_ai.response.finish_reason"),
    agent: first("gen_ai.agent.name", "crewai.agent.role"),
    promptIds: listIn(attributes.prompt_token_ids),
    responseIds: listIn(attributes.response_token_ids),
    logprobs: listIn(attributes["logprobs.content"]),
  };
}

/** A list that was written as JSON, or as it is; null if there is none. */
function listIn(value) {
  const found = typeof value === "string" ? parsed(value) : value;
  return Array.isArray(found) ? found : null;
}

/** The text of the last answer of a trace; null if a model gave none. */
export function lastAnswer(spans) {
  const answers = callsOf(spans).flatMap((call) => call.answers);
  const texts = answers.map((one) => asPlain(one.content)).filter((text) => text.trim());
  return texts.pop() ?? null;
}

/** Content as one text. */
export function asPlain(content) {
  return partsOf(content).map((part) => part.text ?? `[${part.kind}]`).join("\n");
}

/** Calls, and the rewards given between them, in the order in which they happened: `{call}` or `{reward}`. */
export function turnsOf(spans) {
  const calls = callsOf(spans).map((call) => ({ call, at: call.span.end_time ?? call.span.start_time ?? 0 }));
  const rewards = spans.filter((span) => rewardsOf(span).length)
    .map((span) => ({ reward: span, at: span.start_time ?? 0 }));
  // A reward that is given at the moment a call ends comes after it.
  return [...calls, ...rewards].sort((one, other) => one.at - other.at || (one.call ? -1 : 1));
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
    else if (field === "content") message.content = value;
  }
  return messages.filter(Boolean).map((message) => ({ ...message, calls: message.calls.filter(Boolean) }));
}

const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;

/** Content as parts: `{text}`, `{image}` for a picture that came along, or `{kind}` for what cannot be shown. */
export function partsOf(content) {
  const parts = typeof content === "string" && content.startsWith("[{") ? parsed(content) : content;
  if (!Array.isArray(parts) || !parts.every((part) => typeof part?.type === "string")) {
    return content === null || content === undefined || content === "" ? [] : [{ text: asWords(content) }];
  }
  return parts.map((part) => {
    if (typeof part.text === "string") return { text: part.text };
    const url = part.image_url?.url ?? part.image_url ?? sourceOf(part.source);
    if (typeof url !== "string") return { kind: part.type };
    return IMAGE.test(url) ? { image: url } : { kind: `${part.type} at ${url.slice(0, 200)}` };
  });
}

const sourceOf = (source) => (source?.data ? `data:${source.media_type};base64,${source.data}` : source?.url);
const asWords = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

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
  const calls = message.calls.map((call) => [call.name, compact(call.arguments)]);
  return JSON.stringify([message.role, message.content, calls]);
}

// JSON without the spaces in which two recordings of one call may differ; anything else as it is.
function compact(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
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

/**
 * The tree with one row for each model call: what the LLM proxy recorded of a call of the SDK stands with it. What a
 * training wrote later is no part of it.
 */
export function waterfallOf(spans) {
  const more = new Map(callsOf(spans).map((call) => [call.span, call.spans.slice(1)]));
  const folded = new Set([...more.values()].flat());
  const rows = treeOf(spans.filter((span) => !folded.has(span) && !isUse(span)));
  return rows.map((row) => ({ ...row, more: more.get(row.span) ?? [] }));
}
