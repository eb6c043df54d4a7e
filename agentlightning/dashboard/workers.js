// Workers: who is there, what each is doing, and how its machine fares.

import { get, now } from "./api.js";
import { ago, badge, duration, firstLine, h, linkTo, note, number, pager, swap, table } from "./dom.js";

const COLUMNS = [
  "Worker", "Status", "Last seen", ["At work", "number"], ["What it is doing", "wide"], ["For", "number"],
  ["CPU", "number"], ["Memory", "number"], "Machine",
];
const PAGE = 50;
const MOST_SHOWN = 3; // rollouts of a worker
const AWAY_SECONDS = 60; // runners send a heartbeat every ten

export function workers(main, route) {
  const place = h("div", { id: "page" });
  swap(main, h("h1", {}, "Workers"), place);
  const go = (to) => route.go(`#/workers${to ? `?page=${to}` : ""}`);
  const refresh = async (signal) => {
    const offset = (Math.max(1, Number(route.query.get("page")) || 1) - 1) * PAGE;
    const asked = { sort_by: "last_heartbeat_time", sort_order: "desc", limit: PAGE, offset };
    const page = await get("workers", asked, signal);
    const work = await workOf(page.items, signal);
    const rows = page.items.map((worker) => cellsOf(worker, work));
    swap(place, table(COLUMNS, rows, "No worker has come yet."), rows.length > 0 && pager(page, PAGE, go),
      rows.length > 0 && note("A worker takes several rollouts at once; CPU and memory are those of its machine."));
  };
  return { kinds: ["worker", "rollout"], refresh, mostSeconds: 10 };
}

/** Ids of the rollouts that a worker has in hand, as far as it tells. */
export function idsOf(worker) {
  const running = worker.heartbeat_stats?.running_attempts;
  const named = Array.isArray(running) ? running.map((pair) => (Array.isArray(pair) ? pair[0] : null)) : [];
  const all = [worker.current_rollout_id, ...named].filter((id) => typeof id === "string");
  return worker.status === "busy" ? [...new Set(all)] : [];
}

/** The rollouts that these workers have in hand, by id. */
export async function workOf(workers, signal) {
  const ids = workers.flatMap((worker) => idsOf(worker).slice(0, MOST_SHOWN));
  if (!ids.length) return new Map();
  const { items } = await get("rollouts", { rollout_id_in: ids }, signal);
  return new Map(items.map((one) => [one.rollout_id, one]));
}

export function lastSeen(worker) {
  const times = [worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time];
  return times.some(Boolean) ? Math.max(...times.filter(Boolean)) : null;
}

/** The name of a worker, in a small space: what stands before the machine, with the whole of it on hovering. */
export function nameOf(worker) {
  return h("span", { class: "task worker", title: worker.worker_id }, worker.worker_id);
}

/** What a worker is doing, as links to its rollouts with their tasks. */
export function doing(worker, work) {
  const ids = idsOf(worker);
  if (!ids.length) {
    const isAway = worker.status !== "busy" && !(now() - lastSeen(worker) < AWAY_SECONDS);
    return h("span", { class: "quiet" }, isAway ? "is away" : worker.status === "busy" ? "–" : "waits for work");
  }
  const shown = ids.slice(0, MOST_SHOWN).map((id) => {
    const task = work.get(id) ? firstLine(work.get(id).input, 80) : "";
    return h("span", { class: "task" }, linkTo("rollouts", id, { key: `${worker.worker_id} ${id}` }), ` ${task}`);
  });
  const rest = ids.length - MOST_SHOWN;
  return h("div", {}, shown, rest > 0 && h("span", { class: "quiet" }, `and ${rest} more`));
}

function cellsOf(worker, work) {
  const stats = worker.heartbeat_stats ?? {};
  const percent = (value) => (Number.isFinite(value) ? `${number(value, 3)} %` : "–");
  const since = idsOf(worker).map((id) => work.get(id)?.attempt?.start_time).filter(Number.isFinite);
  return [
    nameOf(worker), badge(worker.status), ago(lastSeen(worker), now()), number(idsOf(worker).length),
    doing(worker, work), since.length ? duration(now() - Math.min(...since)) : "–",
    percent(stats.cpu_usage_pct), percent(stats.mem_pct), stats.host ?? "–",
  ];
}
