// Speech on the page: what the microphone records, or a file has, goes to v1/audio/transcriptions, and texts go to
// v1/audio/speech, whose audio is played while it comes.
import { $, ask, el, events, explain } from "./common.js";

// Hertz of what is sent to be written down: recognizers take no other rate.
const RATE = 16000;
const NO_VOICE = "the model's own";

/** Show what can be done with `models`, a list from GET status. */
export function showSpeech(models) {
  for (const [what, task] of [["hear", "transcribe"], ["speak", "speech"]]) {
    const names = models.filter((model) => model.state === "ready" && model.tasks.includes(task)).map((model) => model.name);
    const before = $(`#${what}-model`);
    $(`#${what}-form`).hidden = !names.length;
    if (names.join() === before.dataset.names) continue;
    before.dataset.names = names.join();
    before.replaceChildren(...names.map((name) => el("option", name)));
    if (task === "speech" && names.length) showVoices();
  }
  $("#speech").hidden = $("#hear-form").hidden && $("#speak-form").hidden;
}

async function showVoices() {
  try {
    const model = $("#speak-model").value;
    const found = await (await ask(`v1/audio/voices?model=${encodeURIComponent(model)}`)).json();
    if (model !== $("#speak-model").value) return;
    const names = found.voices.map((voice) => el("option", voice.name));
    $("#voice").replaceChildren(...(names.length ? names : [Object.assign(el("option", NO_VOICE), { value: "" })]));
  } catch (error) {
    $("#speak-problem").textContent = explain(error);
  }
}

// Hearing

/** Return a WAV file of one channel with 16 bits, of samples from -1 to 1. */
function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (at, text) => [...text].forEach((letter, place) => view.setUint8(at + place, letter.charCodeAt(0)));
  write(0, "RIFF"); write(8, "WAVEfmt "); write(36, "data");
  view.setUint32(4, view.byteLength - 8, true);
  [[16, 16, 4], [20, 1, 2], [22, 1, 2], [24, rate, 4], [28, 2 * rate, 4], [32, 2, 2], [34, 16, 2], [40, 2 * samples.length, 4]]
    .forEach(([at, value, size]) => (size === 2 ? view.setUint16(at, value, true) : view.setUint32(at, value, true)));
  samples.forEach((one, place) => view.setInt16(44 + 2 * place, Math.max(-1, Math.min(1, one)) * 32767, true));
  return new Blob([view], { type: "audio/wav" });
}

/** Return what was recorded, in the browser's format, as WAV: that takes no further extra of the service. */
async function converted(recorded) {
  const audio = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recorded.arrayBuffer());
  const channels = Array.from({ length: audio.numberOfChannels }, (_, number) => audio.getChannelData(number));
  return wav(channels[0].map((_, place) => channels.reduce((sum, one) => sum + one[place], 0) / channels.length), RATE);
}

async function transcribe(file, name) {
  const form = new FormData();
  form.append("model", $("#hear-model").value);
  form.append("stream", "true");
  form.append("file", file, name);
  $("#heard").textContent = "";
  const response = await ask("v1/audio/transcriptions", { method: "POST", body: form });
  for await (const event of events(response)) {
    $("#heard").textContent = event.text ?? $("#heard").textContent + event.delta;
  }
}

/** Run `work`, during which `button` cannot be pressed; `problem` shows what goes wrong. */
async function guarded(button, problem, work) {
  problem.textContent = "";
  button.disabled = true;
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") problem.textContent = explain(error);
  }
  button.disabled = false;
}

let recorder = null;

async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const parts = [], began = performance.now();
  recorder = new MediaRecorder(stream);
  const clock = setInterval(() => {
    $("#record").textContent = `Stop (${Math.floor((performance.now() - began) / 1000)} s)`;
  }, 200);
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  recorder.addEventListener("stop", () => {
    clearInterval(clock);
    stream.getTracks().forEach((track) => track.stop());
    const recorded = new Blob(parts, { type: recorder.mimeType });
    recorder = null;
    $("#record").textContent = "Record";
    guarded($("#record"), $("#hear-problem"), async () => transcribe(await converted(recorded), "recording.wav"));
  });
  recorder.start();
  $("#record").textContent = "Stop (0 s)";
}

// Browsers have no microphone for pages over plain HTTP from another machine.
$("#record").hidden = !(navigator.mediaDevices && window.MediaRecorder);
$("#no-microphone").hidden = !$("#record").hidden;
$("#record").addEventListener("click", () => {
  if (recorder) recorder.stop();
  else guarded($("#record"), $("#hear-problem"), record);
});
$("#hear-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const [file] = $("#recording").files;
  guarded($("#transcribe"), $("#hear-problem"), () => transcribe(file, file.name));
});

// Speaking

/** Play the samples of a streamed WAV file (16 bits, one channel) as they come, and return them with their rate. */
async function play(response, context) {
  const reader = response.body.getReader(), parts = [];
  let rest = new Uint8Array(), rate = 0, at = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const bytes = new Uint8Array(rest.length + value.length);
    bytes.set(rest);
    bytes.set(value, rest.length);
    let start = 0;
    if (!rate && bytes.length >= 44) {
      rate = new DataView(bytes.buffer).getUint32(24, true);
      start = 44;
    }
    const count = rate ? (bytes.length - start) >> 1 : 0;
    rest = bytes.slice(start + 2 * count);
    if (!count) continue;
    const view = new DataView(bytes.buffer, start, 2 * count);
    const samples = Float32Array.from({ length: count }, (_, place) => view.getInt16(2 * place, true) / 32768);
    parts.push(samples);
    const buffer = context.createBuffer(1, count, rate), source = context.createBufferSource();
    buffer.copyToChannel(samples, 0);
    source.buffer = buffer;
    source.connect(context.destination);
    at = Math.max(at, context.currentTime);
    source.start(at);
    at += buffer.duration;
  }
  const all = new Float32Array(parts.reduce((sum, one) => sum + one.length, 0));
  parts.reduce((place, one) => (all.set(one, place), place + one.length), 0);
  return [all, rate];
}

let speaking = null;

function hush() {
  speaking?.request.abort();
  speaking?.context.close();
  speaking = null;
  $("#hush").hidden = true;
}

async function speak() {
  hush();
  $("#spoken").hidden = true;
  const mine = speaking = { request: new AbortController(), context: new AudioContext() };
  $("#hush").hidden = false;
  const voice = $("#voice").value;
  const body = { model: $("#speak-model").value, input: $("#speak-text").value, response_format: "wav", ...(voice && { voice }) };
  try {
    const response = await ask("v1/audio/speech", { method: "POST", signal: mine.request.signal,
      headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const [samples, rate] = await play(response, mine.context);
    URL.revokeObjectURL($("#spoken").src);
    $("#spoken").src = URL.createObjectURL(wav(samples, rate));
    $("#spoken").hidden = false;
  } catch (error) {
    if (speaking === mine) hush();
    throw error;
  }
}

$("#speak-model").addEventListener("change", showVoices);
$("#hush").addEventListener("click", hush);
$("#spoken").addEventListener("play", hush);
$("#speak-form").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded($("#speak"), $("#speak-problem"), speak);
});
