// For admins: pulling, loading and unloading models and their adapters; keys and tiers with their usage.

import { $, bytes, duration, number, rows, send } from "./common.js";

const LOADED = ["loading", "ready", "draining", "dead"];
const pending = new Set(); // names of models and adapters with an unanswered request of this page
let shown = "";

// --- models -------------------------------------------------------------------------------------------------

// `offers` are all models; `snapshot` has those that are configured or have been asked for.
export function showModels(snapshot, offers) {
  $("all-models").hidden = false;
  const there = new Set(snapshot.models.map((model) => model.name));
  const others = offers.filter((offer) => !offer.parent && !there.has(offer.id));
  const models = [...snapshot.models, ...others.map((offer) => ({ name: offer.id, state: "unloaded" }))];
  const text = JSON.stringify([models.map(({ stats, requests, recent, tiers, ...rest }) => [
    rest, stats?.memory_bytes, stats?.num_running, stats?.num_waiting,
  ]), snapshot.pulls, [...pending]]);
  if (text === shown) return; // so that the focus stays
  shown = text;
  const focused = document.activeElement?.dataset?.model;
  rows("models", models.flatMap((model) => [[
    model.name, stateOf(model), bytes(model.stats?.memory_bytes), number(model.stats?.num_running),
    number(model.stats?.num_waiting), modelButton(model),
  ], ...(model.adapters ?? []).map((adapter) => adapterRow(`${model.name}:${adapter}`))]));
  rows("pulls", (snapshot.pulls ?? []).map((pull) => [pull.model, progress(pull)]));
  $("pulls-table").hidden = !snapshot.pulls?.length;
  if (focused) document.querySelector(`#models button[data-model="${CSS.escape(focused)}"]`)?.focus();
}

function stateOf(model) {
  const state = document.createElement("span");
  if (model.preparing) return progress(model.preparing);
  if (model.state === "loading") {
    state.append(bar(model.load_progress, 1), ` loading, ${Math.round(100 * model.load_progress)} %`);
  } else {
    state.append(model.state + (model.pinned ? ", pinned" : ""));
  }
  if (model.error) Object.assign(state, { title: model.error, className: "failure" }).append(`: ${model.error}`);
  return state;
}

function progress({ stage, done_bytes: done, total_bytes: total, bytes_per_s: rate, remaining_s: left }) {
  const shown = document.createElement("span");
  shown.append(bar(done, total ?? undefined), ` ${stage}`);
  if (total) shown.append(` ${bytes(done)} of ${bytes(total)}`);
  if (rate) shown.append(`, ${bytes(rate)}/s, ${duration(left)} left`);
  return shown;
}

function bar(value, max) {
  const made = document.createElement("progress");
  if (max !== undefined) Object.assign(made, { max, value });
  return made;
}

function modelButton({ name, state }) {
  const verb = LOADED.includes(state) ? "unload" : "load";
  return buttonOf(verb === "load" ? "Load" : "Unload", name, `admin/models/${verb}`, { model: name });
}

const adapterRow = (name) =>
  [name, "adapter", "", "", "", buttonOf("Unload", name, "v1/unload_lora_adapter", { lora_name: name })];

function buttonOf(text, name, path, body) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.dataset.model = name;
  button.disabled = pending.has(name);
  button.setAttribute("aria-label", `${button.textContent} ${name}`);
  button.addEventListener("click", () => act(name, path, body));
  return button;
}

// Returns whether it was done.
async function act(name, path, body, done = "") {
  pending.add(name);
  $("models-note").textContent = "";
  try {
    await send(path, body);
    $("models-note").textContent = done;
    dispatchEvent(new Event("models-changed"));
    return true;
  } catch (error) {
    $("models-note").textContent = error.message;
    return false;
  } finally {
    pending.delete(name);
  }
}

$("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("pull-name").value.trim();
  if (!name || pending.has(name)) return;
  $("pull-name").value = "";
  act(name, "admin/models/pull", { model: name }, `${name} is here.`);
});

$("adapter").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [name, path] = ["adapter-name", "adapter-path"].map((id) => $(id).value.trim());
  if (!name || !path || pending.has(name)) return;
  const body = { lora_name: name, lora_path: path, load_inplace: $("adapter-replaces").checked };
  $("adapter-load").disabled = true;
  if (await act(name, "v1/load_lora_adapter", body, `${name} is here.`)) event.target.reset();
  $("adapter-load").disabled = false;
});

// --- keys and tiers -----------------------------------------------------------------------------------------

const limit = (value) => (value == null ? "no limit" : number(value));

export function showKeys({ keys, tiers, time_s: now }) {
  if (!keys) return; // only some snapshots have keys
  $("keys-card").hidden = !keys.length && tiers.length < 2;
  rows("tier-limits", tiers.map((tier) => [
    tier.name, tier.priority, limit(tier.requests_per_minute), limit(tier.tokens_per_minute),
    limit(tier.max_concurrent_requests), number(tier.refused),
  ]));
  rows("keys", keys.map((key) => [
    key.label || key.key_id, key.tier, number(key.num_requests), number(key.num_prompt_tokens),
    number(key.num_output_tokens), key.last_used_s ? ago(now - key.last_used_s) : "never",
  ]));
  $("keys-table").hidden = !keys.length;
}

const ago = (seconds) => (seconds < 90 ? "now" : seconds < 5400 ? `${Math.round(seconds / 60)} min ago`
  : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} d ago`);
