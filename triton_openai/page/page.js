// The page: models and figures from GET status, and a chat through v1/chat/completions. Speech has a module of its own.
import { $, ask, el, events, hasKey, onKey } from "./common.js";
import { Markdown } from "./markdown.js";
import { showSpeech } from "./speech.js";

const POLL_MS = 2000, WINDOW_MS = 15000;
const EXAMPLES = {
  tools: [{ type: "function", function: { name: "get_weather", description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  schema: { type: "object", properties: { answer: { type: "string" }, sure: { type: "boolean" } },
    required: ["answer", "sure"], additionalProperties: false },
};

// Models and figures

function modelCard(model) {
  const state = model.state !== "ready" ? model.state : model.chat === false ? "cannot chat" : model.problem ? "cannot be used" : "ready";
  const kind = state === "ready" ? "good" : model.state === "ready" || model.state === "not loaded" ? "warn" : "bad";
  const names = [...model.aliases, ...model.loras].join(", ");
  return el("li.panel",
    el("div.row", el("strong", model.name), el(`span.badge.${kind}`, state)),
    model.adapter && el("p.note", `adapter ${model.adapter}`, names && `, also as ${names}`),
    el("p", ...[...model.tasks, ...model.features].map((name) => el("span.chip", name.replace("_", " ")))),
    model.problem && el("p.problem", model.problem));
}

function showModels(models) {
  const found = models.map(modelCard);
  $("#models").replaceChildren(...(found.length ? found : [el("li.note", "No model that this key may use.")]));
  const able = models.filter((model) => model.tasks.includes("generate"));
  const names = able.flatMap((model) => [model.name, ...model.aliases, ...model.loras].map((name) => [name, model.chat]));
  if (JSON.stringify(names) === $("#model").dataset.names) return;
  const before = $("#model").value;
  $("#model").dataset.names = JSON.stringify(names);
  $("#model").replaceChildren(...names.map(([name, chat]) => {
    const option = el("option", chat === false ? `${name} (cannot chat)` : name);
    option.value = name;
    option.disabled = chat === false;
    return option;
  }));
  if (names.some(([name]) => name === before)) $("#model").value = before;
  showCode();
}

let readings = [];

function showFigures(figures) {
  $("#live").hidden = !figures;
  if (!figures) return;
  const now = performance.now();
  readings = [...readings.filter((one) => now - one.now < WINDOW_MS + POLL_MS), { now, ...figures }];
  const first = readings[0], seconds = (now - first.now) / 1000;
  // Sums begin again when the service is restarted.
  const tokens = Math.max(0, figures.output_tokens - first.output_tokens);
  const answers = figures.first_tokens - first.first_tokens;
  const rate = seconds > 0 ? tokens / seconds : 0;
  $("#running").textContent = figures.running;
  $("#queued").textContent = figures.queued;
  $("#rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  if (answers > 0) {
    const mean = (figures.first_token_seconds - first.first_token_seconds) / answers;
    $("#first").textContent = mean < 1 ? `${(mean * 1000).toFixed(0)} ms` : `${mean.toFixed(1)} s`;
  }
}

function showEndpoints(endpoints) {
  $("#fleet").hidden = !endpoints;
  $("#endpoints").replaceChildren(...(endpoints ?? []).map((one) => {
    const item = document.createElement("li");
    const failing = one.ejected.length ? `, ejected for ${one.ejected.join(", ")}` : "";
    item.textContent = `${one.name}: ${one.state}, ${one.running} running, ${one.models.join(", ") || "no model"}${failing}`;
    item.className = one.state === "ready" && !failing ? "" : "bad";
    return item;
  }));
}

// By id. A card is changed in place, so that its button keeps the focus.
const cards = new Map();
let batchesOff = false;

function batchCard(id) {
  const [badge, note, problem, bar, button] = ["span", "p.note", "p.problem", "progress", "button"].map((kind) => el(kind));
  bar.ariaLabel = `Progress of ${id}`;
  button.type = "button";
  button.ariaLabel = `Cancel ${id}`;
  // The second click means it.
  const reset = () => { button.textContent = "Cancel"; };
  button.addEventListener("blur", reset);
  button.addEventListener("click", async () => {
    if (button.textContent === "Cancel") return button.textContent = "Cancel now?";
    reset();
    problem.textContent = "";
    try {
      show(await (await ask(`v1/batches/${id}/cancel`, { method: "POST" })).json());
    } catch (error) {
      problem.textContent = error.message;
    }
  });
  reset();
  const show = (batch) => {
    const { total, completed, failed } = batch.request_counts;
    const open = ["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status);
    badge.className = `badge ${open || batch.status === "completed" ? "good" : "bad"}`;
    badge.textContent = batch.status.replace("_", " ");
    if (total) [bar.max, bar.value] = [total, completed + failed];
    bar.hidden = !open;
    button.hidden = !["validating", "in_progress"].includes(batch.status);
    note.textContent = [total ? `${completed + failed} of ${total} lines` : "no lines yet", failed && `${failed} failed`,
      batch.endpoint, open && `until ${new Date(batch.expires_at * 1000).toLocaleString()}`].filter(Boolean).join(" · ");
    if (batch.errors) problem.textContent = batch.errors.data[0].message;
  };
  return { item: el("li.panel", el("div.row", el("strong", id), badge), bar, note, problem, button), show };
}

async function showBatches() {
  if (batchesOff) return;
  let batches;
  try {
    batches = (await (await ask("v1/batches?limit=20")).json()).data;
  } catch (error) {
    // Off, or not for this key: another one may see them. What else is wrong passes.
    batchesOff = [403, 404].includes(error.status);
    if (!batchesOff) return;
    batches = [];
  }
  $("#batches-part").hidden = !batches.length;
  const shown = batches.map((batch) => {
    if (!cards.has(batch.id)) cards.set(batch.id, batchCard(batch.id));
    cards.get(batch.id).show(batch);
    return cards.get(batch.id).item;
  });
  const list = $("#batches");
  if (shown.length !== list.children.length || shown.some((item, index) => item !== list.children[index])) list.replaceChildren(...shown);
}

async function refresh() {
  const status = await (await ask("status")).json();
  const triton = status.triton ? `${status.triton.name} ${status.triton.version}` : "Triton";
  $("#about").textContent = `${status.version} · ${triton} ${status.triton_answers ? "answers" : "does not answer"}`;
  $("#about").className = status.triton_answers ? "good" : "bad";
  showModels(status.models);
  showSpeech(status.models);
  showEndpoints(status.endpoints);
  showFigures(status.figures);
  await showBatches();
}

async function poll() {
  if (!document.hidden && $("#key-form").hidden) {
    try {
      await refresh();
    } catch (error) {
      $("#about").textContent = error.status ? error.message : "The service does not answer.";
      $("#about").className = "bad";
    }
  }
  setTimeout(poll, POLL_MS);
}

// The request, and the same in code

let messages = [], asked = [], running = null;
const unanswered = () => {
  const last = messages.findLast((message) => message.role === "assistant");
  const done = new Set(messages.map((message) => message.tool_call_id));
  return messages.at(-1)?.role === "user" ? [] : (last?.tool_calls ?? []).filter((call) => !done.has(call.id));
};

function json(field) {
  const text = $(`#${field}`).value.trim();
  try {
    return text ? JSON.parse(text) : null;
  } catch (error) {
    throw new Error(`${$(`label[for=${field}]`).textContent}: ${error.message}`);
  }
}

function message(text) {
  const [call] = unanswered();
  return call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
}

function request(all) {
  const body = { model: $("#model").value, messages: all };
  for (const name of ["max_tokens", "temperature"]) if ($(`#${name}`).value) body[name] = Number($(`#${name}`).value);
  const tools = json("tools"), schema = json("schema");
  if (tools) Object.assign(body, { tools, tool_choice: $("#tool_choice").value });
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  if ($("#stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return body;
}

/** Write a value as Python does. */
function python(value) {
  if (value === null || typeof value === "boolean") return { null: "None", true: "True", false: "False" }[value];
  if (Array.isArray(value)) return `[${value.map((one) => python(one)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
}

function showCode() {
  let body;
  try {
    const text = $("#prompt").value;
    // What Send would send, else what it has sent.
    body = request(text || !asked.length ? [...messages, message(text || "Hello!")] : asked);
  } catch {
    return;  // It is shown once the JSON is complete.
  }
  const url = new URL("v1", document.baseURI).href;
  const header = hasKey() ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  $("#curl").textContent =
    `curl ${body.stream ? "-N " : ""}${url}/chat/completions${header} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`;
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  $("#python").textContent = [
    hasKey() ? "import os\n" : null,
    "from openai import OpenAI\n",
    `client = OpenAI(base_url="${url}", api_key=${hasKey() ? 'os.environ["API_KEY"]' : '"none"'})`,
    `answer = client.chat.completions.create(\n${fields}\n)`,
    body.stream
      ? 'for chunk in answer:\n    for choice in chunk.choices:\n        print(choice.delta.content or "", end="", flush=True)'
      : "print(answer.choices[0].message)",
  ].filter(Boolean).join("\n");
}

// The chat

function bubble(role, ...content) {
  const made = el(`div.bubble.${role}`, el("strong", { user: "You", assistant: "Model", tool: "Tool" }[role]), ...content);
  atEnd(() => $("#log").append(made), true);
  return made;
}

/** Change the log, which stays at its end unless its reader has gone up in it. */
function atEnd(change, always = false) {
  const log = $("#log"), follow = always || log.scrollHeight - log.scrollTop - log.clientHeight < 50;
  change();
  if (follow) log.scrollTop = log.scrollHeight;
}

/** Add what a delta, or a whole message, brings to the answer. */
function add(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = answer.calls[part.index ?? answer.calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    call.id += part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

/** Return a function that shows what has come of `answer` since its last call: once per frame, or `now`. */
function shower(answer, isJson) {
  const reasoning = el("p"), content = el("div"), calls = el("div"), note = el("p.note"), markdown = new Markdown(content);
  const details = el("details", el("summary", "Reasoning"), reasoning);
  details.hidden = true;
  bubble("assistant", details, content, calls, note);
  let thought = 0, said = 0, asked = 0;
  if (isJson) markdown.write("```\n");
  const show = () => atEnd(() => {
    asked = 0;
    if (answer.reasoning.length > thought) reasoning.append(answer.reasoning.slice(thought));
    if (answer.content.length > said) markdown.write(answer.content.slice(said));
    [thought, said] = [answer.reasoning.length, answer.content.length];
    details.hidden = !thought;
    answer.calls.forEach((call, index) => {
      (calls.children[index] ?? calls.appendChild(el("code.call"))).textContent = `${call.function.name}(${call.function.arguments})`;
    });
    note.textContent = [answer.first && `${answer.first.toFixed(2)} s to the first token`,
      answer.usage && `${answer.usage.completion_tokens} tokens`, answer.finish].filter(Boolean).join(" · ");
  });
  return (now) => {
    if (!now) return asked ||= requestAnimationFrame(show);
    cancelAnimationFrame(asked);
    return show();
  };
}

async function complete() {
  const thread = messages, body = request(asked = [...thread]), began = performance.now();
  const answer = { content: "", reasoning: "", calls: [], first: 0, usage: null, finish: "" };
  running = new AbortController();
  const response = await ask("v1/chat/completions", { method: "POST", signal: running.signal,
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const show = shower(answer, "response_format" in body);
  try {
    for await (const event of body.stream ? events(response) : [await response.json()]) {
      for (const choice of event.choices) {
        const delta = choice.delta ?? choice.message;
        add(answer, delta);
        if (body.stream && (delta.content || delta.tool_calls)) answer.first ||= (performance.now() - began) / 1000;
        answer.finish = choice.finish_reason ?? answer.finish;
      }
      answer.usage = event.usage ?? answer.usage;
      show();
    }
  } finally {
    show(true);
    // Calls of an answer that was cut off may be incomplete. A new chat leaves `thread` behind.
    const calls = answer.finish && answer.calls.length ? { tool_calls: answer.calls } : {};
    thread.push({ role: "assistant", content: answer.content, ...calls });
  }
}

async function send() {
  const text = $("#prompt").value.trim();
  if (running || !text) return;
  $("#problem").textContent = "";
  const before = messages;
  try {
    request(messages);
    messages = [...messages, message(text)];
    const said = bubble(messages.at(-1).role, el("p", text));
    $("#prompt").value = "";
    $("#send").hidden = !($("#stop").hidden = false);
    try {
      if (!unanswered().length) await complete();
    } catch (error) {
      if (messages.length === before.length + 1) {
        messages = before;
        said.remove();
        // To be sent again, before what was typed meanwhile.
        $("#prompt").value = [text, $("#prompt").value].filter(Boolean).join("\n");
      }
      throw error;
    }
  } catch (error) {
    $("#problem").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  running = null;
  $("#send").hidden = !($("#stop").hidden = true);
  const [call] = unanswered();
  $("#prompt-label").textContent = call ? `What ${call.function.name} returns` : "Your message";
  $("#prompt").focus();
  showCode();
}

$("#chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("#chat-form").addEventListener("input", showCode);
$("#prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("#stop").addEventListener("click", () => running?.abort());
$("#clear").addEventListener("click", () => {
  running?.abort();
  messages = asked = [];
  $("#log").replaceChildren();
  $("#prompt-label").textContent = "Your message";
  showCode();
});
for (const button of document.querySelectorAll("[data-example]")) button.addEventListener("click", () => {
  $(`#${button.dataset.example}`).value = JSON.stringify(EXAMPLES[button.dataset.example], null, 2);
  showCode();
});
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", async () => {
  const place = $(`#${button.dataset.copy}`);
  try {
    await navigator.clipboard.writeText(place.textContent);
    button.textContent = "Copied";
  } catch {
    // Browsers have no clipboard for pages over plain HTTP from another machine: what is selected can be copied by hand.
    getSelection().selectAllChildren(place);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
onKey(async () => { batchesOff = false; await refresh(); showCode(); });
showCode();
poll();
