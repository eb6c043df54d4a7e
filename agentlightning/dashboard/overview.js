// The overview: how many rollouts are where, how the reward goes, who works, what went wrong.

import { get, inParallel, now } from "./api.js";
import { chart } from "./chart.js";
import { ago, badge, duration, empty, facts, firstLine, h, linkTo, note, number, panel, swap, table } from "./dom.js";
import { known, learn } from "./rewards.js";
import { FINAL, isFinal, STATUSES } from "./states.js";
import { errorOf } from "./traces.js";
import { sentenceOf } from "./verdict.js";

const LATEST = 200; // finished rollouts from which the throughput is told
const WINDOW_SECONDS = 60;
const WINDOWS = 48; // points of the reward curve
const PER_WINDOW = 8; // rollouts read for a point
const ERRORS = 6;
const RETRIED = 50; // rollouts that are to be tried again, among which the latest errors are looked for
const WORKERS = 50;
const RUN_POINTS = 2000; // of a run, the latest
const RUN_CURVES = { "reward/mean": "train", "validation/reward": "validation" };
const WIDE_FROM = 700; // pixels that a wide chart needs

export function overview(main) {
  const names = ["run", "states", "figures", "reward", "workers", "errors"];
  const places = Object.fromEntries(names.map((name) => [name, h("div")]));
  swap(
    main,
    h("h1", {}, "Overview"),
    places.run,
    panel("Rollouts by state", places.states, places.figures),
    panel("Mean reward over time", places.reward),
    h("div", { class: "columns" }, panel("Workers", places.workers), panel("Latest errors", places.errors)),
  );
  const refresh = async (signal) => {
    const asked = [countAll(signal), get("statistics", {}, signal), latestFinished(signal)];
    const [counts, statistics, finished] = await Promise.all(asked);
    showStates(places.states, counts);
    showFigures(places.figures, counts, statistics, finished);
    await Promise.all([showWorkers(places.workers, signal), showErrors(places.errors, signal)]);
    const curves = await showRun(places.run, signal);
    if (curves === null) await showReward(places.reward, counts, signal);
    else swap(places.reward, curves);
  };
  return { kinds: ["rollout", "worker", "run", "metrics"], refresh, mostSeconds: 10 };
}

/** The newest run with its verdict, and the curves of its own metrics; null where it has none. */
async function showRun(place, signal) {
  const asked = { sort_by: "start_time", sort_order: "desc", limit: 1 };
  const run = (await get("runs", asked, signal)).items[0];
  if (run === undefined) {
    swap(place);
    return null;
  }
  const words = sentenceOf(run);
  swap(place, panel("Current run",
    h("p", {}, linkTo("runs", run.run_id, { text: run.name }), " ", badge(run.status), " ", ago(run.start_time, now())),
    words !== null && h("p", {}, words)));
  const path = `runs/${encodeURIComponent(run.run_id)}/metrics`;
  const names = Object.keys(RUN_CURVES);
  const { total } = await get(path, { names, limit: 0 }, signal);
  const page = await get(path, { names, limit: RUN_POINTS, offset: Math.max(0, total - RUN_POINTS) }, signal);
  const pointsOf = (name) => page.items.filter((one) => name in one.values).map((one) => [one.step, one.values[name]]);
  const curves = names.map((name) => ({ name: RUN_CURVES[name], points: pointsOf(name) }));
  const series = curves.filter((one) => one.points.length);
  const label = (step) => `step ${number(Math.round(step))}`;
  return series.length ? [chart("", series, { label, isWide: place.clientWidth > WIDE_FROM }), note("By step.")] : null;
}

async function countAll(signal) {
  const count = async (status) => (await get("rollouts", { status_in: status, limit: 0 }, signal)).total;
  const totals = await inParallel(STATUSES, count);
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
  const numbers = STATUSES.map((status) => {
    const count = h("b", { "data-count": status }, number(counts[status]));
    return h("li", {}, h("a", { href: `#/rollouts?status=${status}`, "data-key": status }, badge(status), count));
  });
  swap(place, bar, h("ul", { class: "counts" }, numbers));
}

// ------------------------------------------------------------------ figures

/** When the latest finished rollouts ended, the newest first. */
async function latestFinished(signal) {
  const asked = { status_in: FINAL, sort_by: "end_time", sort_order: "desc", limit: LATEST };
  return (await get("rollouts", asked, signal)).items.map((rollout) => rollout.end_time).filter(Boolean);
}

function showFigures(place, counts, statistics, ends) {
  const pairs = [
    ["Finished", `${number(totalOf(counts, FINAL))} of ${number(totalOf(counts))}`],
    ["Throughput", throughput(ends)],
    ["Last finished", ends.length ? ago(ends[0], now()) : "–"],
    ["Attempts", number(statistics.total_attempts)],
    ["Spans", number(statistics.total_spans)],
    ["Runs", h("a", { href: "#/runs" }, number(statistics.total_runs))],
  ];
  swap(place, facts(pairs));
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
  const times = series.flatMap((one) => one.points.map((point) => point[0]));
  const [began, ended] = [Math.min(...times), Math.max(...times)];
  const label = (x) => duration(ended - began > 10 ? Math.round(x - began) : x - began);
  const word = stride === PER_WINDOW ? "All finished rollouts" : `${PER_WINDOW} of every ${number(stride)} rollouts`;
  const curve = chart("", series, { label, isWide: place.clientWidth > WIDE_FROM });
  swap(place, curve, note(`${word}, by mode; time since the first.`));
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

/** The mean time and the mean reward of each mode, as `[[mode, [time, reward]], …]`. */
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
    worker.current_rollout_id && linkTo("rollouts", worker.current_rollout_id, { key: worker.worker_id }),
  ]);
  const more = page.total > rows.length && note(`${number(page.total)} in all.`);
  swap(place, table(["Worker", "Status", "Last seen", "Works on"], rows, "No worker has come yet."), more);
}

function lastSeen(worker) {
  const times = [worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time];
  return times.some(Boolean) ? Math.max(...times.filter(Boolean)) : null;
}

async function showErrors(place, signal) {
  const rollouts = await latestErrors(signal);
  await learn(rollouts, signal);
  const lines = rollouts.map((rollout) => {
    const text = (known(rollout)?.error ?? errorOf(rollout.attempt))?.text ?? "An attempt is tried again.";
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
  const newestBy = (field, limit) => ({ sort_by: field, sort_order: "desc", limit });
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
