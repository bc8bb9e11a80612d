// What the pages share: making elements, requests with the reader's API key, and streams.

export const $ = (selector) => document.querySelector(selector);

/** Make an element: `el("p.note", "text", child)`; "p.note" is a tag and its classes. Text is never read as HTML. */
export function el(kind, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  made.classList.add(...classes);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// In memory only: a page that is reloaded asks again.
let key = "";
export const hasKey = () => key !== "";

/** Fetch `path` with the key. Throws an Error with the service's own sentence; a missing key shows the form for it. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let message = `${response.status} ${response.statusText}`;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* Not from the service: a proxy's page, for example. */ }
  if (response.status === 401 && $("#key-form").hidden) {
    $("#key-form").hidden = false;
    $("#key").focus();
  }
  throw Object.assign(new Error(message), { status: response.status });
}

/** Call `ready` with each key that the reader enters; the form goes away when the key is accepted. */
export function onKey(ready) {
  $("#key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    key = $("#key").value.trim();
    $("#key-problem").textContent = "";
    try {
      await ready();
      $("#key-form").hidden = true;
      $("#key").value = "";
    } catch (error) {
      $("#key-problem").textContent = error.message;
    }
  });
}

/** Yield the events of a stream. Throws an Error with the service's own sentence. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
