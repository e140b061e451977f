// The page: snapshots come every second or two, each part draws what is its own.

import * as ask from "./ask.js";
import * as charts from "./charts.js";
import * as cluster from "./cluster.js";
import { milliseconds, percent, rate, setText } from "./format.js";
import { follow } from "./stream.js";
import * as waterfall from "./waterfall.js";

const at = (id) => document.getElementById(id);
let span = "10";
let latest = null;

function show(snapshot) {
  latest = snapshot;
  setText(at("model"), snapshot.model);
  document.title = `Baton · ${snapshot.model}`;
  say(snapshot.ready ? "ready" : "not ready");
  figures(snapshot);
  charts.push(snapshot, span);
  if (document.hidden) return;
  cluster.draw(snapshot);
  waterfall.draw(snapshot);
}

function figures(snapshot) {
  const window = snapshot.windows[span];
  setText(at("ttft-p50"), milliseconds(window.ttft_p50_s));
  setText(at("ttft-p99"), milliseconds(window.ttft_p99_s));
  setText(at("itl-p50"), milliseconds(window.itl_p50_s));
  setText(at("itl-p99"), milliseconds(window.itl_p99_s));
  setText(at("output"), rate(window.output_tokens_per_s));
  setText(at("prompt"), rate(window.prompt_tokens_per_s));
  setText(at("requests"), rate(window.requests_per_s));
  setText(at("errors"), rate(window.errors_per_s));
  setText(at("cached"), percent(cachedShare(snapshot.workers)));
  setText(at("goodput"), rate(window.good_per_s));
  const { ttft_s: ttft, itl_s: itl } = snapshot.slo;
  const targets = [ttft, itl].map((target) => (target ? `< ${milliseconds(target)}` : "any"));
  setText(at("targets"), ttft || itl ? `${targets[0]}, then ${targets[1]}` : "no targets set");
  setText(at("flight"), snapshot.in_flight ? `${snapshot.in_flight} under way` : "nothing under way");
}

// Of the prompt tokens of the last seconds, those that no worker had to compute.
function cachedShare(workers) {
  const sum = (name) => workers.reduce((total, worker) => total + (worker.rates[name] ?? 0), 0);
  const [computed, cached] = [sum("prompt_tokens"), sum("cached_tokens")];
  return computed + cached ? cached / (computed + cached) : null;
}

const STATES = { lost: "connection lost", locked: "key wanted" };

function say(state) {
  at("state").dataset.state = state;
  setText(at("state"), STATES[state] ?? state);
}

function chooseSpan(chosen) {
  span = chosen;
  for (const one of ["10", "60"]) at(`span-${one}`).setAttribute("aria-pressed", String(one === span));
  if (latest) figures(latest);
}

function chooseTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  charts.restyle();
}

function toggleTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem("baton-theme", next);
  chooseTheme(next);
}

const KEYS = {
  "/": () => at("ask-text").focus(),
  w: () => chooseSpan(span === "10" ? "60" : "10"),
  p: waterfall.hold,
  t: toggleTheme,
  "?": () => at("help-dialog").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") ask.stop();
  const isWriting = event.target.matches("input, textarea, dialog *");
  if (isWriting || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.addEventListener("visibilitychange", () => !document.hidden && charts.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chooseTheme(null));
at("span-10").addEventListener("click", () => chooseSpan("10"));
at("span-60").addEventListener("click", () => chooseSpan("60"));
at("theme").addEventListener("click", toggleTheme);
at("help").addEventListener("click", KEYS["?"]);

chooseTheme(localStorage.getItem("baton-theme"));
ask.start();
waterfall.start();
follow(show, say);
