// A conversation: what was said to models and by them, with the rewards where they were given.

import { asText, copyButton, duration, empty, h, number, unfolding } from "./dom.js";
import { asPlain, partsOf, repeated, rewardsOf, turnsOf } from "./traces.js";

/** The turns of an attempt, one below the other. */
export function conversation(spans) {
  const turns = turnsOf(spans);
  const calls = turns.filter((turn) => turn.call).map((turn) => turn.call);
  if (!calls.length && !turns.length) return empty("No model was called.");
  return turns.map((turn) => {
    if (turn.reward) return pinned(turn.reward);
    const index = calls.indexOf(turn.call);
    return exchange(turn.call, calls[index - 1], index);
  });
}

/** A reward, where it was given. */
function pinned(span) {
  const values = rewardsOf(span).map(([name, value]) =>
    h("span", { class: `reward ${value > 0 ? "good" : value < 0 ? "bad" : ""}` },
      name === "primary" ? "Reward " : `${name} `, h("b", {}, number(value))));
  return h("p", { class: "pinned" }, values);
}

function exchange(call, before, index) {
  const known = repeated(call, before);
  const hasTokens = (call.tokensIn ?? call.tokensOut) !== undefined;
  const about = [
    call.agent && `by ${call.agent}`,
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
  const error = call.span.status?.status_code === "ERROR" && call.span.status.description;
  return h("article", { class: "call" },
    h("h3", {}, `Call ${index + 1}`, h("span", { class: "quiet" }, about.filter(Boolean).join(" · "))),
    earlier,
    call.prompt.slice(known).map((one) => message(one)),
    call.answers.map((one) => message(one, "answer")),
    error && h("p", { class: "error" }, asText(error)));
}

function message(one, kind = "") {
  const calls = one.calls.map((call) => {
    const given = h("code", {}, asText(call.arguments ?? ""));
    return h("div", { class: "toolcall" }, h("b", {}, call.name ?? "a tool"), given);
  });
  const parts = partsOf(one.content).map((part) => {
    if (part.image) return h("img", { class: "picture", src: part.image, alt: "An image of the conversation" });
    return part.text === undefined ? h("div", { class: "quiet" }, part.kind)
      : h("div", { class: "said" }, asText(part.text));
  });
  const isEmpty = !parts.length && !calls.length;
  return h("div", { class: `message ${kind}` },
    h("span", { class: "role" }, one.role),
    h("div", {}, parts, calls, isEmpty && h("span", { class: "quiet" }, "nothing")),
    parts.length > 0 && copyButton(() => asPlain(one.content)));
}
