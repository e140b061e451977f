// Numbers as people read them. Nothing known is a dash.

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = 1e3 * seconds;
  if (ms >= 1000) return `${seconds.toFixed(seconds >= 10 ? 1 : 2)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function bytes(value, suffix = "") {
  if (value === null || value === undefined) return "–";
  const names = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(names.length - 1, value >= 1 ? Math.floor(Math.log10(value) / 3) : 0);
  const shown = value / 1e3 ** power;
  return `${shown >= 100 || power === 0 ? shown.toFixed(0) : shown.toFixed(1)} ${names[power]}${suffix}`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(0)} %`;
}

// How long ago, in steps of five seconds: each change of a text costs a drawing.
export function ago(seconds) {
  if (seconds < 60) return `${5 * Math.floor(seconds / 5)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

// An element with text and classes; never markup, so that nothing received can become any.
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
