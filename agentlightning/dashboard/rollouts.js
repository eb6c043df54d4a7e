// The table of rollouts: filtered and paged by the server, however many there are.

import { get, now } from "./api.js";
import { ago, badge, duration, firstLine, h, linkTo, number, swap, table } from "./dom.js";
import { known, learn } from "./rewards.js";
import { isFinal, MODES, STATUSES } from "./states.js";

const ASKED = ["status", "mode", "id", "page"]; // what stands in the address
const COLUMNS = [
  "Rollout", "Status", "Mode", ["Reward", "number"], ["Attempts", "number"], "Start", ["Duration", "number"],
  ["Task", "wide"],
];
const PAGE = 50;
const TYPING_MS = 250; // after the last letter

export function rollouts(main, route) {
  const place = h("div", { id: "page" });
  const asked = () => Object.fromEntries(ASKED.map((name) => [name, route.query.get(name) ?? ""]));
  const go = (changes) => {
    const wanted = Object.entries({ ...asked(), page: "", ...changes });
    const query = new URLSearchParams(wanted.filter(([, value]) => value));
    place.setAttribute("aria-busy", "true");
    route.go(`#/rollouts${query.size ? `?${query}` : ""}`);
  };
  swap(main, h("h1", {}, "Rollouts"), filters(asked(), go), place);
  const refresh = async (signal) => {
    const page = await pageOf(asked(), signal);
    show(place, page, go);
    place.removeAttribute("aria-busy");
    await learn(page.items, signal, (rollout) => tellReward(place, rollout));
  };
  return { kinds: ["rollout"], refresh, mostSeconds: 10 };
}

function filters(wanted, go) {
  let typing;
  const typed = (event) => {
    clearTimeout(typing);
    // He may have left the view meanwhile.
    typing = setTimeout(() => event.target.isConnected && go({ id: event.target.value.trim() }), TYPING_MS);
  };
  const select = (label, name, values) => {
    const chosen = (event) => go({ [name]: event.target.value });
    const options = values.map((value) => h("option", { value, selected: wanted[name] === value }, value));
    const all = h("option", { value: "" }, "all");
    return h("label", {}, `${label} `, h("select", { id: `filter-${name}`, onchange: chosen }, all, options));
  };
  const field = { id: "filter-id", type: "search", placeholder: "part of an id" };
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    select("Status", "status", STATUSES),
    select("Mode", "mode", MODES),
    h("label", {}, "Id ", h("input", { ...field, value: wanted.id, oninput: typed })));
}

async function pageOf(wanted, signal) {
  const conditions = { status_in: wanted.status, mode_in: wanted.mode, rollout_id_contains: wanted.id };
  const offset = (Math.max(1, Number(wanted.page) || 1) - 1) * PAGE;
  return get("rollouts", { ...conditions, sort_by: "start_time", sort_order: "desc", limit: PAGE, offset }, signal);
}

// ------------------------------------------------------------------ showing

function show(place, page, go) {
  const rows = page.items.map((rollout) => [
    linkTo("rollouts", rollout.rollout_id),
    badge(rollout.status),
    rollout.mode,
    h("span", { "data-reward": rollout.rollout_id }, rewardText(rollout)),
    number(rollout.attempt?.sequence_id ?? 0),
    ago(rollout.start_time, now()),
    duration(lasted(rollout.attempt)),
    h("span", { class: "task" }, firstLine(rollout.input)),
  ]);
  swap(place, table(COLUMNS, rows, "No rollout is like that."), pager(page, go));
}

function rewardText(rollout) {
  if (!isFinal(rollout)) return "–";
  const found = known(rollout);
  return found ? number(found.reward) : "…";
}

function tellReward(place, rollout) {
  const cell = place.querySelector(`[data-reward="${CSS.escape(rollout.rollout_id)}"]`);
  if (cell) cell.textContent = rewardText(rollout);
}

function lasted(attempt) {
  return attempt ? Math.max(0, (attempt.end_time ?? now()) - attempt.start_time) : null;
}

function pager(page, go) {
  const current = page.offset / PAGE + 1;
  const pages = Math.max(1, Math.ceil(page.total / PAGE));
  const turn = (name, to) => {
    const disabled = to < 1 || to > pages || to === current;
    const onclick = () => go({ page: to > 1 ? to : "" });
    return h("button", { type: "button", "data-key": name, disabled, onclick }, name);
  };
  const last = page.offset + page.items.length;
  const range = page.items.length ? `${number(page.offset + 1)} to ${number(last)}` : "0";
  return h("nav", { class: "pager", "aria-label": "Pages" },
    turn("Newest", 1),
    turn("Newer", current - 1),
    h("span", { id: "shown" }, `${range} of ${number(page.total)}`),
    turn("Older", current + 1),
    turn("Oldest", pages));
}
