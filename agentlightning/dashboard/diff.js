// Differences: of two texts, line by line and within changed lines word by word, and of two sets of named values.

import { asText, empty, h } from "./dom.js";

const MOST_CELLS = 4e6; // of the table in which the longest common part is looked for
const CONTEXT = 3; // lines around a change that are shown

/** What of two lists is common, removed and added, as `[kind, item]` in order; kinds are "same", "gone", "new". */
export function compared(before, after) {
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start++;
  let end = 0;
  const rest = Math.min(before.length, after.length) - start;
  while (end < rest && before[before.length - 1 - end] === after[after.length - 1 - end]) end++;
  const [one, other] = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  const same = (items) => items.map((item) => ["same", item]);
  return [...same(before.slice(0, start)), ...changes(one, other), ...same(before.slice(before.length - end))];
}

function changes(one, other) {
  const [rows, columns] = [one.length, other.length];
  if ((rows + 1) * (columns + 1) > MOST_CELLS) {
    return [...one.map((item) => ["gone", item]), ...other.map((item) => ["new", item])];
  }
  const common = new Uint32Array((rows + 1) * (columns + 1)); // length of the longest common part from here on
  const at = (i, j) => i * (columns + 1) + j;
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      common[at(i, j)] = one[i] === other[j]
        ? common[at(i + 1, j + 1)] + 1 : Math.max(common[at(i + 1, j)], common[at(i, j + 1)]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < rows || j < columns) {
    if (i < rows && j < columns && one[i] === other[j]) {
      found.push(["same", one[i]]);
      i++, j++;
    } else if (j >= columns || (i < rows && common[at(i + 1, j)] >= common[at(i, j + 1)])) {
      found.push(["gone", one[i++]]);
    } else found.push(["new", other[j++]]);
  }
  return found;
}

/** Two texts as one, with what was taken out and put in. */
export function textDiff(before, after) {
  const [one, other] = [asText(before), asText(after)];
  if (one === other) return empty("They are the same.");
  const lines = compared(one.split("\n"), other.split("\n"));
  return h("div", { class: "diff", role: "group", "aria-label": "Differences" }, folded(blocks(lines)));
}

/** Lines that follow each other with the same fate, removed ones with those that came for them. */
function blocks(lines) {
  const found = [];
  for (const [kind, text] of lines) {
    const last = found[found.length - 1];
    if (kind === "same") {
      if (last?.kind === "same") last.lines.push(text);
      else found.push({ kind: "same", lines: [text] });
    } else {
      const change = last?.kind === "change" ? last : { kind: "change", gone: [], new: [] };
      if (change !== last) found.push(change);
      change[kind].push(text);
    }
  }
  return found;
}

function folded(found) {
  return found.flatMap((one, i) => {
    if (one.kind === "change") return changed(one);
    const [head, tail] = [i > 0 ? CONTEXT : 0, i < found.length - 1 ? CONTEXT : 0];
    const hidden = one.lines.length - head - tail;
    const row = (text) => h("div", { class: "same" }, text || "\u00a0");
    if (hidden <= 2) return one.lines.map(row);
    const middle = one.lines.slice(head, one.lines.length - tail);
    const fold = h("details", {}, h("summary", {}, `${hidden} lines without a change`), middle.map(row));
    return [...one.lines.slice(0, head).map(row), fold, ...(tail ? one.lines.slice(-tail).map(row) : [])];
  });
}

/** Changed lines; where some came in the place of others, with the words that differ marked. */
function changed(change) {
  const plain = (kind, name) => change[kind].map((text) =>
    h("div", { class: kind }, h("span", { class: "unseen" }, name), text || "\u00a0"));
  if (!change.gone.length || !change.new.length) return [...plain("gone", "Removed: "), ...plain("new", "Added: ")];
  const words = (lines) => lines.join("\n").split(/(\s+|[.,;:!?()[\]{}"'])/).filter(Boolean);
  const parts = compared(words(change.gone), words(change.new));
  const side = (kind, mark, name) => {
    const shown = parts.filter(([fate]) => fate === "same" || fate === kind);
    if (!shown.length) return null;
    const text = shown.map(([fate, word]) => (fate === kind ? h(mark, {}, word) : word));
    return h("div", { class: kind }, h("span", { class: "unseen" }, name), text);
  };
  return [side("gone", "del", "Removed: "), side("new", "ins", "Added: ")];
}

// ------------------------------------------------------------------ values

/** Nested values by their paths: `settings.algorithm.steps`. */
export function flattened(value, path = "", found = new Map()) {
  if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [name, item] of Object.entries(value)) flattened(item, path ? `${path}.${name}` : name, found);
  } else if (path) found.set(path, value);
  return found;
}

/** What an algorithm was set to comes first, what surrounded it last. */
function rankOf(name) {
  if (name.startsWith("settings.algorithm.")) return 0;
  return /^(git|python|version|settings)\b/.test(name) ? 2 : 1;
}

/** Values of several things side by side, those that differ marked and first; `columns` are `[heading, values]`. */
export function valuesDiff(columns) {
  const flat = columns.map(([, values]) => flattened(values));
  const names = [...new Set(flat.flatMap((one) => [...one.keys()]))];
  names.sort((one, other) => rankOf(one) - rankOf(other) || one.localeCompare(other));
  const shown = (one, name) => (one.has(name) ? asText(one.get(name)) : "–");
  const rows = names.map((name) => ({ name, cells: flat.map((one) => shown(one, name)) }));
  const differs = (row) => row.cells.some((cell) => cell !== row.cells[0]);
  const tableOf = (chosen) => h("div", { class: "scroll" }, h("table", { class: "values" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"),
      columns.map(([heading]) => h("th", { scope: "col" }, heading.cloneNode?.(true) ?? heading)))),
    h("tbody", {}, chosen.map((row) => h("tr", { class: differs(row) ? "differs" : "" },
      h("th", { scope: "row" }, row.name), row.cells.map((cell) => h("td", {}, cell)))))));
  const [other, same] = [rows.filter(differs), rows.filter((row) => !differs(row))];
  return [
    other.length ? tableOf(other) : empty("No setting differs."),
    same.length > 0 && h("details", { "data-key": "same settings" },
      h("summary", {}, `${same.length} settings are the same`), tableOf(same)),
  ];
}
