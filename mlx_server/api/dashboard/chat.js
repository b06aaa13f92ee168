// Chats through the public API. They are stored in this browser (IndexedDB) and nowhere else.

import { $, ask, askForKey, duration, events, headers, number, reasonOf } from "./common.js";
import { showMarkdown } from "./markdown.js";

const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const SETTINGS_KEY = "mlx-serve-settings";
const MAX_TITLE = 40;
const MAX_CHATS = 100; // the oldest chats beyond these limits are deleted; images count, too
const MAX_LETTERS = 50e6;

// --- models to choose from ----------------------------------------------------------------------------------

export let offers = [];

export async function listOffers() {
  try {
    offers = (await ask("v1/models")).data;
  } catch {
    return; // page.js shows the reason
  }
  const select = $("model");
  const names = offers.map((offer) => offer.id);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  showAttach();
  dispatchEvent(new Event("offers-changed"));
}

const takesImages = () => Boolean(offers.find((offer) => offer.id === $("model").value)?.capabilities?.includes("vision"));

function showAttach() {
  $("attach-label").hidden = !takesImages();
  if (!takesImages()) setPictures([]);
}

$("model").addEventListener("change", showAttach);
addEventListener("key-changed", listOffers);
addEventListener("models-changed", listOffers);

// --- stored chats ------------------------------------------------------------------------------------------

const opened = new Promise((resolve) => {
  const request = indexedDB.open("mlx-serve", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => resolve(null); // a private window: chats are lost with the page
});

async function kept(mode, work) {
  const db = await opened;
  if (!db) return undefined;
  return new Promise((resolve) => {
    const change = db.transaction("chats", mode);
    const request = work(change.objectStore("chats"));
    change.oncomplete = () => resolve(request.result);
    change.onabort = () => resolve(undefined); // for example, no room, which shows only here
  });
}

let chat = null; // { id, title, changed, turns: [{ role, content, images, reasoning }] }
let chats = [];

function begin() {
  chat = { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, title: "New chat", changed: Date.now(), turns: [] };
  show();
}

// Stores a chat. Returns whether the browser had room for it.
async function keep(one) {
  if (one.isDeleted || !one.turns.length) return true;
  one.changed = Date.now();
  one.title = one.turns[0].content.slice(0, MAX_TITLE).replace(/\s+/g, " ") || "Image";
  if (!chats.includes(one)) chats.unshift(one);
  const isKept = (await kept("readwrite", (store) => store.put(one))) !== undefined;
  await forgetOldest(one);
  listChats();
  return isKept || !await opened; // without a store, chats are not kept anyway
}

const letters = ({ turns }) => turns.reduce((sum, { content, reasoning = "", images = [] }) =>
  sum + content.length + reasoning.length + images.reduce((all, url) => all + url.length, 0), 0);

async function forgetOldest(latest) {
  let room = MAX_LETTERS - letters(latest);
  const others = chats.filter((one) => one !== latest).sort((one, other) => other.changed - one.changed);
  const gone = others.filter((one, index) => (room -= letters(one)) < 0 || index >= MAX_CHATS - 1);
  chats = chats.filter((one) => !gone.includes(one));
  for (const one of gone) await kept("readwrite", (store) => deleteUnchanged(store, one));
}

// Unless another tab has changed it.
function deleteUnchanged(store, { id, changed }) {
  const request = store.get(id);
  request.onsuccess = () => request.result?.changed === changed && store.delete(id);
  return request;
}

function listChats() {
  const known = chats.includes(chat) || !chat ? chats : [chat, ...chats];
  $("chats").replaceChildren(...known.map((one) => new Option(one.title, one.id)));
  $("chats").value = chat?.id ?? "";
  $("delete-chat").disabled = !chats.includes(chat);
}

function show() {
  $("log").replaceChildren();
  $("chat-note").textContent = "";
  for (const turn of chat.turns) addTurn(turn);
  listChats();
}

$("chats").addEventListener("change", () => {
  running?.abort();
  chat = chats.find((one) => one.id === $("chats").value) ?? chat;
  show();
});
$("new-chat").addEventListener("click", () => {
  running?.abort();
  begin();
  $("message").focus();
});
$("delete-chat").addEventListener("click", async () => {
  running?.abort();
  const gone = chat;
  gone.isDeleted = true;
  chats = chats.filter((one) => one !== gone);
  begin();
  await kept("readwrite", (store) => store.delete(gone.id));
});

async function restore() {
  const found = (await kept("readonly", (store) => store.getAll())) ?? [];
  chats = [...chats, ...found.sort((one, other) => other.changed - one.changed)];
  if (chat.turns.length || !chats.length) { // a chat has begun already
    listChats();
    return;
  }
  [chat] = chats;
  show();
}

// --- settings -----------------------------------------------------------------------------------------------

const field = (name) => $(`setting-${name}`);
const saved = savedSettings();
function savedSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS_KEY)) ?? {};
  } catch {
    return {}; // written by another page of this address
  }
}
for (const name of SETTINGS) {
  field(name).value = saved[name] ?? "";
  field(name).addEventListener("change", () => {
    const values = SETTINGS.map((one) => [one, field(one).value.trim()]).filter(([, value]) => value);
    localStorage.setItem(SETTINGS_KEY, JSON.stringify(Object.fromEntries(values)));
  });
}

function sampling() {
  const given = SETTINGS.slice(1).filter((name) => field(name).value.trim() !== "");
  return Object.fromEntries(given.map((name) => [name, Number(field(name).value)]));
}

// --- images -------------------------------------------------------------------------------------------------

let pictures = [];

function setPictures(urls) {
  pictures = urls;
  $("pictures").replaceChildren(...urls.map((url, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Remove";
    button.append(Object.assign(new Image(), { src: url, alt: `Image ${index + 1}, remove` }));
    button.addEventListener("click", () => setPictures(pictures.filter((one) => one !== url)));
    return button;
  }));
}

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

async function attach(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  if (takesImages() && found.length) setPictures([...pictures, ...await Promise.all(found.map(read))]);
}

$("attach").addEventListener("change", async () => {
  await attach($("attach").files);
  $("attach").value = "";
});
$("message").addEventListener("paste", (event) => attach(event.clipboardData.files));

// --- a conversation -----------------------------------------------------------------------------------------

let running = null;

function addTurn({ role, content, images = [], reasoning = "" }) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  for (const url of images) turn.append(Object.assign(new Image(), { src: url, alt: "Image" }));
  const text = document.createElement("div");
  if (role === "assistant") {
    text.className = "markdown";
    showMarkdown(content, text);
  } else {
    text.textContent = content;
  }
  turn.append(text);
  $("log").append(turn);
  if (reasoning) showReasoning(turn, reasoning);
  $("log").scrollTop = $("log").scrollHeight;
  return turn;
}

function showReasoning(turn, text) {
  let reasoning = turn.querySelector(".reasoning");
  if (!reasoning) {
    reasoning = document.createElement("details");
    reasoning.className = "reasoning";
    reasoning.open = true;
    reasoning.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }), document.createElement("div"));
    turn.prepend(reasoning);
  }
  reasoning.lastChild.textContent = text;
}

function setRunning(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").hidden = controller === null;
}

const message = ({ role, content, images = [] }) => ({
  role,
  content: images.length ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }]
    : content,
});

// Shows an answer as it arrives, at most once a frame, and less often if that takes long.
function painter(turn, answer) {
  let next = 0;
  let asked = false;
  const paint = () => {
    asked = false;
    const began = performance.now();
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    showMarkdown(answer.content, turn.querySelector(".markdown"));
    if (answer.reasoning) showReasoning(turn, answer.reasoning);
    if (follows) log.scrollTop = log.scrollHeight;
    next = performance.now() + 4 * (performance.now() - began);
  };
  return {
    now: paint,
    soon: () => {
      if (asked) return;
      asked = true;
      setTimeout(() => requestAnimationFrame(paint), Math.max(0, next - performance.now()));
    },
  };
}

async function send(text, images) {
  const own = chat;
  own.turns.push({ role: "user", content: text, images });
  addTurn(own.turns.at(-1));
  const answer = { role: "assistant", content: "", reasoning: "" };
  const turn = addTurn(answer);
  const paint = painter(turn, answer);
  const controller = new AbortController();
  setRunning(controller);
  const started = performance.now();
  let first = null;
  let usage = null;
  try {
    const system = field("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...own.turns.map(message)];
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: controller.signal,
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        model: $("model").value || undefined, messages, ...sampling(), stream: true, stream_options: { include_usage: true },
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
      if (thought) answer.reasoning += thought;
      if (delta.content) answer.content += delta.content;
      if (!thought && !delta.content) continue;
      first ??= performance.now();
      paint.soon();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (own === chat) addTurn({ role: "error", content: error.message });
      if (!answer.content && !$("message").value) { // to retry
        $("message").value = text;
        setPictures(images);
      }
    }
  }
  paint.now();
  if (answer.content) own.turns.push(answer);
  else { own.turns.pop(); if (!answer.reasoning) turn.remove(); }
  const isKept = await keep(own);
  const seconds = (performance.now() - (first ?? started)) / 1000;
  $("chat-note").textContent = first === null ? "" : `first token ${duration((first - started) / 1000)}`
    + (usage && usage.completion_tokens > 1 ? `, ${number((usage.completion_tokens - 1) / seconds)} tok/s` : "");
  if (!isKept) $("chat-note").textContent = "The browser has no room to keep this chat.";
  setRunning(null);
  listOffers(); // the first message loads a model, and only then it is known whether it takes images
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if ((!text && !pictures.length) || running) return;
  const images = pictures;
  $("message").value = "";
  setPictures([]);
  send(text, images);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName)) {
    event.preventDefault();
    $("message").focus();
  }
});

begin();
restore();
listOffers();
