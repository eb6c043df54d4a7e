// Runs: every training and optimisation, with what it was started with, how it ended, and its curves.

import { get, now } from "./api.js";
import { chart } from "./chart.js";
import {
  ago, asText, badge, duration, empty, facts, firstLine, h, linkTo, note, number, panel, swap, table,
} from "./dom.js";
import { sentenceOf, verdictOf } from "./verdict.js";

const COLUMNS = ["Run", "Status", "Start", ["Duration", "number"], "Algorithm", ["Summary", "wide"]];
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
      linkTo("runs", run.run_id, { text: run.name }),
      badge(run.status),
      ago(run.start_time, now()),
      duration((run.end_time ?? now()) - run.start_time),
      configuredAs(run),
      h("span", { class: "task" }, sentenceOf(run) ?? summed(run.summary)),
    ]);
    swap(place, table(COLUMNS, rows, "No run was recorded."), pager(offset, page.total));
  };
  return { kinds: ["run"], refresh, mostSeconds: 10 };
}

function pager(offset, total) {
  const current = offset / PAGE + 1;
  const turn = (name, to, isThere) => h("a", { href: `#/runs?page=${to}`, hidden: !isThere, "data-key": name }, name);
  return h("nav", { class: "pager", "aria-label": "Pages" },
    turn("Newer", current - 1, offset > 0),
    h("span", {}, `${number(total)} in all`),
    turn("Older", current + 1, offset + PAGE < total));
}

function configuredAs(run) {
  const algorithm = run.config?.algorithm;
  return typeof algorithm === "string" ? algorithm.split(".").pop() : firstLine(run.config ?? {}, 40);
}

/** The figures of a summary in one line. */
function summed(summary) {
  const figures = Object.entries(summary ?? {}).filter(([, value]) => ["number", "string"].includes(typeof value));
  const shown = (value) => (typeof value === "number" ? number(value) : firstLine(value, 60));
  return figures.map(([name, value]) => `${name} ${shown(value)}`).join(", ");
}

// ------------------------------------------------------------------ one run

export function run(main, route) {
  const id = route.parts[1];
  const title = h("h1", {}, "Run");
  const about = h("div");
  const curves = h("div", { class: "charts" });
  const notes = h("div");
  const path = h("p", { class: "path" }, h("a", { href: "#/runs" }, "Runs"), " / ", id);
  swap(main, path, title, about, panel("Metrics", curves, notes));
  const points = [];
  const refresh = async (signal) => {
    const found = await get(`runs/${encodeURIComponent(id)}`, {}, signal);
    if (found === null) {
      swap(about, empty("There is no such run."));
      return;
    }
    title.textContent = `Run ${found.name}`;
    swap(about, head(found));
    const isCut = await read(points, id, signal);
    const { groups, constant } = seriesOf(points);
    const label = (step) => `step ${number(Math.round(step))}`;
    const charts = groups.map(([name, series]) => chart(name, series, { label }));
    swap(curves, charts.length || constant.length ? charts : empty("No figures yet."));
    swap(
      notes,
      constant.length && note(`Always the same: ${constant.join(", ")}.`),
      isCut && note(`The first ${number(MOST_POINTS)} points.`),
    );
  };
  return { kinds: ["run", "metrics"], concerns: (notice) => notice.name === id, refresh, mostSeconds: 10 };
}

function head(found) {
  const pairs = [
    ["Status", badge(found.status)],
    ["Start", ago(found.start_time, now())],
    ["Duration", duration((found.end_time ?? now()) - found.start_time)],
  ];
  const whenEmpty = found.status === "running" ? "It comes at the end." : "Empty.";
  const { verdict: _, ...figures } = found.summary ?? {};
  const summary = panel("Summary", listed(figures, whenEmpty));
  const configuration = panel("Configuration", listed({ ...found.config, ...found.metadata }, "Empty."));
  return h("div", {},
    h("section", { class: "panel" }, facts(pairs)),
    verdictOf(found),
    h("div", { class: "columns" }, summary, configuration));
}

function listed(values, ifEmpty) {
  const entries = Object.entries(values ?? {});
  if (!entries.length) return empty(ifEmpty);
  const shown = (value) => (typeof value === "number" ? number(value) : asText(value));
  return facts(entries.map(([name, value]) => [name, shown(value)]), "attributes");
}

/** Bring the points up to date; true if there are more than are read. */
async function read(points, id, signal) {
  points.length = Math.max(0, points.length - OVERLAP);
  for (;;) {
    const asked = { limit: Math.min(POINTS, MOST_POINTS - points.length), offset: points.length };
    const page = await get(`runs/${encodeURIComponent(id)}/metrics`, asked, signal);
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
  const steady = [...curves].filter(([, curve]) => isConstant(curve));
  const constant = steady.map(([name, curve]) => `${name} ${number(curve[0][1])}`);
  const groups = new Map();
  for (const [name, curve] of curves) {
    if (isConstant(curve)) continue;
    const [group, ...rest] = name.split("/");
    groups.set(group, [...(groups.get(group) ?? []), { name: rest.join("/") || name, full: name, points: curve }]);
  }
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  const sorted = [...groups].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
  const apart = (series) => series.map((one) => [one.full, [one]]);
  const isCrowded = (series) => series.length > MOST_TOGETHER;
  const shown = sorted.flatMap(([group, series]) => (isCrowded(series) ? apart(series) : [[group, series]]));
  return { groups: shown, constant };
}
