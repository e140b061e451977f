// The cluster as it is: a card for each worker, a wire for each pair, thicker and moving where blocks flow.

import { bytes, element, percent, rate, setText } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MANY = 8; // beyond so many pairs only wires in use are drawn
const cards = new Map(); // worker name -> its card and the parts that change
const wires = new Map(); // "prefill>decode" -> path and label
let latest = null;
let laidOut = false; // wires end where cards are
const sizes = new ResizeObserver(() => {
  laidOut = false;
  connect(latest);
});

export function draw(snapshot) {
  latest = snapshot;
  const present = new Set();
  for (const worker of snapshot.workers) {
    present.add(worker.name);
    show(cards.get(worker.name) ?? add(worker), worker);
  }
  for (const [name, card] of cards) {
    if (present.has(name)) continue;
    card.root.remove();
    sizes.unobserve(card.root);
    cards.delete(name);
    laidOut = false;
  }
  const roles = new Set(snapshot.workers.map((worker) => worker.role));
  const box = document.getElementById("cluster");
  box.dataset.empty = String(snapshot.workers.length === 0);
  box.dataset.colocated = String(!roles.has("prefill"));
  connect(snapshot);
  const total = snapshot.links.reduce((sum, link) => sum + (link.bytes_per_s ?? 0), 0);
  setText(document.getElementById("links-total"), snapshot.links.length ? `${bytes(total, "/s")} of KV blocks` : "");
}

function add(worker) {
  const root = element("article", "worker");
  root.setAttribute("role", "listitem");
  root.tabIndex = 0;
  const parts = { root };
  const head = element("div", "name");
  head.append(element("span", "dot"), (parts.name = element("b")), (parts.state = element("span", "state")));
  const use = element("div", "bar");
  use.append((parts.use = element("span")));
  const figures = element("dl");
  const moving = worker.role === "prefill" ? "parked" : "arriving";
  for (const name of ["KV", "running", "waiting", moving, "tokens/s", "CPU", "memory"]) {
    const pair = element("div");
    pair.append(element("dt", "", name), (parts[name] = element("dd")));
    figures.append(pair);
  }
  root.append(head, use, figures);
  const column = document.getElementById(worker.role);
  const after = [...column.children].find((other) => other.dataset.worker > worker.name);
  column.insertBefore(root, after ?? null);
  root.dataset.worker = worker.name;
  sizes.observe(root);
  cards.set(worker.name, parts);
  return parts;
}

function show(card, worker) {
  const { load, rates } = worker;
  const state = worker.state === "ready" && !worker.trusted ? "on probation" : worker.state;
  card.root.dataset.state = state;
  card.root.title = [worker.reason, worker.address, worker.pid ? `pid ${worker.pid}` : ""].filter(Boolean).join(" · ");
  setText(card.name, worker.name);
  setText(card.state, worker.reason && state !== "ready" ? `${state}: ${worker.reason}` : state);
  card.use.style.width = `${(100 * worker.kv_use).toFixed(1)}%`;
  card.use.parentElement.dataset.full = String(worker.kv_use > 0.9);
  setText(card.KV, percent(worker.kv_use));
  setText(card.running, String(load.num_running));
  setText(card.waiting, String(load.num_waiting));
  if (card.parked) setText(card.parked, String(load.num_parked_blocks));
  if (card.arriving) setText(card.arriving, String(load.num_receiving));
  const speed = worker.role === "prefill" ? rates.prompt_tokens : rates.generation_tokens;
  setText(card["tokens/s"], rate(speed));
  setText(card.CPU, percent(rates.cpu_seconds));
  setText(card.memory, bytes(worker.memory_bytes));
}

function connect(snapshot) {
  const svg = document.getElementById("wires");
  const place = laidOut ? null : placing(svg);
  const flows = new Map(snapshot.links.map((link) => [`${link.prefill}>${link.decode}`, link.bytes_per_s ?? 0]));
  const of = (role) => snapshot.workers.filter((worker) => worker.role === role);
  const pairs = of("prefill").flatMap((from) => of("decode").map((to) => [from, to]));
  const kept = new Set();
  for (const [from, to] of pairs) {
    const name = `${from.name}>${to.name}`;
    const flow = flows.get(name) ?? 0;
    if (pairs.length > MANY && !flow) continue;
    kept.add(name);
    const wire = wires.get(name) ?? addWire(name, svg);
    const broken = [from, to].some((worker) => ["lost", "silent", "refused"].includes(worker.state));
    place?.(wire, from.name, to.name);
    wire.path.dataset.state = broken ? "broken" : flow > 1 ? "flowing" : "idle";
    wire.path.style.strokeWidth = String(flow > 1 ? Math.min(7, 1.5 + Math.log10(1 + flow / 1e5)) : 1.2);
    setText(wire.label, flow > 1 && !broken ? bytes(flow, "/s") : "");
  }
  laidOut = true;
  for (const [name, wire] of wires) {
    if (kept.has(name)) continue;
    wire.path.remove();
    wire.label.remove();
    wires.delete(name);
  }
}

function addWire(name, svg) {
  const wire = { path: document.createElementNS(SVG, "path"), label: document.createElementNS(SVG, "text") };
  wire.path.dataset.pair = name;
  svg.append(wire.path, wire.label);
  wires.set(name, wire);
  laidOut = false;
  return wire;
}

// Puts wires where they belong. All cards are looked at first: looking after each change would lay the page out again.
function placing(svg) {
  const frame = svg.getBoundingClientRect();
  const frames = new Map([...cards].map(([name, card]) => [name, card.root.getBoundingClientRect()]));
  return (wire, from, to) => {
    const [a, b] = [frames.get(from), frames.get(to)];
    const stacked = b.left < a.right; // a narrow window: one column
    const [x1, y1] = stacked ? [a.left + a.width / 2, a.bottom] : [a.right, a.top + a.height / 2];
    const [x2, y2] = stacked ? [b.left + b.width / 2, b.top] : [b.left, b.top + b.height / 2];
    const [ax, ay, bx, by] = [x1 - frame.left, y1 - frame.top, x2 - frame.left, y2 - frame.top];
    const bend = stacked ? [ax, (ay + by) / 2, bx, (ay + by) / 2] : [(ax + bx) / 2, ay, (ax + bx) / 2, by];
    wire.path.setAttribute("d", `M${ax} ${ay}C${bend.join(" ")} ${bx} ${by}`);
    wire.label.setAttribute("x", String((ax + bx) / 2));
    wire.label.setAttribute("y", String((ay + by) / 2 - 8));
  };
}

// A worker's colour: prefill-0 for the first prefill worker of the drawing, and so on.
export function colourOf(name) {
  const card = cards.get(name)?.root;
  if (!card) return "decode-0";
  const column = card.parentElement;
  return `${column.id}-${[...column.children].indexOf(card) % 3}`;
}
