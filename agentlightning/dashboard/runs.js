// Runs: every training and optimisation, with what it was started with, how it ended, and its curves.

import { get, now } from "./api.js";
import { chart } from "./chart.js";
import { ago, asText, badge, duration, firstLine, h, number, panel, swap, table } from "./dom.js";

const PAGE = 50;
const POINTS = 2000; // asked for at once
const MOST_POINTS = 40000;
const MOST_TOGETHER = 4; // curves in one chart
const FIRST = ["reward", "validation", "apo", "gepa", "sft"];
const OVERLAP = 100; // points read again, for a point may come in behind others of its step

export function runs(main, route) {
  const place = h("div");
  swap(main, h("h1", {}, "Runs"), place);
  const refresh = async (signal) => {
    const offset = (Math.max(1, Number(route.query.get("page")) || 1) - 1) * PAGE;
    const page = await get("runs", { sort_by: "start_time", sort_order: "desc", limit: PAGE, offset }, signal);
    const rows = page.items.map((run) => [
      h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}`, "data-key": run.run_id }, run.name),
      badge(run.status),
      ago(run.start_time, now()),
      duration((run.end_time ?? now()) - run.start_time),
      configuredAs(run),
      h("span", { class: "task" }, summed(run.summary)),
    ]);
    const turn = (name, to, isThere) => h("a", { href: `#/runs?page=${to}`, hidden: !isThere, "data-key": name }, name);
    const current = offset / PAGE + 1;
    const pager = h("nav", { class: "pager", "aria-label": "Pages" }, turn("Newer", current - 1, offset > 0), h("span", {}, `${number(page.total)} in all`), turn("Older", current + 1, offset + PAGE < page.total));
    swap(place, table(["Run", "Status", "Start", ["Duration", "number"], "Algorithm", ["Summary", "wide"]], rows, { empty: "No run was recorded." }), pager);
  };
  return { kinds: ["run"], refresh, mostSeconds: 10 };
}

function configuredAs(run) {
  const algorithm = run.config?.algorithm;
  return typeof algorithm === "string" ? algorithm.split(".").pop() : firstLine(run.config ?? {}, 40);
}

/** The figures of a summary in one line. */
function summed(summary) {
  const figures = Object.entries(summary ?? {}).filter(([, value]) => ["number", "string"].includes(typeof value));
  return figures.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : firstLine(value, 60)}`).join(", ");
}

// ------------------------------------------------------------------ one run

export function run(main, route) {
  const id = route.parts[1];
  const title = h("h1", {}, "Run");
  const about = h("div");
  const curves = h("div", { class: "charts" });
  const notes = h("div");
  swap(main, h("p", { class: "path" }, h("a", { href: "#/runs" }, "Runs"), " / ", id), title, about, panel("Metrics", curves, notes));
  const points = [];
  const refresh = async (signal) => {
    const found = await get(`runs/${encodeURIComponent(id)}`, {}, signal);
    if (found === null) {
      swap(about, h("p", { class: "empty" }, "There is no such run."));
      return;
    }
    title.textContent = `Run ${found.name}`;
    swap(about, head(found));
    const isCut = await read(points, id, signal);
    const { groups, constant } = seriesOf(points);
    const charts = groups.map(([name, series]) => chart(name, series, { label: (step) => `step ${number(Math.round(step))}` }));
    swap(curves, charts.length || constant.length ? charts : h("p", { class: "empty" }, "No figures yet."));
    swap(notes, constant.length && h("p", { class: "note" }, `Always the same: ${constant.join(", ")}.`), isCut && h("p", { class: "note" }, `The first ${number(MOST_POINTS)} points.`));
  };
  return { kinds: ["run", "metrics"], concerns: (notice) => notice.name === id, refresh, mostSeconds: 10 };
}

function head(found) {
  const facts = [
    ["Status", badge(found.status)],
    ["Start", ago(found.start_time, now())],
    ["Duration", duration((found.end_time ?? now()) - found.start_time)],
  ];
  const listed = (values, name) => {
    const entries = Object.entries(values ?? {});
    return panel(name, entries.length ? h("dl", { class: "attributes" }, entries.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, typeof value === "number" ? number(value) : asText(value)))))
      : h("p", { class: "empty" }, found.status === "running" && name === "Summary" ? "It comes at the end." : "Empty."));
  };
  return h("div", {}, h("section", { class: "panel" }, h("dl", { class: "figures" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
    h("div", { class: "columns" }, listed(found.summary, "Summary"), listed({ ...found.config, ...found.metadata }, "Configuration")));
}

/** Bring the points up to date; true if there are more than are read. */
async function read(points, id, signal) {
  points.length = Math.max(0, points.length - OVERLAP);
  for (;;) {
    const page = await get(`runs/${encodeURIComponent(id)}/metrics`, { limit: Math.min(POINTS, MOST_POINTS - points.length), offset: points.length }, signal);
    points.push(...page.items);
    if (points.length >= MOST_POINTS) return page.total > points.length;
    if (points.length >= page.total || !page.items.length) return false;
  }
}

/**
 * Curves that belong together: `reward/mean` and `reward/max` share a chart, unless there are too many. Those about
 * reward come first; figures that never change are named with their value.
 */
function seriesOf(points) {
  const curves = new Map();
  for (const point of points) {
    for (const [name, value] of Object.entries(point.values)) {
      if (!curves.has(name)) curves.set(name, []);
      curves.get(name).push([point.step, value]);
    }
  }
  const isConstant = (curve) => curve.length > 1 && curve.every((point) => point[1] === curve[0][1]);
  const constant = [...curves].filter(([, curve]) => isConstant(curve)).map(([name, curve]) => `${name} ${number(curve[0][1])}`);
  const groups = new Map();
  for (const [name, curve] of curves) {
    if (isConstant(curve)) continue;
    const [group, ...rest] = name.split("/");
    groups.set(group, [...(groups.get(group) ?? []), { name: rest.join("/") || name, full: name, points: curve }]);
  }
  const rank = (name) => FIRST.indexOf(name) >>> 0;
  const sorted = [...groups].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
  const shown = sorted.flatMap(([group, series]) => (series.length > MOST_TOGETHER ? series.map((one) => [one.full, [one]]) : [[group, series]]));
  return { groups: shown, constant };
}
