// Requests to this server: server-sent events read with fetch, which, unlike EventSource, can send a key.

const KEY = "baton-key";

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Asks for a key until the server takes one.
export async function askForKey(wasGiven) {
  const dialog = document.getElementById("key-dialog");
  const field = document.getElementById("key");
  document.getElementById("key-wrong").hidden = !wasGiven;
  field.value = "";
  if (!dialog.open) dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  if (field.value) sessionStorage.setItem(KEY, field.value);
}

// The data of each event, in order, until the stream ends.
export async function* events(reply) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data:")) yield part.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Snapshots for as long as the page is open; says what becomes of the connection in between.
export async function follow(onSnapshot, onState) {
  let pause = 500;
  for (;;) {
    try {
      const reply = await fetch("live/events", { headers: headers(), cache: "no-store" });
      if (reply.status === 401) {
        onState("locked");
        await askForKey("Authorization" in headers());
        continue;
      }
      if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
      for await (const data of events(reply)) {
        pause = 500;
        onSnapshot(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof SyntaxError) throw error;
    }
    onState("lost");
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(5000, pause * 1.6);
  }
}
