// The parts of the page, each drawn from the sections of the state that it shows.

import { curve, stacked, timeline } from "./charts.js";
import { $, bytes, clock, column, count, facts, h, percent, plural, put, seconds, short, since, table, when } from "./dom.js";

const STATES = {
  starting: ["starting", "note"], training: ["training", "good"], recovering: ["recovering", "warn busy"],
  done: ["done", "good"], failed: ["failed", "bad"], silent: ["silent", "bad"],
};
const PHASES = [["detect_s", "detect"], ["agree_s", "agree"], ["reform_s", "re-form", "reform"], ["restore_s", "restore"], ["reexecute_s", "re-execute", "reexecute"]];
const NODE_STATES = ["training", "restoring", "spare", "held off", "lost", "left", "idle"];
const stateClass = (state) => `s-${state.replace(" ", "-")}`;

export function head(state) {
  const { head: now } = state;
  const [words, kind] = STATES[now.state] || [now.state, "note"];
  put("run", now.run || "a run");
  $("state").className = `pill ${kind}`;
  put("state", words);
  document.title = `${words} · step ${count(now.step)} · Holdfast`;
  put("partial", now.partial);
  $("partial").hidden = !now.partial;
  put("foot", `${count(now.events)} events read`, now.damaged ? `, ${plural(now.damaged, "damaged line")} left out` : "", ". ", now.message || "", now.state === "silent" ? `The last event is of ${clock(now.now_s)}; since then nobody wrote or answered.` : "");
}

const alone = (now) => now.source === "coordinator";

const unknown = () => h("p", { class: "empty" }, "Only events tell it: give the job's run directories too.");

export function figures(state) {
  const { head: now, protection, checkpoints } = state;
  const wanted = Object.values(now.wanted).reduce((sum, each) => sum + each, 0);
  const trainers = now.wanted.trainer || now.world;
  const over = now.ended_s !== null;
  const figure = (name, value, under, kind = "") =>
    h("dl", { class: "figure" }, h("dt", {}, name), h("dd", {}, h("span", { class: `value ${kind}` }, value), h("span", { class: "under" }, under || " ")));
  const durable = checkpoints.durable_s === null ? null : now.now_s - checkpoints.durable_s;
  put("figures",
    !now.timed && !now.step ? figure("Steps complete", "–", "not all events are read") : figure("Steps complete", count(now.step), now.step_s === null ? (now.step ? " " : "no step yet") : `${seconds(now.step_s)} a step`),
    !now.timed ? figure("Goodput", "–", "not all events are read") : figure("Goodput", percent(now.goodput), `of ${seconds(now.wall_s)}`, now.wall_s > 60 && now.goodput < 0.5 ? "warn" : ""),
    figure("Protected step", protection.step === null ? "none" : count(protection.step),
      over ? "the job is over" : protection.step === null ? "a loss costs all since the checkpoint" : `${plural(protection.at_risk_steps, "step")} at risk, ${seconds(protection.age_s)} old`,
      !over && (protection.step === null || protection.why_not) ? "warn" : ""),
    figure("Durable checkpoint", checkpoints.durable_step === null ? "none" : `step ${count(checkpoints.durable_step)}`,
      checkpoints.in_a_row ? `${plural(checkpoints.in_a_row, "failure")} since` : durable === null ? " " : `${seconds(durable)} ${over ? "before the end" : "ago"}`, checkpoints.in_a_row ? "bad" : ""),
    figure("Trainers", `${count(now.world)}${trainers > now.world ? ` of ${count(trainers)}` : ""}`,
      `generation ${count(now.generation)}${wanted > trainers ? `, ${count(wanted - trainers)} other workers` : ""}`, trainers > now.world && !over ? "warn" : ""),
    figure("Losses", count(now.losses), !now.timed ? "as far as known" : `cost ${seconds(now.recoveries_s + now.lost_s)}, ${plural(now.steps_lost, "step")} again`));
}

let drawn = null;

export function drawTimeline(state) {
  const { head: now, progress, recoveries, faults, checkpoints } = state;
  const place = $("timeline");
  if (alone(now) || (!now.timed && !progress.points.length)) { drawn = null; put("timeline-legend"); return put(place, unknown()); }
  const width = Math.max(place.clientWidth, 280);
  drawn = timeline({ width, start: now.started_s || now.now_s, now: now.now_s, progress, recoveries, faults, checkpoints: checkpoints.newest });
  put(place, drawn.picture);
  place.onpointermove = (event) => {
    const { t, step } = drawn.read(event);
    put("at", `${since(t, 0)} after the start${step === null ? "" : `: step ${count(step)}`}, ${clock((now.started_s || 0) + t)}`);
  };
  place.onpointerleave = () => { drawn.away(); put("at"); };
  return undefined;
}

export function legends() {
  const key = (kind, name) => h("span", {}, h("i", { class: kind }), name);
  put("timeline-legend", key("k-step", "complete steps"), key("k-loss", "recovery from a loss"), key("k-join", "others join"),
    key("k-ckpt", "durable checkpoint"), h("span", {}, "▼ loss or fault"), h("span", {}, "┆ gN: generation N begins"));
  put("phases", PHASES.map(([, name, kind]) => key(kind || name, name)));
}

function victims(each) {
  if (each.cause === "start") return "start of the job";
  const names = each.victims.slice(0, 3).join(", ") + (each.victims.length > 3 ? ` and ${each.victims.length - 3} more` : "");
  const words = { loss: "lost: ", join: "joined: ", rollback: "rolled back", change: "changed" }[each.cause] || "";
  const what = { exit: "process ended", node_lost: "node lost", hang: "hung", stopped: "stopped", stall: "stalled", unreachable: "unreachable", sidecar_exit: "sidecar ended", lease_lost: "lease lost", notice: "notice" };
  const causes = each.cause === "loss" ? each.causes.map((name) => what[name] || name).join(", ") : "";
  return [`${words}${names}`, causes ? h("div", { class: "note" }, causes) : null];
}

export function recoveries(state) {
  const { head: now, recoveries: all } = state;
  const open = new Set([...$("recoveries").querySelectorAll("details[open]")].map((each) => each.dataset.generation));
  if (!all.length) return put("recoveries", h("p", { class: "empty" }, "no generation yet"));
  const rows = all.map((each) => {
    const from = each.restore_step === null ? "nothing to restore" : `step ${count(each.restore_step)}, ${each.tier === "none" ? each.restore_how : each.tier}`;
    const why = h("details", { "data-generation": each.generation, open: open.has(String(each.generation)) }, h("summary", {}, "why"), h("p", {}, each.reason || "no reason was told"));
    return [each.dated ? when(each.at_s, now.started_s) : "before", `g${each.generation}`, h("td", {}, victims(each)),
      h("td", {}, each.total_s === null ? (each.over ? "–" : "not over yet") : h("b", {}, seconds(each.total_s)),
        stacked("stack", PHASES.map(([field, name, kind]) => ({ name, class: kind || name, value: each[field] || 0 })))),
      ...PHASES.map(([field]) => seconds(each[field])), count(each.steps_lost), from, h("td", {}, why)];
  });
  put("recoveries", table("Recoveries, the newest first",
    [column("at", "nw soft"), column("", "soft"), column("cause"), column("total"), ...PHASES.map(([, name]) => column(name, "n")), column("steps again", "n"), column("from", "nw"), column("planner")], rows));
}

// -- nodes -----------------------------------------------------------------------------------------

const many = (nodes) => nodes.size > 64;

function ranksOf(node) {
  const ranks = node.seats ? node.seats.filter((each) => each.rank !== null).map((each) => each.rank) : node.ranks;
  if (!ranks || !ranks.length) return "no rank";
  const [low, high] = [Math.min(...ranks), Math.max(...ranks)];
  return low === high ? `rank ${low}` : `ranks ${low}–${high}`;
}

function describe(node) {
  const trouble = node.why || (node.troubles && node.troubles[0]) || "";
  return `${node.node}: ${node.state}, ${ranksOf(node)}${node.losses ? `, lost ${node.losses} times` : ""}${trouble ? `; ${trouble}` : ""}`;
}

export function nodes(state, { chosen, toggle, risks }) {
  const all = [...state.nodes.values()].sort((a, b) => a.node.localeCompare(b.node, "en", { numeric: true }));
  const squares = many(state.nodes);
  const place = $("nodes");
  place.classList.toggle("many", squares);
  const tally = Object.fromEntries(NODE_STATES.map((each) => [each, 0]));
  for (const node of all) tally[node.state] += 1;
  put("states", NODE_STATES.filter((each) => tally[each]).map((each) => h("span", { class: stateClass(each) }, h("i", { class: "sw" }), `${each} `, h("b", {}, count(tally[each])))));
  put("nodes-note", `${plural(all.length, "node")}; select some to ask what their loss would cost`);
  const known = new Map([...place.children].map((each) => [each.dataset.node, each]));
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.node : undefined;
  const fresh = all.map((node) => {
    const risk = squares || ["lost", "left"].includes(node.state) ? undefined : risks.get(node.node);
    const mark = JSON.stringify([squares ? describe(node) : node, chosen.has(node.node), risk || null]);
    const old = known.get(node.node);
    if (old && old.dataset.mark === mark) return old;
    // A known button stays the same element, so that a click that is under way is not lost.
    const button = old || h("button", { type: "button", "data-node": node.node, tabindex: -1, on: { click: (event) => toggle(node.node, event.shiftKey) } });
    button.className = `node ${stateClass(node.state)}${node.troubles && node.troubles.length ? " troubled" : ""}`;
    button.dataset.mark = mark;
    button.title = describe(node);
    button.setAttribute("aria-pressed", String(chosen.has(node.node)));
    if (squares) button.setAttribute("aria-label", describe(node));
    else {
      const trouble = node.state === "training" ? node.troubles[0] : ["idle", "left"].includes(node.state) ? "" : node.why;
      put(button,
        risk ? h("span", { class: `risk ${risk.step === null ? "costs" : ""}`, title: risk.step === null ? "its loss would cost the snapshots in memory" : "its loss costs no protected step" }, risk.step === null ? "▲ not safe" : "safe") : null,
        h("b", {}, node.node),
        h("span", { class: "sub" }, `${node.state} · ${ranksOf(node)}`),
        trouble ? h("span", { class: "sub trouble", title: trouble }, trouble) : h("span", { class: "sub" }, node.answered ? `${bytes(node.slots_bytes)} + ${bytes(node.parity_bytes)}` : " "));
    }
    return button;
  });
  const same = fresh.length === place.children.length && fresh.every((each, at) => each === place.children[at]);
  if (!same) put(place, fresh);
  const stop = fresh.find((each) => each.dataset.node === focused) || fresh[0];
  for (const each of fresh) each.tabIndex = each === stop ? 0 : -1;
  if (focused && !same && stop && stop.dataset.node === focused) stop.focus();
  if (!$("nodes-table").hidden) nodesTable(all);
}

function nodesTable(all) {
  put("nodes-table", table("Nodes", [column("node"), column("state"), column("ranks"), column("protected", "n"), column("snapshots", "n"), column("parity", "n"), column("losses", "n"), column("why, troubles", "words")],
    all.map((node) => [node.node, node.state, ranksOf(node), node.protected === undefined || node.protected === null ? "–" : count(node.protected),
      node.answered && node.slots_bytes !== undefined ? bytes(node.slots_bytes) : "–", node.answered && node.parity_bytes !== undefined ? bytes(node.parity_bytes) : "–",
      count(node.losses), [node.why, ...(node.troubles || [])].filter(Boolean).join("; ")])));
}

export function nodeDetail(node, start) {
  $("node").hidden = !node;
  if (!node) return;
  const seats = (node.seats || []).map((each) => [each.seat, each.rank === null ? "–" : count(each.rank), each.step === null ? "–" : count(each.step),
    each.alive ? `pid ${each.pid}` : "not running", count(each.attempt), each.straggles || (each.version !== null ? `weights of version ${count(each.version)}` : "")]);
  put("node", h("p", {}, h("b", {}, node.node), `: ${node.state}`, node.since_s ? ` since ${since(node.since_s, start)}` : "", node.why ? `; ${node.why}` : ""),
    (node.troubles || []).map((each) => h("p", { class: "why" }, each)),
    node.answered && node.slots_bytes !== undefined ? h("p", { class: "note" }, `protected step ${count(node.protected)}, committed ${count(node.committed)}, durable ${count(node.durable)}; snapshots ${bytes(node.slots_bytes)}, parity ${bytes(node.parity_bytes)}, logs ${bytes(node.logs_bytes)}, on disk ${bytes(node.disk_bytes)}; budget ${node.budget_bytes ? bytes(node.budget_bytes) : "none"}, mode ${node.mode || "–"}`) : null,
    seats.length ? h("div", { class: "wide" }, table("Workers of the node", [column("worker"), column("rank", "n"), column("step", "n"), column("process"), column("start", "n"), column("")], seats)) : null);
}

// -- protection ------------------------------------------------------------------------------------

export function protection(state, { risks, answer, chosen }) {
  const { head: now, protection: it, checkpoints } = state;
  const over = now.ended_s !== null;
  const rest = checkpoints.durable_step === null ? "the job would begin anew: there is no checkpoint" : `the job would go back to the checkpoint of step ${count(checkpoints.durable_step)}`;
  put("protection",
    over ? h("p", { class: "empty" }, "The job is over; its memory is free.") : null,
    facts([
      ["newest protected step", it.step === null ? "none" : count(it.step)], ["its age", seconds(it.age_s)],
      ["steps that a loss would repeat", it.at_risk_steps === null ? "all since the checkpoint" : count(it.at_risk_steps)],
      ["end of a step to protected", it.protect_median_s === null ? "–" : `${seconds(it.protect_median_s)}, at most ${seconds(it.protect_max_s)}`],
      over ? null : ["snapshots in memory", bytes(it.slots_bytes)], over ? null : ["parity in memory", bytes(it.parity_bytes)],
      it.logs_bytes ? ["logs in memory", bytes(it.logs_bytes)] : null, it.disk_bytes ? ["on the nodes' disks", bytes(it.disk_bytes)] : null,
      it.budget_bytes ? ["budget of memory", bytes(it.budget_bytes)] : null,
      over ? null : ["told by", it.told_by === "nodes" ? "the nodes" : "events (no node answers)"],
    ]),
    it.why_not ? h("p", { class: "why" }, `Not protected: ${it.why_not}`) : null,
    now.silence && !over ? h("p", { class: "why" }, `The nodes do not answer: ${now.silence}`) : null);
  if (over) return put("losses", h("p", { class: "empty" }, "Nothing can be lost any more."));
  put("losses", chosen.size ? verdict(answer, rest) : mayDie(risks, state, rest));
}

function mayDie(risks, state, rest) {
  const found = [...risks.values()];
  const hint = h("p", { class: "note" }, "Select nodes to ask for them together.");
  if (!found.length) {
    const words = many(state.nodes) ? "Select nodes: the server asks their parity groups." : state.head.silence ? "It cannot be told while no node answers." : "Asking the nodes …";
    return h("p", { class: "empty" }, words);
  }
  const costly = found.filter((each) => each.step === null), parity = found[0].parity;
  if (!costly.length) {
    return [h("div", { class: "verdict" }, h("p", {}, h("b", {}, "Any one node may die now"), `: step ${count(found[0].step)} stays in memory.`),
      h("p", {}, parity > 1 ? `Parity covers any ${parity} nodes of a group at once.` : "Two nodes of one parity group at once may not.")), hint];
  }
  const names = costly.map((each) => each.nodes[0]).join(", ");
  return [h("div", { class: "verdict bad" }, h("p", {}, h("b", {}, `The loss of ${costly.length === found.length ? "any node" : names} would cost the snapshots`), `: ${rest}.`), h("p", {}, costly[0].reason)), hint];
}

function verdict(answer, rest) {
  if (!answer) return h("p", { class: "empty" }, "Asking the nodes …");
  if (answer.error) return h("div", { class: "verdict warn" }, h("p", {}, answer.error));
  const names = answer.nodes.length > 6 ? `these ${answer.nodes.length} nodes` : answer.nodes.join(", ");
  const left = `${plural(answer.ranks_left, "rank")} of ${count(answer.ranks)} would go on at once.`;
  const groups = answer.groups.length ? `Parity groups hit: ${answer.groups.slice(0, 4).map((each) => each.join(" ")).join(" | ")}${answer.groups.length > 4 ? " …" : ""}; parity ${answer.parity}.` : "They hold no part of the snapshot.";
  if (answer.step !== null) {
    return h("div", { class: "verdict" }, h("p", {}, h("b", {}, `${names}: no protected step would be lost.`)),
      h("p", {}, `Training would go on from step ${count(answer.step)}${answer.rebuilt ? `, ${plural(answer.rebuilt, "rank")} rebuilt from parity` : ""}: ${plural(answer.steps_lost, "step")} again. ${left}`), h("p", {}, groups));
  }
  return h("div", { class: "verdict bad" }, h("p", {}, h("b", {}, `${names}: the snapshots in memory would be lost`), `, and ${rest}: ${plural(answer.steps_lost, "step")} again. ${left}`), h("p", {}, answer.reason), h("p", {}, groups));
}

// -- the rest --------------------------------------------------------------------------------------

export function time(state) {
  const { head: now } = state;
  if (!now.timed) { put("time-note"); return put("time", unknown()); }
  const parts = Object.entries(now.shares).filter(([, value]) => value > 0).sort((a, b) => (b[0] === "productive") - (a[0] === "productive") || b[1] - a[1])
    .map(([name, value]) => ({ name, value, class: `t-${name.replaceAll(" ", "-")}` }));
  put("time-note", `Every second is in exactly one class. Goodput is the productive share from the first step on: ${percent(now.goodput)}.`);
  const whole = parts.reduce((sum, each) => sum + each.value, 0) || 1;
  return put("time", stacked("timebar", parts), table("Wall time by class", [column("class"), column("time", "n"), column("share", "n")],
    parts.map((each) => [h("td", {}, h("span", { class: "legend" }, h("span", {}, h("i", { class: each.class }), each.name))), seconds(each.value), percent(each.value / whole)])));
}

export function checkpoints(state) {
  const { head: now, checkpoints: it, stored } = state;
  const there = new Map(((stored && stored.newest) || []).map((each) => [each.step, each]));
  put("checkpoints-note", !now.timed && !it.newest.length ? "" : `${count(it.done)} durable, ${count(it.failed)} failed, ${count(it.skipped)} skipped`, stored && !stored.error ? `; ${count(stored.committed)} in the store` : "");
  const told = new Map(it.newest.map((each) => [each.step, each]));
  const steps = [...new Set([...told.keys(), ...there.keys()])].sort((a, b) => b - a);
  const trouble = stored && stored.error ? h("p", { class: "why" }, `The store cannot be listed: ${stored.error}`) : null;
  if (!steps.length && !now.timed) return put("checkpoints", trouble, it.durable_step === null ? unknown() : h("p", {}, `The newest that the nodes know to be durable is of step ${count(it.durable_step)}.`));
  if (!steps.length) return put("checkpoints", trouble, h("p", { class: "empty" }, "No checkpoint was begun: a loss that memory cannot make good would cost the whole run."));
  const mark = { durable: "good", failed: "bad", skipped: "warn", writing: "note" };
  const pill = (kind, words) => h("td", {}, h("span", { class: `pill ${kind}` }, words));
  const lowest = there.size ? Math.min(...there.keys()) : Infinity;
  const stock = (step) => {
    const each = there.get(step);
    if (!each) return step > lowest ? "not there" : "";
    return `${{ sound: "sound", damaged: "DAMAGED", unfinished: "unfinished" }[each.state] || each.state}${each.pinned ? ", pinned" : ""}`;
  };
  return put("checkpoints", trouble, table("Checkpoints, the newest first",
    [column("step", "n"), column("state"), column("age", "n"), column("size", "n"), column("took", "n"), column("rate", "n"), ...(stored ? [column("store", "nw")] : []), column("")],
    steps.map((step) => {
      const each = told.get(step) || { state: "", at_s: 0, size_bytes: there.get(step).size_bytes, seconds: null, bytes_per_s: null, done: null, retries: 0, why: "" };
      return [count(step), each.state ? pill(mark[each.state] || "note", each.state === "writing" && each.done !== null ? `writing ${percent(each.done)}` : each.state) : pill("", "before this log"),
        each.at_s ? seconds(Math.max(now.now_s - each.at_s, 0)) : "–", bytes(each.size_bytes), seconds(each.seconds), each.bytes_per_s ? `${bytes(each.bytes_per_s)}/s` : "–",
        ...(stored ? [stock(step)] : []),
        [each.retries ? plural(each.retries, "retry", "retries") : "", each.why, (there.get(step) || {}).why].filter(Boolean).join("; ")];
    })));
}

export function rollouts(state) {
  const it = state.rollouts;
  $("rollouts-card").hidden = !it;
  if (!it) return;
  put("rollouts", ...facts([
    ["rollout workers", `${count(it.workers)}, ${count(it.sampling)} sampling`], ["samples under way", count(it.samples_under_way)],
    ["tokens sampled", `${count(it.tokens)}${it.tokens_per_s === null ? "" : `, ${count(it.tokens_per_s)}/s`}`],
    ["staleness", it.staleness === null ? "–" : `${plural(it.staleness, "step")} (versions ${it.version_oldest}–${it.version_newest})`],
    it.pending === null ? null : ["prompts in the ledger", `${count(it.pending)} pending, ${count(it.running)} running, ${count(it.ready)} ready${it.dropped ? `, ${count(it.dropped)} dropped` : ""}${it.skipped ? `, ${count(it.skipped)} skipped` : ""}; ${count(it.trained)} trained`],
    it.awaited === null ? null : ["the next step waits for", plural(it.awaited, "prompt")],
    it.staleness_most === null ? null : ["staleness of samples, at most", plural(it.staleness_most, "step")],
    it.reward === null ? null : ["newest reward", short(it.reward)],
    ["trainer waited for samples", `${seconds(it.waited_s)}, last ${seconds(it.waited_last_s)}`], ["slots busy", percent(it.busy)],
    ["held and not trained on", it.held_tokens === null ? "–" : `${count(it.held_tokens)} tokens${it.pressure ? `, held back by ${it.pressure}` : ""}`],
    ["carried to later steps", it.carried_tokens === null ? "–" : `${count(it.carried_tokens)} tokens`],
    ["length of a sample", it.length_p50_tokens === null ? "–" : `${count(it.length_p50_tokens)} median, ${count(it.length_p95_tokens)} p95`],
    ["a sample waited, p95", seconds(it.sample_waited_p95_s)], ["weights pulled", `${count(it.pulled)}, ${bytes(it.pulled_bytes)}`],
    ["refused weights", count(it.refused)], ["lost workers taken back", `${count(it.recovered)}: ${count(it.salvaged_tokens)} tokens kept, ${count(it.resampled_tokens)} sampled again`],
    ["checked anew", `${count(it.rechecked)}${it.difference_most === null ? "" : `, differ by ${short(it.difference_most)} at most`}`], ["violations", count(it.violations)], it.duplicates === null ? null : ["samples that came twice, refused", count(it.duplicates)],
    it.environment_p95_s === null ? null : ["environment waits, p95", `${seconds(it.environment_p95_s)}, ${count(it.environment_waiting)} wait now, ${count(it.environment_failed)} failed`],
  ], "facts").children);
}

export function island(state) {
  const it = state.island;
  $("island-card").hidden = !it;
  if (!it) return;
  put("island", ...facts([["island", it.island], ["state", it.state], ["tides adopted", count(it.tide)], ["islands in the last merge", count(it.islands)],
    ["waited for merges", `${seconds(it.waited_s)}, last ${seconds(it.waited_last_s)}`], ["sent", bytes(it.sent_bytes)], ["fetched", bytes(it.fetched_bytes)], ["weights given to others", count(it.given)]], "facts").children);
}

export function curves(state) {
  if (alone(state.head)) return put("curves", unknown());
  const [times, stalls] = state.steps || [];
  const found = (state.curves || []).filter((each) => each.points.length);
  const steps = times ? [curve({ ...times, name: "time of a step" }, { xName: "time", unit: seconds }), curve({ ...stalls, name: "snapshots held a step up" }, { xName: "time", unit: seconds })] : [];
  return put("curves", steps, found.map((each) => curve(each)));
}

export function stragglers(state) {
  const { head: now, stragglers: all } = state;
  $("stragglers-card").hidden = !all.length;
  put("stragglers", table("Stragglers, the newest first", [column("found", "nw soft"), column("rank", "nw"), column("node", "nw"), column("slower", "n"), column("until", "nw"), column("finding", "words")],
    all.map((each) => [when(each.at_s, now.started_s), each.seat, each.node, `${each.times.toFixed(1)} ×`, each.over_s === null ? "now" : since(each.over_s, now.started_s), each.why])));
}

let newestBad = null;

export function messages(state) {
  const { head: now, messages: all } = state;
  const wanted = { news: ["good", "note", "warn", "bad"], all: ["routine", "good", "note", "warn", "bad"], warn: ["warn", "bad"], bad: ["bad"] }[$("level").value];
  const place = $("messages"), kept = place.scrollTop;
  if (alone(now)) return put(place, h("li", {}, h("span"), h("span"), unknown()));
  const shown = all.filter((each) => wanted.includes(each.level));
  put(place, shown.length ? shown.map((each) => h("li", { class: `l-${each.level}` }, when(each.at_s, now.started_s), h("span", { class: "dot", title: each.level }),
    h("div", { class: "text" }, each.text, each.reason ? h("span", { class: "reason" }, each.reason) : null))) : h("li", {}, h("span"), h("span"), h("span", { class: "empty" }, "nothing to tell")));
  place.scrollTop = kept;
  const bad = all.find((each) => each.level === "bad");
  if (bad && newestBad !== null && bad.at_s > newestBad) put("said", bad.text);
  newestBad = bad ? bad.at_s : 0;
  return undefined;
}
