// The table of rollouts: filtered and paged by the server, however many there are.

import { get, now } from "./api.js";
import { ago, badge, duration, firstLine, h, number, swap, table } from "./dom.js";
import { isFinal, known, learn } from "./rewards.js";

const STATUSES = ["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"];
const MODES = ["train", "val", "test"]; // as the server sorts them: missing, test, train, val
const PAGE = 50;
const TYPING_MS = 250;

export function rollouts(main, route) {
  const place = h("div", { id: "page" });
  const asked = () => Object.fromEntries(["status", "mode", "id", "page"].map((name) => [name, route.query.get(name) ?? ""]));
  const go = (changes) => {
    const query = new URLSearchParams(Object.entries({ ...asked(), page: "", ...changes }).filter(([, value]) => value));
    place.setAttribute("aria-busy", "true");
    route.go(`#/rollouts${query.size ? `?${query}` : ""}`);
  };
  swap(main, h("h1", {}, "Rollouts"), filters(asked(), go), place);
  const ranges = new Map();
  const refresh = async (signal) => {
    const wanted = asked();
    const page = await (wanted.mode ? pageOfMode(wanted, ranges, signal) : pageOf(wanted, signal));
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
  const select = (name, values) =>
    h("label", {}, `${name} `, h("select", { id: `filter-${name.toLowerCase()}`, onchange: (event) => go({ [name.toLowerCase()]: event.target.value }) },
      h("option", { value: "" }, "all"), values.map((value) => h("option", { value, selected: wanted[name.toLowerCase()] === value }, value))));
  const search = h("input", { id: "filter-id", type: "search", placeholder: "part of an id", value: wanted.id, oninput: typed });
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, select("Status", STATUSES), select("Mode", MODES), h("label", {}, "Id ", search));
}

// ------------------------------------------------------------------ asking

function conditions(wanted) {
  return { status_in: wanted.status, rollout_id_contains: wanted.id };
}

async function pageOf(wanted, signal) {
  const offset = (Math.max(1, Number(wanted.page) || 1) - 1) * PAGE;
  return get("rollouts", { ...conditions(wanted), sort_by: "start_time", sort_order: "desc", limit: PAGE, offset }, signal);
}

/**
 * A page of one mode. The server cannot filter by it, but sorts by it, the oldest first within a mode: where the mode
 * begins and ends is found by halving, and pages are cut from the end.
 */
async function pageOfMode(wanted, ranges, signal) {
  const asked = { ...conditions(wanted), sort_by: "mode" };
  const { total } = await get("rollouts", { ...asked, limit: 0 }, signal);
  const modeAt = async (offset) => (await get("rollouts", { ...asked, limit: 1, offset }, signal)).items[0]?.mode ?? "";
  const key = [wanted.status, wanted.mode, wanted.id].join();
  const guess = ranges.get(key) ?? { begin: total >> 1, end: total };
  const [begin, end] = await Promise.all([
    boundary(total, guess.begin, async (offset) => (await modeAt(offset)) < wanted.mode),
    boundary(total, guess.end, async (offset) => (await modeAt(offset)) <= wanted.mode),
  ]);
  ranges.set(key, { begin, end });
  const offset = (Math.max(1, Number(wanted.page) || 1) - 1) * PAGE;
  const first = Math.max(begin, end - offset - PAGE);
  const limit = Math.max(0, end - offset - first);
  const { items } = await get("rollouts", { ...asked, limit, offset: first }, signal);
  return { items: items.filter((rollout) => rollout.mode === wanted.mode).reverse(), total: end - begin, offset, limit: PAGE };
}

/** The first of `total` places that is not before the boundary, looked for around a guess first. */
async function boundary(total, guess, isBefore) {
  let [low, high] = [0, total];
  let at = Math.min(Math.max(guess, 0), total - 1);
  for (let step = 1; low < high; step *= 2) {
    if (await isBefore(at)) {
      low = at + 1;
      at += step;
    } else {
      high = at;
      at -= step;
    }
    if (at < low || at >= high || (low > 0 && high < total)) at = (low + high) >> 1;
  }
  return low;
}

// ------------------------------------------------------------------ showing

function show(place, page, go) {
  const rows = page.items.map((rollout) => [
    h("a", { href: `#/rollouts/${encodeURIComponent(rollout.rollout_id)}`, "data-key": rollout.rollout_id }, rollout.rollout_id),
    badge(rollout.status),
    rollout.mode,
    h("span", { "data-reward": rollout.rollout_id }, rewardText(rollout)),
    number(rollout.attempt?.sequence_id ?? 0),
    ago(rollout.start_time, now()),
    duration(lasted(rollout.attempt)),
    h("span", { class: "task" }, firstLine(rollout.input)),
  ]);
  const columns = ["Rollout", "Status", "Mode", ["Reward", "number"], ["Attempts", "number"], "Start", ["Duration", "number"], ["Task", "wide"]];
  swap(place, table(columns, rows, { empty: "No rollout is like that." }), pager(page, go));
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
  const turn = (name, to) => h("button", { type: "button", "data-key": name, disabled: to < 1 || to > pages || to === current, onclick: () => go({ page: to > 1 ? to : "" }) }, name);
  const shown = page.items.length ? `${number(page.offset + 1)} to ${number(page.offset + page.items.length)} of ${number(page.total)}` : `0 of ${number(page.total)}`;
  return h("nav", { class: "pager", "aria-label": "Pages" }, turn("Newest", 1), turn("Newer", current - 1), h("span", { id: "shown" }, shown), turn("Older", current + 1), turn("Oldest", pages));
}
