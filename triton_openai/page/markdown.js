// Markdown of a model's answer as DOM nodes, while it arrives. Text is never read as HTML, and a line that has ended is
// never rendered again: a long answer costs no more per line than a short one.
import { el } from "./common.js";

// The line that has not ended is rendered with each frame, so a longer one is cut.
const LONGEST = 4000;
// What can stand in a line: a sticky pattern, and what it makes (null: nothing, it is text).
const SPANS = [
  [/\\([!-/:-@[-`{-~])/y, ([, character]) => character],
  [/(`+)(?!`)(.*?[^`])\1(?!`)/y, ([, , text]) => el("code", text)],
  [/!?\[([^[\]]*)\]\(\s*<?((?:[^\s<>()]|\([^\s<>()]*\))*)>?(?:\s+"[^"]*")?\s*\)/y, ([, label, url]) => link(inline(label), url)],
  [/(?<!\w)https?:\/\/[^\s<>"'`()[\]]*[^\s<>"'`()[\].,:;!?*_~]/y, ([url]) => link([url], url)],
  [/(\*\*|~~|(?<!\w)__)(?=\S)(.*?\S)\1(?![\w*])/y, ([, mark, text]) => el(mark === "~~" ? "del" : "strong", ...inline(text))],
  [/(\*|(?<!\w)_)(?![\s*_])((?:(?!\1).)*)\1(?<!\s.)(?![\w*])/y, ([, , text]) => el("em", ...inline(text))],
];

/** Make a link, of these schemes only: one of a script would run with the page's rights, a relative one leads into it. */
function link(label, address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return null;
  return Object.assign(el("a", ...label), { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
}

/** Return the texts and elements of a line. */
function inline(text) {
  const made = [];
  let from = 0;
  for (let at = 0; at < text.length; at += 1) {
    if (!"\\`![h*_~".includes(text[at])) continue;
    for (const [pattern, make] of SPANS) {
      pattern.lastIndex = at;
      const found = pattern.exec(text), node = found && make(found);
      if (!node) continue;
      made.push(text.slice(from, at), node);
      from = at + found[0].length;
      at = from - 1;
      break;
    }
  }
  return [...made, text.slice(from)].filter((part) => part !== "");
}

/** An answer as far as it has been written, shown in `place`. */
export class Markdown {
  // Where the next line goes on: the marker of an open code block, the element that it would continue, the open lists.
  #fence = ""; #open = null; #lists = [];
  #place; #rest = ""; #made = []; #draft = [];

  constructor(place) { this.#place = place; }

  /** Add text. Call it once per frame and not for each token. */
  write(text) {
    for (const node of this.#draft) node.remove();
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line);
    for (; this.#rest.length > LONGEST; this.#rest = this.#rest.slice(LONGEST)) this.#line(this.#rest.slice(0, LONGEST), "");
    // The line that has not ended is a draft, for the next call to take away. What may begin a code block has none.
    const state = [this.#fence, this.#open, [...this.#lists]];
    this.#made = [];
    if (this.#rest && !/^\s*(`{1,3}[^`]*|~{2,3}[^~]*)$/.test(this.#rest)) this.#line(this.#rest, "");
    this.#draft = this.#made;
    [this.#fence, this.#open, this.#lists] = state;
  }

  #add(parent, ...children) {
    const nodes = children.map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
    parent.append(...nodes);
    this.#made.push(...nodes);
    return nodes[0];
  }

  #line(line, end = "\n") {
    this.#made = [];
    const fence = /^\s*(`{3,}|~{3,})[^`]*$/.exec(line)?.[1];
    if (this.#fence) {
      if (fence?.startsWith(this.#fence) && line.trim() === fence) this.#fence = "", this.#open = null;
      else this.#add(this.#open, line + end);
      return;
    }
    const indent = /^\s*/.exec(line)[0].length, item = indent > 1 && this.#lists.at(-1)?.item, text = line.trim();
    let found;
    if (fence) {
      this.#fence = fence;
      this.#open = el("code");
      this.#add(item || this.#place, el("pre", this.#open));
    } else if (!text) {
      this.#open = null;
    } else if ((found = /^(#{1,6})\s+(.*)$/.exec(text))) {
      this.#block(`h${Math.min(found[1].length + 3, 6)}`, found[2], false);
    } else if (/^([-*_])[ \t]*(\1[ \t]*){2,}$/.test(text)) {
      this.#block("hr", "", false);
    } else if ((found = /^(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/.exec(text))) {
      this.#item(indent, found[1], found[2]);
    } else if ((found = /^> ?(.*)$/.exec(text)) && this.#open?.tagName !== "BLOCKQUOTE") {
      this.#block("blockquote", found[1]);
    } else if (this.#open) {
      this.#add(this.#open, "\n", ...inline(found ? found[1] : text));
    } else if (item) {
      this.#open = this.#add(item, el("p", ...inline(text)));
    } else {
      this.#block("p", text);
    }
  }

  /** Begin what belongs to no list; the next line can go on with it if it stays open. */
  #block(kind, text, open = true) {
    const made = this.#add(this.#place, el(kind, ...inline(text)));
    [this.#lists, this.#open] = [[], open ? made : null];
  }

  #item(indent, number, text) {
    while (this.#lists.at(-1)?.indent > indent) this.#lists.pop();
    const last = this.#lists.at(-1), kind = number ? "OL" : "UL", deeper = indent > last?.indent + 1;
    if (last && !deeper) this.#lists.pop();
    const list = !deeper && last?.list.tagName === kind ? last.list
      : this.#add(this.#lists.at(-1)?.item ?? this.#place, Object.assign(el(kind.toLowerCase()), number && { start: number }));
    this.#open = this.#add(list, el("li", ...inline(text)));
    this.#lists.push({ indent, list, item: this.#open });
  }
}
