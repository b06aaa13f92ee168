// The live page: reads one snapshot a second, keeps two minutes of history, draws.

import { showKeys, showModels } from "./admin.js";
import { listOffers, offers } from "./chat.js";
import { $, askForKey, bytes, duration, events, headers, number, reasonOf, rows, share } from "./common.js";

const HISTORY = 120;
const RETRY_MS = 2000;
const BLOCK_KINDS = ["free", "cached", "referenced", "shared"];

let wake = () => {};
const pause = () => new Promise((resolve) => {
  const timer = setTimeout(resolve, RETRY_MS);
  wake = () => { clearTimeout(timer); resolve(); };
});
addEventListener("key-changed", () => wake());

function setConnection(text, kind) {
  $("connection").textContent = text;
  $("connection").className = `badge ${kind}`;
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("dashboard/events", { headers: headers() });
      if (response.status === 401 || response.status === 403) {
        setConnection("key needed", "bad");
        askForKey(`The figures are for admins only. ${await reasonOf(response)}`);
      } else if (!response.ok) {
        setConnection(await reasonOf(response), "bad");
      } else {
        setConnection("live", "good");
        for await (const event of events(response)) show(JSON.parse(event));
        setConnection("server gone", "bad");
      }
    } catch {
      setConnection("no connection", "bad");
    }
    await pause();
  }
}

// --- history ------------------------------------------------------------------------------------------------

const histories = new Map(); // model name to { last, lines }

function advance(model, time) {
  const kept = histories.get(model.name);
  const entry = { last: model, time, lines: kept?.lines ?? { rate: [], prompt: [], ttft: [], itl: [] }, idle: null };
  if (kept && model.num_generated_tokens >= kept.last.num_generated_tokens) {
    const seconds = Math.max(time - kept.time, 0.001);
    const perSecond = (name) => (model[name] - kept.last[name]) / seconds;
    const mean = (name) => {
      const count = model[name].count - kept.last[name].count;
      return count > 0 ? (model[name].sum - kept.last[name].sum) / count : null;
    };
    push(entry.lines.rate, perSecond("num_generated_tokens"));
    push(entry.lines.prompt, perSecond("num_prompt_tokens_computed"));
    push(entry.lines.ttft, mean("ttft_s"));
    push(entry.lines.itl, mean("itl_s"));
  }
  histories.set(model.name, entry);
  return entry;
}

function push(line, value) {
  line.push(value);
  if (line.length > HISTORY) line.shift();
}

const lastOf = (line) => line.findLast((value) => value !== null) ?? null;

// --- showing a snapshot -------------------------------------------------------------------------------------

let newest = null;
let known = ""; // the models, their states and adapters

function show(snapshot) {
  newest = snapshot;
  for (const model of snapshot.models) if (model.stats) advance({ name: model.name, ...model.stats }, snapshot.time_s);
  const states = snapshot.models.map((model) => `${model.name} ${model.state} ${model.adapters}`).join("\n");
  if (states !== known) listOffers();
  known = states;
  showModels(snapshot, offers);
  showKeys(snapshot);
  draw();
}

function draw() {
  const name = $("model").value;
  const base = offers.find((offer) => offer.id === name)?.parent ?? name;
  const model = newest?.models.find((one) => one.name === base);
  if (!model) return;
  $("model-state").textContent = model.state === "loading"
    ? `loading, ${Math.round(100 * model.load_progress)} %` : model.state;
  $("model-state").className = `badge ${model.state === "ready" ? "good" : model.error ? "bad" : ""}`;
  $("model-state").title = model.error ?? "";
  const history = histories.get(model.name);
  if (!model.stats || !history) return clearFigures();
  const { stats } = model;
  const { lines } = history;

  $("running").textContent = stats.num_running;
  $("waiting").textContent = stats.num_waiting;
  $("output-rate").textContent = number(lines.rate.at(-1));
  $("prompt-rate").textContent = number(lines.prompt.at(-1));
  $("ttft").textContent = duration(lastOf(lines.ttft));
  $("itl").textContent = duration(lastOf(lines.itl));
  $("idle").textContent = share(stats.idle_time_s, stats.busy_time_s + stats.idle_time_s);
  $("preemptions").textContent = number(stats.num_preemptions);
  $("acceptance").textContent = share(stats.num_accepted_tokens, stats.num_draft_tokens);
  $("tokens-a-call").textContent = stats.num_model_calls ? (stats.num_generated_tokens / stats.num_model_calls).toFixed(2) : "–";
  $("pool-used").textContent = share(stats.num_blocks - stats.num_free_blocks, stats.max_blocks);
  $("pool-cached").textContent = share(stats.num_cached_blocks, stats.max_blocks);
  $("hit-rate").textContent = share(stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens);
  $("memory").textContent = bytes(stats.memory_bytes);
  $("pressure").textContent = stats.pressure_level ? `memory ${stats.pressure_level} % full` : "";
  drawLine($("rate-line"), lines.rate, (value) => `${number(value)} tok/s`);
  drawLine($("ttft-line"), lines.ttft, duration);
  drawLine($("itl-line"), lines.itl, duration);
  drawBlocks($("blocks"), stats.block_map);
  const perCell = stats.num_blocks / Math.max(stats.block_map.length, 1);
  $("blocks-note").textContent = `${number(stats.num_blocks)} blocks of ${stats.block_size} tokens`
    + (stats.max_blocks > stats.num_blocks ? ` of at most ${number(stats.max_blocks)}` : "")
    + (perCell > 1 ? `, every ${perCell.toFixed(1)}th shown` : "");

  rows("tiers", model.tiers.map((tier) => [tier.name, tier.running, tier.waiting]));
  rows("requests", model.requests.map((one) => [
    one.request_id, one.tier, one.state, one.effective_priority.toFixed(2),
    one.num_computed_tokens < one.num_prompt_tokens
      ? `${number(one.num_computed_tokens)} of ${number(one.num_prompt_tokens)}` : number(one.num_prompt_tokens),
    number(one.num_output_tokens), duration(one.age_s),
  ]), true);
  const hidden = stats.num_running + stats.num_waiting - model.requests.length;
  $("requests-note").textContent = hidden > 0 ? `and ${number(hidden)} more`
    : model.requests.length ? "" : "Nothing is in progress.";
  rows("recent", model.recent.map((one) => [
    one.request_id, one.tier, one.finish_reason, `${number(one.num_prompt_tokens)} (${number(one.num_cached_tokens)})`,
    number(one.num_output_tokens),
    duration(one.queue_s) + (one.num_preemptions ? `, preempted ${number(one.num_preemptions)}×` : ""),
    duration(one.ttft_s), duration(one.tpot_s),
  ]), true);
  $("recent-note").hidden = model.recent.length > 0;
}

function clearFigures() {
  for (const figure of document.querySelectorAll("main dd")) figure.textContent = "–";
  for (const id of ["tiers", "requests", "recent"]) rows(id, []);
  for (const id of ["rate-line", "ttft-line", "itl-line", "blocks"]) prepared($(id));
  for (const id of ["pressure", "blocks-note"]) $(id).textContent = "";
  $("requests-note").textContent = "The model is not loaded; a first message loads it.";
}

$("model").addEventListener("change", draw);
addEventListener("offers-changed", draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// --- drawing ------------------------------------------------------------------------------------------------

function prepared(canvas) {
  const scale = devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

// light-dark() is resolved only where a colour is used, so colours are read from an element that uses them.
const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};

function drawLine(canvas, line, words) {
  const { pen, width, height } = prepared(canvas);
  const known = line.filter((value) => value !== null);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colour("quiet");
  if (!known.length || !width) return;
  const top = Math.max(...known, 1e-9);
  const x = (index) => (width * (HISTORY - line.length + index)) / (HISTORY - 1);
  const y = (value) => height - 2 - (height - 16) * (value / top);
  pen.fillText(`most ${words(top)}`, 0, 10);
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  let isDown = false;
  line.forEach((value, index) => {
    if (value === null) return;
    if (isDown) pen.lineTo(x(index), y(value));
    else pen.moveTo(x(index) - 1, y(value));
    isDown = true;
    if (known.length === 1) pen.lineTo(x(index), y(value));
  });
  pen.stroke();
}

function drawBlocks(canvas, map) {
  const { pen, width, height } = prepared(canvas);
  if (!map.length || !width) return;
  const colours = BLOCK_KINDS.map(colour);
  const size = Math.max(Math.floor(Math.sqrt((width * height) / map.length)), 2);
  const columns = Math.max(Math.floor(width / size), 1);
  const cell = Math.min(size, height / Math.ceil(map.length / columns));
  for (let index = 0; index < map.length; index += 1) {
    pen.fillStyle = colours[Number(map[index])];
    pen.fillRect((index % columns) * size, Math.floor(index / columns) * cell, size - 1, Math.max(cell - 1, 1));
  }
}

watch();
