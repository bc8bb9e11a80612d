// Markdown of a model's answer as DOM nodes, while it arrives. Text is never read as HTML, and a line that has ended is
// never rendered again: a long answer costs no more per line than a short one.
import { el } from "./common.js";
import { highlighted } from "./highlight.js";

// The line that has not ended is rendered with each frame, so a longer one is cut.
const LONGEST = 4000;
// What a backslash takes its meaning from, what begins a span, and what a word is made of.
const PUNCTUATION = /[!-/:-@[-`{-~]/, SPECIAL = /[\\`![h*_~$]/g, WORD = /\w/, SPACE = /\s/;
const ADDRESS = /https?:\/\/[^\s<>"'`()[\]]*[^\s<>"'`()[\].,:;!?*_~]/y;
const CLOSING = { "\\[": "\\]", $$: "$$" };
const TAGS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em" };
// A longer run of the same mark is text.
const LONGEST_RUN = 3;
// What stands above a code block: of the name of its language, in characters.
const MAX_LANGUAGE = 30;
// A longer formula stays a source: the time for one grows faster than its length.
const MAX_FORMULA = 3000;

let math = null;

/** Return an element with the formula `tex`; until it is typeset, and if it is broken, with its `source`. */
function formula(tex, source, display) {
  const place = el(`span.math${display ? ".display" : ""}`, el("code", source));
  if (display) place.tabIndex = 0;
  if (tex.length > MAX_FORMULA) return place;
  math ??= import("./math.js");
  math.then(({ typeset }) => typeset(place, tex, display), () => { math = null; });
  return place;
}

/** Make a link, of these schemes only: one of a script would run with the page's rights, a relative one leads into it. */
function link(label, address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return null;
  const made = filled(el("a"), label);
  return Object.assign(made, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
}

/** Append `parts` one by one: a call cannot have as many arguments as a long line has parts. */
function filled(parent, parts) {
  for (const part of parts) parent.append(part);
  return parent;
}

/** Return `parts` without empty texts, and with texts that follow each other as one. */
function joined(parts) {
  const made = [];
  let texts = [];
  for (const part of [...parts, null]) {
    if (typeof part === "string") {
      texts.push(part);
      continue;
    }
    const text = texts.join("");
    texts = [];
    if (text) made.push(text);
    if (part) made.push(part);
  }
  return made;
}

/**
 * The texts and elements of a line, in one pass: each character is looked at a few times, whatever stands around it.
 * What may open an emphasis is a text until something closes it; then the parts behind it become one element.
 */
class Line {
  #text; #at = 0; #parts = []; #openers = []; #places = new Map(); #fences = null; #unclosed = new Set();

  constructor(text) { this.#text = text; }

  parts() {
    const text = this.#text;
    while (this.#at < text.length) {
      SPECIAL.lastIndex = this.#at;
      const next = SPECIAL.exec(text)?.index ?? text.length;
      this.#parts.push(text.slice(this.#at, next));
      this.#at = next;
      if (next < text.length) this.#special(text[next]);
    }
    return joined(this.#parts);
  }

  /** Add a part that ends at `end`. */
  #take(part, end) {
    this.#parts.push(part);
    this.#at = end;
  }

  #special(mark) {
    const at = this.#at, text = this.#text;
    if (mark === "\\") {
      if (this.#bracketed(text[at + 1])) return;
      const escaped = at + 1 < text.length && PUNCTUATION.test(text[at + 1]);
      this.#take(escaped ? text[at + 1] : mark, at + (escaped ? 2 : 1));
    } else if (mark === "`") {
      this.#code();
    } else if (mark === "h") {
      this.#address();
    } else if (mark === "$") {
      this.#dollars();
    } else if (mark === "[" || mark === "!") {
      this.#link();
    } else {
      this.#emphasis(mark);
    }
  }

  /** Return the place behind the run of `mark` at `at`. */
  #run(mark, at) {
    while (this.#text[at] === mark) at += 1;
    return at;
  }

  /** Take a formula up to `close`, if there is something in it. Return whether it was one. */
  #formula(begin, close, end, display) {
    const tex = this.#text.slice(begin, close);
    if (!tex.trim()) return false;
    this.#take(formula(tex, this.#text.slice(this.#at, end), display), end);
    return true;
  }

  /** Take a formula of the form `\(x\)` or `\[x\]`. Return whether there was one. */
  #bracketed(mark) {
    const closing = { "(": "\\)", "[": "\\]" }[mark], begin = this.#at + 2;
    if (!closing || this.#unclosed.has(closing)) return false;
    const close = this.#text.indexOf(closing, begin);
    // Nor will there be one further on: looking again would take quadratic time.
    if (close < 0) this.#unclosed.add(closing);
    return close >= 0 && this.#formula(begin, close, close + 2, mark === "[");
  }

  /** Take a formula of the form `$x$` or `$$x$$`, which ends at the next dollar: those of prices and variables are text. */
  #dollars() {
    const at = this.#at, text = this.#text, begin = this.#run("$", at), size = begin - at;
    const close = size > 2 ? -1 : this.#nextDollar(begin), end = close + size;
    const closes = close >= 0 && this.#run("$", close) === end && (size === 2 || isFormula(text, at, close));
    if (!closes || !this.#formula(begin, close, end, size === 2)) this.#take(text.slice(at, begin), begin);
  }

  #nextDollar(at) {
    for (const text = this.#text; at < text.length; at += text[at] === "\\" ? 2 : 1) if (text[at] === "$") return at;
    return -1;
  }

  #code() {
    const at = this.#at, text = this.#text, end = this.#run("`", at), size = end - at;
    this.#fences ??= this.#backticks();
    // The places of the runs of this length, the last first; those behind us are of no use any more.
    const places = this.#fences.get(size) ?? [];
    while (places.length && places.at(-1) < end) places.pop();
    const close = places.at(-1);
    if (close === undefined) this.#take(text.slice(at, end), end);
    else this.#take(el("code", text.slice(end, close)), close + size);
  }

  /** Return the places of all runs of backticks by their lengths, the last first. */
  #backticks() {
    const found = new Map();
    for (const { 0: run, index } of this.#text.matchAll(/`+/g)) {
      if (!found.has(run.length)) found.set(run.length, []);
      found.get(run.length).push(index);
    }
    for (const places of found.values()) places.reverse();
    return found;
  }

  #address() {
    const at = this.#at, text = this.#text;
    ADDRESS.lastIndex = at;
    const url = at && WORD.test(text[at - 1]) ? null : ADDRESS.exec(text)?.[0];
    const made = url ? link([url], url) : null;
    if (made) this.#take(made, at + url.length);
    else this.#take("h", at + 1);
  }

  #link() {
    const at = this.#at, text = this.#text, begin = at + (text[at] === "!" ? 2 : 1);
    let end = text[begin - 1] === "[" ? begin : text.length;
    while (end < text.length && text[end] !== "[" && text[end] !== "]") end += 1;
    const [address, after] = text[end] === "]" ? destination(text, end + 1) : [null, 0];
    const made = address === null ? null : link(new Line(text.slice(begin, end)).parts(), address);
    if (made) this.#take(made, after);
    else this.#take(text[at], at + 1);
  }

  #emphasis(mark) {
    const at = this.#at, text = this.#text, end = this.#run(mark, at), before = text[at - 1] ?? " ", after = text[end] ?? " ";
    let left = end - at > LONGEST_RUN ? 0 : end - at;
    if (!SPACE.test(before) && !WORD.test(after)) {
      for (let size; (size = this.#nearest(mark, left)); left -= size) this.#close(mark.repeat(size));
    }
    const opens = !SPACE.test(after) && !(mark === "_" && WORD.test(before));
    for (const size of opens ? [2, 1] : []) {
      if (left >= size && !(mark === "~" && size === 1)) {
        this.#open(mark.repeat(size));
        left -= size;
      }
    }
    this.#take(end - at > LONGEST_RUN ? text.slice(at, end) : mark.repeat(left), end);
  }

  /** Return the length of the marker that `most` characters close: as long as they are, or the one opened last; or 0. */
  #nearest(mark, most) {
    const last = (size) => (most >= size ? this.#places.get(mark.repeat(size))?.at(-1) ?? -1 : -1);
    const one = last(1), two = last(2);
    if (one < 0 && two < 0) return 0;
    return two > one || (two >= 0 && most === 2) ? 2 : 1;
  }

  #open(marker) {
    if (!this.#places.has(marker)) this.#places.set(marker, []);
    this.#places.get(marker).push(this.#parts.length);
    this.#openers.push(marker);
    this.#parts.push(marker);
  }

  /** Make an element of what follows the last such marker. What was opened in between stays text. */
  #close(marker) {
    let opener;
    let place;
    do {
      opener = this.#openers.pop();
      place = this.#places.get(opener).pop();
    } while (opener !== marker);
    const inner = this.#parts.splice(place);
    this.#parts.push(filled(el(TAGS[marker]), joined(inner.slice(1))));
  }
}

/** Return whether what stands between the dollars at `at` and `close` is a formula, and not a price or a shell's variable. */
function isFormula(text, at, close) {
  const before = text[at - 1] ?? " ", last = text[close - 1], after = text[close + 1] ?? " ";
  if (WORD.test(before) || SPACE.test(text[at + 1]) || SPACE.test(last) || /\d/.test(after)) return false;
  // As in "the $n$th".
  return !WORD.test(after) || /[\w)}\]']/.test(last);
}

/** Return the address in the parentheses at `at`, and the place behind them; null if there is none. */
function destination(text, at) {
  const none = [null, 0];
  const spaces = () => {
    const from = at;
    while (at < text.length && SPACE.test(text[at])) at += 1;
    return at > from;
  };
  if (text[at] !== "(") return none;
  at += 1;
  spaces();
  if (text[at] === "<") at += 1;
  const begin = at;
  for (let depth = 0; at < text.length && !/[\s<>]/.test(text[at]); at += 1) {
    if (text[at] === "(") depth += 1;
    if (text[at] === ")") depth -= 1;
    // One pair may be inside.
    if (depth < 0 || depth > 1) break;
  }
  const address = text.slice(begin, at);
  if (text[at] === ">") at += 1;
  if (spaces() && text[at] === '"') {
    const quote = text.indexOf('"', at + 1);
    if (quote < 0) return none;
    at = quote + 1;
    spaces();
  }
  return text[at] === ")" ? [address, at + 1] : none;
}

/** Return how a line begins a formula that it does not end, and the rest of it; null if it begins none. */
function openFormula(text) {
  const opening = text.slice(0, 2), line = text.slice(2);
  return opening in CLOSING && !line.includes(CLOSING[opening]) ? { opening, line } : null;
}

/** Return whether a line is a rule: three or more of one mark, and blanks. */
function isRule(text) {
  if (!"-*_".includes(text[0])) return false;
  const marks = text.replace(/[ \t]/g, "");
  return marks.length > 2 && marks === text[0].repeat(marks.length);
}

/** Return the cells of a table's row; a bar behind a backslash is text. */
function cells(text) {
  const made = [];
  let cell = "";
  for (let at = text[0] === "|" ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      at += 1;
      cell += "|";
    } else if (text[at] === "|") {
      made.push(cell.trim());
      cell = "";
    } else {
      cell += text[at];
    }
  }
  return cell.trim() ? [...made, cell.trim()] : made;
}

/** Return how the columns are aligned that the second line of a table describes; null if it is no such line. */
function alignments(text) {
  if (!text.includes("-") || !/^[-:|\s]+$/.test(text)) return null;
  const marks = cells(text);
  if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
}

/** Return the text of a list's item, in which a task's `[ ]` or `[x]` is a box. */
function withBox(text) {
  return text.replace(/^\[([ xX])\]\s+/, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

/** Return the texts and elements of a line. */
const inline = (text) => new Line(text).parts();

/** An answer as far as it has been written, shown in `place`. */
export class Markdown {
  // Where the next line goes on: the marker of an open code block and its language, the element that it would continue, the open lists.
  #fence = ""; #language = ""; #open = null; #lists = [];
  // The open formula of several lines: its closing mark, its source so far, and its place.
  #formula = null;
  // The last line of the open paragraph and its nodes: a table's head, if the next line describes columns. The open table.
  #head = null; #table = null;
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
    const state = [this.#fence, this.#language, this.#open, [...this.#lists], this.#head, this.#table, this.#formula];
    this.#made = [];
    // Nor has the line that makes the line before it the head of a table.
    const begins = /^\s*(`{1,3}[^`]*|~{2,3}[^~]*)$/.test(this.#rest) || (this.#head && /^[-:|\s]+$/.test(this.#rest));
    if (this.#rest && !begins) this.#line(this.#rest, "");
    this.#draft = this.#made;
    [this.#fence, this.#language, this.#open, this.#lists, this.#head, this.#table, this.#formula] = state;
  }

  #add(parent, children) {
    const nodes = children.map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
    filled(parent, nodes);
    for (const node of nodes) this.#made.push(node);
    return nodes[0];
  }

  #line(line, end = "\n") {
    this.#made = [];
    const fence = /^\s*(`{3,}(?!`)|~{3,}(?!~))[^`]*$/.exec(line)?.[1];
    if (this.#fence) {
      if (fence?.startsWith(this.#fence) && line.trim() === fence) this.#fence = "", this.#open = null;
      else this.#add(this.#open, joined([...highlighted(line, this.#language), end]));
      return;
    }
    if (this.#formula && this.#goOn(line)) return;
    const indent = /^\s*/.exec(line)[0].length, item = indent > 1 && this.#lists.at(-1)?.item, text = line.trim();
    const head = this.#head, columns = head && alignments(text);
    this.#head = null;
    if (this.#table && text.includes("|") && !fence) {
      this.#row(text);
      return;
    }
    this.#table = null;
    let found;
    if (fence) {
      this.#fence = fence;
      this.#open = el("code");
      const code = el("pre", this.#open);
      code.tabIndex = 0;
      const block = el("div.block", el("button.copy", "Copy"), code);
      const [language] = text.slice(fence.length).trim().split(/\s/, 1);
      this.#language = language.slice(0, MAX_LANGUAGE);
      if (language) block.dataset.language = this.#language;
      this.#add(item || this.#place, [block]);
    } else if (!text) {
      this.#open = null;
    } else if ((found = openFormula(text))) {
      this.#beginFormula(found, item || this.#place);
    } else if (columns && columns.length === cells(head.text).length) {
      this.#begin(head, columns, item);
    } else if ((found = /^(#{1,6})\s+(.*)$/s.exec(text))) {
      this.#block(`h${Math.min(found[1].length + 2, 6)}`, found[2], false);
    } else if (isRule(text)) {
      this.#block("hr", "", false);
    } else if ((found = /^(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/s.exec(text))) {
      this.#item(indent, found[1], found[2]);
    } else if ((found = /^> ?(.*)$/s.exec(text)) && this.#open?.tagName !== "BLOCKQUOTE") {
      this.#block("blockquote", found[1]);
    } else if (this.#open) {
      const from = this.#made.length;
      this.#add(this.#open, ["\n", ...inline(found ? found[1] : text)]);
      this.#note(text, this.#made.slice(from));
    } else if (item) {
      this.#open = this.#add(item, [filled(el("p"), inline(text))]);
    } else {
      this.#block("p", text);
      this.#note(text, [this.#open]);
    }
  }

  #beginFormula({ opening, line }, parent) {
    const source = el("code", `${opening}${line}\n`), place = el("div.formula", source);
    this.#add(parent, [place]);
    this.#open = null;
    this.#formula = { opening, tex: `${line}\n`, source, place };
  }

  /** Add a line to the open formula. Return whether it is part of it: a blank line, or too many, end what stays a source. */
  #goOn(line) {
    const { opening, tex, source, place } = this.#formula, close = line.indexOf(CLOSING[opening]);
    const all = tex + (close < 0 ? `${line}\n` : line.slice(0, close));
    if (!line.trim() || all.length > MAX_FORMULA) {
      this.#formula = null;
      return false;
    }
    if (close < 0) {
      this.#add(source, [`${line}\n`]);
      this.#formula = { ...this.#formula, tex: all };
      return true;
    }
    // The style hides the source when the formula is behind it. So a draft leaves it there.
    const rest = line.slice(close + 2).trim();
    this.#add(place, [formula(all, opening + all + CLOSING[opening], true), ...(rest ? [filled(el("p"), inline(rest))] : [])]);
    this.#formula = null;
    return true;
  }

  /** Keep a line that can be the head of a table. */
  #note(text, nodes) {
    if (text.includes("|")) this.#head = { text, nodes };
  }

  /** Begin a table, whose head has been shown as text. */
  #begin(head, columns, item) {
    for (const node of head.nodes) node.remove();
    const body = el("tbody"), row = el("tr");
    for (const [index, cell] of cells(head.text).entries()) row.append(filled(el(`th.${columns[index]}`), inline(cell)));
    const place = el("div.table", el("table", el("thead", row), body));
    place.tabIndex = 0;
    this.#add(item || this.#place, [place]);
    this.#open = null;
    this.#table = { body, columns };
  }

  #row(text) {
    const { body, columns } = this.#table, row = el("tr");
    // A short row stays short: many of them would make more cells than there is text.
    for (const [index, cell] of cells(text).slice(0, columns.length).entries()) {
      row.append(filled(el(`td.${columns[index]}`), inline(cell)));
    }
    this.#add(body, [row]);
  }

  /** Begin what belongs to no list; the next line can go on with it if it stays open. */
  #block(kind, text, open = true) {
    const made = this.#add(this.#place, [filled(el(kind), inline(text))]);
    [this.#lists, this.#open] = [[], open ? made : null];
  }

  #item(indent, number, text) {
    while (this.#lists.at(-1)?.indent > indent) this.#lists.pop();
    const last = this.#lists.at(-1), kind = number ? "OL" : "UL", deeper = indent > last?.indent + 1;
    if (last && !deeper) this.#lists.pop();
    const list = !deeper && last?.list.tagName === kind ? last.list
      : this.#add(this.#lists.at(-1)?.item ?? this.#place, [Object.assign(el(kind.toLowerCase()), number && { start: number })]);
    const formula = openFormula(text);
    this.#open = this.#add(list, [filled(el("li"), formula ? [] : inline(withBox(text)))]);
    this.#lists.push({ indent, list, item: this.#open });
    if (formula) this.#beginFormula(formula, this.#open);
  }
}
