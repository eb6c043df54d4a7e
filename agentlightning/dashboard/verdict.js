// The verdict on a run: what was gained, or why nothing was, with what to try.

import { h, panel } from "./dom.js";

/** The panel of a verdict; null for a run that has none. */
export function verdictOf(run) {
  const lines = verdictLines(run);
  return lines.length ? panel("Verdict", lines) : null;
}

/** The verdict in a sentence, with the interval of what was gained, and every warning by its name. */
export function verdictLines(run) {
  const verdict = run.summary?.verdict;
  if (!isVerdict(verdict)) return [];
  const findings = Array.isArray(verdict.findings) ? verdict.findings : [];
  const items = findings.map((one) => h("li", {},
    h("span", { class: "badge requeuing" }, text(one?.name).replaceAll("_", " ") || "warning"), " ",
    h("b", {}, text(one?.sentence)), " ", text(one?.advice)));
  return [
    h("p", { class: `verdict ${classOf(verdict.outcome)}` }, verdict.sentence),
    items.length > 0 && h("ul", { class: "findings" }, items),
  ].filter(Boolean);
}

/** The verdict in one line; null for a run that has none. */
export function sentenceOf(run) {
  return isVerdict(run.summary?.verdict) ? run.summary.verdict.sentence : null;
}

const isVerdict = (verdict) => typeof verdict?.sentence === "string" && verdict.outcome !== "unknown";
const classOf = (outcome) => ({ gained: "good", lost: "bad" }[outcome] ?? "warn");
const text = (value) => (typeof value === "string" ? value : "");
