// Typesets formulas and writes the markup of each, or null: `node formulas.mjs FOLDER`, the folder of the page's files.
// Standard input is a JSON list. Of the browser there is what the modules use.
import { readFileSync } from "node:fs";
import { argv, default as process } from "node:process";
import { runInThisContext } from "node:vm";

runInThisContext(readFileSync(`${argv[2]}/temml.js`, "utf-8"));
const { temml } = globalThis;
const made = new Map();

class Node {
  constructor() { Object.assign(this, { classList: { add() {} }, attributes: [], scrollHeight: 0, scrollTop: 0, clientHeight: 0 }); }
  append(script) { script?.onload?.(); }
  querySelectorAll() { return []; }
  get firstElementChild() { return this; }
  cloneNode() { return this; }
}
globalThis.document = { head: new Node(), createElement: () => new Node(), querySelector: () => new Node() };
// Without a document the library writes markup.
globalThis.temml = { render: (tex, place, options) => { place.markup = temml.renderToString(tex, options); } };

const { typeset } = await import(`${argv[2]}/math.js`);
let input = "";
for await (const piece of process.stdin.setEncoding("utf-8")) input += piece;
const formulas = JSON.parse(input);
for (const [index, tex] of formulas.entries()) {
  const began = process.cpuUsage();
  await typeset({ isConnected: true, replaceChildren: (node) => made.set(index, node.markup) }, tex, true);
  const { user, system } = process.cpuUsage(began);
  if (user + system > 3_000_000) console.error(tex.slice(0, 40), (user + system) / 1e6, "s");
}
console.log(JSON.stringify(formulas.map((_, index) => made.get(index) ?? null)));
