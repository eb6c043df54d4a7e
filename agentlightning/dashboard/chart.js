// Charts, drawn as SVG: lines over one axis with intervals, smoothing and zoom, and histograms. They are read with the
// mouse or the arrow keys, zoomed by dragging or with + and -, and answer a click on a step.

import { empty, h, number, svg } from "./dom.js";

const WIDTH = 560;
const HEIGHT = 200;
const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const MOST_POINTS = 280; // drawn of one series; of more, means of neighbours
const COLOURS = 6;
const FLAT = 1e-9; // a range that is smaller, as a share of the values, is rounding
const LEAST_DRAG = 8; // pixels; a shorter one is a click
const BINS = 20;
const FEW_POINTS = 8; // which are marked
const LABEL_WIDTH = 64; // of a label below the axis, with space around it
const LEAST_WIDTH = 400; // of a chart with more labels than those of its ends

/**
 * `series` is a list of `{name, points: [[x, y], …], band: [[x, low, high], …], colour, isFaint}` with ascending x.
 * `label` words an x; `view` is shared by charts that are zoomed together: `{range, smoothing, redraw}`; `pick` is
 * called with the x that was chosen.
 */
export function chart(title, series, options = {}) {
  const { label = number, width = WIDTH, height = HEIGHT, view = null, pick = null } = options;
  const drawn = series.map((one, i) => prepared(one, i, view)).filter((one) => one.points.length);
  const figure = (...parts) => h("figure", { class: "chart" }, h("figcaption", {}, title), parts);
  if (!drawn.length) return figure(empty("No figures yet."));
  const scale = scaleOf(drawn, width, height, view?.range);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 });
  picture.dataset.key = `chart ${title}`;
  picture.setAttribute("aria-label", inWords(title, drawn));
  const inside = drawn.map((one) => ({ ...one, points: one.points.filter(([x]) => x >= scale.x0 && x <= scale.x1) }));
  picture.append(...axes(scale, label), ...drawn.flatMap((one) => band(one, scale)));
  picture.append(...inside.flatMap((one) => [one.raw && line(one.raw, scale, one.colour, "raw"),
    line(one.points, scale, one.colour), ...dotsOf(one, scale)].filter(Boolean)));
  const key = keyOf(drawn);
  readable(picture, inside, scale, { label, key, view, pick });
  const whole = view?.range && h("button", { type: "button", class: "plain whole", onclick: () => zoom(view, null) },
    "Show all");
  return figure(whole, picture, key);
}

/** Points that can be drawn, smoothed if the view says so. */
function prepared(one, index, view) {
  const finite = one.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  const points = thinned(finite);
  const isSmoothed = view?.smoothing > 0 && points.length > 2;
  return {
    ...one,
    colour: one.colour ?? index % COLOURS,
    points: isSmoothed ? smoothed(points, view.smoothing) : points,
    raw: isSmoothed ? points : null,
    band: isSmoothed ? [] : (one.band ?? []).filter((point) => point.every(Number.isFinite)),
  };
}

/** An exponential mean that does not lean on the first value; `weight` between 0 and 1. */
export function smoothed(points, weight) {
  let [sum, norm] = [0, 0];
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return [x, sum / norm];
  });
}

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

/** The names of the series in their colours, each with its latest value. */
function keyOf(series) {
  const items = series.map((one) => {
    const name = one.href ? h("a", { href: one.href }, one.name) : h("span", {}, one.name);
    return h("li", { class: `colour-${one.colour}` }, name, " ", h("b", {}, lastValue(one)));
  });
  return h("ul", { class: "key", "aria-live": "polite" }, items);
}

/** The chart for those who cannot see it. */
function inWords(title, series) {
  const ends = series.map((one) => `${one.name} ends at ${lastValue(one)}`).join(", ");
  return title ? `${title}: ${ends}` : ends;
}

const lastValue = (one) => (one.points.length ? number(one.points[one.points.length - 1][1]) : "–");

function scaleOf(series, width, height, range) {
  const xs = series.flatMap((one) => one.points.map((point) => point[0]));
  const [x0, x1] = range ?? [Math.min(...xs), Math.max(...xs)];
  const isInside = ([x]) => x >= x0 && x <= x1;
  const shown = series.flatMap((one) => [
    ...[...one.points, ...(one.raw ?? [])].filter(isInside).map((point) => point[1]),
    ...one.band.filter(isInside).flatMap((point) => [point[1], point[2]]),
  ]);
  const ys = shown.length ? shown : [0, 1];
  const steps = ticks(Math.min(...ys), Math.max(...ys));
  const [y0, y1] = [steps[0], steps[steps.length - 1]];
  return {
    width, height, x0, x1, steps,
    x: (value) => LEFT + (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5) * (width - LEFT - RIGHT),
    y: (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (height - TOP - BOTTOM),
    at: (pixel) => x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0),
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
  const labels = [...ends, ...between(scale)].map(([value, anchor]) =>
    svg("text", { x: scale.x(value), y: scale.height - 6, "text-anchor": anchor }, label(value)));
  return [...levels, ...labels];
}

/** Round places between both ends of the lower axis, where there is space for their labels. */
function between({ x, x0, x1, width }) {
  if (!(x1 - x0 > FLAT * Math.abs(x1))) return [];
  const isFree = (one) => x(one) - x(x0) > LABEL_WIDTH && x(x1) - x(one) > LABEL_WIDTH;
  const places = ticks(x0, x1).filter((one) => Number.isInteger(one) && isFree(one)); // there is no half step
  const isTight = places.length > 1 && x(places[1]) - x(places[0]) < LABEL_WIDTH;
  return width < LEAST_WIDTH || isTight ? [] : places.map((one) => [one, "middle"]);
}

function line(all, scale, colour, kind = "") {
  const points = all.filter(([x]) => x >= scale.x0 && x <= scale.x1);
  if (!points.length) return null;
  if (points.length === 1) {
    return dot(...points[0], scale, colour);
  }
  const places = points.map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`);
  return svg("polyline", { class: `line colour-${colour} ${kind}`, points: places.join(" ") });
}

const dot = (x, y, scale, colour) =>
  svg("circle", { class: `dot colour-${colour}`, cx: scale.x(x), cy: scale.y(y), r: 3 });

/** Dots on the points of a line that has few. */
function dotsOf(one, scale) {
  if (one.points.length > FEW_POINTS || one.points.length < 2) return [];
  return one.points.map(([x, y]) => dot(x, y, scale, one.colour));
}

/** The interval around a line; bars where there are few points. */
function band(one, scale) {
  const points = one.band.filter(([x]) => x >= scale.x0 && x <= scale.x1);
  if (points.length <= FEW_POINTS) {
    return points.map(([x, low, high]) => svg("line", {
      class: `bar-line colour-${one.colour}`, x1: scale.x(x), x2: scale.x(x), y1: scale.y(low), y2: scale.y(high),
    }));
  }
  const there = points.map(([x, low]) => `${scale.x(x).toFixed(1)},${scale.y(low).toFixed(1)}`);
  const back = points.map(([x, , high]) => `${scale.x(x).toFixed(1)},${scale.y(high).toFixed(1)}`).reverse();
  return [svg("polygon", { class: `band colour-${one.colour}`, points: [...there, ...back].join(" ") })];
}

/** Show other x's in all charts of a view; null shows all. */
function zoom(view, range) {
  view.range = range;
  view.redraw();
}

/** Show the values under the mouse, or where the arrow keys have gone, in the key; zoom; pick. */
function readable(picture, series, scale, { label, key, view, pick }) {
  const xs = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const mark = svg("line", { class: "mark", y1: TOP, y2: scale.height - BOTTOM, visibility: "hidden" });
  const chosen = svg("rect", { class: "chosen", y: TOP, height: scale.height - BOTTOM - TOP, visibility: "hidden" });
  picture.append(chosen, mark);
  if (!xs.length) return;
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
  const pixel = (event) => {
    const box = picture.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * scale.width;
  };
  const nearest = (x) =>
    xs.reduce((best, value, i) => (Math.abs(scale.x(value) - x) < Math.abs(scale.x(xs[best]) - x) ? i : best), 0);
  let from = null; // where dragging began
  picture.addEventListener("pointerdown", (event) => {
    from = event.button === 0 && event.pointerType === "mouse" ? pixel(event) : null;
  });
  picture.addEventListener("pointermove", (event) => {
    show(nearest(pixel(event)));
    if (from === null || !view) return;
    const [start, end] = [from, pixel(event)].sort((a, b) => a - b);
    chosen.setAttribute("x", start);
    chosen.setAttribute("width", end - start);
    chosen.setAttribute("visibility", "visible");
  });
  picture.addEventListener("pointerup", (event) => {
    const [start, end] = [from ?? pixel(event), pixel(event)].sort((a, b) => a - b);
    const isDrag = from !== null && end - start > LEAST_DRAG;
    from = null;
    chosen.setAttribute("visibility", "hidden");
    if (isDrag && view) zoom(view, [scale.at(start), scale.at(end)]);
    else if (!isDrag && pick) pick(xs[nearest(pixel(event))]);
  });
  picture.addEventListener("pointerleave", () => {
    from = null;
    chosen.setAttribute("visibility", "hidden");
    hide();
  });
  picture.addEventListener("blur", hide);
  picture.addEventListener("dblclick", () => view && zoom(view, null));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (step) {
      event.preventDefault();
      show(at + step);
    } else if (event.key === "Enter" && pick && at < xs.length) {
      pick(xs[at]);
    } else if (factor && view && scale.x1 > scale.x0) {
      const middle = at < xs.length ? xs[at] : (scale.x0 + scale.x1) / 2;
      const half = ((scale.x1 - scale.x0) * factor) / 2;
      zoom(view, [middle - half, middle + half]);
    } else if (event.key === "0" && view) {
      zoom(view, null);
    }
  });
}

// ------------------------------------------------------------------ histograms

/** How many of the values lie where. */
export function histogram(title, values, { width = WIDTH, height = 150 } = {}) {
  const finite = values.filter(Number.isFinite);
  const figure = (...parts) => h("figure", { class: "chart" }, h("figcaption", {}, title), parts);
  if (!finite.length) return figure(empty("No rewards yet."));
  const bins = binsOf(finite);
  const most = Math.max(...bins.map((bin) => bin.count));
  const wide = (width - LEFT - RIGHT) / bins.length;
  const words = bins.filter((bin) => bin.count).map((bin) => `${bin.count} at ${bin.name}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${words}` });
  const floor = height - BOTTOM;
  picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }));
  const every = Math.ceil(bins.length / 6);
  bins.forEach((bin, i) => {
    const tall = (bin.count / most) * (floor - TOP - 12);
    const [x, middle] = [LEFT + i * wide + 1, LEFT + (i + 0.5) * wide];
    const box = svg("rect", { class: "bin", x, y: floor - tall, width: Math.max(1, wide - 2), height: tall, rx: 2 });
    box.append(svg("title", {}, `${bin.count} at ${bin.name}`));
    picture.append(box);
    if (bin.count) picture.append(svg("text", { x: middle, y: floor - tall - 4, "text-anchor": "middle" }, bin.count));
    if (i % every === 0) {
      picture.append(svg("text", { x: middle, y: height - 6, "text-anchor": "middle" }, bin.name));
    }
  });
  return figure(picture);
}

/** Few different values have a bin each; many share bins of equal width. */
function binsOf(values) {
  const different = [...new Set(values)].sort((a, b) => a - b);
  if (different.length <= BINS / 2) {
    return different.map((value) => ({ name: number(value, 3), count: values.filter((one) => one === value).length }));
  }
  const steps = ticks(different[0], different[different.length - 1]);
  const [low, high] = [steps[0], steps[steps.length - 1]];
  const bins = Array.from({ length: BINS }, (_, i) => ({ name: number(low + ((high - low) * i) / BINS, 3), count: 0 }));
  for (const value of values) bins[Math.min(BINS - 1, Math.floor(((value - low) / (high - low)) * BINS))].count += 1;
  return bins;
}
