// The curves of a run: read as they grow, and sorted into those that matter first and all others.

import { get } from "./api.js";
import { number } from "./dom.js";

const POINTS = 2000; // asked for at once
const MOST_POINTS = 40000;
const OVERLAP = 100; // points read again, for a point may come in behind others of its step
const MOST_TOGETHER = 4; // curves in one chart

/** The few charts that say how a training goes; a curve may have the names of its interval. */
const MAIN = [
  ["Reward", [
    { name: "train", metric: "reward/mean", low: "interval/low", high: "interval/high" },
    { name: "validation", metric: "validation/reward", low: "validation/low", high: "validation/high" },
    { name: "watched", metric: "watched/mean" },
    { name: "best prompt", metric: "apo/best_score" },
    { name: "beam", metric: "apo/beam_score" },
    { name: "best prompt", metric: "gepa/best_score" },
  ]],
  ["Loss", [{ name: "train", metric: "sft/loss" }, { name: "held out", metric: "sft/held_out_loss" }]],
  ["Length of answers, in tokens", [{ name: "mean", metric: "answers/tokens" }]],
  ["Entropy", [{ name: "entropy", metric: "learner/entropy" }]],
  ["KL divergence", [
    { name: "to the weights that sampled", metric: "learner/kl_to_old" },
    { name: "to the reference", metric: "learner/kl" },
  ]],
];

/** A run's points, which `read` brings up to date; `isCut` if there are more than are read. */
export function followMetrics(runId) {
  const found = { points: [], isCut: false, read };
  const path = `runs/${encodeURIComponent(runId)}/metrics`;
  async function read(signal) {
    const { points } = found;
    points.length = Math.max(0, points.length - OVERLAP);
    for (;;) {
      const asked = { limit: Math.min(POINTS, MOST_POINTS - points.length), offset: points.length };
      const page = await get(path, asked, signal);
      points.push(...page.items);
      found.isCut = points.length >= MOST_POINTS && page.total > points.length;
      if (found.isCut || points.length >= page.total || !page.items.length) return found;
    }
  }
  return found;
}

/** `[[x, value], …]` of every metric; x is the step, or with `start` the seconds since then. */
export function curvesOf(points, start = null) {
  const curves = new Map();
  for (const point of points) {
    const x = start === null ? point.step : point.time - start;
    for (const [name, value] of Object.entries(point.values)) {
      if (!curves.has(name)) curves.set(name, []);
      curves.get(name).push([x, value]);
    }
  }
  if (start !== null) for (const curve of curves.values()) curve.sort((a, b) => a[0] - b[0]);
  if (!curves.has("answers/tokens") && curves.has("samples/tokens") && curves.has("samples/used")) {
    const used = new Map(curves.get("samples/used"));
    const means = curves.get("samples/tokens").map(([x, tokens]) => [x, tokens / used.get(x)]);
    curves.set("answers/tokens", means.filter(([, mean]) => Number.isFinite(mean)));
  }
  return curves;
}

/** The main charts that the curves can fill, as `[[title, series], …]`, and the names they use. */
export function mainCharts(curves) {
  const used = new Set();
  const charts = MAIN.map(([title, wanted]) => {
    const series = wanted.filter((one) => curves.has(one.metric)).map((one) => {
      for (const name of [one.metric, one.low, one.high]) if (name) used.add(name);
      const band = curves.has(one.low) && curves.has(one.high) ? bandOf(curves.get(one.low), curves.get(one.high)) : [];
      return { name: one.name, points: curves.get(one.metric), band };
    });
    return [title, series];
  });
  return { charts: charts.filter(([, series]) => series.length), used };
}

function bandOf(low, high) {
  const tops = new Map(high);
  return low.filter(([x]) => tops.has(x)).map(([x, value]) => [x, value, tops.get(x)]);
}

/** All other curves: `reward/mean` and `reward/max` share a chart, unless there are too many; constants are named. */
export function otherCharts(curves, used) {
  const isConstant = (curve) => curve.length > 1 && curve.every((point) => point[1] === curve[0][1]);
  const rest = [...curves].filter(([name]) => !used.has(name));
  const steady = rest.filter(([, curve]) => isConstant(curve));
  const constant = steady.map(([name, curve]) => `${name} ${number(curve[0][1])}`);
  const groups = new Map();
  for (const [name, points] of rest.filter(([, curve]) => !isConstant(curve))) {
    const [group, ...parts] = name.split("/");
    groups.set(group, [...(groups.get(group) ?? []), { name: parts.join("/") || name, full: name, points }]);
  }
  const sorted = [...groups].sort(([one], [other]) => one.localeCompare(other));
  const apart = (series) => series.map((one) => [one.full, [one]]);
  const isCrowded = (series) => series.length > MOST_TOGETHER;
  const charts = sorted.flatMap(([group, series]) => (isCrowded(series) ? apart(series) : [[group, series]]));
  return { charts, constant };
}

/** The last value of a metric; null if there is none. */
export function lastOf(curves, name) {
  const curve = curves.get(name);
  return curve?.length ? curve[curve.length - 1][1] : null;
}

/** The sum of a metric over all steps; null if there is none. */
export function sumOf(curves, name) {
  const curve = curves.get(name);
  return curve?.length ? curve.reduce((sum, point) => sum + point[1], 0) : null;
}
