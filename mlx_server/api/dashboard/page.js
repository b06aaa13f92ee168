// The live page: reads one snapshot a second, keeps two minutes of history, draws; and chats through the public API.

const $ = (id) => document.getElementById(id);
const HISTORY = 120;
const RETRY_MS = 2000;
const NARROW = matchMedia("(max-width: 42rem)"); // as in page.css
const BLOCK_KINDS = ["free", "cached", "referenced", "shared"];

// --- the key: kept for this tab only ------------------------------------------------------------------------

const KEY = "mlx-serve-key";
const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key-form").hidden = true;
  $("key").value = "";
  wake();
});

function askForKey(reason) {
  $("key-reason").textContent = reason;
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

// --- server-sent events over fetch, since EventSource cannot send a key -------------------------------------

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reasonOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

let wake = () => {};
const pause = () => new Promise((resolve) => {
  const timer = setTimeout(resolve, RETRY_MS);
  wake = () => { clearTimeout(timer); resolve(); };
});

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
  if (kept && model.generated_tokens >= kept.last.generated_tokens) {
    const seconds = Math.max(time - kept.time, 0.001);
    const perSecond = (name) => (model[name] - kept.last[name]) / seconds;
    const mean = (name) => {
      const count = model[name].count - kept.last[name].count;
      return count > 0 ? (model[name].sum - kept.last[name].sum) / count : null;
    };
    push(entry.lines.rate, perSecond("generated_tokens"));
    push(entry.lines.prompt, perSecond("computed_prompt_tokens"));
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

function show(snapshot) {
  newest = snapshot;
  for (const model of snapshot.models) if (model.stats) advance({ name: model.name, ...model.stats }, snapshot.time_s);
  offerModels(snapshot.models);
  listModels(snapshot.models);
  draw();
}

function offerModels(models) {
  const select = $("model");
  const names = models.map((model) => model.name);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function listModels(models) {
  $("all-models").hidden = models.length < 2;
  rows("models", models.map(({ name, state, stats }) => [
    name, state, bytes(stats?.memory_bytes), number(stats?.running), number(stats?.waiting),
  ]));
}

function draw() {
  const model = newest?.models.find((one) => one.name === $("model").value);
  if (!model) return;
  $("model-state").textContent = model.state === "loading"
    ? `loading, ${Math.round(100 * model.load_progress)} %` : model.state;
  $("model-state").className = `badge ${model.state === "ready" ? "good" : model.error ? "bad" : ""}`;
  $("model-state").title = model.error ?? "";
  const history = histories.get(model.name);
  if (!model.stats || !history) return clearFigures();
  const { stats } = model;
  const { lines } = history;

  $("running").textContent = stats.running;
  $("waiting").textContent = stats.waiting;
  $("output-rate").textContent = number(lines.rate.at(-1));
  $("prompt-rate").textContent = number(lines.prompt.at(-1));
  $("ttft").textContent = duration(lastOf(lines.ttft));
  $("itl").textContent = duration(lastOf(lines.itl));
  $("idle").textContent = share(stats.idle_s, stats.busy_s + stats.idle_s);
  $("preemptions").textContent = number(stats.preemptions);
  $("pool-used").textContent = share(stats.blocks - stats.free_blocks, stats.max_blocks);
  $("pool-cached").textContent = share(stats.cached_blocks, stats.max_blocks);
  $("hit-rate").textContent = share(stats.prefix_hit_tokens, stats.prefix_query_tokens);
  $("memory").textContent = bytes(stats.memory_bytes);
  $("pressure").textContent = stats.pressure_level ? `memory ${stats.pressure_level} % full` : "";
  drawLine($("rate-line"), lines.rate, (value) => `${number(value)} tok/s`);
  drawLine($("ttft-line"), lines.ttft, duration);
  drawLine($("itl-line"), lines.itl, duration);
  drawBlocks($("blocks"), stats.block_map);
  const perCell = stats.blocks / Math.max(stats.block_map.length, 1);
  $("blocks-note").textContent = `${number(stats.blocks)} blocks of ${stats.block_size} tokens`
    + (stats.max_blocks > stats.blocks ? ` of ${number(stats.max_blocks)} that may come` : "")
    + (perCell > 1 ? `, every ${perCell.toFixed(1)}th shown` : "");

  rows("tiers", model.tiers.map((tier) => [tier.name, tier.running, tier.waiting]));
  rows("requests", model.requests.map((one) => [
    one.id, one.tier, one.state, one.effective_priority.toFixed(2),
    one.computed_tokens < one.prompt_tokens
      ? `${number(one.computed_tokens)} of ${number(one.prompt_tokens)}` : number(one.prompt_tokens),
    number(one.output_tokens), duration(one.age_s),
  ]), true);
  const hidden = stats.running + stats.waiting - model.requests.length;
  $("requests-note").textContent = hidden > 0 ? `and ${number(hidden)} more`
    : model.requests.length ? "" : "Nothing is in progress.";
  rows("recent", model.recent.map((one) => [
    one.id, one.tier, one.finish_reason, `${number(one.prompt_tokens)} (${number(one.cached_tokens)})`,
    number(one.output_tokens), duration(one.queue_s), duration(one.ttft_s), duration(one.tpot_s),
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
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

function rows(id, table, hasId = false) {
  $(id).replaceChildren(...table.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((cell, index) => {
      const data = row.insertCell();
      const isId = hasId && index === 0;
      data.textContent = isId && NARROW.matches ? shortened(cell) : cell;
      if (isId) { data.className = "id"; data.title = cell; }
    });
    return row;
  }));
}

// An id begins with what the client calls the request, and ends with what no other has.
const shortened = (id) => (id.length > 19 ? `${id.slice(0, 10)}…${id.slice(-8)}` : id);

// --- words --------------------------------------------------------------------------------------------------

const format = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const number = (value) => (value == null ? "–" : value > 0 && value < 10 && !Number.isInteger(value)
  ? value.toFixed(1) : format.format(value));
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return seconds < 90 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
}
function bytes(value) {
  if (value == null) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
}

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

// light-dark() is resolved only where a colour is used, so colours are read from elements that use them.
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

// --- the chat -----------------------------------------------------------------------------------------------

const turns = [];
let running = null;

function addTurn(role, text = "") {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return turn;
}

function setRunning(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").hidden = controller === null;
}

async function send(text) {
  turns.push({ role: "user", content: text });
  addTurn("user", text);
  const turn = addTurn("assistant");
  const controller = new AbortController();
  setRunning(controller);
  const started = performance.now();
  let first = null;
  let answer = "";
  let reasoning = null;
  let usage = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: controller.signal,
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        model: $("model").value || undefined, messages: turns, stream: true, stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) {
      const reason = await reasonOf(response);
      if (response.status === 401) askForKey(reason);
      throw new Error(reason);
    }
    for await (const event of events(response)) {
      if (event === "[DONE]") break;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta ?? {};
      const thought = delta.reasoning ?? delta.reasoning_content;
      if (thought) {
        if (!reasoning) turn.prepend(reasoning = Object.assign(document.createElement("span"), { className: "reasoning" }));
        reasoning.textContent += thought;
      }
      if (delta.content) { answer += delta.content; turn.append(delta.content); }
      if (first === null && (thought || delta.content)) first = performance.now();
      $("log").scrollTop = $("log").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      addTurn("error", error.message);
      if (!answer && !$("message").value) $("message").value = text; // to try again
    }
  }
  if (answer) turns.push({ role: "assistant", content: answer });
  else { turns.pop(); if (!reasoning) turn.remove(); }
  const seconds = (performance.now() - (first ?? started)) / 1000;
  $("chat-note").textContent = first === null ? "" : `first token ${duration((first - started) / 1000)}`
    + (usage && usage.completion_tokens > 1 ? `, ${number((usage.completion_tokens - 1) / seconds)} tok/s` : "");
  setRunning(null);
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  send(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns.length = 0;
  $("log").replaceChildren();
  $("chat-note").textContent = "";
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName)) {
    event.preventDefault();
    $("message").focus();
  }
});

watch();
