// A prompt to this server, its answer coloured by the workers that sampled the tokens.

import { colourOf } from "./cluster.js";
import { element, milliseconds, rate, setText } from "./format.js";
import { askForKey, events, headers } from "./stream.js";

let running = null; // AbortController of the answer under way

export function start() {
  document.getElementById("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask();
  });
  document.getElementById("ask-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) document.getElementById("ask").requestSubmit();
  });
}

export function stop() {
  running?.abort();
}

async function ask() {
  running = new AbortController();
  setText(document.getElementById("ask-send"), "Stop");
  document.getElementById("answer").replaceChildren();
  document.getElementById("ask-legend").replaceChildren();
  setText(document.getElementById("ask-result"), "");
  try {
    await stream(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  } finally {
    running = null;
    setText(document.getElementById("ask-send"), "Send");
  }
}

function body() {
  const text = document.getElementById("ask-text").value;
  const isChat = document.getElementById("ask-chat").checked;
  const fields = {
    model: "default",
    max_tokens: Number(document.getElementById("ask-tokens").value) || 96,
    temperature: Number(document.getElementById("ask-temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    return_workers: true,
  };
  return [isChat, isChat ? { ...fields, messages: [{ role: "user", content: text }] } : { ...fields, prompt: text }];
}

async function stream(signal) {
  const [isChat, content] = body();
  const url = isChat ? "v1/chat/completions" : "v1/completions";
  const began = performance.now();
  const options = { method: "POST", signal, headers: { "Content-Type": "application/json", ...headers() } };
  const reply = await fetch(url, { ...options, body: JSON.stringify(content) });
  if (reply.status === 401) {
    await askForKey("Authorization" in headers());
    return stream(signal);
  }
  if (!reply.ok) throw new Error((await reply.json()).error?.message ?? `HTTP ${reply.status}`);
  const told = { first: 0, last: 0, count: 0, byWorker: new Map() };
  for await (const data of events(reply)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    told.count = event.usage?.completion_tokens ?? told.count;
    const choice = event.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning_content ?? "";
    if (choice && text) add(text, choice.worker ?? "", told, began);
    summarize(told, began);
  }
}

function add(text, worker, told, began) {
  const now = performance.now();
  const token = element("span", "token", text);
  token.dataset.worker = worker;
  token.dataset.colour = colourOf(worker);
  token.title = told.first ? `${worker}, after ${milliseconds((now - told.last) / 1e3)}` : `${worker}, first`;
  told.first ||= now;
  told.last = now;
  told.byWorker.set(worker, (told.byWorker.get(worker) ?? 0) + 1);
  document.getElementById("answer").append(token);
  legend(told.byWorker);
}

function legend(byWorker) {
  const entries = [...byWorker].map(([worker, count]) => {
    const entry = element("span", "", `${worker} · ${count}`);
    entry.dataset.colour = colourOf(worker);
    return entry;
  });
  document.getElementById("ask-legend").replaceChildren(...entries);
}

function summarize(told, began) {
  if (!told.first) return;
  const chunks = [...told.byWorker.values()].reduce((sum, count) => sum + count, 0);
  const count = told.count || chunks;
  const speed = told.last > told.first ? (count - 1) / ((told.last - told.first) / 1e3) : null;
  const text = `first after ${milliseconds((told.first - began) / 1e3)} · ${count} tokens · ${rate(speed)}/s`;
  setText(document.getElementById("ask-result"), text);
}

function complain(message) {
  document.getElementById("answer").append(element("p", "bad", message));
}
