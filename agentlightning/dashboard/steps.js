// The steps of a run: the rewards of one step as a histogram, its groups, and of a group the best and the worst sibling
// side by side.

import { answerOf, learnAnswers } from "./answers.js";
import { get } from "./api.js";
import { histogram } from "./chart.js";
import { conversation } from "./conversation.js";
import { badge, empty, firstLine, h, linkTo, note, number, panel, swap, table } from "./dom.js";
import { asStored } from "./states.js";

const MOST_ROLLOUTS = 2000; // of a step
const MOST_SPANS = 300; // of a sibling
const GROUP_COLUMNS = [
  ["Task", "wide"], ["Rollouts", "number"], ["Mean", "number"], ["Spread", "number"], "Rewards",
];
const SIBLING_COLUMNS = ["Rollout", "Status", ["Reward", "number"], ["Output", "wide"]];

/** A function that shows the step and the group that a query names. */
export function stepsPanel(place, runId, go) {
  let known = { step: null, isOver: false, items: [] };
  return async (query, points, signal) => {
    const numbers = [...new Set(points.filter((one) => "reward/mean" in one.values).map((one) => one.step))];
    if (!numbers.length) return swap(place);
    const last = numbers[numbers.length - 1];
    const asked = Number.parseInt(query.get("step"), 10);
    const step = Number.isNaN(asked) ? last : Math.min(Math.max(asked, numbers[0]), last);
    if (known.step !== step || !known.isOver) {
      const wanted = { run_id_in: runId, step_in: asStored(step), mode_in: "train", limit: MOST_ROLLOUTS };
      const { items } = await get("rollouts", wanted, signal);
      known = { step, items, isOver: numbers.includes(step) };
    }
    const groups = groupsOf(known.items);
    const group = groups.find((one) => one.name === query.get("group"));
    const siblings = group ? await siblingsPanel(group, signal) : null;
    const parts = [stepChooser(numbers, step, go), rewardsOf(known.items, step), groupTable(groups, group, go)];
    swap(place, panel("Steps", parts), siblings);
    if (group) await learnAnswers(group.rollouts, signal, (rollout) => tellAnswer(place, rollout));
  };
}

function groupsOf(rollouts) {
  const byName = new Map();
  for (const rollout of rollouts) {
    const name = String(rollout.metadata?.group ?? rollout.rollout_id);
    byName.set(name, [...(byName.get(name) ?? []), rollout]);
  }
  return [...byName].map(([name, members]) => {
    const rewards = members.map((one) => one.reward).filter(Number.isFinite);
    const mean = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
    const spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
    return { name, rollouts: members, rewards, mean, spread };
  });
}

function stepChooser(numbers, step, go) {
  const at = numbers.indexOf(step);
  const turn = (name, to) => h("button", {
    type: "button", "data-key": `step ${name}`, disabled: numbers[to] === undefined,
    onclick: () => go({ step: String(numbers[to]), group: "" }),
  }, name);
  const slider = h("input", {
    type: "range", min: 0, max: numbers.length - 1, value: at, id: "step", "data-key": "step", "aria-label": "Step",
    "aria-valuetext": `step ${step}`, onchange: (event) => go({ step: String(numbers[event.target.value]), group: "" }),
  });
  const here = h("b", {}, `Step ${number(step)}`);
  return h("div", { class: "row stepper" }, turn("Earlier", at - 1), slider, turn("Later", at + 1), here);
}

function rewardsOf(rollouts, step) {
  const rewards = rollouts.map((one) => one.reward).filter(Number.isFinite);
  const without = rollouts.length - rewards.length;
  return [
    h("div", { class: "small" }, histogram(`Rewards of step ${number(step)}`, rewards)),
    without > 0 && note(`${number(without)} of ${number(rollouts.length)} rollouts have no reward.`),
  ];
}

function groupTable(groups, chosen, go) {
  const rows = groups.map((group) => {
    const task = h("button", {
      type: "button", class: "plain task", "aria-pressed": String(group === chosen), "data-key": `group ${group.name}`,
      onclick: () => go({ group: group === chosen ? "" : group.name }),
    }, firstLine(group.rollouts[0].input) || group.name);
    return [task, number(group.rollouts.length), number(group.mean, 3), number(group.spread, 3), dots(group)];
  });
  return table(GROUP_COLUMNS, rows, "No rollout of this step is in the store.");
}

/** One link for each rollout of a group, with its reward, the best first. */
function dots(group) {
  const sorted = [...group.rollouts].sort((one, other) => (other.reward ?? -Infinity) - (one.reward ?? -Infinity));
  const low = Math.min(...group.rewards);
  return h("span", { class: "dots" }, sorted.map((one) => {
    const share = group.spread ? (one.reward - low) / group.spread : one.reward > 0 ? 1 : 0;
    const kind = Number.isFinite(one.reward) ? (share > 0.5 ? "good" : "low") : "none";
    return h("a", { href: `#/rollouts/${encodeURIComponent(one.rollout_id)}`, class: `reward-dot ${kind}`,
      title: `${one.rollout_id}, ${one.status}` }, number(one.reward, 2));
  }));
}

// ------------------------------------------------------------------ siblings

async function siblingsPanel(group, signal) {
  const judged = group.rollouts.filter((one) => Number.isFinite(one.reward)).sort((a, b) => b.reward - a.reward);
  const rows = group.rollouts.map((one) => [
    linkTo("rollouts", one.rollout_id, { key: `sibling ${one.rollout_id}` }), badge(one.status), number(one.reward),
    h("span", { class: "task", "data-answer": one.rollout_id }, answerOf(one) ?? "–"),
  ]);
  const list = panel(`Siblings in ${group.name}`, table(SIBLING_COLUMNS, rows));
  const [best, worst] = [judged[0], judged[judged.length - 1]];
  if (judged.length < 2) return [list];
  const columns = [];
  for (const [title, one] of [["Best", best], ["Worst", worst]]) {
    const asked = { rollout_id: one.rollout_id, attempt_id: "latest", limit: MOST_SPANS };
    const spans = await get("spans", asked, signal).then((page) => page.items, () => []); // may have been dropped
    columns.push(panel(`${title}: ${number(one.reward)}`,
      h("p", { class: "path" }, linkTo("rollouts", one.rollout_id, { key: `${title} sibling` })),
      spans.length ? conversation(spans) : empty("Its spans are not kept.")));
  }
  const same = best.reward === worst.reward && note("All siblings have the same reward: the group teaches nothing.");
  return [list, same, h("div", { class: "columns siblings" }, columns)];
}

function tellAnswer(place, rollout) {
  const cell = place.querySelector(`[data-answer="${CSS.escape(rollout.rollout_id)}"]`);
  if (cell) cell.textContent = answerOf(rollout) ?? "–";
}
