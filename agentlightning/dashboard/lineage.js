// The prompts that an optimisation tried, each below the one it came from, with what changed and why.

import { textDiff } from "./diff.js";
import { badge, block, copyButton, firstLine, h, note, number, panel } from "./dom.js";

const MOST_INDENT = 8;

/** The panel of the candidates in a run's summary; null for a run that has none. */
export function lineagePanel(run, query, go) {
  const candidates = (Array.isArray(run.summary?.candidates) ? run.summary.candidates : [])
    .filter((one) => typeof one?.version === "string" && typeof one.template === "string");
  if (!candidates.length) return null;
  const byVersion = new Map(candidates.map((one) => [one.version, one]));
  const best = run.summary.best_version ?? [...candidates].reverse().find((one) => one.fate === "promoted")?.version;
  const shown = byVersion.get(query.get("prompt")) ?? byVersion.get(best) ?? candidates[candidates.length - 1];
  const rows = ordered(candidates).map(({ one, depth }) => row(one, depth, one === shown, go));
  return [
    panel("Prompts, each below the one it came from", h("ul", { class: "lineage" }, rows)),
    details(shown, byVersion.get(shown.parent)),
  ];
}

/** Parents before their children, with their depth; one whose parent is not known is a root. */
function ordered(candidates) {
  const versions = new Set(candidates.map((one) => one.version));
  const found = [];
  const seen = new Set();
  const add = (one, depth) => {
    if (seen.has(one)) return;
    seen.add(one);
    found.push({ one, depth });
    for (const child of candidates) if (child.parent === one.version && child !== one) add(child, depth + 1);
  };
  for (const one of candidates) if (!versions.has(one.parent)) add(one, 0);
  for (const one of candidates) add(one, 0); // in a circle
  return found;
}

function row(one, depth, isShown, go) {
  const button = h("button", {
    type: "button", class: "plain", "aria-pressed": String(isShown), "data-key": `prompt ${one.version}`,
    onclick: () => go({ prompt: one.version }),
  }, one.version);
  const item = h("li", {}, button, badge(one.fate), h("span", { class: "number" }, scoreOf(one)),
    h("span", { class: "task quiet" }, firstLine(one.reason ?? one.critique ?? one.template, 100)));
  item.style.marginInlineStart = `${1.2 * Math.min(depth, MOST_INDENT)}rem`;
  return item;
}

/** The latest mean reward of a candidate. */
function scoreOf(one) {
  const rounds = Object.entries(one.scores ?? {}).sort(([a], [b]) => Number(a) - Number(b));
  return rounds.length ? number(rounds[rounds.length - 1][1], 3) : "–";
}

function details(one, parent) {
  const scores = Object.entries(one.scores ?? {}).map(([round, score]) => `round ${round}: ${number(score, 3)}`);
  return panel(`Prompt ${one.version}`,
    copyButton(one.template, "Copy prompt"),
    parent && h("h4", {}, `Compared with ${parent.version}`),
    parent ? textDiff(parent.template, one.template) : block(one.template),
    one.critique && h("details", { "data-key": "critique", open: true },
      h("summary", {}, "What was criticised"), h("div", { class: "said" }, one.critique)),
    one.reason && note(one.reason),
    scores.length > 0 && note(`Scores: ${scores.join(", ")}.`));
}
