// The page at /: a chat with the model, its settings, and what the server does.

import {Chat, answerLast, refusalOf, requestFields} from "./chat.js";
import {showMarkdown} from "./markdown.js";
import {showState} from "./memory.js";

const LARGE_IMAGE_NBYTES = 512 << 10, MOST_PIXELS = 1280; // larger files are sent with at most so many pixels a side
const NOTES = {length: "The answer was cut: it reached the most tokens.", stopped: "Stopped."};
const find = id => document.getElementById(id), form = find("ask"), talk = find("talk");
let chat = new Chat(), underWay = null, editing = null, images = [], server = null;

function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

function makeButton(text, act) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not to be had without TLS, but at localhost
    const field = make("textarea", "", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

// -- the conversation

function picture(url) {
  const image = make("img");
  image.src = url;
  image.alt = "image";
  return image;
}

function showUser(turn, index) {
  const tools = make("div", "tools", "", makeButton("Edit", () => edit(index)));
  return make("div", "message user", "", make("div", "who", "You"), make("div", "text", turn.text),
    make("div", "pictures", "", ...turn.images.map(picture)), tools);
}

function showAnswer(turn, index) {
  const answer = make("div", "message model", "", make("div", "who", "Model"));
  answer.reasoning = make("div", "reasoning");
  answer.details = make("details", "", "", make("summary", "", "Reasoning"), answer.reasoning);
  answer.text = make("div", "text");
  answer.note = make("div", "note");
  answer.tools = make("div", "tools", "", makeButton("Copy", button => copy(turn.answer, button)),
    makeButton("Again", () => send(turn.text, turn.images, index)));
  answer.append(answer.details, answer.text, answer.note, answer.tools);
  return answer;
}

function update(answer, turn) {
  answer.details.hidden = !turn.reasoning;
  answer.reasoning.textContent = turn.reasoning;
  showMarkdown(answer.text, turn.answer, copy);
  answer.note.textContent = turn.error || turn.note || (turn.answer || turn.reasoning ? "" : "…");
  answer.note.className = turn.error ? "note error" : "note";
  answer.tools.hidden = turn === chat.turns.at(-1) && underWay !== null;
}

function showTrim() {
  talk.querySelector(".trimmed")?.remove();
  if (chat.first) {
    talk.querySelectorAll(".message.user")[chat.first].before(
      make("div", "trimmed", "Messages above no longer fit and are not sent."));
  }
}

function showChat() {
  talk.replaceChildren(...chat.turns.flatMap((turn, index) => {
    const answer = showAnswer(turn, index);
    update(answer, turn);
    return [showUser(turn, index), answer];
  }));
  showTrim();
}

const atEnd = () => innerHeight + scrollY >= form.getBoundingClientRect().top + scrollY;

function edit(index) {
  editing = index;
  form.text.value = chat.turns[index].text;
  images = [...chat.turns[index].images];
  showImages();
  find("editing").hidden = false;
  form.text.focus();
}

function clearInput() {
  editing = null;
  images = [];
  form.text.value = "";
  showImages();
  find("editing").hidden = true;
}

// -- requests

const headers = () => ({"Content-Type": "application/json",
  ...(form.key.value ? {"Authorization": "Bearer " + form.key.value} : {})});

async function readServer() {
  const reply = await fetch("/state", {headers: headers()});
  if (!reply.ok) throw new Error((await refusalOf(reply)).message);
  const state = await reply.json(), first = server === null;
  server = state.server;
  if (first) {
    find("model").replaceChildren(...server.models.map(name => make("option", "", name)));
    find("model").hidden = server.models.length < 2;
    find("attach").hidden = !server.images;
    form.max_tokens.placeholder = server.new_tokens;
  }
  return state;
}

const SAMPLING = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

async function send(text, pictures, count) {
  if (underWay) return;
  const turn = chat.begin(text, pictures, count), aborted = underWay = new AbortController();
  find("stop").disabled = false;
  find("send").disabled = true;
  showChat();
  const answer = talk.lastElementChild, here = chat;
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    if (chat !== here) return;
    const follow = atEnd();
    showTrim();
    update(answer, turn);
    if (follow) answer.scrollIntoView({block: "end"});
  };
  answer.scrollIntoView({block: "nearest"});
  try {
    if (server === null) await readServer();
    const fields = {model: find("model").value, ...requestFields(Object.fromEntries(
      SAMPLING.map(name => [name, form[name].value])))};
    if (fields.max_tokens === undefined) fields.max_tokens = -1;
    const finish = await answerLast(here, {system: form.system.value, fields, template: server.chat_template,
      send: (path, body) => fetch(path, {method: "POST", headers: headers(), signal: aborted.signal,
        body: JSON.stringify(body)}),
      hear: () => { drawn = drawn || requestAnimationFrame(draw); }});
    turn.note = NOTES[finish] || "";
    if (!turn.note && !turn.answer) turn.note = "The answer is empty.";
  } catch (error) {
    turn.error = error.message;
  }
  cancelAnimationFrame(drawn);
  underWay = null;
  find("stop").disabled = true;
  find("send").disabled = false;
  draw();
}

form.addEventListener("submit", event => {
  event.preventDefault();
  const text = form.text.value, pictures = images, count = editing ?? chat.turns.length;
  if (underWay || !(text.trim() || pictures.length)) return;
  clearInput();
  send(text, pictures, count);
});
form.text.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
find("stop").addEventListener("click", () => underWay?.abort());
find("cancel").addEventListener("click", clearInput);
find("new").addEventListener("click", () => {
  underWay?.abort();
  chat = new Chat();
  clearInput();
  showChat();
  form.text.focus();
});

// -- images

function showImages() {
  find("images").replaceChildren(...images.map((url, i) => {
    const button = makeButton("", () => {
      images.splice(i, 1);
      showImages();
    });
    button.title = "Remove";
    button.append(picture(url));
    return button;
  }));
}

async function addImages(files) {
  for (const file of files) {
    if (server?.images && file.type.startsWith("image/")) images.push(await dataUrl(file));
  }
  showImages();
}

async function dataUrl(file) {
  if (file.size <= LARGE_IMAGE_NBYTES) {
    const reader = new FileReader();
    return new Promise((resolve, reject) => {
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const bitmap = await createImageBitmap(file), canvas = make("canvas");
  const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map(side => Math.max(1, Math.round(side * scale)));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

form.image.addEventListener("change", () => addImages([...form.image.files]).then(() => { form.image.value = ""; }));
form.text.addEventListener("paste", event => addImages([...event.clipboardData.files]));
for (const [kind, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  addEventListener(kind, event => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    form.classList.toggle("over", over && Boolean(server?.images));
    if (kind === "drop") addImages([...event.dataTransfer.files]);
  });
}

// -- what the server does

async function watch() {
  try {
    showState(await readServer(), find);
  } catch (error) {
    find("counts").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
  }
  setTimeout(watch, 1000);
}
watch();
