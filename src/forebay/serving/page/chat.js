// A chat as turns, what of it is sent to the server, and the server's answers; without a page.

/** A chat: turns of {text, images, answer, reasoning, note, error}. Those before `first` are no longer sent. */
export class Chat {
  constructor() {
    this.turns = [];
    this.first = 0;
  }

  /** Begins a turn after the first `count` turns, and drops the others. */
  begin(text, images = [], count = this.turns.length) {
    this.turns.length = count;
    this.first = Math.min(this.first, count);
    const turn = {text, images, answer: "", reasoning: "", note: "", error: ""};
    this.turns.push(turn);
    return turn;
  }

  /** The messages of the turns that are sent; turns without an answer are left out, but for the last one. */
  messages(system = "") {
    const sent = this.turns.slice(this.first), last = sent.at(-1);
    return [...(system.trim() ? [{role: "system", content: system}] : []), ...sent.flatMap(turn => {
      if (turn === last) return [userMessage(turn)];
      return turn.answer ? [userMessage(turn), {role: "assistant", content: turn.answer}] : [];
    })];
  }

  /** Leaves out the oldest quarter of the turns, so that the next turns begin alike; whether there were any. */
  trim() {
    const older = this.turns.length - 1 - this.first;
    this.first += Math.ceil(older / 4);
    return older > 0;
  }
}

function userMessage({text, images}) {
  if (!images.length) return {role: "user", content: text};
  return {role: "user", content: [...images.map(url => ({type: "image_url", image_url: {url}})),
    ...(text ? [{type: "text", text}] : [])]};
}

/** The fields of a request that settings name; empty ones are left out. */
export function requestFields(settings) {
  return Object.fromEntries(Object.entries(settings).filter(([, value]) => String(value).trim() !== "")
    .map(([name, value]) => [name, Number(value)]));
}

/** Lets the last turn of a chat be answered, and returns why the answer ended: "stop", "length" or "stopped".
 *
 * `send(path, body)` returns the reply of a request. `hear()` is called after each change of the turn. A chat that is
 * too long is sent again without its oldest turns. A server without a chat template gets the last text alone.
 */
export async function answerLast(chat, {system, fields, template, send, hear}) {
  const turn = chat.turns.at(-1), ask = () => template
    ? send("/v1/chat/completions", {...fields, stream: true, messages: chat.messages(system)})
    : send("/v1/completions", {...fields, stream: true, prompt: turn.text});
  let finish = null;
  try {
    let reply = await ask();
    for (let refusal; !reply.ok; reply = await ask()) {
      refusal = await refusalOf(reply);
      if (!template || refusal.code !== "context_length_exceeded" || !chat.trim()) throw new Error(refusal.message);
      hear();
    }
    for await (const event of eventsOf(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (!choice) continue;
      turn.answer += (choice.delta ? choice.delta.content : choice.text) || "";
      turn.reasoning += choice.delta?.reasoning_content || "";
      finish = choice.finish_reason || finish;
      hear();
    }
    if (finish === null) throw new Error("the server left before the answer's end");
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    finish = "stopped";
  }
  return finish;
}

/** Why a server refuses a request: {message, code}. */
export async function refusalOf(reply) {
  try {
    return (await reply.json()).error;
  } catch {
    return {message: reply.statusText || `status ${reply.status}`};
  }
}

/** The objects in a stream of server-sent events. */
export async function* eventsOf(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    rest += done ? "" : decoder.decode(value, {stream: true});
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (event.startsWith("data:") && data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}
