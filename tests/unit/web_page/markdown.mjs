// Renders texts and writes the HTML of each, or of a long one the number of its elements: `node markdown.mjs MODULE`.
// Standard input is a JSON list: of each text its beginning, what is repeated, how often, its end, and the size of the
// pieces in which it is written.
// Of the browser's document there is what the module uses.
import { argv, default as process } from "node:process";

const ESCAPED = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };

class Node {
  constructor(tag, text = "") {
    Object.assign(this, { tagName: tag.toUpperCase(), text, children: [], parent: null, classes: [], dataset: {} });
    this.classList = { add: (...names) => this.classes.push(...names) };
  }

  append(...parts) {
    for (const part of parts) {
      const node = typeof part === "string" ? new Node("", part) : part;
      node.parent = this;
      this.children.push(node);
    }
  }

  remove() {
    // A draft is at the end.
    this.parent.children.splice(this.parent.children.lastIndexOf(this), 1);
  }

  html() {
    const inner = this.children.map((child) => child.html()).join("");
    if (!this.tagName) return this.text.replace(/[&<>]/g, (character) => ESCAPED[character]);
    const tag = this.tagName.toLowerCase();
    const shown = ["href", "start"].filter((name) => this[name] !== undefined).map((name) => ` ${name}="${this[name]}"`);
    if (tag === "span") shown.push(` class=${this.classes.join(" ")}`);
    for (const [name, value] of Object.entries(this.dataset)) shown.push(` data-${name}="${value}"`);
    return `<${tag}${shown.join("")}>${inner}</${tag}>`;
  }
}

globalThis.document = {
  head: new Node("head"),
  createElement: (tag) => new Node(tag),
  createTextNode: (text) => new Node("", text),
};

const { Markdown } = await import(argv[2]);
let input = "";
for await (const piece of process.stdin.setEncoding("utf-8")) input += piece;
const made = JSON.parse(input).map(([begin, one, count, end, size]) => {
  const text = begin + one.repeat(count) + end, began = process.cpuUsage();
  const place = new Node("div"), shown = new Markdown(place);
  for (let at = 0; at < text.length; at += size) shown.write(text.slice(at, at + size));
  const { user, system } = process.cpuUsage(began);
  if (user + system > 3_000_000) console.error(JSON.stringify(one.slice(0, 40)), count, size, (user + system) / 1e6, "s");
  return text.length > 10000 ? place.children.length : place.html();
});
console.log(JSON.stringify(made));
