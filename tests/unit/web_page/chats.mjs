// Adds each chat of a JSON list on standard input, and writes which of them were taken, the titles of two tabs that
// keep chats in turns, and what is written while a reader types: `node chats.mjs MODULE`. Of the browser there is what the
// module uses.
import { argv, default as process } from "node:process";

const kept = new Map();
let written = [];
globalThis.document = { baseURI: "http://127.0.0.1/" };
globalThis.localStorage = {
  getItem: (name) => kept.get(name) ?? null,
  setItem: (name, text) => { kept.set(name, text); written.push(text.length); },
  removeItem: (name) => kept.delete(name),
};

let input = "";
for await (const piece of process.stdin.setEncoding("utf-8")) input += piece;
const first = await import(`${argv[2]}?first`);
const taken = JSON.parse(input).map((one) => {
  try {
    first.add(JSON.stringify(one));
    return true;
  } catch {
    return false;
  }
});
first.removeAll();

const second = await import(`${argv[2]}?second`);
const write = (tab, text) => {
  tab.chat().messages.push({ role: "user", content: text });
  tab.keep();
};
// Both tabs have the same chat. One goes on with it while a draft is written in the other.
write(first, "one");
second.chat().draft = "draft";
const changed = second.takeOthers(false);
second.keep();
const { messages } = first.chat();
first.takeOthers(false);
const same = first.chat().messages === messages;
first.begin();
write(first, "two");
second.takeOthers(false);
second.begin();
write(second, "three");
first.takeOthers(false);
first.keep();
const chats = JSON.parse([...kept.values()][0]);
const texts = chats.flatMap((one) => one.messages.map((message) => message.content)).sort();

// A reader types into a long chat, leaves it for another one, and loads the page again.
const typing = await import(`${argv[2]}?typing`);
write(typing, "long".repeat(100_000));
const long = typing.chat().id;
written = [];
for (const draft of ["H", "He", "Hey"]) {
  typing.chat().draft = draft;
  typing.keepTyped();
}
const largest = Math.max(...written);
const draftOf = (tab) => tab.all().find((one) => one.id === long).draft;
const afterReload = draftOf(await import(`${argv[2]}?reload`));
typing.choose(typing.all().find((one) => one.id !== long).id);
typing.keep();
const afterLeaving = draftOf(await import(`${argv[2]}?left`));
// What is sent is typed no more.
typing.choose(long);
typing.chat().draft = "";
typing.keep();
const afterSending = draftOf(await import(`${argv[2]}?sent`));
// A new chat is kept from the first key on, and so is one that another tab has left out.
typing.begin();
write(second, "four");
typing.takeOthers(false);
typing.chat().draft = "new";
typing.keepTyped();
const ofNew = (await import(`${argv[2]}?new`)).all().find((one) => one.id === typing.chat().id)?.draft;
// Something else under the name of what is typed.
kept.set([...kept.keys()][0] + ` typed ${long}`, "{");
const withOthers = (await import(`${argv[2]}?others`)).all().length;
kept.delete([...kept.keys()][0] + ` typed ${long}`);
typing.chat().draft = "newer";
typing.keepTyped();
typing.removeAll();
const left = [...kept.values()].join("").includes("newer");
const drafts = chats.map((one) => one.draft).filter(Boolean);
const typed = { largest, afterReload, afterLeaving, afterSending, ofNew, withOthers: withOthers > 1, left };
process.stdout.write(JSON.stringify({ taken, changed, same, texts, drafts, typed }));
