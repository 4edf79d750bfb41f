// Pictures: pure functions from values to SVG, redrawn whole.

import { count, h, s, seconds, short } from "./dom.js";

const scale = (low, high, start, end) => (value) => start + ((value - low) / (high - low || 1)) * (end - start);

function marks(low, high, about) {
  if (high <= low) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const pace = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / pace - 1e-9); at * pace <= high + pace * 1e-9; at += 1) found.push(at * pace);
  return found;
}

// Marks of a time axis at round seconds, minutes, hours or days.
function timeMarks(high, about) {
  const paces = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const pace = paces.find((each) => high / each <= about) || paces[paces.length - 1] * Math.ceil(high / about / 604800);
  const found = [];
  for (let at = 0; at <= high; at += pace) found.push(at);
  return found;
}

function timeMark(t) {
  if (t === 0) return "0";
  if (t % 86400 === 0) return `${t / 86400} d`;
  if (t % 3600 === 0) return `${t / 3600} h`;
  if (t % 60 === 0) return `${t / 60} min`;
  return t < 60 ? `${t} s` : `${Math.floor(t / 60)}:${String(t % 60).padStart(2, "0")} min`;
}

const path = (points) => (points.length ? `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` : "");

const HEIGHT = 236;
const LEFT = 56;

export function timeline({ width, start, now, progress, recoveries, faults, checkpoints }) {
  const right = width - 10, top = 32, bottom = HEIGHT - 24;
  const points = progress ? progress.points : [];
  const most = Math.max(1, ...points.map((each) => each[3]));
  const least = Math.min(most - 1, ...points.map((each) => each[2]));
  const span = Math.max(now - start, 1);
  const x = scale(0, span, LEFT, right), y = scale(least > most / 2 ? least : 0, most * 1.04, bottom, top);
  const parts = [];
  for (const mark of marks(least > most / 2 ? least : 0, most, 4)) {
    if (!Number.isInteger(mark)) continue;
    parts.push(s("line", { class: "grid", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) }));
    parts.push(s("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, count(mark || 0)));
  }
  for (const mark of timeMarks(span, Math.max(3, Math.floor(width / 110)))) {
    parts.push(s("text", { x: x(mark), y: HEIGHT - 6, "text-anchor": mark ? "middle" : "start" }, timeMark(mark)));
  }
  let free = -1;
  for (const each of [...recoveries].reverse()) {
    const begin = x(Math.max(each.at_s - start, 0));
    const end = each.total_s === null ? x(span) : x(Math.min(each.at_s + each.total_s - start, span));
    const words = `generation ${each.generation}, ${each.cause}${each.victims.length ? ` of ${each.victims.join(", ")}` : ""}: ` +
      `${each.total_s === null ? "not over yet" : seconds(each.total_s)}, ${count(each.steps_lost)} steps executed again`;
    if (each.cause !== "start") {
      parts.push(s("rect", { class: `band ${each.cause}`, x: begin, y: top, width: Math.max(end - begin, 3), height: bottom - top }, s("title", {}, words)));
    }
    const place = x(Math.max(each.proposed_s - start, 0));
    parts.push(s("line", { class: "gen", x1: place, x2: place, y1: 18, y2: bottom }, s("title", {}, words)));
    if (place >= free) {
      parts.push(s("text", { x: place - 3, y: 13 }, `g${each.generation}`));
      free = place + 12 + 7 * String(each.generation).length;
    }
  }
  const middle = progress ? progress.width / 2 : 0;
  const line = points.map((each) => [x(Math.min(Math.max(each[0] + middle - start, 0), span)), y(each[3])]);
  if (line.length) {
    parts.push(s("path", { class: "area", d: `${path(line)}L${line[line.length - 1][0].toFixed(1)} ${bottom}L${line[0][0].toFixed(1)} ${bottom}Z` }));
    parts.push(s("path", { class: "line", d: path(line) }));
  }
  for (const each of checkpoints) {
    if (each.state !== "durable" || each.at_s < start) continue;
    parts.push(s("circle", { class: "ckpt", cx: x(each.at_s - start), cy: bottom, r: 3 }, s("title", {}, `checkpoint of step ${each.step} is durable`)));
  }
  for (const each of faults) {
    const place = x(Math.max(each.at_s - start, 0));
    parts.push(s("path", { class: "mark", d: `M${place - 5} ${top - 11}h10l-5 9z` }, s("title", {}, `${each.victim}: ${each.what} ${each.why}`)));
  }
  const cursor = s("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
  const picture = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img",
    "aria-label": `Steps over time: ${count(most)} steps in ${seconds(span)}, ${count(recoveries.filter((each) => each.cause === "loss").length)} recoveries from losses. The table of recoveries has the figures.` }, parts, cursor);
  const read = (event) => {
    const box = picture.getBoundingClientRect();
    const at = Math.min(Math.max((event.clientX - box.left) * (width / box.width), LEFT), right);
    const t = ((at - LEFT) / (right - LEFT || 1)) * span;
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
    let step = null;
    for (const each of points) if (each[0] - start <= t) step = each[3];
    return { t, step };
  };
  const away = () => cursor.setAttribute("visibility", "hidden");
  return { picture, read, away };
}

export function curve({ name, width: bucket, points }, { xName = "step", unit = short } = {}) {
  const width = 300, height = 96, left = 40, bottom = 78, right = width - 4;
  if (!points.length) return h("div", {}, h("h3", {}, name), h("p", { class: "empty" }, "nothing yet"));
  const first = points[0][0], last = points[points.length - 1][0] + bucket;
  const low = Math.min(...points.map((each) => each[2])), high = Math.max(...points.map((each) => each[3]));
  const x = scale(first, last, left, right), y = scale(low, high === low ? low + 1 : high, bottom, 8);
  const middle = (each) => x(each[0] + bucket / 2);
  const top = points.map((each) => [middle(each), y(each[3])]), under = points.map((each) => [middle(each), y(each[2])]).reverse();
  const newest = points[points.length - 1][1];
  const base = xName === "time" ? first : 0;
  const mark = (value) => (xName === "time" ? seconds(value - base) : count(value));
  return h("div", {},
    h("h3", {}, name, h("b", {}, unit(newest))),
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}: ${unit(newest)} now, from ${unit(low)} to ${unit(high)}` },
      s("line", { class: "grid", x1: left, x2: right, y1: bottom, y2: bottom }), s("line", { class: "grid", x1: left, x2: right, y1: 8, y2: 8 }),
      s("text", { x: left - 5, y: bottom, "text-anchor": "end" }, unit(low)), s("text", { x: left - 5, y: 13, "text-anchor": "end" }, unit(high)),
      s("path", { class: "area", d: `${path([...top, ...under])}Z` }), s("path", { class: "line", d: path(points.map((each) => [middle(each), y(each[1])])) }),
      s("text", { x: left, y: height - 3 }, mark(first)), s("text", { x: right, y: height - 3, "text-anchor": "end" }, mark(points[points.length - 1][0]))));
}

// A bar of parts side by side; the table or legend beside it has the figures.
export function stacked(kind, parts) {
  const whole = parts.reduce((sum, each) => sum + each.value, 0) || 1;
  return h("div", { class: kind, "aria-hidden": "true" }, parts.filter((each) => each.value > 0).map((each) =>
    h("span", { class: each.class, title: `${each.name}: ${seconds(each.value)}`, width: `${(100 * each.value) / whole}%` })));
}
