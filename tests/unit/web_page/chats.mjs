// Adds each chat of a JSON list on standard input, and writes which of them were taken, and the titles of two tabs that
// keep chats in turns: `node chats.mjs MODULE`. Of the browser there is what the module uses.
import { argv, default as process } from "node:process";

const kept = new Map();
globalThis.document = { baseURI: "http://127.0.0.1/" };
globalThis.localStorage = { getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text) };

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
first.takeOthers(false);
first.begin();
write(first, "two");
second.takeOthers(false);
second.begin();
write(second, "three");
first.takeOthers(false);
first.keep();
const chats = JSON.parse([...kept.values()][0]);
const texts = chats.flatMap((one) => one.messages.map((message) => message.content)).sort();
process.stdout.write(JSON.stringify({ taken, changed, texts, drafts: chats.map((one) => one.draft).filter(Boolean) }));
