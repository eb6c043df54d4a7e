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

/** A table whose cells are given row by row; a column may be named with a class: `["Reward", "number"]`. */
export function table(columns, rows, ifEmpty) {
  if (!rows.length) return empty(ifEmpty);
  const named = columns.map((column) => (Array.isArray(column) ? column : [column, ""]));
  const head = h("tr", {}, named.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: named[i][1] }, cell ?? "–"))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
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
  return seconds < 1 ? "now" : `${duration(Math.floor(seconds))} ago`;
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
