// Markdown as elements. A model's output becomes text and a few kinds of elements, created one by one. No HTML is
// parsed, so none of it can become script. marked (vendor/) only finds the structure.

import { Lexer } from "./vendor/marked.esm.js";

const MAX_DEPTH = 24;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–" };

// Shows `text` in `node`. While the text grows, blocks that do not change keep their elements.
export function showMarkdown(text, node) {
  let tokens;
  try {
    tokens = new Lexer({ gfm: true }).lex(text).filter((token) => token.type !== "space" && token.type !== "def");
  } catch { // nested too deeply
    node.replaceChildren(text);
    return;
  }
  tokens.forEach((token, index) => {
    const there = node.childNodes[index];
    if (there?.markdown === token.raw) return;
    const made = block(token, 0);
    made.markdown = token.raw;
    if (there) there.replaceWith(made);
    else node.append(made);
  });
  while (node.childNodes.length > tokens.length) node.lastChild.remove();
}

function element(name, children = [], properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const plain = (text) => String(text ?? "").replace(/&(#x[0-9a-f]{1,6}|#\d{1,7}|[a-z]+);/gi, (whole, name) => {
  if (name[0] !== "#") return NAMED[name] ?? whole;
  const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
});

function block(token, depth) {
  if (depth > MAX_DEPTH) return element("p", [token.raw ?? ""]);
  const blocks = (tokens) => (tokens ?? []).filter((one) => one.type !== "space").map((one) => block(one, depth + 1));
  switch (token.type) {
    case "heading": return element(`h${Math.min(token.depth + 2, 6)}`, inlines(token.tokens, depth), { className: "md" });
    case "paragraph": return element("p", inlines(token.tokens, depth));
    case "code": return code(token);
    case "hr": return element("hr");
    case "blockquote": return element("blockquote", blocks(token.tokens));
    case "list": {
      const items = token.items.map((item) => element("li", blocks(item.tokens)));
      const list = element(token.ordered ? "ol" : "ul", items);
      if (token.ordered && Number.isInteger(token.start)) list.start = token.start;
      return list;
    }
    case "table": return table(token, depth);
    case "text": return element("span", token.tokens ? inlines(token.tokens, depth) : [plain(token.text)]);
    case "checkbox": return element("input", [], { type: "checkbox", disabled: true, checked: token.checked });
    default: return element("p", [token.raw ?? ""]); // also HTML
  }
}

function code(token) {
  const copy = element("button", ["Copy"], { type: "button", className: "copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(token.text);
      copy.textContent = "Copied";
    } catch { copy.textContent = "Select it by hand"; } // browsers refuse it without HTTPS
  });
  const language = element("span", [token.lang ?? ""]);
  return element("figure", [element("figcaption", [language, copy]), element("pre", [element("code", [token.text])])]);
}

function table(token, depth) {
  const row = (cells, kind) => element("tr", cells.map((cell) => element(kind, inlines(cell.tokens, depth))));
  const head = element("thead", [row(token.header, "th")]);
  return element("div", [element("table", [head, element("tbody", token.rows.map((cells) => row(cells, "td")))])],
    { className: "scroll" });
}

function inlines(tokens, depth) {
  return (tokens ?? []).map((token) => inline(token, depth + 1));
}

function inline(token, depth) {
  if (depth > MAX_DEPTH) return token.raw ?? "";
  switch (token.type) {
    case "strong": case "em": case "del": return element(token.type, inlines(token.tokens, depth));
    case "codespan": return element("code", [token.text]);
    case "br": return element("br");
    case "escape": return token.text;
    case "text": return token.tokens ? element("span", inlines(token.tokens, depth)) : plain(token.text);
    case "link": return link(token.href, inlines(token.tokens, depth));
    case "image": return link(token.href, [`[image: ${token.text || token.href}]`]); // images are not fetched
    default: return token.raw ?? "";
  }
}

function link(href, children) {
  const target = plain(href).trim();
  if (!SAFE_LINK.test(target)) return element("span", children, { title: target });
  return element("a", children, { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow" });
}
