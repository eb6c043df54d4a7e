// The overview: how many rollouts are where, how the reward goes, who works, what went wrong.

import { get, inParallel, now } from "./api.js";
import { chart } from "./chart.js";
import { ago, badge, duration, firstLine, h, number, panel, swap, table } from "./dom.js";
import { isFinal, known, learn } from "./rewards.js";
import { errorOf } from "./traces.js";

const STATUSES = ["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"];
const FINAL = ["succeeded", "failed", "cancelled"];
const LATEST = 200; // finished rollouts from which the throughput is told
const WINDOW_SECONDS = 60;
const WINDOWS = 48; // points of the reward curve
const PER_WINDOW = 8; // rollouts read for a point
const ERRORS = 6;
const WORKERS = 50;
const WIDE_FROM = 700;

export function overview(main) {
  const places = Object.fromEntries(["states", "figures", "reward", "workers", "errors"].map((name) => [name, h("div")]));
  swap(
    main,
    h("h1", {}, "Overview"),
    panel("Rollouts by state", places.states, places.figures),
    panel("Mean reward over time", places.reward),
    h("div", { class: "columns" }, panel("Workers", places.workers), panel("Latest errors", places.errors)),
  );
  const refresh = async (signal) => {
    const [counts, statistics, finished] = await Promise.all([countAll(signal), get("statistics", {}, signal), latestFinished(signal)]);
    showStates(places.states, counts);
    showFigures(places.figures, counts, statistics, finished);
    await Promise.all([showWorkers(places.workers, signal), showErrors(places.errors, signal)]);
    await showReward(places.reward, counts, signal);
  };
  return { kinds: ["rollout", "worker"], refresh, mostSeconds: 10 };
}

async function countAll(signal) {
  const totals = await inParallel(STATUSES, async (status) => (await get("rollouts", { status_in: status, limit: 0 }, signal)).total);
  return Object.fromEntries(STATUSES.map((status, i) => [status, totals[i]]));
}

function totalOf(counts, statuses = STATUSES) {
  return statuses.reduce((sum, status) => sum + counts[status], 0);
}

function showStates(place, counts) {
  const total = totalOf(counts);
  const bar = h("div", { class: "bar", "aria-hidden": "true" });
  for (const status of STATUSES.filter((one) => counts[one])) {
    const part = h("i", { class: status });
    part.style.flexGrow = counts[status] / total;
    bar.append(part);
  }
  const numbers = STATUSES.map((status) =>
    h("li", {}, h("a", { href: `#/rollouts?status=${status}`, "data-key": status }, badge(status), h("b", { "data-count": status }, number(counts[status])))));
  swap(place, bar, h("ul", { class: "counts" }, numbers));
}

// ------------------------------------------------------------------ figures

async function latestFinished(signal) {
  const asked = { status_in: FINAL, sort_by: "end_time", sort_order: "desc", limit: LATEST };
  return (await get("rollouts", asked, signal)).items.map((rollout) => rollout.end_time).filter(Boolean);
}

function showFigures(place, counts, statistics, ends) {
  const figures = [
    ["Finished", `${number(totalOf(counts, FINAL))} of ${number(totalOf(counts))}`],
    ["Throughput", throughput(ends)],
    ["Last finished", ends.length ? ago(ends[0], now()) : "–"],
    ["Attempts", number(statistics.total_attempts)],
    ["Spans", number(statistics.total_spans)],
    ["Runs", h("a", { href: "#/runs" }, number(statistics.total_runs))],
  ];
  swap(place, h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

/** Rollouts finished in the last minute, by the latest of them. */
function throughput(ends) {
  const recent = ends.filter((end) => now() - end <= WINDOW_SECONDS);
  if (!recent.length) return ends.length ? "idle" : "–";
  const seconds = recent.length === LATEST ? Math.max(now() - recent[recent.length - 1], 0.001) : WINDOW_SECONDS;
  const rate = recent.length / seconds;
  return rate >= 1 ? `${number(rate, 3)} / s` : `${number(rate * 60, 3)} / min`;
}

// ------------------------------------------------------------------ reward

/**
 * Rollouts at fixed places in the order of their creation, so that what was read stays good as the store grows. Up to
 * a few hundred all are read; of more, equally many in equal distances.
 */
async function showReward(place, counts, signal) {
  await forgetOthers(signal);
  const total = totalOf(counts);
  let stride = PER_WINDOW;
  while (total / stride > WINDOWS) stride *= 2;
  const offsets = Array.from({ length: Math.ceil(total / stride) }, (_, i) => i * stride);
  const windows = await inParallel(offsets, (offset) => windowAt(offset, signal));
  await learn(windows.flat(), signal);
  const byMode = new Map();
  for (const rollouts of windows) {
    for (const [mode, point] of pointsOf(rollouts)) byMode.set(mode, [...(byMode.get(mode) ?? []), point]);
  }
  const series = [...byMode].map(([name, points]) => ({ name, points: points.sort((a, b) => a[0] - b[0]) }));
  const began = Math.min(...series.flatMap((one) => one.points.map((point) => point[0])));
  const ended = Math.max(...series.flatMap((one) => one.points.map((point) => point[0])));
  const label = (x) => duration(ended - began > 10 ? Math.round(x - began) : x - began);
  const word = stride === PER_WINDOW ? "All finished rollouts" : `${PER_WINDOW} of every ${number(stride)} rollouts`;
  swap(place, chart("", series, { label, isWide: place.clientWidth > WIDE_FROM }), h("p", { class: "note" }, `${word}, by mode; time since the first.`));
}

const full = new Map(); // windows in which everything is finished, by offset
let oldest; // id of the first rollout

/** A server that was started again may have another store. */
async function forgetOthers(signal) {
  const id = (await get("rollouts", { limit: 1 }, signal)).items[0]?.rollout_id;
  if (id !== oldest) full.clear();
  oldest = id;
}

async function windowAt(offset, signal) {
  if (full.has(offset)) return full.get(offset);
  const { items } = await get("rollouts", { limit: PER_WINDOW, offset }, signal);
  if (items.length === PER_WINDOW && items.every(isFinal)) full.set(offset, items);
  return items;
}

function pointsOf(rollouts) {
  const byMode = new Map();
  for (const rollout of rollouts) {
    const reward = known(rollout)?.reward;
    if (typeof reward !== "number") continue;
    const mode = rollout.mode ?? "no mode";
    byMode.set(mode, [...(byMode.get(mode) ?? []), [rollout.end_time ?? rollout.start_time, reward]]);
  }
  const mean = (points, axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length;
  return [...byMode].map(([mode, points]) => [mode, [mean(points, 0), mean(points, 1)]]);
}

// ------------------------------------------------------------------ workers and errors

async function showWorkers(place, signal) {
  const page = await get("workers", { sort_by: "last_heartbeat_time", sort_order: "desc", limit: WORKERS }, signal);
  const rows = page.items.map((worker) => [
    worker.worker_id,
    badge(worker.status),
    ago(lastSeen(worker), now()),
    worker.current_rollout_id && h("a", { href: `#/rollouts/${encodeURIComponent(worker.current_rollout_id)}`, "data-key": worker.worker_id }, worker.current_rollout_id),
  ]);
  const more = page.total > rows.length && h("p", { class: "note" }, `${number(page.total)} in all.`);
  swap(place, table(["Worker", "Status", "Last seen", "Works on"], rows, { empty: "No worker has come yet." }), more);
}

function lastSeen(worker) {
  const times = [worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time];
  return times.some(Boolean) ? Math.max(...times.filter(Boolean)) : null;
}

async function showErrors(place, signal) {
  const asked = { status_in: ["failed", "requeuing"], sort_by: "start_time", sort_order: "desc", limit: ERRORS };
  const { items } = await get("rollouts", asked, signal);
  await learn(items, signal);
  const lines = items.map((rollout) => {
    const text = (known(rollout)?.error ?? errorOf(rollout.attempt))?.text ?? "An attempt is tried again.";
    const link = h("a", { href: `#/rollouts/${encodeURIComponent(rollout.rollout_id)}`, "data-key": `error ${rollout.rollout_id}` }, rollout.rollout_id);
    return h("li", {}, link, " ", ago(rollout.end_time ?? rollout.attempt?.end_time, now()), h("span", { class: "error" }, firstLine(text, 200)));
  });
  swap(place, lines.length ? h("ul", { class: "errors" }, lines) : h("p", { class: "empty" }, "No rollout has failed."));
}
