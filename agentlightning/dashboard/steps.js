// The steps of a run: the rewards of one step as a histogram, its groups, and of a group the best and the worst sibling
// side by side.

import { answerOf, learnAnswers } from "./answers.js";
import { get } from "./api.js";
import { histogram } from "./chart.js";
import { conversation } from "./conversation.js";
import { badge, empty, firstLine, h, linkTo, note, number, panel, swap, table } from "./dom.js";
import { asStored } from "./states.js";

const MOST_ROLLOUTS = 2000; // of a step
const MOST_WITHOUT_STEP = 500; // of a run whose rollouts name no step
const MOST_SPANS = 300; // of a sibling
const GROUP_COLUMNS = [
  ["Task", "wide"], ["Rollouts", "number"], ["Mean", "number"], ["Spread", "number"], "Rewards",
];
const SIBLING_COLUMNS = ["Rollout", "Status", ["Reward", "number"], ["Output", "wide"]];
const END_OF_STEP = ["reward/mean", "apo/best_score", "gepa/best_score"]; // drawn when the rollouts of a step are over

/** The run that rollouts name: an algorithm that keeps a run of its own sends them for the trainer's. */
export function runOfRollouts(run) {
  const of = run.metadata?.trainer_run_id;
  return typeof of === "string" ? of : run.run_id;
}

/** A function that shows the step and the group that a query names; all rollouts, if they name no step. */
export function stepsPanel(place, go) {
  let known = { step: null, isOver: false, items: [], total: 0 };
  return async (run, query, points, signal) => {
    const ends = points.filter((one) => END_OF_STEP.some((name) => name in one.values)).map((one) => one.step);
    const numbers = [...new Set(ends)];
    const asked = Number.parseInt(query.get("step"), 10);
    const step = numbers.length ? nearest(numbers, Number.isNaN(asked) ? Infinity : asked) : null;
    if (known.step !== step || !known.isOver) known = await readStep(run, step, signal);
    if (!known.items.length) return swap(place);
    const groups = groupsOf(known.items);
    const group = groups.find((one) => one.names.has(query.get("group")));
    const siblings = group ? await siblingsPanel(group, signal) : null;
    const rest = known.total - known.items.length;
    swap(place, panel(known.isAll ? "Its rollouts" : "Steps",
      !known.isAll && stepChooser(numbers, step, go),
      rewardsOf(known.items, known.isAll ? "Rewards" : `Rewards of step ${number(step)}`),
      groupTable(groups, group, go),
      rest > 0 && note(`The newest ${number(known.items.length)} of ${number(known.total)}.`)), siblings);
    if (group) await learnAnswers(group.rollouts, signal, (rollout) => tellAnswer(place, rollout));
  };
}

const nearest = (numbers, wanted) =>
  numbers.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best),
    numbers[numbers.length - 1]);

/** The rollouts of a step; all of the run, if none of them names that step. */
async function readStep(run, step, signal) {
  const wanted = { run_id_in: runOfRollouts(run), sort_by: "start_time", sort_order: "desc", limit: MOST_ROLLOUTS };
  const ofStep = step === null ? null : await get("rollouts", { ...wanted, step_in: asStored(step) }, signal);
  const isAll = !ofStep?.total;
  const { items, total } = isAll ? await get("rollouts", { ...wanted, limit: MOST_WITHOUT_STEP }, signal) : ofStep;
  return { step, isAll, total, items: items.reverse(), isOver: !isAll || run.status !== "running" };
}

/** The copies of a task, as the algorithm sent them; if it sent none, the rollouts of the same task. */
function groupsOf(rollouts) {
  const nameOf = (rollout) => String(rollout.metadata?.group ?? rollout.rollout_id);
  const grouped = (keyOf) => {
    const found = new Map();
    for (const one of rollouts) found.set(keyOf(one), [...(found.get(keyOf(one)) ?? []), one]);
    return [...found.values()];
  };
  const sent = grouped(nameOf);
  const ofTasks = () => grouped((one) => JSON.stringify(one.input)).sort((one, other) => other.length - one.length);
  const groups = sent.every((one) => one.length === 1) ? ofTasks() : sent;
  return groups.map((members) => {
    const rewards = members.map((one) => one.reward).filter(Number.isFinite);
    const mean = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
    const spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
    const names = new Set(members.map(nameOf));
    return { name: nameOf(members[0]), names, rollouts: members, rewards, mean, spread };
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

function rewardsOf(rollouts, title) {
  const rewards = rollouts.map((one) => one.reward).filter(Number.isFinite);
  const without = rollouts.length - rewards.length;
  return [
    h("div", { class: "small" }, histogram(title, rewards)),
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
  const hasPrompts = new Set(group.rollouts.map((one) => one.resources_id)).size > 1; // each with another one
  const rows = group.rollouts.map((one) => [
    linkTo("rollouts", one.rollout_id, { key: `sibling ${one.rollout_id}` }), badge(one.status), number(one.reward),
    h("span", { class: "task", "data-answer": one.rollout_id }, answerOf(one) ?? "–"),
    ...(hasPrompts ? [linkTo("resources", one.resources_id ?? "–", { key: `resources ${one.rollout_id}` })] : []),
  ]);
  const columns = hasPrompts ? [...SIBLING_COLUMNS, "Resources"] : SIBLING_COLUMNS;
  const list = panel("Siblings", h("h3", {}, firstLine(group.rollouts[0].input) || group.name), table(columns, rows));
  const [best, worst] = [judged[0], judged[judged.length - 1]];
  if (judged.length < 2) return [list];
  const sides = [];
  for (const [title, one] of [["Best", best], ["Worst", worst]]) {
    const asked = { rollout_id: one.rollout_id, attempt_id: "latest", limit: MOST_SPANS };
    const spans = await get("spans", asked, signal).then((page) => page.items, () => []); // may have been dropped
    sides.push(panel(`${title}: ${number(one.reward)}`,
      h("p", { class: "path" }, linkTo("rollouts", one.rollout_id, { key: `${title} sibling` })),
      spans.length ? conversation(spans) : empty("Its spans are not kept.")));
  }
  const same = best.reward === worst.reward && note("All siblings have the same reward.");
  return [list, same, h("div", { class: "columns siblings" }, sides)];
}

function tellAnswer(place, rollout) {
  const cell = place.querySelector(`[data-answer="${CSS.escape(rollout.rollout_id)}"]`);
  if (cell) cell.textContent = answerOf(rollout) ?? "–";
}
