// Runs: every training and optimisation, with how it ended; several of them can be laid over each other.

import { get, now } from "./api.js";
import { chart } from "./chart.js";
import { valuesDiff } from "./diff.js";
import {
  addressOf, ago, badge, duration, empty, field, firstLine, h, linkTo, note, number, pager, panel, swap, table,
} from "./dom.js";
import { curvesOf, followMetrics } from "./metrics.js";
import { sentenceOf } from "./verdict.js";

const COLUMNS = [
  "Compare", "Run", "Status", "Start", ["Took", "number"], "Algorithm", ["What came of it", "wide"],
];
const PAGE = 50;
const MOST_COMPARED = 6;
const FIRST_METRICS = ["reward/mean", "validation/reward", "apo/best_score", "gepa/best_score", "sft/loss"];
const OTHER_METRICS = 2; // charts of a comparison beside the chosen one

export function runs(main, route) {
  const [place, comparison] = [h("div", { id: "page" }), h("div")];
  const chosen = () => (route.query.get("ids") ?? "").split(",").filter(Boolean).slice(0, MOST_COMPARED);
  const go = (changes) => {
    const wanted = Object.entries({ ...Object.fromEntries(route.query), ...changes });
    const query = new URLSearchParams(wanted.filter(([, value]) => value));
    route.go(`#/runs${query.size ? `?${query}` : ""}`);
  };
  swap(main, h("h1", {}, "Runs"), comparison, place);
  const followed = new Map(); // metrics of the compared runs
  const view = { range: null, smoothing: 0, redraw: () => {} };
  const refresh = async (signal) => {
    const offset = (Math.max(1, Number(route.query.get("page")) || 1) - 1) * PAGE;
    const page = await get("runs", { sort_by: "start_time", sort_order: "desc", limit: PAGE, offset }, signal);
    const ids = chosen();
    const rows = page.items.map((run) => [
      chooser(run, chosen, go),
      linkTo("runs", run.run_id, { text: run.name }),
      badge(run.status),
      ago(run.start_time, now()),
      duration((run.end_time ?? now()) - run.start_time),
      algorithmOf(run),
      h("span", { class: "task" }, sentenceOf(run) ?? summed(run.summary)),
    ]);
    const hint = page.total > 1 && note("Tick two or more to lay them over each other.");
    swap(place, table(COLUMNS, rows, "No run was recorded."), hint, pager(page, PAGE, (to) => go({ page: to })));
    if (ids.length < 2) swap(comparison);
    else await compare(comparison, ids, { followed, view, route, go }, signal);
  };
  return { kinds: ["run", "metrics"], refresh, mostSeconds: 30 };
}

function chooser(run, chosen, go) {
  const change = (event) => {
    const others = chosen().filter((id) => id !== run.run_id);
    go({ ids: (event.target.checked ? [...others, run.run_id] : others).join(",") });
  };
  return h("input", {
    type: "checkbox", checked: chosen().includes(run.run_id), onchange: change, "data-key": `choose ${run.run_id}`,
    "aria-label": `Compare ${run.name}, ${run.run_id}`,
  });
}

const ALGORITHMS = ["GRPO", "SFT", "APO", "GEPA", "VERL"];

/** The name of a run's algorithm: of its class, of its function, or of the run that an algorithm keeps of its own. */
export function algorithmOf(run) {
  const { algorithm, settings } = run.config ?? {};
  const own = settings?.algorithm?.algorithm_func; // of a function with the decorator `algo`
  const path = [own, algorithm, run.name].find((one) => typeof one === "string") ?? "";
  const name = path.split(".").pop();
  return ALGORITHMS.find((one) => one.toLowerCase() === name.toLowerCase()) ?? (path === run.name ? "–" : name);
}

/** The figures of a summary in one line. */
function summed(summary) {
  const figures = Object.entries(summary ?? {}).filter(([, value]) => ["number", "string"].includes(typeof value));
  const shown = (value) => (typeof value === "number" ? number(value) : firstLine(value, 60));
  return figures.map(([name, value]) => `${name} ${shown(value)}`).join(", ");
}

// ------------------------------------------------------------------ several runs

async function compare(place, ids, { followed, view, route, go }, signal) {
  const found = [];
  for (const id of ids) {
    const run = await get(`runs/${encodeURIComponent(id)}`, {}, signal);
    if (run === null) continue;
    if (!followed.has(id)) followed.set(id, followMetrics(id));
    await followed.get(id).read(signal);
    found.push(run);
  }
  const isByTime = route.query.get("by") === "time";
  const curves = found.map((run) => curvesOf(followed.get(run.run_id).points, isByTime ? run.start_time : null));
  const names = [...new Set(curves.flatMap((one) => [...one.keys()]))].sort();
  const main = [route.query.get("metric"), ...FIRST_METRICS].find((name) => names.includes(name)) ?? names[0];
  view.smoothing = Number(route.query.get("smooth")) || 0;
  view.redraw = () => draw();
  const charts = h("div");
  const label = isByTime ? duration : (step) => `step ${number(Math.round(step))}`;
  const draw = () => {
    const series = (name) => found.map((run, i) => ({
      name: titleOf(run, found), href: addressOf("runs", run.run_id), points: curves[i].get(name) ?? [], colour: i,
    }));
    const others = FIRST_METRICS.concat("learner/entropy", "learner/kl_to_old")
      .filter((name) => name !== main && names.includes(name)).slice(0, OTHER_METRICS);
    const wide = { label, view, width: Math.max(320, place.clientWidth - 40), height: 280 };
    swap(charts, main ? chart(main, series(main), wide) : empty("No figures yet."),
      h("div", { class: "charts" }, others.map((name) => chart(name, series(name), { label, view }))));
  };
  const heading = (run) => linkTo("runs", run.run_id, { text: titleOf(run, found), key: `config ${run.run_id}` });
  swap(place,
    panel(`${found.length} runs over each other`, controls({ names, main, isByTime, view, go }), charts),
    panel("Configurations", valuesDiff(found.map((run) => [heading(run), run.config]))),
    panel("Results", valuesDiff(found.map((run) => [heading(run), plainSummary(run)]))));
  draw();
}

/** The name of a run; with its start where another has the same. */
function titleOf(run, all) {
  if (!all.some((other) => other !== run && other.name === run.name)) return run.name;
  return `${run.name} ${new Date(run.start_time * 1000).toLocaleTimeString()} ${run.run_id.slice(-4)}`;
}

function plainSummary(run) {
  const { verdict, candidates: _, ...rest } = run.summary ?? {};
  return { status: run.status, verdict: verdict?.sentence, ...rest };
}

/** How curves are shown: which, over what, and how smooth. */
export function controls({ names, main, isByTime, view, go }) {
  const smooth = h("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: view.smoothing, id: "smoothing", "data-key": "smoothing",
    oninput: (event) => {
      view.smoothing = Number(event.target.value);
      view.redraw();
    },
    onchange: (event) => go({ smooth: Number(event.target.value) ? event.target.value : "" }),
  });
  const by = h("select", { id: "by", "data-key": "by", onchange: (event) => {
    view.range = null;
    go({ by: event.target.value });
  } }, h("option", { value: "" }, "step"), h("option", { value: "time", selected: isByTime }, "time"));
  const choose = (event) => go({ metric: event.target.value });
  const metric = main && h("select", { id: "metric", "data-key": "metric", onchange: choose },
    names.map((name) => h("option", { value: name, selected: name === main }, name)));
  return h("div", { class: "filters" },
    metric && field("Curve", metric), field("By", by), field("Smoothing", smooth),
    note("Drag over a chart to zoom, double-click to see all; on the keyboard + - 0 and the arrows."));
}
