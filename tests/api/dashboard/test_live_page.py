"""What people do on the live page, in a browser: chats with Markdown that cannot become script, kept in the browser;
settings, images, the stop button; models and keys for admins."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.config import CacheConfig, Config, PoolConfig, ServerConfig
from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.models import store
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.model_entries import ModelEntry
from mlx_server.pool.model_pool import build_pool
from mlx_server.runtime.models.progress import shown
from mlx_server.tiers import Tier, default_tiers
from tests.adapter_files import write_adapter, write_model
from tests.api.fakes import say
from tests.api.worlds import Site, World, until
from tests.browser import EXECUTABLE, Page, browser
from tests.picture_worlds import QWEN, encoded, picture

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium"),
]

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "text <b onmouseover='window.hacked = 1'>inside</b> a line",
    "<svg/onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "<style>body { display: none }</style>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt:window.hacked=1)",
    "[x](java\tscript:window.hacked=1)",
    "[x](&#106;avascript:window.hacked=1)",
    "[x](&#x6A;&#x61;vascript&colon;window.hacked=1)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:hacked) [y](file:///etc/passwd) [z](//evil.example)",
    "[x](<javascript:window.hacked=1> 'title')",
    "[a]: javascript:window.hacked=1\n\n[a]",
    "<javascript:window.hacked=1>",
    '[x](https://a.example/" onclick="window.hacked=1)',
    "![x](javascript:window.hacked=1) ![y](https://a.example/pixel.png) ![](data:image/svg+xml,<svg onload=hacked=1>)",
    '```"><script>window.hacked=1</script>\n</code></pre><script>window.hacked=1</script>\n```',
    "`</code><img src=x onerror=hacked=1>`",
    "| a | <script>hacked=1</script> |\n|---|---|\n| [x](javascript:hacked=1) | <img src=x onerror=hacked=1> |",
    "- [ ] <input autofocus onfocus=hacked=1>\n- [x] [x](javascript:hacked=1)",
    "# <script>hacked=1</script>\n\n> <object data=x>\n> ## [x](javascript:hacked=1)",
    "&lt;script&gt;hacked=1&lt;/script&gt; &#60;img src=x onerror=hacked=1&#62;",
    "<form action=https://evil.example><button>",
    "<!-- --!><img src=x onerror=hacked=1> -->",
    "<math><mtext></table><img src=x onerror=hacked=1>",
]
ENDLESS = [">" * 5000 + " x", "- " * 3000 + "x", "*" * 20000, "[" * 5000, "`" * 9999, "a_" * 9999, "<" * 9999]
MAY_BE = {
    *("P", "SPAN", "A", "CODE", "PRE", "FIGURE", "FIGCAPTION", "BUTTON", "UL", "OL", "LI", "INPUT", "BLOCKQUOTE"),
    *("H3", "H4", "H5", "H6", "HR", "BR", "STRONG", "EM", "DEL", "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
}
ATTRIBUTES = {"class", "href", "title", "target", "rel", "type", "disabled", "start", "checked"}
LOOK = """(async () => {
    const { showMarkdown } = await import(new URL("dashboard/markdown.js", location).href);
    const node = document.createElement("div");
    document.body.append(node);
    showMarkdown(TEXT, node);
    const all = [...node.querySelectorAll("*")];
    const found = {
        text: node.textContent, names: all.map((one) => one.tagName),
        attributes: all.flatMap((one) => one.getAttributeNames()),
        links: [...node.querySelectorAll("a")].map((a) => a.href),
    };
    node.remove();
    return found;
})()"""

KINDS = """# Title

Some **bold**, *slanted* and `inline` text &amp; a [link](https://a.example/?a=1&b=2).

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>")
```
"""


@pytest_asyncio.fixture(loop_scope="session")
async def guest(world: World) -> AsyncIterator[Page]:
    """A page whose reader is no admin: it chats, and reads no figures."""
    world.configure_server(admin_key="admin")
    world.engine.max_model_len = 8192
    async with asyncio.timeout(60), browser(world.url) as page:
        await page.until("document.getElementById('model')?.value === 'fake'")
        yield page
        assert page.errors == []


async def submit(page: Page, form: str, field: str, text: str) -> None:
    await page.evaluate(f"document.getElementById('{field}').value = {json.dumps(text)}")
    await page.evaluate(f"document.getElementById('{form}').requestSubmit()")


async def say_on(page: Page, text: str) -> None:
    await submit(page, "chat", "message", text)


async def answered(page: Page, num_turns: int) -> None:
    is_done = "document.getElementById('stop').hidden && !document.getElementById('send').disabled"
    await page.until(f"{is_done} && document.querySelectorAll('.turn').length === {num_turns}")


async def test_markdown_is_shown_and_cannot_become_script(world: World, guest: Page) -> None:
    for text in HOSTILE:
        found = await guest.evaluate(LOOK.replace("TEXT", json.dumps(text)))
        assert set(found["names"]) <= MAY_BE, text
        assert set(found["attributes"]) <= ATTRIBUTES, text
        assert all(link.startswith("https://a.example/") for link in found["links"]), text
    for text in ENDLESS:
        found = await guest.evaluate(LOOK.replace("TEXT", json.dumps(text)))
        assert set(found["names"]) <= MAY_BE, text
    world.engine.script = say(KINDS + "\n\n".join(HOSTILE))
    await say_on(guest, "Show me **all** <b>of it</b>")
    await answered(guest, 2)
    assert await guest.evaluate("document.querySelector('.turn.user').textContent") == "Show me **all** <b>of it</b>"
    shown_parts = {
        "h3": "Title",
        "strong": "bold",
        "em": "slanted",
        "p code": "inline",
        "a": "link",
        "li:last-child": "two",
        "td": "1",
        "pre": 'print("<b>")',
        "figcaption span": "python",
    }
    for selector, text in shown_parts.items():
        assert await guest.evaluate(f"document.querySelector('.markdown {selector}').textContent") == text
    assert await guest.evaluate("document.querySelector('.markdown a').href") == "https://a.example/?a=1&b=2"
    assert "text & a" in await guest.evaluate("document.querySelectorAll('.markdown p')[0].textContent")
    assert await guest.evaluate("document.querySelectorAll('#log img, #log script, #log iframe').length") == 0
    assert await guest.evaluate("window.hacked === undefined")


async def test_chats_are_kept_in_the_browser_and_settings_are_sent(world: World, guest: Page) -> None:
    settings = {"system": "Be terse.", "temperature": "0.3", "top_p": "0.9", "max_tokens": "9", "seed": "7"}
    for name, value in settings.items():
        script = f"document.getElementById('setting-{name}')"
        await guest.evaluate(f"{script}.value = '{value}'; {script}.dispatchEvent(new Event('change'))")
    await say_on(guest, "First of all")
    await answered(guest, 2)
    request = world.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.3, 0.9, 9, 7)
    assert "Be terse." in world.engine.tokenizer.decode(request.prompt_token_ids)
    await guest.evaluate("document.getElementById('new-chat').click()")
    assert await guest.evaluate("document.querySelectorAll('.turn').length") == 0
    await say_on(guest, "Second")
    await answered(guest, 2)
    titles = "[...document.getElementById('chats').options].map((option) => option.text).join('|')"
    await guest.until(f"{titles} === 'Second|First of all'")
    await guest.reload()
    await guest.until(f"{titles} === 'Second|First of all'")
    assert await guest.evaluate("document.getElementById('setting-seed').value") == "7"
    choose = "const s = document.getElementById('chats'); s.selectedIndex = 1; s.dispatchEvent(new Event('change'))"
    await guest.evaluate(f"{{ {choose} }}")
    texts = "[...document.querySelectorAll('.turn')].map((turn) => turn.textContent)"
    assert await guest.evaluate(texts) == ["First of all", "Hello world"]
    await guest.until("document.getElementById('model').value === 'fake'")
    await say_on(guest, "And then?")
    await answered(guest, 4)
    prompt = world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids)
    assert prompt.index("First of all") < prompt.index("Hello world") < prompt.index("And then?")
    await guest.evaluate("document.getElementById('delete-chat').click()")
    await guest.until(f"{titles} === 'New chat|Second'")
    await guest.reload()
    await guest.until(f"{titles} === 'Second'")


FILL = """new Promise((done, fail) => {
    const request = indexedDB.open("mlx-serve", 1);
    request.onsuccess = () => {
        const change = request.result.transaction("chats", "readwrite");
        const turns = (size) => [{ role: "user", content: "x".repeat(size) }];
        for (let n = 0; n < COUNT; n++) {
            change.objectStore("chats").put({ id: `${n}`, title: `${n}`, changed: n, turns: turns(SIZE) });
        }
        change.oncomplete = () => done(request.result.close());
        change.onerror = () => fail(change.error);
    };
})"""
KEPT = """new Promise((done) => {
    const request = indexedDB.open("mlx-serve", 1);
    request.onsuccess = () => {
        const all = request.result.transaction("chats").objectStore("chats").getAll();
        all.onsuccess = () => {
            request.result.close();
            done(all.result.sort((a, b) => b.changed - a.changed).map((chat) => chat.title));
        };
    };
})"""


@pytest.mark.parametrize(
    ("count", "size", "num_left"), [(120, 9, 99), pytest.param(6, 12_000_000, 4, marks=pytest.mark.slow)]
)
async def test_a_browser_keeps_so_many_chats_and_the_latest(
    world: World, guest: Page, count: int, size: int, num_left: int
) -> None:
    await guest.evaluate(FILL.replace("COUNT", str(count)).replace("SIZE", str(size)))
    await guest.evaluate("localStorage.setItem('mlx-serve-settings', '{not ours')")
    await guest.reload()
    await guest.until(f"document.getElementById('chats').options.length >= {count}")
    await guest.until("document.getElementById('model').value === 'fake'")
    await guest.evaluate("document.getElementById('new-chat').click()")
    await say_on(guest, "The latest")
    await answered(guest, 2)
    left = ["The latest", *(str(number) for number in range(count - 1, count - 1 - num_left, -1))]
    assert await guest.evaluate(KEPT) == left
    assert await guest.evaluate("document.getElementById('chats').options.length") == len(left)


async def test_an_answer_can_be_stopped_and_its_part_stays(world: World, guest: Page) -> None:
    world.engine.script, world.engine.pause_after = say("one two three four five six"), 4
    await say_on(guest, "Count")
    await guest.until("document.querySelector('.turn.assistant')?.textContent.startsWith('one')")
    assert not await guest.evaluate("document.getElementById('stop').hidden")
    await guest.evaluate("document.getElementById('stop').click()")
    await answered(guest, 2)
    await until(lambda: world.engine.aborted)
    world.engine.resume()
    assert not (await guest.evaluate("document.querySelector('.turn.assistant').textContent")).endswith("six")


async def test_images_are_sent_where_the_model_sees(world: World, guest: Page, tmp_path: Path) -> None:
    hidden = "document.getElementById('attach-label').hidden"
    assert await guest.evaluate(hidden)
    tokenizer = QWEN.tokenizer()
    engine = world.engine
    engine.vision, engine.tokenizer, engine.grammars = (
        QWEN.load(tmp_path, tokenizer),
        tokenizer,
        GrammarCompiler(tokenizer),
    )
    engine.chat = ChatFormatter(engine.tokenizer)
    await guest.evaluate("dispatchEvent(new Event('models-changed'))")
    await guest.until(f"!{hidden}")
    content = base64.b64encode(encoded(picture(0))).decode()
    await guest.evaluate(
        f"""{{
        const bytes = Uint8Array.from(atob("{content}"), (one) => one.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], "cat.png", {{ type: "image/png" }}));
        const input = document.getElementById("attach");
        input.files = files.files;
        input.dispatchEvent(new Event("change"));
        }}"""
    )
    await guest.until("document.querySelectorAll('#pictures img').length === 1")
    await say_on(guest, "What is it?")
    await answered(guest, 2)
    assert len(engine.requests[-1].images) == 1
    assert await guest.evaluate("document.querySelectorAll('#pictures img').length") == 0
    assert await guest.evaluate("document.querySelector('.turn.user img').naturalWidth > 0")


async def press(page: Page, name: str) -> None:
    """The button of a model or adapter, once what it did before has been answered."""
    button = f"document.querySelector('#models button[data-model=\"{name}\"]')"
    await page.until(f"{button}.disabled === false")
    await page.evaluate(f"{button}.click()")


@pytest.mark.slow
async def test_admins_load_unload_and_fetch_models(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"attention_backend": "reference"}
    entries = tuple(ModelEntry(id=name, model="random:mini", overrides=overrides) for name in ("one", "two"))
    settings = Config(models=entries, cache=CacheConfig(num_kv_blocks=40), pool=PoolConfig(pulled_models=True))
    pool = build_pool(settings)
    await pool.start()
    site.serve(pool, settings)
    release = threading.Event()

    def fetch(name: str) -> Path:
        with shown(name, "fetching", 100 * 2**20) as report:
            report(40 * 2**20)
            release.wait(30)
        return Path()

    monkeypatch.setattr(store, "resolve_model", fetch)
    state = "document.querySelector('#models tr:nth-child({}) td:nth-child(2)')?.textContent"
    try:
        async with asyncio.timeout(60), browser(site.url) as page:
            await page.until(f"{state.format(2)} === 'unloaded'")
            await press(page, "two")
            await page.until(f"{state.format(2)} === 'ready'")
            assert await page.evaluate(state.format(1)) == "unloaded"
            await press(page, "two")
            await page.until(f"{state.format(2)} === 'unloaded'")
            await submit(page, "pull", "pull-name", "owner/new")
            status = "document.getElementById('pulls').textContent"
            await page.until(f"{status}.startsWith('owner/new fetching 40 MiB of 100 MiB')")
            (pull,) = (await site.http.get("/admin/models")).json()["pulls"]
            assert (pull["model"], pull["done_bytes"], pull["total_bytes"]) == ("owner/new", 40 * 2**20, 100 * 2**20)
            release.set()
            await page.until("document.getElementById('models-note').textContent === 'owner/new is here.'")
            await page.until("document.getElementById('pulls-table').hidden")
            await submit(page, "pull", "pull-name", "nothing")
            await page.until("document.getElementById('models-note').textContent.includes('by their hub id')")
            assert page.errors == []
    finally:
        release.set()
        await pool.stop(0)


@pytest.mark.slow
async def test_admins_load_and_unload_adapters(site: Site, tmp_path: Path) -> None:
    base = write_model("llama", tmp_path / "base")
    own = write_adapter(base, tmp_path / "own", seed=1)
    entries = (ModelEntry(id="one", model="random:mini"), ModelEntry(id="two", model=str(base)))
    settings = Config(models=entries, cache=CacheConfig(num_kv_blocks=40))
    pool = build_pool(settings)
    await pool.start()
    site.serve(pool, settings)
    rows = "[...document.querySelectorAll('#models tr')].map((row) => row.cells[0].textContent).join()"
    note = "document.getElementById('models-note').textContent"
    form = "{ const field = (name) => document.getElementById(`adapter-${name}`);"
    submit_adapter = form + "field('name').value = '%s'; field('path').value = '%s'; field('replaces').checked = %s;"
    submit_adapter += "document.getElementById('adapter').requestSubmit(); }"
    async with asyncio.timeout(60), browser(site.url) as page:
        await page.until(f"{rows} === 'one,two'")
        await page.evaluate(submit_adapter % ("two:mine", own, "false"))
        await page.until(f"{note} === 'two:mine is here.' && {rows} === 'one,two,two:mine'")
        assert await page.evaluate(form + "field('name').value + field('path').value; }") == ""
        await page.until("[...document.getElementById('model').options].some((one) => one.value === 'two:mine')")
        await page.evaluate(submit_adapter % ("two:mine", own, "false"))
        await page.until(f"{note}.startsWith('The adapter two:mine is loaded already')")
        assert await page.evaluate(form + "field('name').value; }") == "two:mine"
        await page.evaluate(submit_adapter % ("two:mine", own, "true"))
        await page.until(f"{note} === 'two:mine is here.'")
        await press(page, "two:mine")
        await page.until(f"{rows} === 'one,two'")
        assert [offer.name for offer in await pool.offered()] == ["one", "two"]
        assert page.errors == []
    await pool.stop(0)


async def test_admins_see_keys_and_tiers_with_their_use(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    with KeyFile.create(path) as file:
        key, admin = file.add("gold", "the editor"), file.add("boss", "me")
        gone = file.add("gold", "gone")
        file.revoke(gone.key_id)
    tiers = {
        **default_tiers(),
        "gold": Tier(name="gold", requests_per_minute=60),
        "boss": Tier(name="boss", admin=True),
    }
    entry = ModelEntry(id="one", model="random:mini", overrides={"attention_backend": "reference"}, pinned=True)
    server = ServerConfig(key_file=str(path))
    settings = Config(models=(entry,), cache=CacheConfig(num_kv_blocks=40), server=server, tiers=tiers)
    pool = build_pool(settings)
    await pool.start()
    context = site.serve(pool, settings)
    body: dict[str, Any] = {"prompt": [5] * 12, "max_tokens": 3, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key.text}"}
    assert (await site.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    await context.keys.usage.flush()
    rows = "[...document.querySelectorAll('#{} tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    async with asyncio.timeout(60), browser(site.url) as page:
        await page.until("document.getElementById('key-form')?.hidden === false")
        await submit(page, "key-form", "key", admin.text)
        await page.until("document.getElementById('keys-card').hidden === false")
        keys = await page.evaluate(rows.format("keys"))
        assert ["the editor", "gold", "1", "12", "3", "now"] in keys
        assert {row[0] for row in keys} == {"the editor", "me"}
        limits = await page.evaluate(rows.format("tier-limits"))
        assert ["gold", "normal", "60", "no limit", "no limit", "0"] in limits
        assert "_" + key.key_id not in await page.evaluate("document.body.textContent")
        assert page.errors == []
    await pool.stop(0)
