// The page: reads the stream, keeps the state, and draws the parts whose sections changed.

import { $, put } from "./dom.js";
import * as parts from "./parts.js";

const RISKS_MS = 5000;
const LONGEST_WAIT_MS = 8000;

const state = { nodes: new Map() };
const chosen = new Set();
const risks = new Map();
let answer = null, asked = 0, failures = 0, running = null;
let token = "", stream = 0;

// -- the token: from the address into this tab alone ------------------------------------------------

function takeToken() {
  if (location.hash.length > 1) {
    token = decodeURIComponent(location.hash.slice(1));
    sessionStorage.setItem("token", token);
    history.replaceState(null, "", location.pathname);
  } else token = sessionStorage.getItem("token") || "";
}

const get = (path, signal) => fetch(path, { headers: { authorization: `Bearer ${token}` }, cache: "no-store", signal });

function askToken(words) {
  put("link", "no access");
  $("link").className = "link off";
  banner(words);
  $("ask").hidden = false;
}

function banner(words) {
  put("banner", words || "");
  $("banner").hidden = !words;
}

// -- the stream: server-sent events, read by fetch as an EventSource sends no headers ---------------

async function follow() {
  const mine = ++stream;
  running = new AbortController();
  const { signal } = running;
  let response;
  try {
    response = await get("/events", signal);
  } catch { return again(mine); }
  if (response.status === 401) {
    askToken(token ? "The server does not take this token: it was started again with another one. Open the address that it printed." : "This page needs the token.");
    return undefined;
  }
  if (!response.ok || !response.body) return again(mine, await response.text());
  failures = 0;
  forget();
  banner("");
  $("ask").hidden = true;
  put("link", "live");
  $("link").className = "link live";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", alive = Date.now();
  const watch = setInterval(() => { if (Date.now() - alive > 35000) running.abort(); }, 5000);
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      alive = Date.now();
      rest += value;
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
    }
  } catch { /* the connection broke; it is made anew */ } finally { clearInterval(watch); }
  return again(mine);
}

function again(mine, words) {
  if (mine !== stream) return;
  failures += 1;
  put("link", "connecting again");
  $("link").className = "link off";
  if (failures > 1) banner(words || "The dashboard's server does not answer. The run goes on without it; this page connects again by itself.");
  setTimeout(() => mine === stream && follow(), Math.min(500 * 2 ** failures, LONGEST_WAIT_MS));
}

function forget() {
  state.nodes.clear();
}

const changed = new Set();
let planned = false;

function take(sections) {
  for (const [name, value] of Object.entries(sections)) {
    if (name.startsWith("node/")) {
      if (value === null) state.nodes.delete(name.slice(5));
      else state.nodes.set(value.node, value);
      changed.add("nodes");
    } else {
      state[name] = value;
      changed.add(name);
    }
  }
  if (!planned) { planned = true; requestAnimationFrame(draw); }
}

// -- drawing ----------------------------------------------------------------------------------------

const DRAWN = [
  [["head"], (now) => parts.head(now)],
  [["head", "protection", "checkpoints"], (now) => parts.figures(now)],
  [["head", "progress", "recoveries", "faults"], (now) => parts.drawTimeline(now)],
  [["nodes", "chosen"], (now) => { parts.nodes(now, { chosen, toggle, risks }); showNode(); }],
  [["head", "protection", "chosen"], (now) => parts.protection(now, { risks, answer, chosen })],
  [["recoveries"], (now) => parts.recoveries(now)],
  [["head"], (now) => parts.time(now)],
  [["head", "checkpoints", "stored"], (now) => parts.checkpoints(now)],
  [["rollouts"], (now) => parts.rollouts(now)],
  [["island"], (now) => parts.island(now)],
  [["steps", "curves"], (now) => parts.curves(now)],
  [["stragglers"], (now) => parts.stragglers(now)],
  [["messages", "level"], (now) => parts.messages(now)],
];

function draw() {
  planned = false;
  if (!state.head) return;
  const now = new Set(changed);
  changed.clear();
  for (const [names, part] of DRAWN) if (names.some((each) => now.has(each))) part(state);
}

function redraw(...names) {
  for (const each of names) changed.add(each);
  if (!planned) { planned = true; requestAnimationFrame(draw); }
}

// -- nodes: choose, ask, look closer ----------------------------------------------------------------

function toggle(name, only) {
  if (only) chosen.clear();
  if (!chosen.delete(name)) chosen.add(name);
  answer = null;
  redraw("chosen");
  if (chosen.size) ask();
}

async function ask() {
  const number = ++asked;
  const query = [...chosen].map((each) => `node=${encodeURIComponent(each)}`).join("&");
  let found;
  try {
    const response = await get(`/losses?${query}`);
    found = response.ok ? await response.json() : { error: await response.text() };
  } catch { found = { error: "the dashboard's server does not answer" }; }
  if (number !== asked) return;
  answer = found;
  redraw("chosen");
}

async function askRisks() {
  if (!state.head || state.head.ended_s !== null || document.hidden || state.nodes.size > 64) { if (risks.size) { risks.clear(); redraw("chosen"); } return; }
  try {
    const response = await get("/losses?each=1");
    if (!response.ok) return;
    const found = await response.json();
    risks.clear();
    if (Array.isArray(found)) for (const each of found) risks.set(each.nodes[0], each);
    if (chosen.size) ask();
    redraw("chosen");
  } catch { /* the stream tells that the server is away */ }
}

async function showNode() {
  const name = [...chosen].at(-1);
  const node = name === undefined ? null : state.nodes.get(name);
  const start = state.head ? state.head.started_s : 0;
  if (!node || node.seats) return parts.nodeDetail(node, start);
  try {
    const response = await get(`/node?name=${encodeURIComponent(name)}`);
    if (response.ok && [...chosen].at(-1) === name) parts.nodeDetail(await response.json(), start);
  } catch { /* as above */ }
  return undefined;
}

function walk(event) {
  const all = [...$("nodes").children], at = all.indexOf(document.activeElement);
  if (at < 0) return;
  const top = all[at].offsetTop, row = all.filter((each) => each.offsetTop === top).length || 1;
  const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -at, End: all.length - 1 - at }[event.key];
  if (move === undefined) {
    if (event.key === "Escape" && chosen.size) { chosen.clear(); answer = null; redraw("chosen"); }
    return;
  }
  event.preventDefault();
  const next = all[Math.min(Math.max(at + move, 0), all.length - 1)];
  all[at].tabIndex = -1; next.tabIndex = 0; next.focus();
}

async function keep() {
  const button = $("keep");
  button.disabled = true;
  try {
    const response = await get("/report.html");
    if (!response.ok) throw new Error(await response.text());
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await response.blob());
    link.download = `holdfast-${(state.head && state.head.run) || "run"}.html`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  } catch (error) { banner(`The file could not be made: ${error.message}`); }
  button.disabled = false;
}

takeToken();
parts.legends();
$("nodes").addEventListener("keydown", walk);
$("keep").addEventListener("click", keep);
$("level").addEventListener("change", () => redraw("level"));
$("as-table").addEventListener("click", () => {
  const table = $("nodes-table");
  table.hidden = !table.hidden;
  $("nodes").hidden = !table.hidden;
  $("as-table").setAttribute("aria-pressed", String(!table.hidden));
  redraw("nodes");
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim().replace(/^.*#/, "");
  sessionStorage.setItem("token", token);
  follow();
});
addEventListener("hashchange", () => { takeToken(); if (running) running.abort(); follow(); });
new ResizeObserver(() => redraw("progress")).observe($("timeline"));
setInterval(askRisks, RISKS_MS);
setTimeout(askRisks, 1500);
follow();
