// The page: which view the address asks for, whether the server is there, and the clock.

import { follow, now } from "./api.js";
import { h, swap, tell } from "./dom.js";
import { overview } from "./overview.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { run, runs } from "./runs.js";

const main = document.getElementById("main");
const VIEWS = new Map([["", overview], ["rollouts", rollouts], ["runs", runs]]);
const DETAILS = new Map([["rollouts", rollout], ["runs", run]]);

let following = new AbortController();

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // somebody has written the address by hand
  }
}

/** What stands behind the #: parts of the path, and a query. */
function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** Show the view of the address. A view draws itself once, and again whenever something changes. */
function open() {
  const route = readAddress();
  const [name = "", detail] = route.parts;
  const view = (detail !== undefined ? DETAILS : VIEWS).get(name);
  for (const link of document.querySelectorAll("nav [data-view]")) {
    const isHere = link.dataset.view === (name || "overview");
    isHere ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  document.title = `${detail ?? (name || "overview")} · Agent Lightning`;
  following.abort();
  if (!view) {
    swap(main, h("p", { class: "empty" }, "There is no such view."));
    return;
  }
  let shown = null;
  route.go = (hash) => {
    history.pushState(null, "", hash);
    route.query = readAddress().query;
    route.refresh();
  };
  route.refresh = () => start(shown);
  shown = view(main, route);
  start(shown);
}

function start(view) {
  following.abort();
  following = new AbortController();
  const { signal } = following;
  follow({ ...view, state, signal }).catch((error) => {
    if (!signal.aborted) swap(main, h("p", { class: "problem", role: "alert" }, error.message), h("button", { type: "button", onclick: open }, "Try again"));
    if (!signal.aborted && !error.status) console.error(error);
  });
}

function state(word) {
  const gone = document.getElementById("gone");
  const isGone = word === "gone";
  if (gone.hidden === isGone) {
    gone.hidden = !isGone;
    gone.textContent = isGone ? "The server does not answer. What you see is what it said last; the page goes on when it is back." : "";
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
setInterval(() => tell(now()), 1000);
open();
