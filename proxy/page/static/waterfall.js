// Requests that have ended, the latest first, each with where its time went.

import { ago, element, milliseconds, setText } from "./format.js";

const SEGMENTS = ["route", "retry", "queue", "prefill", "transfer", "wait", "decode"];
const rows = new Map(); // id of a request -> its row and the parts that change, in the order shown
let chosen = null; // id of a request
let shown = [];
let held = false;

export function start() {
  const legend = document.getElementById("recent-legend");
  for (const name of SEGMENTS) {
    const entry = element("span", "", name);
    entry.dataset.segment = name;
    legend.append(entry);
  }
  const list = document.getElementById("recent");
  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const at = shown.findIndex((record) => record.id === chosen);
    const next = shown[Math.max(0, Math.min(shown.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)))];
    if (next) choose(next.id);
  });
  document.getElementById("pause").addEventListener("click", hold);
}

export function hold() {
  held = !held;
  document.getElementById("pause").setAttribute("aria-pressed", String(held));
}

export function draw(snapshot) {
  if (held) return;
  shown = snapshot.recent;
  const list = document.getElementById("recent");
  if (!shown.length) {
    rows.clear();
    list.replaceChildren(element("p", "quiet", "None yet: send one."));
  } else if (shown[0].id !== rows.keys().next().value) {
    const before = new Map(rows);
    rows.clear();
    for (const record of shown) rows.set(record.id, before.get(record.id) ?? row(record));
    list.replaceChildren(...[...rows.values()].map((parts) => parts.root));
    scale();
    mark();
  }
  for (const record of shown) setText(rows.get(record.id).when, `${ago(record.arrived_s_ago)} ago`);
}

// Bars of all rows to one scale.
function scale() {
  const longest = Math.max(1e-3, ...shown.map((record) => record.total_s));
  for (const record of shown) {
    const { bar } = rows.get(record.id);
    record.segments.forEach((segment, number) => {
      const { style } = bar.children[number];
      style.left = `${(100 * segment.start_s) / longest}%`;
      style.width = `${(100 * segment.seconds) / longest}%`;
    });
  }
}

function row(record) {
  const root = element("div", "request");
  root.id = `request-${record.id}`;
  root.setAttribute("role", "option");
  root.dataset.outcome = record.error ? "error" : record.outcome;
  root.addEventListener("click", () => choose(record.id));
  const bar = element("div", "waterfall");
  for (const segment of record.segments) {
    const part = element("span");
    part.dataset.segment = segment.name;
    part.title = `${segment.name} ${milliseconds(segment.seconds)}`;
    bar.append(part);
  }
  const when = element("span", "when");
  const tokens = `${record.prompt_tokens} → ${record.output_tokens}`;
  const end = record.error ?? (record.outcome === "abort" ? "client left" : milliseconds(record.total_s));
  root.append(when, element("span", "route", routeOf(record)), element("span", "tokens", tokens), bar, element("span", "end", end));
  return { root, bar, when };
}

function routeOf(record) {
  const last = record.routes.at(-1);
  if (!last) return "no worker";
  const retries = record.routes.length > 1 ? ` (attempt ${record.routes.length})` : "";
  return `${last.prefill ? `${last.prefill} → ` : ""}${last.decode}${retries}`;
}

function choose(id) {
  chosen = chosen === id ? null : id;
  mark();
}

function mark() {
  for (const node of document.querySelectorAll("#recent .request")) {
    node.setAttribute("aria-selected", String(node.id === `request-${chosen}`));
  }
  document.getElementById("recent").setAttribute("aria-activedescendant", chosen ? `request-${chosen}` : "");
  describe(shown.find((record) => record.id === chosen));
}

function describe(record) {
  const box = document.getElementById("detail");
  if (!record) {
    box.replaceChildren();
    return;
  }
  const list = element("dl");
  const tell = (name, text) => list.append(element("dt", "", name), element("dd", "", text));
  tell("request", record.id);
  record.routes.forEach((route, number) => {
    const pair = `${route.prefill ? `${route.prefill} → ` : ""}${route.decode}`;
    tell(`attempt ${number + 1}`, `${pair}, ${route.path}${route.error ? `, failed: ${route.error}` : ""}`);
  });
  tell("prompt", `${record.prompt_tokens} tokens, ${record.cached_tokens} of them from the cache`);
  tell("first token", milliseconds(record.ttft_s));
  tell("each further one", milliseconds(record.tpot_s));
  for (const segment of record.segments) tell(segment.name, milliseconds(segment.seconds));
  const split = Object.entries(record.split ?? {});
  tell("time went to", split.map(([name, s]) => `${name.replace(/_s$/, "")} ${milliseconds(s)}`).join(" · "));
  box.replaceChildren(list);
}
