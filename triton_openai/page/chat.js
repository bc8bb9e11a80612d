// A chat through v1/chat/completions: its messages and what can be done with each, its settings, and its answers.
import { $, ask, atEnd, atSecondClick, copy, download, el, events, explain } from "./common.js";
import * as branches from "./branches.js";
import * as chats from "./chats.js";
import { showCode } from "./code.js";
import { Markdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];
const SETTINGS = ["model", "system", ...NUMBERS, "reasoning_effort", "more", "tools", "tool_choice", "schema"];
const EXAMPLES = {
  tools: [{ type: "function", function: { name: "get_weather", description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  schema: { type: "object", properties: { answer: { type: "string" }, sure: { type: "boolean" } },
    required: ["answer", "sure"], additionalProperties: false },
};
// Of a file that is attached as text.
const MAX_TEXT = 1_000_000;

let running = null;
let attached = [];

// Models

/** Offer `models`, a list from GET status. */
export function offerModels(models) {
  const able = models.filter((model) => model.tasks.includes("generate"));
  const names = able.flatMap((model) => [model.name, ...model.aliases, ...model.loras].map((name) => [name, model.chat]));
  if (JSON.stringify(names) === $("#model").dataset.names) return;
  $("#model").dataset.names = JSON.stringify(names);
  $("#model").replaceChildren(...names.map(([name, chat]) => {
    const option = el("option", chat === false ? `${name} (cannot chat)` : name);
    option.value = name;
    option.disabled = chat === false;
    return option;
  }));
  chooseModel();
  refreshCode();
}

function chooseModel() {
  const wanted = chats.chat().settings.model;
  const options = [...$("#model").options].filter((option) => !option.disabled);
  const option = options.find((one) => one.value === wanted) ?? options[0];
  if (option) $("#model").value = option.value;
}

// The request

/** Return the calls of the last answer that have no result yet. */
function unanswered(messages) {
  if (messages.at(-1)?.role === "user") return [];
  const last = messages.findLast((message) => message.role === "assistant");
  const done = new Set(messages.map((message) => message.tool_call_id));
  return (last?.tool_calls ?? []).filter((call) => !done.has(call.id));
}

function json(field) {
  const text = $(`#${field}`).value.trim();
  try {
    return text ? JSON.parse(text) : null;
  } catch (error) {
    throw new Error(`${$(`label[for=${field}]`).textContent}: ${error.message}`);
  }
}

/** Return the parameters that have no field of their own. */
function furtherParameters() {
  const further = json("more") ?? {};
  if (typeof further !== "object" || Array.isArray(further)) {
    throw new Error(`${$("label[for=more]").textContent}: an object is needed, as in ${$("#more").placeholder}`);
  }
  return further;
}

function written(text) {
  const [call] = unanswered(chats.chat().messages);
  if (call) return { role: "tool", tool_call_id: call.id, content: text };
  const texts = attached.filter((file) => file.text).map((file) => `\n\n${file.name}:\n\`\`\`\n${file.text}\n\`\`\``);
  const urls = (kind) => attached.filter((file) => file.url?.startsWith(`data:${kind}/`)).map((file) => file.url);
  const images = urls("image"), audio = urls("audio");
  return { role: "user", content: text + texts.join(""), ...(images.length && { images }), ...(audio.length && { audio }) };
}

/** Return a message as the API takes it: what the page keeps beside it is left out. */
function sent({ role, content, images = [], audio = [], tool_calls, tool_call_id }) {
  const parts = [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...audio.map(heard)];
  return { role, content: parts.length ? [{ type: "text", text: content }, ...parts] : content, ...(tool_calls?.length && { tool_calls }), ...(tool_call_id && { tool_call_id }) };
}

/** Return a recording as a part of a message. */
function heard(url) {
  const [, type, data] = /^data:audio\/(?:x-)?([\w-]*).*?,(.*)$/s.exec(url) ?? [];
  return { type: "input_audio", input_audio: { data, format: { mpeg: "mp3", wave: "wav" }[type] ?? type } };
}

function request(messages) {
  const system = $("#system").value.trim();
  // An answer that broke before its first character is no message.
  const whole = messages.filter((message) => message.role !== "assistant" || message.content || message.tool_calls?.length);
  const all = whole.map(sent);
  const body = { model: $("#model").value, messages: system ? [{ role: "system", content: system }, ...all] : all };
  for (const name of NUMBERS) if ($(`#${name}`).value) body[name] = Number($(`#${name}`).value);
  if ($("#reasoning_effort").value) body.reasoning_effort = $("#reasoning_effort").value;
  const tools = json("tools"), schema = json("schema");
  if (tools) Object.assign(body, { tools, tool_choice: $("#tool_choice").value });
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  if ($("#stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return Object.assign(body, furtherParameters());
}

/** Show what Send would send, else what was sent, in code. */
export function refreshCode() {
  const { messages } = chats.chat(), text = $("#prompt").value;
  const asked = messages.slice(0, messages.findLastIndex((message) => message.role !== "assistant") + 1);
  try {
    const body = request(text || !asked.length ? [...messages, written(text || "Hello!")] : asked);
    showCode(body, Object.keys(furtherParameters()));
  } catch { /* It is shown once the JSON is complete. */ }
}

// The messages on the screen

function action(name, title, act = null) {
  const made = Object.assign(el("button.action", name), { type: "button", title });
  if (act) made.addEventListener("click", () => act(made));
  return made;
}

/** Return an empty bubble for `message`, with what can be done with it. */
function bubble(message) {
  const made = el(`div.bubble.${message.role}`, el("strong", message.model ?? NAMES[message.role]));
  const actions = el("div.actions");
  const place = el("div.said");
  actions.append(action("Copy", "Copy this message", (button) => copy(button, message.content, place)));
  if (message.role === "user") actions.append(action("Edit", "Change this message, and ask again", () => edit(message, made)));
  if (message.role === "assistant") {
    const again = action("Regenerate", "Ask again", () => askAgain(message));
    again.classList.add("again");
    actions.append(again, action("Edit", "Change this answer", () => edit(message, made)), rawAction(message, place));
  }
  const button = action("Delete", "Delete this message and what follows");
  atSecondClick(button, "Delete now?", () => remove(message));
  actions.append(button);
  if (message.branches) actions.append(versions(message));
  made.append(place, actions);
  return { made, place };
}

/** Return the button that shows an answer as the model wrote it, and back. */
function rawAction(message, place) {
  const button = action("Raw", "Show the answer as the model wrote it", () => {
    const raw = place.querySelector(".source");
    if (raw) raw.remove();
    else place.firstElementChild.after(Object.assign(el("pre.source", message.content), { tabIndex: 0 }));
    button.ariaPressed = !raw;
  });
  button.ariaPressed = false;
  return button;
}

/** Return the buttons that show the other versions of `message`. */
function versions(message) {
  const { index, tails } = message.branches, count = tails.length + 1;
  const button = (name, title, next) => {
    const made = action(name, title, () => switchTo(message, next));
    made.classList.add(title.split(" ")[0]);
    made.ariaLabel = title;
    made.disabled = next < 0 || next >= count;
    return made;
  };
  return el("span.versions", button("‹", "Previous version", index - 1), `${index + 1}/${count}`, button("›", "Next version", index + 1));
}

function switchTo(message, index) {
  if (running) return;
  const { messages } = chats.chat(), at = messages.indexOf(message), forward = index > message.branches.index;
  branches.choose(messages, at, index);
  showFrom(at);
  changed();
  const buttons = [...$("#log").children[at].querySelectorAll(".versions button")];
  // At the last version there is none to go forward to.
  (forward ? buttons.reverse() : buttons).find((button) => !button.disabled).focus();
}

function show(message) {
  const { made, place } = bubble(message);
  if (message.role === "assistant") {
    shower(message, place)(true);
  } else {
    place.append(el("p", message.content));
    for (const url of message.images ?? []) place.append(Object.assign(el("img"), { src: url, alt: "attached image" }));
    if (message.audio) place.append(el("span.chip", `${message.audio.length} × audio`));
  }
  if (message.error) broken(made, message);
  if (message.unfinished) offerToContinue(made, message);
  atEnd(() => $("#log").append(made), true);
  return made;
}

/** Add a button to an answer that was cut. The style shows it on the last answer only. */
function offerToContinue(made, message) {
  const button = action("Continue", "Go on where this answer ends", () => goOn(message));
  button.classList.add("continue");
  made.querySelector(".actions").append(button);
}

function broken(made, message) {
  made.classList.add("broken");
  const alert = el("p.problem", message.error);
  alert.setAttribute("role", "alert");
  made.querySelector(".said").after(alert);
  made.querySelector(".again").textContent = "Try again";
}

/** Return a function that shows what has come of `answer` in `place` since its last call: once per frame, or `now`. */
function shower(answer, place) {
  const reasoning = el("p"), content = el("div"), calls = el("div"), note = el("p.note"), markdown = new Markdown(content);
  const details = el("details", el("summary", "Reasoning"), reasoning);
  details.hidden = true;
  place.append(details, content, calls, note);
  let thought = 0, said = 0, asked = 0;
  const render = () => atEnd(() => {
    asked = 0;
    if (answer.reasoning?.length > thought) reasoning.append(answer.reasoning.slice(thought));
    if (answer.json && answer.content && !said) markdown.write("```json\n");
    if (answer.content.length > said) markdown.write(answer.content.slice(said));
    [thought, said] = [answer.reasoning?.length ?? 0, answer.content.length];
    details.hidden = !thought;
    for (const [index, call] of (answer.tool_calls ?? []).entries()) {
      (calls.children[index] ?? calls.appendChild(el("code.call"))).textContent = `${call.function.name}(${call.function.arguments})`;
    }
    note.textContent = answer.note ?? "";
  });
  return (now) => {
    if (!now) return asked ||= requestAnimationFrame(render);
    cancelAnimationFrame(asked);
    return render();
  };
}

/** Show the current chat: its messages, its draft and its settings. */
function showChat() {
  const { messages, draft, settings } = chats.chat();
  $("#log").replaceChildren();
  for (const message of messages) show(message);
  $("#prompt").value = draft;
  for (const name of SETTINGS) if (name !== "model") $(`#${name}`).value = settings[name] ?? (name === "tool_choice" ? "auto" : "");
  $("#stream").checked = settings.stream ?? true;
  chooseModel();
  attached = [];
  showAttached();
  showList();
  showPromptLabel();
  refreshCode();
}

function showList() {
  $("#chats").replaceChildren(...chats.all().map((one) => Object.assign(el("option", chats.titleOf(one)), { value: one.id })));
  $("#chats").value = chats.chat().id;
  $("#title").value = chats.chat().title;
  $("#title").placeholder = chats.titleOf(chats.chat());
}

function showPromptLabel() {
  const [call] = unanswered(chats.chat().messages);
  $("#prompt-label").textContent = call ? `What ${call.function.name} returns` : "Your message";
}

// Answers

/** Add what a delta, or a whole message, brings to the answer. */
function add(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = answer.tool_calls[part.index ?? answer.tool_calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    call.id += part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

/** Say how long an answer took: to its first token, and per second of what follows. */
function describe(answer, times, usage, finish) {
  const tokens = usage?.completion_tokens, seconds = (times.last - times.first) / 1000;
  const rate = times.first && tokens > 1 && seconds > 0.05 ? (tokens - 1) / seconds : 0;
  answer.note = [times.first && `${((times.first - times.began) / 1000).toFixed(2)} s to the first token`,
    tokens && `${tokens} tokens`, rate && `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`, finish].filter(Boolean).join(" · ");
}

/** Ask for an answer to the messages of `thread`, with these `others`, or for the rest of its last one, `begun`. Show it while it comes. */
async function complete(thread, begun, others) {
  const body = request(thread.messages), times = { began: performance.now(), first: 0, last: 0 };
  const answer = { role: "assistant", model: body.model, content: "", reasoning: "", tool_calls: [], ...("response_format" in body && { json: true }), ...(others && { branches: others }) };
  if (begun) {
    Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
    Object.assign(answer, { content: begun.content, ...(begun.branches && { branches: begun.branches }) });
  }
  // It is one of the messages from now on: what is kept meanwhile has it, and with it its other versions.
  const at = begun ? thread.messages.indexOf(begun) : thread.messages.length;
  thread.messages.splice(at, 1, answer);
  chats.keep();
  const { made, place } = bubble(answer);
  const render = shower(answer, place);
  made.classList.add("waiting");
  atEnd(() => $("#log").append(made), true);
  let usage = null, finish = "";
  running = new AbortController();
  try {
    const response = await ask("v1/chat/completions", { method: "POST", signal: running.signal,
      headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    for await (const event of body.stream ? events(response) : [await response.json()]) {
      for (const choice of event.choices) {
        const delta = choice.delta ?? choice.message;
        add(answer, delta);
        if (body.stream && (delta.content || delta.reasoning_content || delta.tool_calls)) {
          times.last = performance.now();
          times.first ||= times.last;
        }
        finish = choice.finish_reason ?? finish;
      }
      usage = event.usage ?? usage;
      describe(answer, times, usage, finish);
      render();
    }
    if (!finish) throw new Error("The answer ended early: the connection was lost.");
  } catch (error) {
    if (error.name === "AbortError") answer.note = "Stopped.";
    else answer.error = explain(error);
  }
  made.classList.remove("waiting");
  // Calls of an answer that was cut off may be incomplete.
  if (!finish || !answer.tool_calls.length) delete answer.tool_calls;
  render(true);
  if (answer.error) broken(made, answer);
  // What follows a thought, a call or the beginning of JSON cannot be asked for as a text.
  answer.unfinished = finish !== "stop" && answer.content !== "" && !(answer.reasoning || answer.tool_calls || answer.json);
  if (answer.unfinished) offerToContinue(made, answer);
}

function busy(now) {
  $("#send").hidden = now;
  $("#stop").hidden = !now;
  $("#log").classList.toggle("busy", now);
}

/** Have the current chat answered, unless a tool's result is still to come, or its last answer `begun` continued. The answer has `others`. */
async function answerChat(begun = null, others = null) {
  const thread = chats.chat();
  busy(true);
  try {
    if (!unanswered(thread.messages).length) await complete(thread, begun, others);
  } catch (error) {
    $("#problem").textContent = explain(error);
  }
  running = null;
  busy(false);
  changed();
}

/** Keep the messages that changed, and show what depends on them. */
function changed() {
  chats.keep();
  showList();
  showPromptLabel();
  refreshCode();
}

async function send() {
  const text = $("#prompt").value.trim();
  if (running || !(text || attached.length)) return;
  $("#problem").textContent = $("#model").value ? "" : "No model can chat now. The list of models says why.";
  if (!$("#model").value || !canAsk()) return;
  const message = written(text);
  chats.chat().messages.push(message);
  chats.chat().draft = "";
  $("#prompt").value = "";
  attached = [];
  showAttached();
  show(message);
  await answerChat();
  $("#prompt").focus();
}

/** Show the messages from `at` on again. */
function showFrom(at) {
  for (const made of [...$("#log").children].slice(at)) made.remove();
  for (const message of chats.chat().messages.slice(at)) show(message);
}

/** Return whether the settings make a request, and say why not. */
function canAsk() {
  try {
    request([]);
    $("#problem").textContent = "";
    return true;
  } catch (error) {
    $("#problem").textContent = error.message;
    return false;
  }
}

function askAgain(message) {
  if (running || !canAsk()) return;
  const { messages } = chats.chat(), at = messages.indexOf(message);
  // An answer that broke before its first character is no version.
  const empty = message.error && !message.content && message === messages.at(-1);
  const others = empty ? message.branches : branches.fork(messages, at);
  messages.splice(at);
  showFrom(at);
  answerChat(null, others);
}

/** Delete `message` and all that follow it. */
function remove(message) {
  if (running) return;
  const { messages } = chats.chat(), at = messages.indexOf(message);
  branches.remove(messages, at);
  showFrom(at);
  changed();
}

/** Ask for the rest of the last answer. */
function goOn(message) {
  if (running || !canAsk()) return;
  $("#log").lastElementChild.remove();
  answerChat(message);
}

/** Put a field in the place of a message. What its reader makes of it is a further version; that of a question is answered. */
function edit(message, made) {
  if (running) return;
  const field = Object.assign(el("textarea"), { value: message.content, rows: 4, ariaLabel: "The message" });
  const place = made.querySelector(".said"), actions = made.querySelector(".actions");
  const { messages } = chats.chat(), at = messages.indexOf(message);
  const back = () => showFrom(at);
  const save = () => {
    if (running || !canAsk()) return;
    const others = branches.fork(messages, at), { note, error, unfinished, ...rest } = message;
    messages.push({ ...rest, content: field.value.trim(), branches: others });
    showFrom(at);
    if (message.role === "user") answerChat();
    else changed();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
  });
  place.replaceChildren(field);
  actions.replaceChildren(action(message.role === "user" ? "Send" : "Save", "Ctrl+Enter", save), action("Cancel", "Escape", back));
  field.focus();
}

// Attached files

function showAttached() {
  $("#attached").replaceChildren(...attached.map((file) => el("li.chip", file.name,
    action("×", `Do not attach ${file.name}`, () => {
      attached = attached.filter((one) => one !== file);
      showAttached();
    }))));
}

async function attach(files) {
  $("#problem").textContent = "";
  for (const file of files) {
    if (/^(image|audio)\//.test(file.type)) {
      const url = await new Promise((done) => {
        const reader = new FileReader();
        reader.addEventListener("load", () => done(reader.result));
        reader.readAsDataURL(file);
      });
      attached.push({ name: file.name, url });
    } else if (file.size > MAX_TEXT) {
      $("#problem").textContent = `${file.name} is longer than a million bytes.`;
    } else {
      const text = await file.text();
      if (/[\0\uFFFD]/.test(text)) $("#problem").textContent = `${file.name} is neither an image, nor audio, nor a text.`;
      else attached.push({ name: file.name, text });
    }
  }
  showAttached();
}

// Search

function search() {
  const words = $("#search").value, matches = chats.found(words);
  $("#search-count").textContent = words.trim() ? `${matches.length} ${matches.length === 1 ? "chat" : "chats"}` : "";
  $("#found").replaceChildren(...matches.map(({ id, title, excerpt }) => {
    const button = Object.assign(el("button", el("strong", title), el("span.note", excerpt)), { type: "button" });
    button.addEventListener("click", () => open(id, words.trim().toLowerCase()));
    return el("li", button);
  }));
}

/** Show a chat that was found, at the first message with these words. */
function open(id, words) {
  $("#search-menu").open = false;
  leave();
  chats.choose(id);
  showChat();
  const bubbles = [...$("#log").children];
  const index = chats.chat().messages.findIndex((message) => message.content.toLowerCase().includes(words));
  bubbles[index]?.scrollIntoView({ block: "nearest" });
  $("#prompt").focus();
}

// What the reader does

function keepTyped() {
  const chat = chats.chat();
  chat.draft = $("#prompt").value;
  for (const name of SETTINGS) if ($(`#${name}`).value || name !== "model") chat.settings[name] = $(`#${name}`).value;
  chat.settings.stream = $("#stream").checked;
  chats.keepTyped();
}

function leave() {
  running?.abort();
  $("#problem").textContent = "";
}

function startChat() {
  leave();
  chats.begin();
  showChat();
  $("#prompt").focus();
}

$("#chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("#chat-form").addEventListener("input", () => { keepTyped(); refreshCode(); });
$("#prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("#prompt").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attach(files); }
});
$("#chat").addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
$("#chat").addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
document.addEventListener("keydown", (event) => {
  const key = event.ctrlKey || event.metaKey ? event.key.toLowerCase() : "";
  if (event.key === "Escape") {
    running?.abort();
    for (const menu of document.querySelectorAll(".menu[open]")) {
      if (menu.contains(document.activeElement)) menu.querySelector("summary").focus();
      menu.open = false;
    }
  }
  if (key === "o" && event.shiftKey) { event.preventDefault(); startChat(); }
  if (key === "k" && !event.shiftKey) { event.preventDefault(); $("#search-menu").open = true; }
});
$("#search").addEventListener("input", (event) => { event.stopPropagation(); search(); });
$("#search-menu").addEventListener("toggle", () => {
  if (!$("#search-menu").open) return;
  search();
  $("#search").select();
});
$("#log").addEventListener("click", ({ target }) => {
  if (!target.classList.contains("copy")) return;
  const place = target.nextElementSibling;
  copy(target, place.textContent, place);
});
$("#stop").addEventListener("click", () => running?.abort());
$("#attach").addEventListener("click", () => $("#files").click());
$("#files").addEventListener("change", async () => { await attach([...$("#files").files]); $("#files").value = ""; });
$("#new").addEventListener("click", startChat);
$("#chats").addEventListener("change", () => { leave(); chats.choose($("#chats").value); showChat(); });
$("#title").addEventListener("input", () => { chats.chat().title = $("#title").value.trim(); chats.keepTyped(); });
$("#title").addEventListener("change", () => { chats.keep(); showList(); });
atSecondClick($("#delete"), "Delete it now?", () => { leave(); chats.remove(); showChat(); });
atSecondClick($("#delete-all"), "Delete all now?", () => { leave(); chats.removeAll(); showChat(); });
$("#export").addEventListener("click", () => download(chats.exported(), "chats.json"));
$("#import").addEventListener("click", () => $("#import-file").click());
$("#import-file").addEventListener("change", async () => {
  try {
    chats.add(await $("#import-file").files[0].text());
    showList();
  } catch (error) {
    $("#problem").textContent = error.message;
  }
  $("#import-file").value = "";
});
addEventListener("storage", ({ key }) => {
  if (key !== chats.NAME) return;
  if (chats.takeOthers(running !== null)) showChat();
  else showList();
});
for (const button of document.querySelectorAll("[data-example]")) button.addEventListener("click", () => {
  $(`#${button.dataset.example}`).value = JSON.stringify(EXAMPLES[button.dataset.example], null, 2);
  keepTyped();
  refreshCode();
});
showChat();
