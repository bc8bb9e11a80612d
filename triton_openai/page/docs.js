// GET openapi.json for people: each operation with its parameters, its body and its answers.
import { $, ask, el, explain, onKey } from "./common.js";

let components;
const named = (schema) => schema.$ref?.split("/").pop();
const resolved = (one) => (one.$ref ? components[one.$ref.split("/")[2]][named(one)] : one);

/** Return the parts of a text: what stands between backquotes is code. */
const prose = (text = "") => text.split("`").map((part, number) => (number % 2 ? el("code", part) : part));

/** Name the type of a schema in a few words. */
function type(schema) {
  if (named(schema)) return named(schema);
  if (schema.anyOf) return schema.anyOf.map(type).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? type(schema.items) : "anything"}`;
  const limits = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength", "pattern"]
    .filter((name) => name in schema).map((name) => `${name} ${schema[name]}`);
  return [[schema.type ?? "anything"].flat().join(" | "), ...limits].join(", ");
}

/** Find the objects that a schema is made of. */
const objects = (schema) => [schema, ...(schema.anyOf ?? []), ...(schema.items ? objects(schema.items) : [])]
  .flatMap((one) => (one.$ref ? [one] : one.anyOf && one !== schema ? objects(one) : []));

function fields(schema, depth = 0) {
  const { properties = {}, required = [] } = resolved(schema);
  const rows = Object.entries(properties).map(([name, one]) => el("div.field",
    el("dt", el("code", name), required.includes(name) ? el("span.chip", "required") : null),
    el("dd", el("code.note", type(one)), one.description && el("p", ...prose(one.description)),
      ...(depth < 4 ? objects(one).map((inner) => lazily(named(inner), () => fields(inner, depth + 1))) : []))));
  return rows.length ? el("dl.fields", ...rows) : el("p.note", ...prose(resolved(schema).description ?? "No fields."));
}

/** Make details whose content is made when they are opened: schemas may contain themselves. */
function lazily(title, make) {
  const made = el("details", el("summary", title));
  made.addEventListener("toggle", () => { if (made.childElementCount === 1) made.append(make()); }, { once: true });
  return made;
}

function content(one) {
  return Object.entries(one.content ?? {}).flatMap(([kind, { schema = {} }]) =>
    objects(schema).length ? objects(schema).map((each) => lazily(`${kind}: ${named(each)}`, () => fields(each))) : [el("p.note", kind)]);
}

function operation(path, method, one) {
  const body = one.requestBody;
  const made = lazily("", () => el("div", one.description && el("p", ...prose(one.description)),
    one.parameters?.length ? el("h3", "Parameters") : null,
    ...(one.parameters ?? []).map((each) => el("p", el("code", each.name), ` in ${each.in}. `, ...prose(each.description))),
    body && el("h3", "Body"), ...(body ? content(body) : []),
    el("h3", "Answers"),
    ...Object.entries(one.responses).map(([status, answer]) => {
      const { description, ...rest } = resolved(answer);
      return el("div.answer", el("strong", status), el("p", ...prose(description)), ...(status < 300 ? content(rest) : []));
    })));
  made.classList.add("panel");
  made.firstChild.replaceChildren(el(`span.method.${method}`, method.toUpperCase()), el("code", path), " ", el("span.note", ...prose(one.summary)));
  return made;
}

async function load() {
  const text = await (await ask("openapi.json")).text(), document_ = JSON.parse(text);
  components = document_.components;
  $("#about").textContent = `${document_.info.version} · OpenAPI ${document_.openapi}`;
  $("#about").className = "";
  $("#download").hidden = false;
  $("#download").href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const every = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => ({ path, method, one })));
  // The same under another path is only named.
  const main = every.filter(({ one }) => !one.description?.startsWith("The same as"));
  const also = ({ path, method }) => every.filter(({ one }) => one.description?.includes(`\`${method.toUpperCase()} ${path}\``))
    .map((each) => `${each.method.toUpperCase()} ${each.path}`).join(", ");
  sections = document_.tags.map(({ name }) => ({ title: el("h2", name), operations: main.filter(({ one }) => one.tags.includes(name)).map((each) => {
    const others = also(each);
    const description = [each.one.description, others && `Also as ${others}.`].filter(Boolean).join(" ");
    const words = `${each.method} ${each.path} ${others} ${JSON.stringify(each.one)} ${fieldNames(each.one.requestBody)}`.toLowerCase();
    return { item: operation(each.path, each.method, { ...each.one, description }), words };
  }) }));
  $("#operations").replaceChildren(el("p", ...prose(document_.info.description)),
    ...sections.flatMap(({ title, operations }) => [title, ...operations.map(({ item }) => item)]));
  search();
}

/** Return the names of all fields that a body has, at any depth. */
function fieldNames(one, seen = new Set()) {
  const names = [];
  for (const [name, inner] of Object.entries(one ?? {})) {
    if (name === "properties") names.push(...Object.keys(inner));
    if (name === "$ref" && !seen.has(inner)) names.push(fieldNames(components[inner.split("/")[2]][inner.split("/").pop()], seen.add(inner)));
    if (inner && typeof inner === "object") names.push(fieldNames(inner, seen));
  }
  return names.join(" ");
}

let sections = [];

/** Show the operations that have all words of the search. */
function search() {
  const wanted = $("#search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { title, operations } of sections) {
    let any = false;
    for (const { item, words } of operations) {
      item.hidden = !wanted.every((word) => words.includes(word));
      any ||= !item.hidden;
      count += !item.hidden;
    }
    title.hidden = !any;
  }
  $("#count").textContent = wanted.length ? `${count} operations` : "";
}

$("#search").addEventListener("input", search);
onKey(load);
load().catch((error) => {
  $("#about").textContent = explain(error);
  $("#about").className = "bad";
});
