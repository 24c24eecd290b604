// Markdown as a tree of plain objects, and the tree as elements of a page.
//
// A node is text, or {tag, children, href?, start?, align?, language?}. Text never becomes HTML: elements are made by
// tag, tags are those named here, and links lead to web pages or mail alone. Answers of a model are not to be trusted.

const DEEPEST = 16; // lists, quotes and emphasis within each other; what is deeper stays text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *(.*)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const DIVIDER = /^:?-+:?$/; // of each cell
const LINK = /!?\[([^[\]]*)\]\(<?((?:[^\s<>()"'`\\]|\([^\s<>()"'`\\]*\))+)>?(?: +(?:"[^"\n]*"|'[^'\n]*'))?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`()[\]{}|\\^]+/y;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)[^\s"'<>`\\]+$/i;
const ESCAPED = /[\\`*_{}[\]()#+\-.!|<>~]/;
const WORD = /[\p{L}\p{N}_]/u;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Returns the nodes of a text in Markdown; an answer on its way may end anywhere. */
export function parseMarkdown(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const [block, next] = readFence(lines, i) || readLine(lines, i) || (depth < DEEPEST
      && (readQuote(lines, i, depth) || readList(lines, i, depth))) || readTable(lines, i)
      || readParagraph(lines, i, depth);
    blocks.push(block);
    i = next;
  }
  return blocks;
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  return found && !(found[1][0] === "`" && line.trimStart().slice(found[1].length).includes("`")) ? found : null;
}

function readFence(lines, i) {
  const found = fenceOf(lines[i]);
  if (!found) return null;
  const [, fence, info] = found, indent = lines[i].search(/[`~]/), code = [];
  for (i += 1; i < lines.length; i += 1) {
    const end = lines[i].trim();
    if (end.length >= fence.length && end === fence[0].repeat(end.length) && lines[i].search(/\S/) < 4 + indent) break;
    code.push(lines[i].slice(Math.min(indent, Math.max(0, lines[i].search(/\S|$/)))));
  }
  return [{tag: "pre", language: info.trim(), children: [code.join("\n")]}, i + 1];
}

function readLine(lines, i) {
  const heading = HEADING.exec(lines[i]);
  if (heading) {
    return [{tag: "h" + heading[1].length, children: inlineOf(heading[2].trimEnd().replace(/ #+$/, ""), 0)}, i + 1];
  }
  return RULE.test(lines[i]) ? [{tag: "hr", children: []}, i + 1] : null;
}

function readQuote(lines, i, depth) {
  if (!QUOTE.test(lines[i])) return null;
  const inside = [];
  for (; i < lines.length && QUOTE.test(lines[i]); i += 1) inside.push(lines[i].replace(QUOTE, ""));
  return [{tag: "blockquote", children: blocksOf(inside, depth + 1)}, i];
}

const indentOf = line => line.search(/\S|$/);

function readList(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  if (!first) return null;
  const kind = mark => mark.at(-1), outer = first[1].length, items = [];
  for (; i < lines.length;) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length > outer + 1 || item[1].length < outer || kind(item[2]) !== kind(first[2])
      || RULE.test(lines[i])) break;
    const inner = item[1].length + item[2].length + 1, inside = [item[4]];
    for (i += 1; i < lines.length; i += 1) {
      const blank = !lines[i].trim();
      if (!blank && indentOf(lines[i]) <= item[1].length && (ITEM.test(lines[i]) || startsBlock(lines, i)
        || !inside.at(-1).trim())) break;
      inside.push(lines[i].slice(Math.min(inner, indentOf(lines[i]))));
    }
    const blocks = blocksOf(inside, depth + 1);
    if (blocks[0]?.tag === "p") blocks.splice(0, 1, ...blocks[0].children);
    items.push({tag: "li", children: blocks});
  }
  const number = parseInt(first[2], 10);
  return items.length ? [Number.isNaN(number) ? {tag: "ul", children: items}
    : {tag: "ol", start: number, children: items}, i] : null;
}

function readTable(lines, i) {
  if (!startsTable(lines, i)) return null;
  const align = cellsOf(lines[i + 1]).map(cell => {
    const left = cell.startsWith(":"), right = cell.endsWith(":");
    return right ? (left ? "center" : "right") : null;
  });
  const row = (line, tag) => {
    const cells = cellsOf(line), count = Math.max(cells.length, align.length);
    return {tag: "tr", children: Array.from({length: count}, (_, k) => ({tag, align: align[k],
      children: inlineOf(cells[k] || "", 0)}))};
  };
  const rows = [row(lines[i], "th")];
  for (i += 2; i < lines.length && lines[i].includes("|"); i += 1) rows.push(row(lines[i], "td"));
  return [{tag: "table", children: rows}, i];
}

function startsTable(lines, i) {
  return lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-")
    && cellsOf(lines[i + 1]).every(cell => DIVIDER.test(cell))
    && cellsOf(lines[i]).length === cellsOf(lines[i + 1]).length;
}

function cellsOf(line) {
  const cells = [""];
  for (let i = 0, text = line.trim(); i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") cells[cells.length - 1] += text[++i];
    else if (text[i] !== "|") cells[cells.length - 1] += text[i];
    else if (i > 0 && i < text.length - 1) cells.push("");
  }
  return cells.map(cell => cell.trim());
}

function startsBlock(lines, i) {
  return fenceOf(lines[i]) || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i])
    || startsTable(lines, i);
}

function readParagraph(lines, i, depth) {
  const from = i;
  const interrupts = line => depth < DEEPEST && (ITEM.exec(line)?.[4] || "") !== "" && !/^ *\d\d/.test(line);
  for (i += 1; i < lines.length && lines[i].trim() && !startsBlock(lines, i) && !interrupts(lines[i]);) i += 1;
  return [{tag: "p", children: inlineOf(lines.slice(from, i).map(line => line.trim()).join("\n"), 0)}, i];
}

/** The nodes of a text within a block. `closed` notes marks without an end, so that each is looked for once. */
function inlineOf(text, depth) {
  const nodes = [], missing = new Set();
  let plain = "";
  const push = node => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let i = 0; i < text.length;) {
    const found = text[i] === "\n" ? [{tag: "br", children: []}, i + 1] : readCode(text, i, missing)
      || readLink(text, i, depth) || readAddress(text, i, depth) || readEmphasis(text, i, depth, missing);
    if (found) {
      push(found[0]);
      i = found[1];
    } else if (text[i] === "\\" && ESCAPED.test(text[i + 1] || "")) {
      plain += text[i + 1];
      i += 2;
    } else if (text[i] === "`" || text[i] === "*" || text[i] === "_" || text[i] === "~") {
      const run = runOf(text, i);
      plain += text.slice(i, i + run);
      i += run;
    } else {
      plain += text[i];
      i += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function runOf(text, i) {
  let end = i;
  while (text[end] === text[i]) end += 1;
  return end - i;
}

function readCode(text, i, missing) {
  if (text[i] !== "`") return null;
  const ticks = runOf(text, i), mark = "`".repeat(ticks);
  if (missing.has(mark)) return null;
  for (let end = text.indexOf(mark, i + ticks); end >= 0; end = text.indexOf(mark, end)) {
    const length = runOf(text, end);
    if (length === ticks) {
      const code = text.slice(i + ticks, end).replace(/\n/g, " "), spaced = /^ .*[^ ].* $/.test(code);
      return [{tag: "code", children: [spaced ? code.slice(1, -1) : code]}, end + ticks];
    }
    end += length;
  }
  missing.add(mark);
  return null;
}

function readLink(text, i, depth) {
  if (depth >= DEEPEST || !(text[i] === "[" || (text[i] === "!" && text[i + 1] === "["))) return null;
  LINK.lastIndex = i; // an image is shown as a link: nothing is fetched
  const [whole, name, href] = LINK.exec(text) || [];
  if (!href || !SAFE_LINK.test(href)) return null;
  return [{tag: "a", href, children: name ? inlineOf(name, DEEPEST) : [href]}, i + whole.length];
}

function readAddress(text, i, depth) {
  ADDRESS.lastIndex = i;
  if (depth >= DEEPEST || text[i] !== "h" || (i && WORD.test(text[i - 1]))) return null;
  const found = ADDRESS.exec(text);
  if (!found) return null;
  let href = found[0];
  while (/[.,;:!?*_~]/.test(href.at(-1))) href = href.slice(0, -1);
  return SAFE_LINK.test(href) ? [{tag: "a", href, children: [href]}, i + href.length] : null;
}

function readEmphasis(text, i, depth, missing) {
  if (depth >= DEEPEST || !"*_~".includes(text[i])) return null;
  const word = at => at >= 0 && at < text.length && WORD.test(text[at]);
  for (const [mark, tag] of MARKS) {
    const from = i + mark.length;
    if (!text.startsWith(mark, i) || missing.has(mark) || !text[from] || /\s/.test(text[from])) continue;
    if (mark[0] === "_" && word(i - 1)) continue;
    for (let end = text.indexOf(mark, from + 1); end >= 0; end = text.indexOf(mark, end)) {
      const run = runOf(text, end);
      const closes = !/\s/.test(text[end - 1]) && !(mark[0] === "_" && word(end + run));
      if (closes && (run === mark.length || run > 2)) {
        const at = end + run - mark.length;
        return [{tag, children: inlineOf(text.slice(from, at), depth + 1)}, at + mark.length];
      }
      end += run;
    }
    missing.add(mark);
  }
  return null;
}

/** Makes the element of a node; `copy` is called with the text of a block of code. */
export function elementOf(node, copy) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElement(node.tag);
  if (node.tag === "pre") return codeElement(element, node, copy);
  if (node.tag === "a") {
    element.href = node.href;
    element.target = "_blank";
    element.rel = "noopener noreferrer nofollow";
  }
  if (node.start !== undefined && node.start !== 1) element.start = node.start;
  if (node.align) element.style.textAlign = node.align;
  element.append(...node.children.map(child => elementOf(child, copy)));
  if (node.tag !== "table") return element;
  const around = document.createElement("div");
  around.className = "table";
  around.append(element);
  return around;
}

function codeElement(element, node, copy) {
  const around = document.createElement("div"), code = document.createElement("code");
  const button = document.createElement("button");
  around.className = "code";
  code.textContent = node.children[0];
  button.type = "button";
  button.textContent = node.language ? `Copy ${node.language}` : "Copy";
  button.addEventListener("click", () => copy(node.children[0], button));
  element.append(code);
  around.append(element, button);
  return around;
}

/** Shows a text in `target`, where elements of blocks that are as before stay. */
export function showMarkdown(target, text, copy) {
  const before = target.shown || [], blocks = parseMarkdown(text), now = blocks.map(block => JSON.stringify(block));
  let same = 0;
  while (same < now.length && now[same] === before[same]) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...blocks.slice(same).map(block => elementOf(block, copy)));
  target.shown = now;
}
