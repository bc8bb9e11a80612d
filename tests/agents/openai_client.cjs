// OpenAI's JavaScript client with the Responses API: node openai_client.cjs BASE_URL MODEL

const assert = require("node:assert");
const OpenAI = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const steered = (text) => `Hello <<steer ${JSON.stringify({ text })}>>`;
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>';
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];

async function main() {
  const first = await client.responses.create({ model, input: steered("one two") });
  assert.equal(first.output_text, "one two");
  assert.equal((await client.responses.retrieve(first.id)).output_text, "one two");

  const stream = client.responses.stream({ model, input: steered(call), tools, previous_response_id: first.id });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  const [called] = (await stream.finalResponse()).output;
  assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
  assert.deepEqual([called.name, JSON.parse(called.arguments)], ["get_weather", { city: "Bonn" }]);

  const output = { type: "function_call_output", call_id: called.call_id, output: "fine" };
  const input = [called, output, { role: "user", content: steered("It is fine.") }];
  assert.equal((await client.responses.create({ model, input, tools })).output_text, "It is fine.");

  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
  console.log("PASSED");
}

main();
