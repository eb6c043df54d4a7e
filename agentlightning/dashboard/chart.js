// A line chart: several series over one axis, drawn as SVG, read with the mouse or the arrow keys.

import { empty, h, number, svg } from "./dom.js";

const WIDTH = 560;
const WIDE = 1120;
const HEIGHT = 190;
const LEFT = 52;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;
const MOST_POINTS = 280; // drawn of one series; of more, means of neighbours
const COLOURS = 6;
const FLAT = 1e-9; // a range that is smaller, as a share of the values, is rounding

/** `series` is a list of `{name, points: [[x, y], …]}` with ascending x; `label` words an x. */
export function chart(title, series, { label = number, isWide = false } = {}) {
  const finite = series.map((one) => ({ ...one, points: thinned(one.points.filter(isFinitePoint)) }));
  const drawn = finite.filter((one) => one.points.length);
  const figure = (...parts) => h("figure", { class: "chart" }, h("figcaption", {}, title), parts);
  if (!drawn.length) return figure(empty("No figures yet."));
  const scale = scaleOf(drawn, isWide ? WIDE : WIDTH);
  const picture = svg("svg", { viewBox: `0 0 ${scale.width} ${HEIGHT}`, role: "img", tabindex: 0 });
  picture.dataset.key = `chart ${title}`;
  picture.setAttribute("aria-label", inWords(title, drawn));
  picture.append(...axes(scale, label), ...drawn.map((one, i) => line(one.points, scale, i % COLOURS)));
  const key = keyOf(drawn);
  readable(picture, drawn, scale, label, key);
  return figure(picture, key);
}

/** The names of the series in their colours, each with its latest value. */
function keyOf(series) {
  const items = series.map((one, i) =>
    h("li", { class: `colour-${i % COLOURS}` }, `${one.name} `, h("b", {}, lastValue(one))));
  return h("ul", { class: "key", "aria-live": "polite" }, items);
}

/** The chart for those who cannot see it. */
function inWords(title, series) {
  const ends = series.map((one) => `${one.name} ends at ${lastValue(one)}`).join(", ");
  return title ? `${title}: ${ends}` : ends;
}

const lastValue = (one) => number(one.points[one.points.length - 1][1]);
const isFinitePoint = ([x, y]) => Number.isFinite(x) && Number.isFinite(y);

function thinned(points) {
  const size = Math.ceil(points.length / MOST_POINTS);
  if (size <= 1) return points;
  const means = [];
  for (let i = 0; i < points.length; i += size) {
    const group = points.slice(i, i + size);
    means.push([0, 1].map((axis) => group.reduce((sum, point) => sum + point[axis], 0) / group.length));
  }
  return means;
}

function scaleOf(series, width) {
  const xs = series.flatMap((one) => one.points.map((point) => point[0]));
  const ys = series.flatMap((one) => one.points.map((point) => point[1]));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const steps = ticks(Math.min(...ys), Math.max(...ys));
  const [y0, y1] = [steps[0], steps[steps.length - 1]];
  return {
    width, x0, x1, steps,
    x: (value) => LEFT + (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5) * (width - LEFT - RIGHT),
    y: (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM),
  };
}

/** Round numbers that enclose a range. */
function ticks(low, high) {
  const most = Math.max(Math.abs(low), Math.abs(high));
  const isFlat = high - low <= FLAT * most;
  const range = isFlat ? most || 1 : high - low;
  const rough = range / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.floor((isFlat ? low - range / 2 : low) / step);
  const final = Math.ceil((isFlat ? high + range / 2 : high) / step);
  return Array.from({ length: final - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function axes(scale, label) {
  const { steps } = scale;
  const digits = Math.max(3, Math.ceil(Math.log10(Math.max(...steps.map(Math.abs)) / (steps[1] - steps[0]))) + 1);
  const levels = steps.flatMap((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: scale.width - RIGHT, y1: scale.y(value), y2: scale.y(value) }),
    svg("text", { x: LEFT - 6, y: scale.y(value) + 4, "text-anchor": "end" }, number(value, digits)),
  ]);
  const ends = scale.x1 > scale.x0 ? [[scale.x0, "start"], [scale.x1, "end"]] : [[scale.x0, "middle"]];
  const labels = ends.map(([value, anchor]) =>
    svg("text", { x: scale.x(value), y: HEIGHT - 6, "text-anchor": anchor }, label(value)));
  return [...levels, ...labels];
}

function line(points, scale, colour) {
  if (points.length === 1) {
    const [[x, y]] = points;
    return svg("circle", { class: `dot colour-${colour}`, cx: scale.x(x), cy: scale.y(y), r: 3 });
  }
  const places = points.map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`);
  return svg("polyline", { class: `line colour-${colour}`, points: places.join(" ") });
}

/** Show the values under the mouse, or where the arrow keys have gone, in the key. */
function readable(picture, series, scale, label, key) {
  const xs = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const mark = svg("line", { class: "mark", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(mark);
  let at = xs.length;
  const show = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    for (const name of ["x1", "x2"]) mark.setAttribute(name, scale.x(xs[at]));
    mark.setAttribute("visibility", "visible");
    series.forEach((one, i) => {
      const point = one.points.filter((candidate) => candidate[0] <= xs[at]).pop();
      key.children[i].lastChild.textContent = point ? number(point[1]) : "–";
    });
    key.dataset.at = label(xs[at]);
  };
  const hide = () => {
    mark.setAttribute("visibility", "hidden");
    series.forEach((one, i) => (key.children[i].lastChild.textContent = lastValue(one)));
    delete key.dataset.at;
    at = xs.length;
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * scale.width;
    show(xs.reduce((best, value, i) => (Math.abs(scale.x(value) - x) < Math.abs(scale.x(xs[best]) - x) ? i : best), 0));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      event.preventDefault();
      show(at + step);
    }
  });
}
