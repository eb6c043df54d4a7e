// The table of rollouts: filtered, sorted and paged by the server, however many there are. The address holds it all.

import { answerOf, learnAnswers } from "./answers.js";
import { get, now } from "./api.js";
import { ago, badge, duration, field, firstLine, h, linkTo, number, pager, rowOf, swap, table } from "./dom.js";
import { asStored, isFinal, MODES, STATUSES, stepOf } from "./states.js";
import { errorOf } from "./traces.js";

const COLUMNS = [
  ["Rollout", "id"], ["Status", "", "status"], ["Mode", "spare", "mode"], ["Step", "number spare", "step"],
  ["Reward", "number", "reward"], ["Task", "wide"], ["Output", "wide"], ["Attempts", "number spare"],
  ["Start", "spare", "start_time"], ["Took", "number spare"],
];
const TEXTS = {
  text: ["Task", "input_contains", "part of the task"],
  error: ["Error", "error_contains", "part of the error"],
  run: ["Run", "run_id_in", "id of a run"],
  agent: ["Agent", "agent_in", "its name"],
  id: ["Id", "rollout_id_contains", "part of an id"],
};
const NUMBERS = {
  min: ["Reward from", "reward_min"], max: ["to", "reward_max"], step: ["Step", "step_in"],
};
const SORTS = {
  start_time: "start", reward: "reward", status: "status", mode: "mode", step: "step", run_id: "run", agent: "agent",
  error: "error",
};
const TASK_ROW = "agentlightning.task"; // where the metadata keep the other fields of a task
const NAMES = ["status", "mode", ...Object.keys(TEXTS), ...Object.keys(NUMBERS), "group", "resources"];
const FIRST_STATUSES = ["queuing", "preparing"]; // of a rollout that is queued, and of one that is begun at once
const PAGE = 50;
const TYPING_MS = 250; // after the last letter

export function rollouts(main, route) {
  const place = h("div", { id: "page" });
  const asked = () => {
    const names = [...NAMES, "sort", "order", "page"];
    return Object.fromEntries(names.map((name) => [name, route.query.get(name) ?? ""]));
  };
  const go = (changes) => {
    const wanted = Object.entries({ ...asked(), page: "", ...changes });
    const query = new URLSearchParams(wanted.filter(([, value]) => value));
    place.setAttribute("aria-busy", "true");
    route.go(`#/rollouts${query.size ? `?${query}` : ""}`);
  };
  swap(main, h("h1", {}, "Rollouts"), filters(asked(), go), place);
  let shown = []; // the rollouts of the page
  const refresh = async (signal, notices) => {
    const changed = notices && (await changedRows(shown, notices, asked(), signal));
    if (changed) {
      for (const one of changed) replace(place, one, asked());
    } else {
      const page = await pageOf(asked(), signal);
      shown = page.items;
      show(place, page, asked(), go);
    }
    place.removeAttribute("aria-busy");
    await learnAnswers(changed ?? shown, signal, (one) => replace(place, one, asked()));
  };
  return { kinds: ["rollout"], refresh, mostSeconds: 30 };
}

/** The rollouts of the page that notices name, read anew; null if others may belong on the page now. */
async function changedRows(shown, notices, wanted, signal) {
  const ids = new Set(shown.map((one) => one.rollout_id));
  const isPlain = NAMES.every((name) => !wanted[name]) && ["", "start_time"].includes(wanted.sort);
  const named = [...new Set(notices.map((notice) => notice.rollout_id))];
  const isNew = notices.some((notice) => !ids.has(notice.rollout_id) && FIRST_STATUSES.includes(notice.status));
  if (!isPlain || !shown.length || (isNew && !wanted.page)) return null;
  const here = named.filter((id) => ids.has(id));
  if (!here.length) return [];
  const { items } = await get("rollouts", { rollout_id_in: here }, signal);
  for (const one of items) shown[shown.findIndex((old) => old.rollout_id === one.rollout_id)] = one;
  return items;
}

// ------------------------------------------------------------------ filters

function filters(wanted, go) {
  let typing;
  const typed = (name) => (event) => {
    clearTimeout(typing);
    // He may have left the view meanwhile.
    typing = setTimeout(() => event.target.isConnected && go({ [name]: event.target.value.trim() }), TYPING_MS);
  };
  const select = (label, name, values) => {
    const chosen = (event) => go({ [name]: event.target.value });
    const options = values.map((value) => h("option", { value, selected: wanted[name] === value }, value));
    const all = h("option", { value: "" }, "all");
    return field(label, h("select", { id: `filter-${name}`, onchange: chosen }, all, options));
  };
  const text = ([name, [label, , placeholder]]) => field(label, h("input", {
    id: `filter-${name}`, type: "search", placeholder, value: wanted[name], oninput: typed(name),
  }));
  const figure = ([name, [label]]) => field(label, h("input", {
    id: `filter-${name}`, type: "number", step: "any", class: "narrow", value: wanted[name], oninput: typed(name),
  }));
  const sort = h("select", { id: "filter-sort", onchange: (event) => go({ sort: event.target.value }) },
    Object.entries(SORTS).map(([value, name]) => h("option", { value, selected: wanted.sort === value }, name)));
  const order = h("select", { id: "filter-order", onchange: (event) => go({ order: event.target.value }) },
    h("option", { value: "" }, "descending"),
    h("option", { value: "asc", selected: wanted.order === "asc" }, "ascending"));
  const [task, ...others] = Object.entries(TEXTS);
  const isUnfolded = others.some(([name]) => wanted[name]);
  const hidden = ["group", "resources"].filter((name) => wanted[name]).map((name) =>
    h("button", { type: "button", onclick: (event) => {
      event.target.remove();
      go({ [name]: "" });
    } }, `${name} ${wanted[name]} ✕`));
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    select("Status", "status", STATUSES), select("Mode", "mode", MODES),
    Object.entries(NUMBERS).map(figure), text(task), field("Sort by", sort), field("Order", order), hidden,
    h("details", { open: isUnfolded }, h("summary", {}, "More filters"),
      h("div", { class: "filters" }, others.map(text))));
}

async function pageOf(wanted, signal) {
  const conditions = { status_in: wanted.status, mode_in: wanted.mode };
  for (const [name, [, condition]] of [...Object.entries(TEXTS), ...Object.entries(NUMBERS)]) {
    conditions[condition] = wanted[name];
  }
  conditions.step_in = asStored(wanted.step);
  conditions.group_id_in = wanted.group;
  conditions.resources_id_in = wanted.resources;
  const offset = (Math.max(1, Number(wanted.page) || 1) - 1) * PAGE;
  const sorting = { sort_by: wanted.sort || "start_time", sort_order: wanted.order === "asc" ? "asc" : "desc" };
  return get("rollouts", { ...conditions, ...sorting, limit: PAGE, offset }, signal);
}

// ------------------------------------------------------------------ showing

function show(place, page, wanted, go) {
  const sorting = {
    by: wanted.sort || "start_time",
    order: wanted.order === "asc" ? "asc" : "desc",
    go: (sort, order) => go({ sort, order }),
  };
  const rows = page.items.map((one) => cellsOf(one, wanted));
  const shown = table(columnsOf(wanted), rows, "No rollout is like that.", sorting);
  swap(place, shown, pager(page, PAGE, (to) => go({ page: to })));
  document.getElementById("filter-sort").value = sorting.by;
  document.getElementById("filter-order").value = sorting.order === "asc" ? "asc" : "";
}

/** The run and the agent are shown to those who sort or filter by them. */
function columnsOf(wanted) {
  const more = [];
  if (wanted.run || wanted.sort === "run_id") more.push(["Run", "", "run_id"]);
  if (wanted.agent || wanted.sort === "agent") more.push(["Agent", "", "agent"]);
  return [...COLUMNS, ...more];
}

function agentOf(rollout) {
  const agent = rollout.input?.agent ?? rollout.metadata?.[TASK_ROW]?.metadata?.agent;
  return typeof agent === "string" ? agent : null;
}

function cellsOf(rollout, wanted) {
  const { run_id: run } = rollout.metadata ?? {};
  const more = {
    Run: () => typeof run === "string" && linkTo("runs", run, { key: `run of ${rollout.rollout_id}` }),
    Agent: () => agentOf(rollout),
  };
  return [
    linkTo("rollouts", rollout.rollout_id),
    badge(rollout.status),
    rollout.mode,
    number(stepOf(rollout)),
    h("span", { class: "reward" }, isFinal(rollout) || rollout.reward !== undefined ? number(rollout.reward) : "–"),
    h("span", { class: "task" }, firstLine(rollout.input)),
    outputOf(rollout),
    number(rollout.attempt?.sequence_id ?? 0),
    ago(rollout.start_time, now()),
    duration(lasted(rollout.attempt)),
    ...columnsOf(wanted).slice(COLUMNS.length).map(([name]) => more[name]() || "–"),
  ];
}

/** What it answered, or why it did not. */
function outputOf(rollout) {
  const error = rollout.status === "failed" || rollout.status === "requeuing" ? errorOf(rollout.attempt) : null;
  if (error) return h("span", { class: "task error" }, firstLine(error.text, 200));
  return h("span", { class: "task" }, answerOf(rollout) ?? "–");
}

/** Show a row anew. */
function replace(place, rollout, wanted) {
  const link = place.querySelector(`a[data-key="${CSS.escape(rollout.rollout_id)}"]`);
  const row = link?.closest("tr");
  if (!row) return;
  const hadFocus = row.contains(document.activeElement);
  const made = rowOf(columnsOf(wanted), cellsOf(rollout, wanted));
  row.replaceWith(made);
  if (hadFocus) made.querySelector("a").focus({ preventScroll: true });
}

function lasted(attempt) {
  return attempt ? Math.max(0, (attempt.end_time ?? now()) - attempt.start_time) : null;
}
