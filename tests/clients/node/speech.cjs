// Speech through OpenAI's client and Vercel's AI SDK: node speech.cjs BASE_URL RECORDING TEXT

const assert = require("node:assert");
const fs = require("node:fs");
const OpenAI = require("openai");
const { createOpenAI } = require("@ai-sdk/openai");
const { experimental_generateSpeech: generateSpeech, experimental_transcribe: transcribe } = require("ai");

const [baseURL, recording, text] = process.argv.slice(2);
const said = "Triton answers in plain English.";
// What the stand-in makes of it: 240 samples for each letter, 24,000 in a second.
const samples = 240 * said.length;

async function openai() {
  const { audio } = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const file = () => fs.createReadStream(recording);
  const whole = await audio.transcriptions.create({ model: "infer_bls", file: file(), language: "en" });
  assert.deepEqual([whole.text, whole.usage], [text, { type: "duration", seconds: 3 }]);
  const verbose = await audio.transcriptions.create({
    model: "whisper", file: file(), response_format: "verbose_json", timestamp_granularities: ["segment"],
  });
  assert.deepEqual([verbose.language, verbose.segments.map((one) => one.text)], ["english", text.split(" ")]);
  const subtitles = await audio.transcriptions.create({ model: "infer_bls", file: file(), response_format: "srt" });
  assert.equal(subtitles, `1\n00:00:00,000 --> 00:00:03,000\n${text}\n\n`);

  const events = [];
  const stream = await audio.transcriptions.create({ model: "whisper_bls", file: file(), stream: true });
  for await (const event of stream) events.push(event);
  const done = events.pop();
  assert.deepEqual([done.type, done.text], ["transcript.text.done", text]);
  assert.equal(events.map((event) => event.delta).join(""), text);

  const translation = await audio.translations.create({ model: "whisper", file: file() });
  assert.equal(translation.text, text.split(" ").map(() => "better").join(" "));

  const wrong = await OpenAI.toFile(Buffer.from("no audio"), "speech.wav");
  await assert.rejects(audio.transcriptions.create({ model: "infer_bls", file: wrong }), (error) =>
    error instanceof OpenAI.BadRequestError && error.param === "file" && error.code === "invalid_audio_format");

  const asked = { model: "int16_tts", voice: "alloy", input: said };
  const spoken = await audio.speech.create({ ...asked, response_format: "wav" });
  assert.equal(spoken.headers.get("content-type"), "audio/wav");
  assert.equal((await spoken.arrayBuffer()).byteLength, 44 + 2 * samples);
  let bytes = 0;
  for await (const part of (await audio.speech.create({ ...asked, response_format: "pcm" })).body) bytes += part.length;
  assert.equal(bytes, 2 * samples);
  const told = await (await audio.speech.create({ ...asked, response_format: "pcm", stream_format: "sse" })).text();
  const parts = told.split("\n").filter((line) => line.startsWith("data: ")).map((line) => JSON.parse(line.slice(6)));
  assert.equal(parts.pop().type, "speech.audio.done");
  assert.equal(Buffer.concat(parts.map((part) => Buffer.from(part.audio, "base64"))).length, 2 * samples);
}

async function aiSdk() {
  const provider = createOpenAI({ baseURL, apiKey: "none" });
  const audio = fs.readFileSync(recording);
  const heard = await transcribe({ model: provider.transcription("whisper"), audio, maxRetries: 0 });
  assert.equal(heard.text, text);
  const told = await transcribe({
    model: provider.transcription("whisper"), audio, maxRetries: 0,
    providerOptions: { openai: { language: "en", timestampGranularities: ["segment"], temperature: 0 } },
  });
  assert.deepEqual([told.text, told.language, told.durationInSeconds], [text, "en", 3]);
  assert.deepEqual(told.segments[1], { text: text.split(" ")[1], startSecond: 0.5, endSecond: 0.9 });

  const spoken = await generateSpeech({ model: provider.speech("int16_tts"), text: said, voice: "alloy", maxRetries: 0 });
  assert.equal(spoken.audio.mediaType, "audio/mpeg");
  assert.ok(spoken.audio.uint8Array.length > 1000);
  await assert.rejects(transcribe({ model: provider.transcription("whisper"), audio: Buffer.from("no audio"), maxRetries: 0 }),
    /not audio of a supported format/);
}

openai().then(aiSdk).then(() => console.log("PASSED"));
