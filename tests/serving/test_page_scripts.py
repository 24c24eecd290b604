"""The scripts of the server's page without a browser: Markdown as nodes, and what of a chat is sent."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import forebay.serving
from forebay.serving.web_page import FILES

PAGE = Path(forebay.serving.__file__).with_name("page")
NODE = shutil.which("node")
TAGS = {"p", "br", "pre", "code", "blockquote", "ul", "ol", "li", "table", "tr", "th", "td", "hr", "strong", "em",
        "del", "a", *(f"h{i}" for i in range(1, 7))}
needs_node = pytest.mark.skipif(NODE is None, reason="no node is installed")


def run_node(folder: Path, script: str, given: Any) -> Any:
    """What a module gives that reads `given` and has the page's scripts next to it."""
    for path in PAGE.glob("*.js"):
        shutil.copy(path, folder / path.name)
    (folder / "package.json").write_text('{"type": "module"}')
    read = 'import {readFileSync} from "node:fs";\nconst given = JSON.parse(readFileSync(0));\n'
    (folder / "check.js").write_text(f"{read}{script}")
    done = subprocess.run([str(NODE), "check.js"], cwd=folder, input=json.dumps(given), text=True, timeout=60,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parse(folder: Path, texts: list[str]) -> list[list[Any]]:
    """The nodes of each text."""
    return run_node(folder, 'import {parseMarkdown} from "./markdown.js";\n'
                    "console.log(JSON.stringify(given.map(parseMarkdown)));", texts)


def brief(node: Any) -> Any:
    """A node as text, or as a tuple of its tag, its other fields and its children."""
    if isinstance(node, str):
        return node
    rest = {name: value for name, value in node.items() if name not in ("tag", "children") and value}
    return (node["tag"], *([rest] if rest else []), *map(brief, node["children"]))


CASES: dict[str, list[Any]] = {
    "# A *b* #\ntext\nmore": [("h1", "A ", ("em", "b")), ("p", "text", ("br",), "more")],
    "**a _b_** ***c*** ~~d~~ 2 * 3 * 4 a_b_c": [
        ("p", ("strong", "a ", ("em", "b")), " ", ("strong", ("em", "c")), " ", ("del", "d"), " 2 * 3 * 4 a_b_c")],
    "``a`b`` `<b>` \\*c\\*": [("p", ("code", "a`b"), " ", ("code", "<b>"), " *c*")],
    "```py\nif a:\n\n    *b*\n```\nc": [("pre", {"language": "py"}, "if a:\n\n    *b*"), ("p", "c")],
    "~~~\n```\nunclosed": [("pre", "```\nunclosed")],
    "- a\n  - b\n\n  c\n- d\n\n3. e\n4. f": [
        ("ul", ("li", "a", ("ul", ("li", "b")), ("p", "c")), ("li", "d")),
        ("ol", {"start": 3}, ("li", "e"), ("li", "f"))],
    "1. a\n   ```\n   b\n     c\n   ```\n2. d": [
        ("ol", {"start": 1}, ("li", "a", ("pre", "b\n  c")), ("li", "d"))],
    "> a\n> > b\n\n---": [("blockquote", ("p", "a"), ("blockquote", ("p", "b"))), ("hr",)],
    "| a | b |\n|---|--:|\n| `c` | d \\| e |\n| f |": [
        ("table", ("tr", ("th", "a"), ("th", {"align": "right"}, "b")),
         ("tr", ("td", ("code", "c")), ("td", {"align": "right"}, "d | e")),
         ("tr", ("td", "f"), ("td", {"align": "right"})))],
    "[a](https://b.c/d_(e) \"t\") ![f](http://g.h/i.png)": [
        ("p", ("a", {"href": "https://b.c/d_(e)"}, "a"), " ", ("a", {"href": "http://g.h/i.png"}, "f"))],
    "See http://a.b/c?d=1. (**https://e.f**)": [
        ("p", "See ", ("a", {"href": "http://a.b/c?d=1"}, "http://a.b/c?d=1"), ". (",
         ("strong", ("a", {"href": "https://e.f"}, "https://e.f")), ")")],
    "[a](javascript:alert(1)) [b](data:text/html,c) [http://d.e](http://f.g)": [
        ("p", "[a](javascript:alert(1)) [b](data:text/html,c) ", ("a", {"href": "http://f.g"}, "http://d.e"))],
    "<script>alert(1)</script><img src=x onerror=alert(1)>": [
        ("p", "<script>alert(1)</script><img src=x onerror=alert(1)>")],
}


@needs_node
def test_markdown_becomes_nodes(tmp_path: Path) -> None:
    """Each kind of block and mark; HTML and links that run scripts stay text."""
    assert dict(zip(CASES, ([brief(node) for node in nodes] for nodes in parse(tmp_path, list(CASES))),
                    strict=True)) == CASES


@needs_node
def test_no_text_is_lost_or_trusted(tmp_path: Path) -> None:
    """Of random texts made of marks every word is shown once and in order, by known elements and links alone; long
    texts made to be slow are not."""
    marks = ["*", "**", "_", "`", "```", "~~", "[", "](", "](http://l/) ", ")", "\n", "\n\n", "\n- ", "\n1. ", "\n> ",
             "|", "\n|-|\n", "#", " ", "  ", "<", ">", "!", "\\", "&lt;", "\n    ", "javascript:", "---", "\n~~~\n",
             "\t", "\r\n"]
    draw, texts = random.Random(0), []
    for _ in range(1000):
        parts = [each for i in range(12)
                 for each in (*draw.choices(marks, k=draw.randrange(4)), f" w{i}"[draw.randrange(2) :])]
        texts.append("".join(parts))
    slow = [mark * (150_000 // len(mark)) + end for end in ("x", "](http://a)") for mark in (
        "*a ", "**a", "_a ", "[", "![", "`", "` ``", "> ", "- ", "**_", "|", "|-", "\n|", "a*", "~~~", "http://", " ",
        "[a](", "```a", "-", "- -", "\n- a\n", "\n> ", "1. ", "<", "\\", "# ")]

    def walk(node: Any, found: list[str], links: int = 0) -> None:
        if isinstance(node, str):
            found.append(node)
            return
        assert node["tag"] in TAGS and node.keys() <= {"tag", "children", "href", "start", "align", "language"}
        if node["tag"] == "a":
            links += 1
            assert re.match(r"https?://|mailto:", node["href"]) and links == 1
        found.append(node.get("language", "") + " ")
        for child in node["children"]:
            walk(child, found, links)
        found.append(" " if node["tag"] not in ("a", "strong", "em", "del", "code") else "")

    for text, nodes in zip(texts, parse(tmp_path, texts), strict=True):
        found: list[str] = []
        for node in nodes:
            walk(node, found)
        assert re.findall(r"w\d+", "".join(found)) == [f"w{i}" for i in range(12)], text
    counts = run_node(tmp_path, 'import {parseMarkdown} from "./markdown.js";\n'
                      "console.log(JSON.stringify(given.map(text => parseMarkdown(text).length)));", slow)
    assert len(counts) == len(slow)


CHAT = """
import {Chat, answerLast, requestFields} from "./chat.js";
const sent = [], chat = new Chat(), encode = text => new TextEncoder().encode(text);
const reply = (texts, finish, fail, form = text => ({delta: {content: text}})) => ({ok: true, body: new ReadableStream({
  start(to) {
    const events = texts.map(text => ({choices: [{...form(text), finish_reason: null}]}));
    if (finish) events.push({choices: [{delta: {}, finish_reason: finish}]}, {choices: []});
    const bytes = encode(events.map(event => `data: ${JSON.stringify(event)}\\n\\n`).join("") + "data: [DONE]\\n\\n");
    for (let i = 0; i < bytes.length; i += 7) to.enqueue(bytes.slice(i, i + 7));
    fail ? setTimeout(() => to.error(fail), 5) : to.close();
  }})});
const refuse = (message, code) => ({ok: false, json: async () => ({error: {message, code}})});
let most = 99, next = () => reply(["é", "ü"], "stop");
const send = async (path, body) => {
  sent.push({path, ...body});
  return (body.messages || []).length > most ? refuse("too long", "context_length_exceeded") : next();
};
async function ask(text, images, count, template = true) {
  const turn = chat.begin(text, images, count);
  try {
    turn.note = await answerLast(chat, {system: "S", fields: {seed: 1}, template, send, hear() {}});
  } catch (error) {
    turn.error = error.message;
  }
  return turn;
}
const turns = [await ask("1")];
next = () => reply(["part"], null, new DOMException("", "AbortError"));
turns.push(await ask("2"));
next = () => reply([], null, new DOMException("", "AbortError"));
turns.push(await ask("3"));
next = () => reply(["half"], null);
turns.push(await ask("4"));
next = () => reply(["cut"], "length");
turns.push(await ask("5", ["data:x"]));
turns.push(await ask("6", [], 1));
const rewound = chat.turns.length;
for (let i = 0; i < 6; i += 1) await ask("more " + i);
most = 6;
turns.push(await ask("7"));
const first = chat.first, kept = sent.at(-1).messages.map(each => each.content);
most = 0;
turns.push(await ask("8"));
next = () => reply(["plain"], "stop", null, text => ({text}));
turns.push(await ask("9", [], 1, false));
console.log(JSON.stringify({turns, first, kept, rewound, after: chat.first, sent,
  fields: requestFields({temperature: "0", seed: "", top_p: "0.5"})}));
"""


@needs_node
def test_a_chat_sends_what_fits_and_was_answered(tmp_path: Path) -> None:
    """Stopped answers stay in the history, turns without one do not; older turns are left out until the rest fits."""
    found = run_node(tmp_path, CHAT, None)
    one, two, three, four, five, six, seven, eight, nine = found["turns"]
    assert (one["answer"], one["note"]) == ("éü", "stop") and (two["answer"], two["note"]) == ("part", "stopped")
    assert (three["answer"], three["note"]) == ("", "stopped") and (five["note"], six["note"]) == ("length", "length")
    assert four["answer"] == "half" and four["error"].startswith("the server left")
    fifth, sixth = found["sent"][4], found["sent"][5]
    assert fifth["messages"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "1"}, {"role": "assistant", "content": "éü"},
        {"role": "user", "content": "2"}, {"role": "assistant", "content": "part"},
        {"role": "user", "content": "4"}, {"role": "assistant", "content": "half"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}},
                                     {"type": "text", "text": "5"}]}]
    assert fifth["stream"] is True and fifth["seed"] == 1 and fifth["path"] == "/v1/chat/completions"
    assert [m["content"] for m in sixth["messages"]] == ["S", "1", "éü", "6"] and found["rewound"] == 2
    assert found["kept"] == ["S", "more 4", "cut", "more 5", "cut", "7"] and found["first"] == 6
    assert seven["note"] == "length" and eight["error"] == "too long" and found["after"] == 1
    assert found["sent"][-1]["prompt"] == "9" and nine["answer"] == "plain"
    assert found["fields"] == {"temperature": 0, "top_p": 0.5}


def test_the_page_refers_to_its_own_files_alone() -> None:
    """Every reference of the page is one of its files, no script makes HTML of text, and none is within the page."""
    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if name in ("src", "href") and value)
            styled.extend(name for name, _ in attrs if name == "style" or name.startswith("on"))
            ids.extend(value for name, value in attrs if name == "id" and value)

        def handle_data(self, data: str) -> None:
            assert self.lasttag != "script" or not data.strip()

    found: list[str] = []
    styled: list[str] = []
    ids: list[str] = []
    Reader().feed(FILES["/"].read_text())
    assert found == ["data:,", "/page/page.css", "/page/page.js"] and not styled and len(ids) == len(set(ids))
    scripts = {path.name: path.read_text() for path in FILES.values() if path.suffix == ".js"}
    for name, text in scripts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text), name
        assert {f"/page/{each}" for each in re.findall(r'from "\./([^"]+)"', text)} <= FILES.keys()
        assert set(re.findall(r'\bfind\("([^"]+)"\)', text)) <= set(ids)
    assert not re.search(r"url\(|@import", FILES["/page/page.css"].read_text())
    assert len(scripts) == 4
