// Elements and words. All that comes out of a store is written as text, never as HTML.

const MOST_LETTERS = 200000; // of one text

/** An element with properties, attributes, listeners (`onclick`) and children; null and false children are left out. */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same for a picture. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  const isThere = (child) => child !== null && child !== undefined && child !== false;
  element.append(...children.flat(Infinity).filter(isThere));
  return element;
}

/** Show other children, and leave the reader where he was: the focus and what he had opened, known by `data-key`. */
export function swap(parent, ...children) {
  const active = parent.contains(document.activeElement) ? document.activeElement : null;
  const focused = active?.closest("[data-key]")?.dataset.key;
  const turned = new Map([...parent.querySelectorAll("details[data-key]")].map((one) => [one.dataset.key, one.open]));
  parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
  for (const one of parent.querySelectorAll("details[data-key]")) {
    if (turned.has(one.dataset.key)) one.open = turned.get(one.dataset.key);
    if (one.open) one.dispatchEvent(new Event("toggle")); // fills it now, so that nothing jumps
  }
  const again = focused && parent.querySelector(`[data-key="${CSS.escape(focused)}"]`);
  if (again) (again.matches("details") ? again.firstElementChild : again).focus({ preventScroll: true });
}

/** Details that are made when they are opened: `build` gives what stands below the summary. */
export function unfolding(properties, summary, build) {
  const fill = () => {
    if (details.open && details.children.length === 1) details.append(...build());
  };
  const details = h("details", { ...properties, ontoggle: fill }, summary);
  return details;
}

/**
 * A table whose cells are given row by row; a column may be named with a class and the field that the server sorts it
 * by: `["Reward", "number", "reward"]`.
 */
export function table(columns, rows, ifEmpty, sorting = null) {
  if (!rows.length) return empty(ifEmpty);
  const named = columns.map((column) => (Array.isArray(column) ? column : [column, ""]));
  const head = h("tr", {}, named.map((column) => headOf(column, sorting)));
  const body = rows.map((cells) => rowOf(columns, cells));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

/** A row of a table, which may be put in the place of another. */
export function rowOf(columns, cells) {
  const kind = (column) => (Array.isArray(column) ? column[1] : "");
  return h("tr", {}, cells.map((cell, i) => h("td", { class: kind(columns[i]) }, cell ?? "–")));
}

/** `sorting` is `{by, order, go}`: what is sorted by, how, and who is told of another wish. */
function headOf([name, kind, field], sorting) {
  if (!field || !sorting) return h("th", { scope: "col", class: kind }, name);
  const isHere = sorting.by === field;
  const order = isHere && sorting.order === "desc" ? "asc" : "desc";
  const mark = isHere ? { desc: " ↓", asc: " ↑" }[sorting.order] : "";
  const sorted = isHere ? { desc: "descending", asc: "ascending" }[sorting.order] : "none";
  const button = h("button", {
    type: "button", class: "plain", "data-key": `sort ${field}`, onclick: () => sorting.go(field, order),
  }, name, mark);
  return h("th", { scope: "col", class: kind, "aria-sort": sorted }, button);
}

/** Names and values, as `[[name, value], …]`: `figures` side by side, `attributes` below each other. */
export function facts(pairs, kind = "figures") {
  return h("dl", { class: kind }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), children);
}

/** What is said where there is nothing to show. */
export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/** A remark below something. */
export function note(text) {
  return h("p", { class: "note" }, text);
}

/** A link to the view of one rollout or run; `key` sets it apart from other links to the same one. */
export function linkTo(view, id, { text = id, key = id } = {}) {
  return h("a", { href: addressOf(view, id), "data-key": key }, text);
}

export function addressOf(view, id) {
  return `#/${view}/${encodeURIComponent(id)}`;
}

export function badge(status) {
  return h("span", { class: `badge ${/^[a-z]+$/.test(status ?? "") ? status : ""}` }, status ?? "–");
}

/** A button that copies a text, which it is given or makes. */
export function copyButton(text, name = "Copy") {
  const button = h("button", { type: "button", class: "plain copy" }, name);
  button.addEventListener("click", async (event) => {
    event.preventDefault(); // it may stand in a summary
    const wanted = typeof text === "function" ? text() : text;
    try {
      await navigator.clipboard.writeText(wanted);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Cannot copy"; // no permission, or a page that is not served safely
    }
    setTimeout(() => (button.textContent = name), 1500);
  });
  return button;
}

/** Ask before something is done: the answer, true or false, once the reader has given it. */
export function confirmed(question, action) {
  const dialog = h("dialog", { "aria-label": question },
    h("form", { method: "dialog" },
      h("p", {}, question),
      h("div", { class: "row" },
        h("button", { value: "yes" }, action),
        h("button", { value: "", autofocus: true }, "Leave it"))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}

/** A value as JSON, made when it is unfolded, with a button that copies all of it. */
export function rawJson(name, value, key) {
  return unfolding({ class: "raw", "data-key": `raw ${key}` }, h("summary", {}, name), () => [
    copyButton(() => JSON.stringify(value, null, 2), "Copy JSON"), block(value),
  ]);
}

/** Something in a small space beside its name. */
export function field(name, control) {
  return h("label", {}, `${name} `, control);
}

/** The pages of a list: `go` is told which is wanted. */
export function pager(page, size, go, [first, newer, older, last] = ["Newest", "Newer", "Older", "Oldest"]) {
  const current = page.offset / size + 1;
  const pages = Math.max(1, Math.ceil(page.total / size));
  const turn = (name, to) => {
    const disabled = to < 1 || to > pages || to === current;
    return h("button", { type: "button", "data-key": name, disabled, onclick: () => go(to > 1 ? to : "") }, name);
  };
  const end = page.offset + page.items.length;
  const range = page.items.length ? `${number(page.offset + 1)} to ${number(end)}` : "0";
  return h("nav", { class: "pager", "aria-label": "Pages" },
    turn(first, 1), turn(newer, current - 1),
    h("span", { id: "shown" }, `${range} of ${number(page.total)}`),
    turn(older, current + 1), turn(last, pages));
}

// ------------------------------------------------------------------ words

export function number(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isSafeInteger(value)) return value.toLocaleString("en");
  const isFarFromOne = Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3;
  return isFarFromOne ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return "0 s"; // two clocks that do not agree
  if (seconds > 0 && seconds < 0.0995) return `${number(seconds * 1000, 2)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** A moment as "5 s ago", which `tell` keeps true; the exact time shows on hovering. */
export function ago(time, now) {
  const moment = new Date(time * 1000);
  if (typeof time !== "number" || Number.isNaN(moment.getTime())) return "–";
  const exact = { datetime: moment.toISOString(), title: moment.toLocaleString() };
  return h("time", { ...exact, "data-at": time }, since(time, now));
}

function since(time, now) {
  const seconds = Math.max(0, now - time);
  if (seconds < 1) return "now";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([least]) => seconds >= least);
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

/** Bring every moment that `ago` has written up to date. */
export function tell(now) {
  for (const one of document.querySelectorAll("time[data-at]")) {
    const text = since(Number(one.dataset.at), now);
    if (one.textContent !== text) one.textContent = text;
  }
}

/** Any value as text, and not more than a page can bear; an object as indented JSON. */
export function asText(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "";
  const rest = text.length - MOST_LETTERS;
  return rest > 0 ? `${text.slice(0, MOST_LETTERS)}… and ${number(rest)} more letters` : text;
}

/** The first line of a value, and not too much of it. */
export function firstLine(value, most = 120) {
  const plain = value && typeof value === "object" && !Array.isArray(value) ? Object.values(value)[0] : value;
  const text = (typeof plain === "string" ? plain : JSON.stringify(plain) ?? "").trim().split("\n", 1)[0];
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** A value as it is, with its lines; a long one can be scrolled with the keyboard. */
export function block(value) {
  const text = asText(value);
  return h("pre", { tabindex: text.length > 600 ? 0 : null }, text);
}
