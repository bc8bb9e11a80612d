// The chats of this reader, kept in this browser: never an API key. A chat is its messages, its draft and its settings.

import { changed, every } from "./branches.js";

// Each address of the service has its own.
export const NAME = `triton-openai chats ${new URL(".", document.baseURI).pathname}`;
const FIELDS = ["id", "title", "changed", "messages", "draft", "settings"];
// What is typed changes with each key. It is kept for each chat alone, for all chats can be megabytes.
const TYPED = ["title", "draft", "settings"];
const ROLES = ["user", "assistant", "tool"];
// Of what a search finds, and how many characters are shown before it and behind it.
const MAX_FOUND = 20, AROUND = 40;

const kept = stored();
let chats = kept.length ? kept : [made()];
let current = chats[0];
// Whether the browser keeps the current chat, to which what is typed can be added.
let currentIsKept = kept.length > 0;

/** Return the chats that this browser keeps, with what was typed in them since. */
function stored() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "[]").filter(isChat).map(withTyped).map(whole);
  } catch { /* The browser keeps nothing, or something else is there. */ }
  return [];
}

/** Return the name under which the browser keeps what is typed in a chat. */
function typedName(one) {
  return `${NAME} typed ${one.id}`;
}

function withTyped(one) {
  try {
    const typed = JSON.parse(localStorage.getItem(typedName(one))) ?? {};
    return { ...one, ...picked(typed, TYPED.filter((name) => name in typed)) };
  } catch { /* Something else is there. */ }
  return one;
}

function forget(name) {
  try {
    localStorage.removeItem(name);
  } catch { /* The browser keeps nothing. */ }
}

function picked(one, fields) {
  return Object.fromEntries(fields.map((name) => [name, one[name]]));
}

/** Return whether something that was kept or imported is a chat that the page can show. */
function isChat(one) {
  return typeof one?.id === "string" && Array.isArray(one.messages) && one.messages.every(isMessage);
}

function isMessage(message) {
  const { role, content, model = "", reasoning = "", images = [], audio = [], tool_calls = [], branches } = message ?? {};
  return ROLES.includes(role) && [content, model, reasoning].every((text) => typeof text === "string")
    && areFiles(images, "data:image/") && areFiles(audio, "data:audio/")
    && Array.isArray(tool_calls) && tool_calls.every(isCall)
    && (branches === undefined || areBranches(branches));
}

function areFiles(urls, begin) {
  return Array.isArray(urls) && urls.every((url) => typeof url === "string" && url.startsWith(begin));
}

function areBranches(branches) {
  const { index, tails } = branches ?? {};
  return Array.isArray(tails) && tails.length > 0 && tails.every((tail) => tail?.length && tail.every(isMessage))
    && Number.isInteger(index) && index >= 0 && index <= tails.length;
}

function isCall(call) {
  return [call?.id, call?.function?.name, call?.function?.arguments].every((text) => typeof text === "string");
}

/** Return a chat with all of its fields, and no others. */
function whole(one) {
  return { id: one.id, title: String(one.title ?? ""), changed: Number(one.changed) || 0, messages: one.messages,
    draft: String(one.draft ?? ""), settings: { ...one.settings } };
}

function made() {
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", changed: Date.now(), messages: [], draft: "", settings: {} };
}

/** Keep all chats. Where there is no room, the oldest attachments go, and then the oldest chats. */
export function keep() {
  current.changed = Date.now();
  currentIsKept = true;
  const kept = [];
  for (const chat of chats) {
    const stays = chat.messages.length > 0 || chat === current;
    if (stays) kept.push(picked(chat, FIELDS));
    if (!stays || chat === current) forget(typedName(chat));
  }
  while (kept.length) {
    try {
      localStorage.setItem(NAME, JSON.stringify(kept));
      return;
    } catch {
      const heavy = kept.findLastIndex((chat) => every(chat.messages).some((message) => message.images?.length || message.audio?.length));
      if (heavy < 0) kept.pop();
      else kept[heavy] = { ...kept[heavy], messages: changed(kept[heavy].messages, ({ images, audio, ...rest }) => rest) };
    }
  }
}

/** Keep what is typed in the current chat: its draft, its title and its settings. */
export function keepTyped() {
  if (!currentIsKept) {
    keep();
    return;
  }
  try {
    localStorage.setItem(typedName(current), JSON.stringify(picked(current, TYPED)));
  } catch {
    // There is no room: `keep` makes some.
    keep();
  }
}

/**
 * Take what another tab has kept: without it, the next `keep` here would lose it. The current chat stays as it is while it
 * is `busy`, and its draft in any case. Return whether its messages are others now.
 */
export function takeOthers(busy) {
  chats = stored();
  const index = chats.findIndex((one) => one.id === current.id);
  const mine = current;
  currentIsKept = index >= 0;
  if (index < 0) chats.unshift(mine);
  else if (busy) chats[index] = mine;
  else current = Object.assign(chats[index], { draft: mine.draft || chats[index].draft });
  const same = JSON.stringify(current.messages) === JSON.stringify(mine.messages);
  // The buttons on the screen are of these.
  if (same) current.messages = mine.messages;
  return !same;
}

export const all = () => chats;
export const chat = () => current;

/** Return what a chat is called: by its reader, or by its first message. */
export function titleOf(one) {
  const first = one.messages.find((message) => message.role === "user")?.content.trim().split("\n")[0] ?? "";
  return one.title || (first.length > 50 ? `${first.slice(0, 50)}…` : first) || "New chat";
}

/** Return the chats that have `words` in their names or messages, each with the text around them. */
export function found(words) {
  const wanted = words.trim().toLowerCase(), matches = [];
  for (const one of wanted ? chats : []) {
    for (const text of [titleOf(one), ...every(one.messages).map((message) => message.content)]) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at < 0) continue;
      const begin = Math.max(0, at - AROUND);
      matches.push({ id: one.id, title: titleOf(one), excerpt: text.slice(begin, at + wanted.length + AROUND) });
      break;
    }
    if (matches.length === MAX_FOUND) break;
  }
  return matches;
}

/** Begin a chat with the settings of the current one. */
export function begin() {
  if (!current.messages.length) return;
  current = { ...made(), settings: { ...current.settings } };
  chats.unshift(current);
  keep();
}

export function choose(id) {
  current = chats.find((one) => one.id === id) ?? current;
  // One without messages is kept while it is the current one.
  currentIsKept = current.messages.length > 0;
}

export function remove() {
  forget(typedName(current));
  chats = chats.filter((one) => one !== current);
  if (!chats.length) chats.push({ ...made(), settings: { ...current.settings } });
  current = chats[0];
  keep();
}

export function removeAll() {
  for (const chat of chats) forget(typedName(chat));
  chats = [made()];
  current = chats[0];
  keep();
}

export const exported = () => JSON.stringify(chats.filter((one) => one.messages.length), null, 2);

/** Add chats that were exported. Throws an Error for what are none. */
export function add(text) {
  let found;
  try {
    found = [JSON.parse(text)].flat();
  } catch {
    found = [];
  }
  if (!found.length || !found.every(isChat)) throw new Error("This file has no chats of this page.");
  const known = new Set(chats.map((one) => one.id));
  for (const one of found) {
    chats.push({ ...whole(one), ...(known.has(one.id) && { id: made().id }) });
  }
  chats.sort((one, other) => other.changed - one.changed);
  keep();
}
