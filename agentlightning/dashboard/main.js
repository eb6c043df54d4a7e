// The page: which view the address asks for, whether the server is there, and the clock.

import { decoded, follow, now, takeToken } from "./api.js";
import { empty, h, swap, tell } from "./dom.js";
import { overview } from "./overview.js";
import { listenForKeys } from "./keys.js";
import { resource, resources } from "./resources.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { run } from "./run.js";
import { runs } from "./runs.js";
import { offerThemes } from "./theme.js";
import { workers } from "./workers.js";

const main = document.getElementById("main");
const VIEWS = new Map(Object.entries({ "": overview, runs, rollouts, resources, workers }));
const DETAILS = new Map(Object.entries({ runs: run, rollouts: rollout, resources: resource }));
const GONE = "The server does not answer. What you see is what it said last; the page goes on when it is back.";

let following = new AbortController();
let shown = null; // the view that is followed; null if there is none, or it could not be shown

/** What stands behind the #: parts of the path, and a query. */
function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** Show the view of the address. A view draws itself once, and again whenever something changes. */
function open() {
  takeToken();
  const route = readAddress();
  const [name = "", detail] = route.parts;
  const view = (detail !== undefined ? DETAILS : VIEWS).get(name);
  for (const link of document.querySelectorAll("nav [data-view]")) {
    const isHere = link.dataset.view === (name || "overview");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${detail ?? (name || "overview")} · Agent Lightning`;
  following.abort();
  shown = null;
  if (!view) {
    swap(main, empty("There is no such view."));
    return;
  }
  route.go = (hash) => {
    history.pushState(null, "", hash);
    route.query = readAddress().query;
    start();
  };
  route.refresh = start;
  shown = view(main, route);
  start();
}

/** Refresh the view and follow what changes in it, as long as somebody can see it. */
function start() {
  following.abort();
  if (shown === null || document.hidden) return;
  following = new AbortController();
  const { signal } = following;
  follow({ ...shown, state, signal }).catch((error) => {
    if (signal.aborted) return;
    shown = null;
    const again = h("button", { type: "button", onclick: open }, "Try again");
    swap(main, h("p", { class: "problem", role: "alert" }, error.message), again);
    if (!error.status) console.error(error);
  });
}

/** Say whether the server is there: `live` or `gone`. */
function state(word) {
  const gone = document.getElementById("gone");
  const isGone = word === "gone";
  if (gone.hidden === isGone) {
    gone.hidden = !isGone;
    gone.textContent = isGone ? GONE : "";
  }
  const here = document.getElementById("state");
  here.className = word;
  const text = isGone ? "away" : "live";
  if (here.textContent !== text) here.textContent = text;
}

addEventListener("hashchange", () => {
  open();
  if (document.activeElement === document.body) main.focus({ preventScroll: true }); // what had the focus is gone
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // #main is a place, not a view
  main.focus();
});
document.addEventListener("visibilitychange", start); // in a hidden tab nothing is asked for
setInterval(() => tell(now()), 1000);
offerThemes(document.getElementById("theme"));
listenForKeys(document.getElementById("keys"));
open();
