// Keys: to the views, to the filter, along the rows of a table; `?` shows them all.

import { facts, h } from "./dom.js";

const VIEWS = { o: "", n: "runs", r: "rollouts", e: "resources", w: "workers" };
const HELP = [
  ["g then o", "overview"], ["g then n", "runs"], ["g then r", "rollouts"], ["g then e", "resources"],
  ["g then w", "workers"], ["/", "the first filter"], ["j and k", "next and previous row"],
  ["← →", "in a chart: along the curve"], ["+ - 0", "in a chart: zoom in, out, show all"],
  ["Enter", "in a chart of a run: show that step"], ["?", "these keys"],
];
const SECOND_KEY_MS = 1500;

/** Listen for keys as long as the page lives; the button shows them too. */
export function listenForKeys(button) {
  let wentAt = -Infinity; // when g was pressed
  button.addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea, dialog");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const isSecond = performance.now() - wentAt < SECOND_KEY_MS;
    wentAt = event.key === "g" ? performance.now() : -Infinity;
    if (isSecond && event.key in VIEWS) location.hash = `#/${VIEWS[event.key]}`;
    else if (event.key === "?") help();
    else if (event.key === "/") focusOn(event, document.querySelector("main .filters input, main .filters select"));
    else if (event.key === "j" || event.key === "k") focusOn(event, nextRow(event.key === "j" ? 1 : -1));
  });
}

function focusOn(event, element) {
  if (!element) return;
  event.preventDefault();
  element.focus();
}

/** The link in the row behind or before the one with the focus. */
function nextRow(step) {
  const rows = [...document.querySelectorAll("main tbody tr")];
  const links = rows.map((one) => one.querySelector("a, button")).filter(Boolean);
  const row = document.activeElement?.closest("tr");
  const at = links.findIndex((link) => row?.contains(link));
  return links[at < 0 ? 0 : at + step];
}

function help() {
  const dialog = h("dialog", { "aria-label": "Keys" },
    h("form", { method: "dialog" }, h("h2", {}, "Keys"), facts(HELP, "attributes"),
      h("button", { autofocus: true }, "Close")));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}
