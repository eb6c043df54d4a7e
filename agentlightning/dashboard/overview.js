// The overview: the newest run with what it has reached and what is wrong with it, then how many rollouts are where,
// who works, and what went wrong last.

import { get, inParallel, now } from "./api.js";
import { chart } from "./chart.js";
import { ago, badge, empty, facts, firstLine, h, linkTo, note, number, panel, swap, table } from "./dom.js";
import { curvesOf, followMetrics, mainCharts } from "./metrics.js";
import { figuresOf, rate } from "./run.js";
import { FINAL, STATUSES } from "./states.js";
import { errorOf } from "./traces.js";
import { verdictLines } from "./verdict.js";
import { doing, lastSeen, nameOf, workOf } from "./workers.js";

const LATEST = 200; // finished rollouts from which the throughput is told
const WINDOW_SECONDS = 60;
const ERRORS = 6;
const RETRIED = 50; // rollouts that are to be tried again, among which the latest errors are looked for
const WORKERS = 10;
const NEWEST = 5; // runs
const CHARTS = 3; // of the newest run

export function overview(main) {
  const names = ["run", "states", "figures", "workers", "errors"];
  const places = Object.fromEntries(names.map((name) => [name, h("div")]));
  swap(
    main,
    h("h1", {}, "Overview"),
    places.run,
    panel("Rollouts by state", places.states, places.figures),
    h("div", { class: "columns" }, panel("Workers", places.workers), panel("Latest errors", places.errors)),
  );
  const current = { id: null, metrics: null, view: { range: null, smoothing: 0, redraw: () => {} } };
  const finished = followFinished();
  const refresh = async (signal, notices) => {
    const has = (...kinds) => !notices || notices.some((notice) => kinds.includes(notice.kind));
    const parts = [
      has("run", "metrics") && showRun(places.run, current, signal),
      has("rollout") && showStates(places, finished, notices, signal),
      has("rollout", "worker") && showWorkers(places.workers, signal),
      (!notices || notices.some(isFailure)) && showErrors(places.errors, signal),
    ];
    await Promise.all(parts.filter(Boolean));
  };
  return { kinds: ["rollout", "worker", "run", "metrics"], refresh, mostSeconds: 15 };
}

const isFailure = (notice) => notice.status === "failed" || notice.status === "requeuing";

// ------------------------------------------------------------------ the newest run

/** The newest run with its figures, its verdict and its reward, all of them its own. */
async function showRun(place, current, signal) {
  const asked = { sort_by: "start_time", sort_order: "desc", limit: NEWEST };
  const newest = (await get("runs", asked, signal)).items;
  const run = newest.find((one) => !one.metadata?.trainer_run_id) ?? newest[0]; // a trainer's has the verdict
  if (run === undefined) {
    const hint = "No run was recorded yet. A training that uses this store appears here as it starts.";
    swap(place, panel("Current run", empty(hint)));
    return;
  }
  if (current.id !== run.run_id) [current.id, current.metrics] = [run.run_id, followMetrics(run.run_id)];
  await current.metrics.read(signal);
  const curves = curvesOf(current.metrics.points);
  const { charts } = mainCharts(curves);
  const label = (step) => `step ${number(Math.round(step))}`;
  const drawing = h("div", { class: "charts main" });
  swap(place, panel(run.status === "running" ? "Current run" : "Latest run",
    h("h3", {}, linkTo("runs", run.run_id, { text: run.name }), h("span", { class: "quiet" }, run.run_id)),
    facts(figuresOf(run, curves)),
    verdictLines(run),
    drawing));
  current.view.redraw = () => {
    const width = Math.max(320, drawing.clientWidth);
    const half = Math.max(320, Math.floor((width - 20) / 2));
    swap(drawing, charts.slice(0, CHARTS).map(([title, series], i) =>
      chart(title, series, { label, view: current.view, width: i ? half : width, height: i ? 170 : 230 })));
  };
  current.view.redraw();
  if (!charts.length) swap(drawing, empty("It has reported no figures yet."));
}

// ------------------------------------------------------------------ rollouts

async function showStates(places, latestFinished, notices, signal) {
  const [counts, statistics, finished] = await Promise.all([
    countAll(signal), get("statistics", {}, signal), latestFinished(notices, signal),
  ]);
  const ends = finished.map((rollout) => rollout.end_time).filter(Boolean);
  const rewards = finished.map((rollout) => rollout.reward).filter(Number.isFinite);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const total = totalOf(counts);
  const bar = h("div", { class: "bar", "aria-hidden": "true" });
  for (const status of STATUSES.filter((one) => counts[one])) {
    const part = h("i", { class: status });
    part.style.flexGrow = counts[status] / total;
    bar.append(part);
  }
  const numbers = STATUSES.map((status) => {
    const count = h("b", { "data-count": status }, number(counts[status]));
    return h("li", {}, h("a", { href: `#/rollouts?status=${status}`, "data-key": status }, badge(status), count));
  });
  swap(places.states, bar, h("ul", { class: "counts" }, numbers));
  swap(places.figures, facts([
    ["Finished", `${number(totalOf(counts, FINAL))} of ${number(total)}`],
    ["Throughput", throughput(ends)],
    rewards.length > 0 && [`Mean reward, last ${number(rewards.length)}`, number(mean, 3)],
    ["Last finished", ends.length ? ago(ends[0], now()) : "–"],
    ["Attempts", number(statistics.total_attempts)],
    ["Spans", number(statistics.total_spans)],
    ["Runs", h("a", { href: "#/runs" }, number(statistics.total_runs))],
  ].filter(Boolean)));
}

async function countAll(signal) {
  const count = async (status) => (await get("rollouts", { status_in: status, limit: 0 }, signal)).total;
  const totals = await inParallel(STATUSES, count);
  return Object.fromEntries(STATUSES.map((status, i) => [status, totals[i]]));
}

function totalOf(counts, statuses = STATUSES) {
  return statuses.reduce((sum, status) => sum + counts[status], 0);
}

/** A function that gives the rollouts that were finished last, the newest first; it reads those that notices name. */
function followFinished() {
  let known = new Map();
  return async (notices, signal) => {
    const ends = (notices ?? []).filter((notice) => FINAL.includes(notice.status)).map((notice) => notice.rollout_id);
    const named = [...new Set(ends)].slice(-LATEST);
    const newest = { status_in: FINAL, sort_by: "end_time", sort_order: "desc", limit: LATEST };
    const isLost = notices === null || !known.size;
    const asked = isLost ? newest : { rollout_id_in: named };
    const items = isLost || named.length ? (await get("rollouts", asked, signal)).items : [];
    if (isLost) known = new Map();
    for (const one of items) known.set(one.rollout_id, one);
    const sorted = [...known.values()].sort((one, other) => other.end_time - one.end_time).slice(0, LATEST);
    known = new Map(sorted.map((one) => [one.rollout_id, one]));
    return sorted;
  };
}

/** Rollouts finished in the last minute, by the latest of them. */
function throughput(ends) {
  const recent = ends.filter((end) => now() - end <= WINDOW_SECONDS);
  if (!recent.length) return ends.length ? "idle" : "–";
  const seconds = recent.length === LATEST ? Math.max(now() - recent[recent.length - 1], 0.001) : WINDOW_SECONDS;
  return rate(recent.length / seconds);
}

// ------------------------------------------------------------------ workers and errors

async function showWorkers(place, signal) {
  const page = await get("workers", { sort_by: "last_heartbeat_time", sort_order: "desc", limit: WORKERS }, signal);
  const work = await workOf(page.items, signal);
  const rows = page.items.map((worker) =>
    [nameOf(worker), badge(worker.status), ago(lastSeen(worker), now()), doing(worker, work)]);
  const more = page.total > rows.length && note(h("a", { href: "#/workers" }, `All ${number(page.total)} workers`));
  swap(place, table(["Worker", "Status", "Last seen", "Works on"], rows, "No worker has come yet."), more);
}

async function showErrors(place, signal) {
  const rollouts = await latestErrors(signal);
  const lines = rollouts.map((rollout) => {
    const text = errorOf(rollout.attempt)?.text ?? "An attempt is tried again.";
    const link = linkTo("rollouts", rollout.rollout_id, { key: `error ${rollout.rollout_id}` });
    return h("li", {}, link, " ", ago(failedAt(rollout), now()), h("span", { class: "error" }, firstLine(text, 200)));
  });
  swap(place, lines.length ? h("ul", { class: "errors" }, lines) : empty("No rollout has failed."));
}

/**
 * Rollouts that have failed or are to be tried again, those where it happened last first. The server cannot sort by the
 * end of an attempt, so of those that are to be tried again the newest rollouts are read and sorted here.
 */
async function latestErrors(signal) {
  const newestBy = (name, limit) => ({ sort_by: name, sort_order: "desc", limit });
  const [failed, retried] = await Promise.all([
    get("rollouts", { status_in: "failed", ...newestBy("end_time", ERRORS) }, signal),
    get("rollouts", { status_in: "requeuing", ...newestBy("start_time", RETRIED) }, signal),
  ]);
  const found = [...failed.items, ...retried.items];
  return found.sort((one, other) => failedAt(other) - failedAt(one)).slice(0, ERRORS);
}

/** When it failed; one that is tried again has not ended, but its latest attempt has. */
function failedAt(rollout) {
  return rollout.end_time ?? rollout.attempt?.end_time ?? rollout.start_time;
}
