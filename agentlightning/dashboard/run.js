// One run: its verdict and warnings, the few charts that say how it goes, its steps down to single rollouts, the
// prompts it tried, and what it was started with.

import { get, now } from "./api.js";
import { chart } from "./chart.js";
import {
  ago, asText, badge, copyButton, duration, empty, facts, h, note, number, panel, rawJson, swap, unfolding,
} from "./dom.js";
import { flattened } from "./diff.js";
import { lineagePanel } from "./lineage.js";
import { curvesOf, followMetrics, lastOf, mainCharts, otherCharts, sumOf } from "./metrics.js";
import { algorithmOf, controls } from "./runs.js";
import { runOfRollouts, stepsPanel } from "./steps.js";
import { verdictOf } from "./verdict.js";

const MOST_POINTS = 40000;
const REWARDS = ["reward/mean", "apo/best_score", "gepa/best_score", "validation/reward"];
const NEWEST = 50; // runs among which that of a prompt optimisation is looked for

export function run(main, route) {
  const id = route.parts[1];
  const title = h("h1", {}, "Run");
  const names = ["about", "curves", "steps", "prompts", "rest", "config"];
  const places = Object.fromEntries(names.map((name) => [name, h("div")]));
  const path = h("p", { class: "path" }, h("a", { href: "#/runs" }, "Runs"), " / ", id);
  const charts = h("div");
  const rest = h("details", { class: "panel", "data-key": "rest" }, h("summary", {}, "All other figures"), places.rest);
  swap(main, path, title, places.about, places.curves, places.steps, places.prompts, rest, places.config);
  const metrics = followMetrics(id);
  const view = { range: null, smoothing: Number(route.query.get("smooth")) || 0, redraw: () => {} };
  const go = (changes) => {
    const wanted = Object.entries({ ...Object.fromEntries(route.query), ...changes });
    const query = new URLSearchParams(wanted.filter(([, value]) => value !== "" && value !== null));
    route.go(`#/runs/${encodeURIComponent(id)}${query.size ? `?${query}` : ""}`);
  };
  const steps = stepsPanel(places.steps, go);
  let isOpened = false; // whether the other figures were shown by themselves
  rest.addEventListener("toggle", () => view.redraw());
  const refresh = async (signal) => {
    const found = await get(`runs/${encodeURIComponent(id)}`, {}, signal);
    if (found === null) {
      swap(places.about, empty("There is no such run."));
      return;
    }
    title.textContent = `Run ${found.name}`;
    await metrics.read(signal);
    const isByTime = route.query.get("by") === "time";
    const curves = curvesOf(metrics.points, isByTime ? found.start_time : null);
    swap(places.about, head(found, curvesOf(metrics.points)), verdictOf(found));
    const label = isByTime ? duration : (step) => `step ${number(Math.round(step))}`;
    const pick = isByTime ? null : (step) => go({ step: String(step), group: "" });
    const { charts: first, used } = mainCharts(curves);
    view.redraw = () => {
      const width = Math.max(320, charts.clientWidth);
      const half = Math.max(320, Math.floor((width - 20) / 2));
      swap(charts, first.map(([name, series], i) =>
        chart(name, series, { label, view, pick, width: i ? half : width, height: i ? 200 : 260 })));
      if (rest.open) showRest(places.rest, otherCharts(curves, used), metrics.isCut, { label, view, pick });
    };
    if (!charts.isConnected) {
      const shown = controls({ names: [], main: null, isByTime, view, go });
      swap(places.curves, panel("How it goes", shown, charts));
    }
    charts.className = "charts main";
    rest.hidden = !curves.size;
    if (!first.length && !isOpened) rest.open = isOpened = curves.size > 0; // it has figures of its own alone
    places.curves.hidden = !first.length && curves.size > 0;
    view.redraw();
    if (!first.length) swap(charts, empty("No figures yet."));
    await steps(found, route.query, metrics.points, signal);
    swap(places.prompts, lineagePanel(await optimisationOf(found, curves, signal), route.query, go));
    swap(places.config, configuration(found));
  };
  return { kinds: ["run", "metrics"], concerns: (notice) => notice.name === id, refresh, mostSeconds: 15 };
}

/** The run that an algorithm for prompts keeps of its own, if this is the trainer's; else the run itself. */
async function optimisationOf(found, curves, signal) {
  const isOfPrompts = [...curves.keys()].some((name) => /^(apo|gepa)\//.test(name));
  if (!isOfPrompts || found.summary?.candidates) return found;
  const asked = { sort_by: "start_time", sort_order: "desc", limit: NEWEST };
  const others = (await get("runs", asked, signal)).items;
  return others.find((one) => one.metadata?.trainer_run_id === found.run_id) ?? found;
}

function showRest(place, { charts, constant }, isCut, options) {
  swap(place,
    h("div", { class: "charts" }, charts.map(([name, series]) => chart(name, series, options))),
    constant.length > 0 && note(`Always the same: ${constant.join(", ")}.`),
    isCut && note(`The first ${number(MOST_POINTS)} points.`));
}

/** The figures of a run in one line. */
export function figuresOf(found, curves) {
  const seconds = (found.end_time ?? now()) - found.start_time;
  const steps = Math.max(0, ...[...curves.values()].map((curve) => curve.length));
  const rollouts = sumOf(curves, "rollouts/finished");
  const trained = sumOf(curves, "samples/tokens");
  const tokens = found.summary?.tokens ?? lastOf(curves, "apo/tokens") ?? lastOf(curves, "gepa/tokens");
  const cost = lastOf(curves, "apo/cost") ?? lastOf(curves, "gepa/cost") ?? lastOf(curves, "usage/cost");
  return [
    ["Status", badge(found.status)],
    ["Algorithm", algorithmOf(found)],
    ["Start", ago(found.start_time, now())],
    ["Took", duration(seconds)],
    ["Steps", number(steps)],
    ["Reward now", number(REWARDS.map((name) => lastOf(curves, name)).find((value) => value !== null), 3)],
    rollouts !== null && ["Rollouts", `${number(rollouts)}, ${rate(rollouts / seconds)}`],
    tokens > 0 && ["Tokens of models", `${number(tokens)}, ${rate(tokens / seconds)}`],
    trained !== null && ["Tokens trained", number(trained)],
    cost > 0 && ["Cost", number(cost, 3)],
  ].filter(Boolean);
}

export function rate(perSecond) {
  if (!Number.isFinite(perSecond)) return "–";
  return perSecond >= 1 ? `${number(perSecond, 3)} / s` : `${number(perSecond * 60, 3)} / min`;
}

function head(found, curves) {
  const address = `#/rollouts?run=${encodeURIComponent(runOfRollouts(found))}`;
  return h("section", { class: "panel" }, facts(figuresOf(found, curves)),
    h("p", { class: "links" },
      h("a", { href: address, "data-key": "its rollouts" }, "All its rollouts"),
      " · ", h("a", { href: `${address}&mode=val` }, "of the validation"),
      " · ", h("a", { href: `${address}&status=failed` }, "that failed")));
}

function configuration(found) {
  const { verdict: _, candidates: __, ...figures } = found.summary ?? {};
  const whenEmpty = found.status === "running" ? "It comes at the end." : "Empty.";
  const { settings, ...parts } = { ...found.config, ...found.metadata };
  const isPlain = ([, value]) => value === null || typeof value !== "object";
  const own = Object.fromEntries(Object.entries(settings?.algorithm ?? {}).filter(isPlain));
  const first = Object.keys(own).length ? own : parts;
  const rest = first === own ? { ...parts, settings } : { settings };
  return [
    h("div", { class: "columns" },
      panel("Summary", listed(figures, whenEmpty)),
      panel("Configuration", copyButton(() => JSON.stringify(found.config, null, 2), "Copy JSON"),
        listed(first, "Empty."),
        flattened(rest).size > 0 && unfolding({ "data-key": "settings" }, h("summary", {}, "All settings"),
          () => [listed(rest, "Empty.")]))),
    panel("Raw", rawJson("The run as JSON", found, "run")),
  ];
}

function listed(values, ifEmpty) {
  const entries = [...flattened(values ?? {})].filter(([, value]) => value !== null);
  if (!entries.length) return empty(ifEmpty);
  const shown = (value) => (typeof value === "number" ? number(value) : asText(value));
  return facts(entries.map(([name, value]) => [name, shown(value)]), "attributes");
}
