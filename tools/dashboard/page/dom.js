// Elements and texts. Every text of a run goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "width" && element.style && !element.viewBox && element.namespaceURI !== SVG) element.style.width = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

export function put(place, ...children) {
  const element = typeof place === "string" ? $(place) : place;
  element.replaceChildren(...children.flat(3).filter((each) => each !== null && each !== undefined && each !== false));
}

export function table(caption, heads, rows) {
  const cell = (value, at) => (value instanceof HTMLTableCellElement ? value : h("td", { class: heads[at].class }, value));
  return h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col", class: each.class }, each.name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))));
}

export const column = (name, kind) => ({ name, class: kind });

export const facts = (pairs, kind = "kv") =>
  h("dl", { class: kind }, pairs.filter(Boolean).map(([name, value]) =>
    kind === "facts" ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : [h("dt", {}, name), h("dd", {}, value)]));

const has = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const count = (value) => (has(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : "–");
export const percent = (value) => (has(value) ? `${(100 * value).toFixed(value > 0.9995 && value < 1 ? 2 : 1)} %` : "–");

export function seconds(value) {
  if (!has(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  if (value < 5970) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (!has(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at ? value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) : value} ${units[at]}`;
}

export function short(value) {
  if (!has(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// The time since the run began, as people say it; the wall clock is in the title.
export function since(at, start) {
  const t = Math.max(at - start, 0);
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  const clock = `${two((t % 3600) / 60)}:${two(t % 60)}`;
  return t < 3600 ? clock : t < 86400 ? `${Math.floor(t / 3600)}:${clock}` : `${Math.floor(t / 86400)}d ${two((t % 86400) / 3600)}:${clock}`;
}

export const clock = (at) => new Date(1000 * at).toLocaleString();
export const when = (at, start) => h("time", { datetime: new Date(1000 * at).toISOString(), title: clock(at) }, since(at, start));
export const plural = (n, word, more = `${word}s`) => `${count(n)} ${n === 1 ? word : more}`;
