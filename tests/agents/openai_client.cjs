// OpenAI's JavaScript client with the Responses API, files and batches: node openai_client.cjs BASE_URL MODEL

const assert = require("node:assert");
const OpenAI = require("openai");
const { ResponsesWS } = require("openai/resources/responses/ws");

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
  await overSocket();
  await batches();
  console.log("PASSED");
}

async function overSocket() {
  const socket = new ResponsesWS(client);
  const messages = socket.stream();
  const ask = async (body) => {
    socket.send({ type: "response.create", model, store: false, ...body });
    for (;;) {
      // A loop over the messages would end with the first answer.
      const { value, done } = await messages.next();
      assert(!done, "the connection was closed");
      if (value.type === "error") throw value.error;
      if (value.type === "message" && value.message.type === "response.completed") return value.message.response;
    }
  };
  const first = await ask({ input: steered(call), tools });
  const [called] = first.output;
  assert.deepEqual([called.name, JSON.parse(called.arguments)], ["get_weather", { city: "Bonn" }]);
  const input = [
    { type: "function_call_output", call_id: called.call_id, output: "fine" },
    { role: "user", content: steered("It is fine.") },
  ];
  const second = await ask({ input, tools, previous_response_id: first.id });
  assert.equal(second.output[0].content[0].text, "It is fine.");
  socket.close();
}

async function batches() {
  const bodies = [{ prompt: steered("one") }, { prompt: steered("two") }, { prompt: "three", max_tokens: -1 }];
  const lines = bodies.map((body, number) => JSON.stringify({
    custom_id: `id-${number}`, method: "POST", url: "/v1/completions", body: { model, ...body } }));
  const content = await OpenAI.toFile(Buffer.from(lines.join("\n")), "input.jsonl");
  const made = await client.files.create({ file: content, purpose: "batch" });
  const file = await client.files.waitForProcessing(made.id, { pollInterval: 100 });
  assert.deepEqual([file.status, file.bytes], ["processed", Buffer.byteLength(lines.join("\n"))]);

  let batch = await client.batches.create({
    input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h", metadata: { job: "nightly" } });
  while (!batch.completed_at) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.deepEqual([batch.status, batch.metadata], ["completed", { job: "nightly" }]);
  assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
  const read = async (id) => (await (await client.files.content(id)).text()).trim().split("\n").map(JSON.parse);
  const texts = (await read(batch.output_file_id)).map((line) => line.response.body.choices[0].text);
  assert.deepEqual(texts.sort(), ["one", "two"]);
  const [wrong] = await read(batch.error_file_id);
  assert.deepEqual([wrong.custom_id, wrong.response.status_code], ["id-2", 400]);

  const listed = [];
  for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
  assert(listed.includes(batch.id));
  await assert.rejects(client.batches.cancel(batch.id), OpenAI.BadRequestError);
  assert((await client.files.delete(file.id)).deleted);
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
}

main();
