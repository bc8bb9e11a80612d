// The page: models, Tritons, figures and batches. The chat and speech have modules of their own.
import { $, ask, atSecondClick, el, explain, hasKey, onKey } from "./common.js";
import { offerModels, refreshCode } from "./chat.js";
import { showSpeech } from "./speech.js";

const POLL_MS = 2000, WINDOW_MS = 15000;

// Models and figures

function modelCard(model) {
  const state = model.state !== "ready" ? model.state : model.chat === false ? "cannot chat" : model.problem ? "cannot be used" : "ready";
  const kind = state === "ready" ? "good" : model.state === "ready" || model.state === "not loaded" ? "warn" : "bad";
  const names = [...model.aliases, ...model.loras].join(", ");
  return el("li.panel",
    el("div.row", el("strong", model.name), el(`span.badge.${kind}`, state)),
    model.adapter && el("p.note", `adapter ${model.adapter}`, names && `, also as ${names}`),
    el("p", ...[...model.tasks, ...model.features].map((name) => el("span.chip", name.replace("_", " ")))),
    model.problem && el("p.problem", model.problem));
}

function showModels(models, tritonAnswers) {
  const cards = models.map(modelCard);
  $("#models").replaceChildren(...(cards.length ? cards : [el("li.note", whyNoModel(tritonAnswers))]));
  offerModels(models);
}

/** Say why there is no model. */
function whyNoModel(tritonAnswers) {
  if (!tritonAnswers) return "No model is known: Triton does not answer. The service keeps trying.";
  if (hasKey()) return "No model that this key may use.";
  return "Triton has no model that the service can use.";
}

let readings = [];

function showFigures(figures) {
  $("#live").hidden = !figures;
  if (!figures) return;
  const now = performance.now();
  readings = [...readings.filter((one) => now - one.now < WINDOW_MS + POLL_MS), { now, ...figures }];
  const first = readings[0], seconds = (now - first.now) / 1000;
  // Sums begin again when the service is restarted.
  const tokens = Math.max(0, figures.output_tokens - first.output_tokens);
  const answers = figures.first_tokens - first.first_tokens;
  const rate = seconds > 0 ? tokens / seconds : 0;
  $("#running").textContent = figures.running;
  $("#queued").textContent = figures.queued;
  $("#rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  if (answers > 0) {
    const mean = (figures.first_token_seconds - first.first_token_seconds) / answers;
    $("#first").textContent = mean < 1 ? `${(mean * 1000).toFixed(0)} ms` : `${mean.toFixed(1)} s`;
  }
}

function showEndpoints(endpoints) {
  $("#fleet").hidden = !endpoints;
  $("#endpoints").replaceChildren(...(endpoints ?? []).map((one) => el("li.panel",
    el("div.row", el("strong", one.name), el(`span.badge.${one.state === "ready" ? "good" : "bad"}`, one.state)),
    el("p.note", `${one.running} running, ${one.models.join(", ") || "no model"}`),
    one.ejected.length ? el("p.problem", `Gets no requests now for ${one.ejected.join(", ")}, because requests failed.`) : null)));
}

// By id. A card is changed in place, so that its button keeps the focus.
const cards = new Map();
let batchesOff = false;

function batchCard(id) {
  const [badge, note, problem, bar, button] = ["span", "p.note", "p.problem", "progress", "button"].map((kind) => el(kind));
  bar.ariaLabel = `Progress of ${id}`;
  button.type = "button";
  button.ariaLabel = `Cancel ${id}`;
  button.textContent = "Cancel";
  atSecondClick(button, "Cancel now?", async () => {
    problem.textContent = "";
    try {
      show(await (await ask(`v1/batches/${id}/cancel`, { method: "POST" })).json());
    } catch (error) {
      problem.textContent = explain(error);
    }
  });
  const show = (batch) => {
    const { total, completed, failed } = batch.request_counts;
    const open = ["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status);
    let kind = "good";
    if (failed) kind = "warn";
    if (!open && batch.status !== "completed") kind = "bad";
    badge.className = `badge ${kind}`;
    badge.textContent = batch.status.replace("_", " ");
    if (total) [bar.max, bar.value] = [total, completed + failed];
    bar.hidden = !open;
    button.hidden = !["validating", "in_progress"].includes(batch.status);
    note.textContent = [total ? `${completed + failed} of ${total} lines` : "no lines yet", failed && `${failed} failed`,
      batch.endpoint, open && `until ${new Date(batch.expires_at * 1000).toLocaleString()}`].filter(Boolean).join(" · ");
    if (batch.errors) problem.textContent = batch.errors.data[0].message;
  };
  return { item: el("li.panel", el("div.row", el("strong", id), badge), bar, note, problem, button), show };
}

async function showBatches() {
  if (batchesOff) return;
  let batches;
  try {
    batches = (await (await ask("v1/batches?limit=20")).json()).data;
  } catch (error) {
    // Off, or not for this key: another one may see them. What else is wrong passes.
    batchesOff = [403, 404].includes(error.status);
    if (!batchesOff) return;
    batches = [];
  }
  $("#batches-part").hidden = !batches.length;
  const shown = batches.map((batch) => {
    if (!cards.has(batch.id)) cards.set(batch.id, batchCard(batch.id));
    cards.get(batch.id).show(batch);
    return cards.get(batch.id).item;
  });
  const list = $("#batches");
  if (shown.length !== list.children.length || shown.some((item, index) => item !== list.children[index])) list.replaceChildren(...shown);
}

async function refresh() {
  const status = await (await ask("status")).json();
  const triton = status.triton ? `${status.triton.name} ${status.triton.version}` : "Triton";
  $("#about").textContent = `${status.version} · ${triton} ${status.triton_answers ? "answers" : "does not answer"}`;
  $("#about").className = status.triton_answers ? "good" : "bad";
  showModels(status.models, status.triton_answers);
  showSpeech(status.models);
  showEndpoints(status.endpoints);
  showFigures(status.figures);
  await showBatches();
}

async function poll() {
  if (!document.hidden && $("#key-form").hidden) {
    try {
      await refresh();
    } catch (error) {
      $("#about").textContent = explain(error);
      $("#about").className = "bad";
    }
  }
  setTimeout(poll, POLL_MS);
}

onKey(async () => { batchesOff = false; await refresh(); refreshCode(); });
poll();
