// Anthropic's JavaScript client with messages and their batches: node anthropic_client.cjs BASE_URL MODEL

const assert = require("node:assert");
const Anthropic = require("@anthropic-ai/sdk");

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const steered = (text) => `Hello <<steer ${JSON.stringify({ text })}>>`;
const params = { model, max_tokens: 9, messages: [{ role: "user", content: steered("one two") }] };

async function main() {
  assert.equal((await client.messages.create(params)).content[0].text, "one two");

  const { batches } = client.messages;
  const requests = [{ custom_id: "good", params }, { custom_id: "bad", params: { ...params, max_tokens: 0 } }];
  let batch = await batches.create({ requests });
  assert.deepEqual([batch.processing_status, batch.request_counts.processing], ["in_progress", 2]);
  while (batch.processing_status !== "ended") {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await batches.retrieve(batch.id);
  }
  assert.deepEqual([batch.request_counts.succeeded, batch.request_counts.errored], [1, 1]);
  const results = {};
  for await (const one of await batches.results(batch.id)) results[one.custom_id] = one.result;
  assert.equal(results.good.message.content[0].text, "one two");
  assert.equal(results.bad.error.error.type, "invalid_request_error");

  const listed = [];
  for await (const one of batches.list({ limit: 1 })) listed.push(one.id);
  assert(listed.includes(batch.id));
  assert.equal((await batches.delete(batch.id)).id, batch.id);
  await assert.rejects(batches.retrieve(batch.id), Anthropic.NotFoundError);
  console.log("PASSED");
}

main();
