// Shared by the parts of the page: the key, requests to the server, number formats.

export const $ = (id) => document.getElementById(id);
export const NARROW = matchMedia("(max-width: 42rem)"); // as in page.css

// --- the key: kept for this tab only ------------------------------------------------------------------------

const KEY = "mlx-serve-key";
export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key-form").hidden = true;
  $("key").value = "";
  dispatchEvent(new Event("key-changed"));
});

export function askForKey(reason) {
  $("key-reason").textContent = reason;
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

// --- requests -----------------------------------------------------------------------------------------------

// The answer; throws the message of the server's error.
export async function send(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { ...options, headers: { "content-type": "application/json", ...headers() } });
  if (!response.ok) throw new Error(await reasonOf(response));
  return response;
}
export const ask = async (path, body) => (await send(path, body)).json();

// Server-sent events over fetch, since EventSource cannot send a key.
export async function* events(response) {
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

export async function reasonOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// --- formats ------------------------------------------------------------------------------------------------

const format = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const number = (value) => (value == null ? "–" : value > 0 && value < 10 && !Number.isInteger(value)
  ? value.toFixed(1) : format.format(value));
export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return seconds < 90 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
}
export function bytes(value) {
  if (value == null) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
}

export function rows(id, table, hasId = false) {
  $(id).replaceChildren(...table.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((cell, index) => {
      const data = row.insertCell();
      const isId = hasId && index === 0;
      data.append(isId && NARROW.matches ? shortened(cell) : cell);
      if (isId) { data.className = "id"; data.title = cell; }
    });
    return row;
  }));
}

// An id begins with the client's own name of the request, and its end is unique.
const shortened = (id) => (id.length > 19 ? `${id.slice(0, 10)}…${id.slice(-8)}` : id);
