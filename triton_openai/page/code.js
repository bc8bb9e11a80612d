// The request on the screen as a curl command and as a program in Python.
import { $, copy, hasKey } from "./common.js";

/** Write a value as Python does. */
function python(value) {
  if (value === null || typeof value === "boolean") return { null: "None", true: "True", false: "False" }[value];
  if (Array.isArray(value)) return `[${value.map((one) => python(one)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
}

/** Show the request `body`; an attached file is cut. OpenAI's client takes the fields `further` in `extra_body` only. */
export function showCode(body, further) {
  const url = new URL("v1", document.baseURI).href;
  const header = hasKey() ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  const short = JSON.parse(JSON.stringify(body, (name, value) => (["url", "data"].includes(name) && typeof value === "string" ? value.replace(/((?:;base64,|^)[\w+/]{20})[\w+/]{40,}=*$/, "$1…") : value)));
  const data = JSON.stringify(short, null, 2).replaceAll("'", "'\\''");
  $("#curl").textContent =
    `curl ${body.stream ? "-N " : ""}${url}/chat/completions${header} \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`;
  const extra = Object.fromEntries(further.map((name) => [name, short[name]]));
  const own = Object.entries(short).filter(([name]) => !further.includes(name));
  const fields = [...own, ...(further.length ? [["extra_body", extra]] : [])]
    .map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  $("#python").textContent = [
    hasKey() ? "import os\n" : null,
    "from openai import OpenAI\n",
    `client = OpenAI(base_url="${url}", api_key=${hasKey() ? 'os.environ["API_KEY"]' : '"none"'})`,
    `answer = client.chat.completions.create(\n${fields}\n)`,
    body.stream
      ? 'for chunk in answer:\n    for choice in chunk.choices:\n        print(choice.delta.content or "", end="", flush=True)'
      : "print(answer.choices[0].message)",
  ].filter(Boolean).join("\n");
}

for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => {
  const place = $(`#${button.dataset.copy}`);
  copy(button, place.textContent, place);
});
