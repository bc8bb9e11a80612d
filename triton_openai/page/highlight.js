// The colours of a line of code: comments, texts, numbers and key words. A line is read by itself, so what spans several
// lines, such as a long comment, has no colour of its own.
import { el } from "./common.js";

// A longer line has no colours: each of its parts would be an element.
const MAX_LINE = 1000;
const DOUBLE = '"(?:\\\\.|[^"\\\\])*"?', SINGLE = "'(?:\\\\.|[^'\\\\])*'", BACKQUOTE = "`[^`]*`?";
const HASH = "(?<!\\S)#.*", SLASHES = "(?<!:)//.*|/\\*.*?(?:\\*/|$)", DASHES = "--.*";
const C_WORDS = "abstract as async await break case catch class const continue default delete do else enum export extends false "
  + "final finally float for from func function go goto if implements import in instanceof int interface let long namespace "
  + "new null of override package private protected public return short static struct super switch this throw true try type "
  + "typedef typeof undefined unsigned using var virtual void while yield bool boolean char double fun val map range defer nil";

/** What languages have in common: their names, what begins a comment, their texts, and their key words. */
const FAMILIES = [
  { names: "python py", comment: HASH, texts: [DOUBLE, SINGLE],
    words: "and as assert async await break class continue def del elif else except False finally for from global if import in is "
      + "lambda None nonlocal not or pass raise return True try while with yield match case self" },
  { names: "bash sh shell zsh fish dockerfile makefile ruby rb perl r", comment: HASH, texts: [DOUBLE, SINGLE],
    words: "if then else elif fi for while until do done case esac in function return export local set unset def end module class "
      + "require unless begin rescue yield FROM RUN COPY CMD ENTRYPOINT ENV ARG WORKDIR USER EXPOSE AS" },
  { names: "yaml yml toml ini", comment: HASH, texts: [DOUBLE, SINGLE], words: "true false null yes no on off" },
  { names: "json jsonc json5", comment: SLASHES, texts: [DOUBLE], words: "true false null" },
  { names: "javascript js jsx mjs typescript ts tsx go golang php", comment: SLASHES, texts: [DOUBLE, SINGLE, BACKQUOTE], words: C_WORDS },
  { names: "c h cpp c++ cc cuda csharp cs c# java kotlin kt swift scala dart", comment: SLASHES, texts: [DOUBLE, SINGLE], words: C_WORDS },
  // An apostrophe begins a lifetime there.
  { names: "rust rs", comment: SLASHES, texts: [DOUBLE],
    words: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub "
      + "ref return self Self static struct super trait true type unsafe use where while" },
  { names: "sql postgresql sqlite mysql lua haskell hs", comment: DASHES, texts: [DOUBLE, SINGLE],
    words: "select from where and or not null as on join left right inner outer group by order limit insert into values update set "
      + "delete create table index drop alter primary key distinct having union with case when then else end local function return "
      + "if elseif for do while in nil true false module import let data type instance class deriving", flags: "i" },
];

const patterns = new Map();
for (const { names, comment, texts, words, flags = "" } of FAMILIES) {
  const pattern = new RegExp(`(?<comment>${comment})|(?<text>${texts.join("|")})|(?<number>\\b\\d[\\w.]*)|`
    + `(?<word>\\b(?:${words.replaceAll(" ", "|")})\\b)`, `g${flags}`);
  for (const name of names.split(" ")) patterns.set(name, pattern);
}

/** Return the texts and elements of `line` in this language. One that is not known has no colours. */
export function highlighted(line, language) {
  const pattern = patterns.get(language.toLowerCase());
  if (!pattern || line.length > MAX_LINE) return [line];
  const parts = [];
  let end = 0;
  for (const { 0: match, index, groups } of line.matchAll(pattern)) {
    const [kind] = Object.keys(groups).filter((name) => groups[name] !== undefined);
    parts.push(line.slice(end, index), el(`span.${kind}`, match));
    end = index + match.length;
  }
  return [...parts, line.slice(end)].filter((part) => part !== "");
}
