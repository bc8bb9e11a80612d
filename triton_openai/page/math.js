// Formulas as MathML. This module, and Temml, which is larger than the page, are loaded with the first formula.
import { atEnd, el } from "./common.js";

// What is deeper stays a source: the time for it grows faster than its length.
const MAX_DEPTH = 40;
// Macros of a formula's own can double each other, so a short formula could take all memory.
const DEFINITION = /\\(?:[gex]?def|(?:re)?newcommand|providecommand|(?:future)?let|global|long)(?![A-Za-z])/;
// The sizes, of spaces for example, are in em and in points.
const OPTIONS = { throwOnError: true, trust: false, maxSize: [20, 200] };
const MATHML = "http://www.w3.org/1998/Math/MathML";
// How many formulas are kept, and how long the page waits for formulas at a time.
const MAX_KEPT = 300, TURN_MS = 8;

// By how it is shown and its source: the formula's element, or null for one that is broken.
const kept = new Map();
// Places of formulas: of those that are kept, and of others.
let known = [], waiting = [];
let planned = false, library = null;

/** Load Temml, which is no module, and the style of formulas. */
function load() {
  const place = (name) => new URL(name, import.meta.url).href;
  const loaded = (made, address) => new Promise((onload, onerror) => {
    document.head.append(Object.assign(made, address, { onload, onerror }));
  });
  return Promise.all([
    loaded(el("link"), { rel: "stylesheet", href: place("math.css") }),
    loaded(el("script"), { src: place("temml.js") }),
  ]);
}

/** Show the formula `tex` in `place`, if it is right: before the browser paints again if it is kept, else where there is time. */
export async function typeset(place, tex, display) {
  if (DEFINITION.test(tex) || depth(tex) > MAX_DEPTH) return;
  const one = { place, tex, display, key: `${display} ${tex}` };
  (kept.has(one.key) ? known : waiting).push(one);
  if (planned) return;
  planned = true;
  try {
    await (library ??= load());
    work();
  } catch {
    // The sources stay, and the next formula tries again.
    [known, waiting, planned, library] = [[], [], false, null];
  }
}

/** Show what is kept, and of what waits at least one, the last first, for the log shows its end. */
function work() {
  const end = performance.now() + TURN_MS;
  atEnd(() => {
    for (const one of known.splice(0)) fill(one);
    do {
      if (waiting.length) fill(waiting.pop());
    } while (waiting.length && performance.now() < end);
  });
  planned = waiting.length > 0;
  if (planned) setTimeout(work);
}

function fill({ place, tex, display, key }) {
  // A draft has been taken away.
  if (!place.isConnected) return;
  if (!kept.has(key)) {
    if (kept.size === MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(key, made(tex, display));
  }
  const node = kept.get(key);
  if (!node) return;
  place.title = tex.trim();
  place.replaceChildren(node.cloneNode(true));
}

/** Return the element of a formula; null for one that is broken. */
function made(tex, display) {
  const place = el("span");
  try {
    globalThis.temml.render(tex, place, { ...OPTIONS, displayMode: display });
  } catch {
    return null;
  }
  return [...place.querySelectorAll("*")].every(isSafe) ? place.firstElementChild : null;
}

/** Return whether an element shows something and does nothing. */
function isSafe({ namespaceURI, localName, attributes }) {
  return (namespaceURI === MATHML || localName === "span") && [...attributes].every(({ name }) => !/^on|href|src|action/.test(name));
}

/** Return how deep the groups and environments of a formula are. */
function depth(tex) {
  let now = 0, most = 0;
  for (const [mark] of tex.matchAll(/\\(?:begin|end|left|right)(?![A-Za-z])|\\.|[{}]/gs)) {
    if (["{", "\\begin", "\\left"].includes(mark)) now += 1;
    if (["}", "\\end", "\\right"].includes(mark)) now -= 1;
    most = Math.max(most, now);
  }
  return most;
}
