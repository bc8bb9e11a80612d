// Goes through the versions of a chat, and searches in it: `node branches.mjs FOLDER`, the folder of the page's files. Writes
// what the messages are after each step. Of the browser there is what the modules use.
import { argv, default as process } from "node:process";

const kept = new Map();
let room = Infinity;
globalThis.document = { baseURI: "http://127.0.0.1/" };
globalThis.localStorage = {
  getItem: (name) => kept.get(name) ?? null,
  setItem: (name, text) => {
    if (text.length > room) throw new Error("full");
    kept.set(name, text);
  },
  removeItem: (name) => kept.delete(name),
};
const branches = await import(`${argv[2]}/branches.js`);
const chats = await import(`${argv[2]}/chats.js`);
const { messages } = chats.chat();
const texts = (all = messages) => all.map(({ content, branches: others }) => content + (others ? ` ${others.index + 1}/${others.tails.length + 1}` : ""));
const steps = {};
const say = (role, content, more) => messages.push({ role, content, ...more });

say("user", "q1");
say("assistant", "a1");
say("user", "q2", { images: ["data:image/png;base64,AAAA"] });
say("assistant", "a2");
// The last answer is made again, twice.
for (const content of ["a3", "a4"]) say("assistant", content, { branches: branches.fork(messages, 3) });
steps.regenerated = texts();
branches.choose(messages, 3, 0);
steps.first = texts();
// The first question is changed: all that followed belongs to its first version.
say("user", "Other QUESTION", { branches: branches.fork(messages, 0) });
say("assistant", "b1");
steps.edited = texts();
chats.keep();
steps.reloaded = texts((await import(`${argv[2]}/chats.js?reload`)).chat().messages);
const found = (words) => chats.found(words).map(({ title, excerpt }) => [title, excerpt]);
steps.found = [found("question"), found(" A4 "), found("nothing"), found(" ")];
branches.choose(messages, 0, 0);
steps.back = texts();
branches.choose(messages, 3, 2);
branches.remove(messages, 3);
steps.removed = texts();
branches.remove(messages, 3);
steps.removedTwice = texts();
branches.choose(messages, 0, 1);
steps.other = texts();
// Images of versions that are not on the screen go too where there is no room.
room = JSON.stringify([chats.chat()]).length - 20;
chats.keep();
const [small] = JSON.parse([...kept.values()][0]);
steps.withoutImages = [...branches.every(small.messages)].map(({ content, images }) => content + (images ? " image" : ""));
branches.remove(messages, 0);
branches.remove(messages, 0);
steps.empty = texts();
process.stdout.write(JSON.stringify(steps));
