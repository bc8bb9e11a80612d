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

/** Change the log, which stays at its end unless its reader has gone up in it. */
export function atEnd(change, always = false) {
  const log = $("#log"), follow = always || log.scrollHeight - log.scrollTop - log.clientHeight < 50;
  change();
  if (follow) log.scrollTop = log.scrollHeight;
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
  let message = `${response.status} ${response.statusText}`, code = null;
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch { /* Not from the service: a proxy's page, for example. */ }
  if (response.status === 401 && $("#key-form").hidden) {
    $("#key-form").hidden = false;
    $("#key").focus();
  }
  throw Object.assign(new Error(message), { status: response.status, code, wait: response.headers.get("Retry-After") });
}

// What to do, by the status of an answer.
const ADVICE = {
  403: "This API key does not allow it. Use another key.",
  404: "The model is not there any more. Choose another one.",
  413: "This is too large. Attach less, or start a new chat.",
  429: "Too many requests. Try again later.",
  502: "The model's engine failed. Try again.",
  503: "The model takes no requests now. Try again later.",
  504: "The model did not answer in time. Try again, or ask for a shorter answer.",
};

/** Say what went wrong and what to do, in the page's words and then in the service's own. */
export function explain(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error instanceof TypeError) return "The service does not answer. Is it running, and does this browser reach it?";
  if (error.code === "context_length_exceeded") {
    return `The chat is longer than the model can read. Start a new chat, or lower “Max. tokens”. (${error.message})`;
  }
  if (error.status === 401) {
    if (!key) return "This service needs an API key: enter yours at the top of the page.";
    return `The service does not accept this API key: enter another one at the top of the page. (${error.message})`;
  }
  const advice = ADVICE[error.status];
  if (!advice) return error.message;
  const again = error.wait ? advice.replace("later", `in ${error.wait} s`) : advice;
  return `${again} (${error.message})`;
}

/** Call `action` at the second click; the button then says `sure`. */
export function atSecondClick(button, sure, action) {
  const text = button.textContent;
  const reset = () => { button.textContent = text; };
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (button.textContent !== sure) {
      button.textContent = sure;
      return;
    }
    reset();
    action();
  });
}

/** Copy `text`, which `place` shows. Browsers have no clipboard for pages over plain HTTP from another machine. */
export async function copy(button, text, place) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // What is selected can be copied by hand.
    getSelection().selectAllChildren(place);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

/** Let the reader save `text` as a file. */
export function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Call `ready` with each key that the reader enters; the form goes away when the key is accepted. */
export function onKey(ready) {
  $("#key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    await use($("#key").value.trim());
  });
  $("#key-button")?.addEventListener("click", () => {
    $("#key-form").hidden = !$("#key-form").hidden;
    $("#key").focus();
  });
  $("#forget")?.addEventListener("click", () => use(""));

  async function use(entered) {
    key = entered;
    $("#key-problem").textContent = "";
    let accepted = false;
    try {
      await ready();
      accepted = key !== "";
      $("#key-form").hidden = true;
      $("#key").value = "";
    } catch (error) {
      $("#key-problem").textContent = explain(error);
    }
    if ($("#forget")) {
      $("#forget").hidden = !key;
      $("#key-button").textContent = accepted ? "API key: in use" : "API key";
    }
  }
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
