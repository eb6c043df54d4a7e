// Resources: prompts and models as they were published, each compared with another one.

import { get, now } from "./api.js";
import { textDiff, valuesDiff } from "./diff.js";
import {
  addressOf, ago, asText, block, copyButton, empty, facts, field, firstLine, h, linkTo, number, pager, panel, rawJson,
  swap, table,
} from "./dom.js";

const COLUMNS = ["Resources", ["Version", "number"], "Published", "Names", ["First lines", "wide"]];
const PAGE = 50;
const COMPARABLE = 200; // the newest, with which others are compared

export function resources(main, route) {
  const place = h("div", { id: "page" });
  swap(main, h("h1", {}, "Resources"), place);
  const go = (to) => route.go(`#/resources${to ? `?page=${to}` : ""}`);
  const refresh = async (signal) => {
    const offset = (Math.max(1, Number(route.query.get("page")) || 1) - 1) * PAGE;
    const asked = { sort_by: "update_time", sort_order: "desc", limit: PAGE, offset };
    const page = await get("resources", asked, signal);
    const rows = page.items.map((one) => [
      linkTo("resources", one.resources_id),
      number(one.version),
      ago(one.update_time, now()),
      Object.entries(one.resources).map(([name, resource]) => `${name} (${kindOf(resource)})`).join(", "),
      h("span", { class: "task" }, linesOf(one.resources).join(" · ")),
    ]);
    swap(place, table(COLUMNS, rows, "No resources were published."), pager(page, PAGE, go));
  };
  return { kinds: ["resources"], refresh };
}

const linesOf = (named) => Object.values(named).map((each) => firstLine(textOf(each), 80));
const kindOf = (resource) => String(resource?.resource_type ?? "resource").replaceAll("_", " ");

/** What of a resource is worth reading: the text of a prompt, or a model and where it is. */
function textOf(resource) {
  if (typeof resource?.template === "string") return resource.template;
  return [resource?.model, resource?.endpoint].filter(Boolean).join(" at ") || asText(resource);
}

// ------------------------------------------------------------------ one of them

export function resource(main, route) {
  const id = route.parts[1];
  const place = h("div");
  swap(main, h("p", { class: "path" }, h("a", { href: "#/resources" }, "Resources"), " / ", id),
    h("h1", {}, "Resources ", h("code", {}, id)), place);
  const refresh = async (signal) => {
    const found = await get(`resources/${encodeURIComponent(id)}`, {}, signal);
    if (found === null) {
      swap(place, empty("There are no such resources."));
      return;
    }
    const asked = { sort_by: "create_time", sort_order: "desc", limit: COMPARABLE };
    const others = (await get("resources", asked, signal)).items.filter((one) => one.resources_id !== id);
    const before = others.find((one) => one.create_time <= found.create_time) ?? null;
    const other = others.find((one) => one.resources_id === route.query.get("with")) ?? before;
    const choose = (event) => route.go(`${addressOf("resources", id)}?with=${encodeURIComponent(event.target.value)}`);
    const option = (one) => h("option", { value: one.resources_id, selected: one === other }, one.resources_id);
    const pairs = [
      ["Version", number(found.version)], ["Published", ago(found.update_time, now())],
      ["First published", ago(found.create_time, now())],
    ];
    swap(place,
      h("section", { class: "panel" }, facts(pairs), h("p", { class: "links" },
        h("a", { href: `#/rollouts?resources=${encodeURIComponent(id)}` }, "Rollouts with these resources"))),
      others.length > 0 && h("div", { class: "filters" },
        field("Compare with", h("select", { id: "with", "data-key": "with", onchange: choose }, others.map(option)))),
      Object.entries(found.resources).map(([name, one]) => resourcePanel(name, one, other?.resources?.[name], other)),
      panel("Raw", rawJson("As JSON", found, "resources")));
  };
  return { kinds: ["resources"], concerns: (notice) => notice.name === id, refresh };
}

function resourcePanel(name, one, before, other) {
  const isText = typeof one?.template === "string";
  const shown = isText ? [copyButton(one.template, "Copy prompt"), block(one.template)]
    : facts(Object.entries(one ?? {}).map(([key, value]) => [key, asText(value ?? "–")]), "attributes");
  const title = `${name} (${kindOf(one)})`;
  if (before === undefined) return panel(title, shown);
  const difference = isText && typeof before.template === "string"
    ? textDiff(before.template, one.template)
    : valuesDiff([[other.resources_id, before], ["these", one]]);
  return panel(title, shown, h("h4", {}, `Compared with ${other.resources_id}`), difference);
}
