// Requests to the server that sent this page, as any client sends them, with the visitor's key.
import {signal} from "@preact/signals";
import {tabStorage} from "./browser_storage.js";

const BASE = new URL(".", location.href);  // a proxy may serve the page below a path of its own
export const addressOf = path => new URL(path, BASE);

const KEY_NAME = "triforce.key";
const ASK_AGAIN = 2000;  // milliseconds until a server that does not answer is asked again
const LOOK_AGAIN = 15000;  // milliseconds until a server that answers is asked whether it is still the same

export const key = signal(tabStorage.get(KEY_NAME) ?? "");
// state: "asking", "up", "locked" or "down". card: of the served model, null before the first answer.
export const server = signal({state: "asking", card: null, message: ""});

class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json"};
  if (key.value) headers.Authorization = "Bearer " + key.value;
  let response;
  try {
    response = await fetch(addressOf(path), {...options, headers});
  } catch (error) {
    throw readable(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// body: an object, or JSON text.
export const post = (path, body, abort) =>
  ask(path, {method: "POST", body: typeof body === "string" ? body : JSON.stringify(body), signal: abort});

function readable(error) {
  if (error.name === "AbortError") return error;
  server.value = {...server.value, state: "down", message: "The server does not answer. This page asks again every two seconds."};
  lookLater(ASK_AGAIN);
  return new ServerError("The server does not answer. Is it still running?");
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = `The server answered with status ${response.status}.`;
  try {
    const {error} = JSON.parse(text);
    message = error.message ?? String(error);
  } catch { /* the answer of a proxy, not of this server */ }
  if (response.status === 401) {
    message = key.value ? "This key is not accepted." : "The server needs a key.";
    server.value = {...server.value, state: "locked", message: key.value ? message : ""};
  }
  return new ServerError(message, response.status);
}

// Yield the events of a stream. Comments, which say that the server still works, have no data.
export async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read().catch(error => { throw readable(error); });
    if (done) throw new ServerError("The connection ended before the answer.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message);
      yield event;
    }
  }
}

// Take the visitor's key for this tab. Return why it cannot be a key, or an empty text.
export function setKey(text) {
  const wrong = [...text].find(letter => letter < "!" || letter > "~");
  if (wrong !== undefined) return `Keys are letters, digits and signs of ASCII; this one has “${wrong}”.`;
  if (!text) return "Type the key with which this server was started.";
  key.value = text;
  tabStorage.set(KEY_NAME, text);
  look();
  return "";
}

export function forgetKey() {
  key.value = "";
  tabStorage.remove(KEY_NAME);
  look();
}

let timer = null;

function lookLater(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(look, milliseconds);
}

// Ask which model the server has now. Without an answer the question is asked again.
export async function look() {
  clearTimeout(timer);
  try {
    const [card] = (await (await ask("v1/models")).json()).data;
    const known = server.value.card;
    const isSame = server.value.state === "up" && JSON.stringify(known) === JSON.stringify(card);
    if (!isSame) server.value = {state: "up", card, message: ""};
  } catch (error) {
    if (error.status === 401) return;  // the page now asks for the key
    const message = error.status ? error.message : "What answers here is no server of triforce.";
    if (server.value.state !== "down" || error.status !== 0) server.value = {...server.value, state: "down", message};
  }
  lookLater(server.value.state === "up" ? LOOK_AGAIN : ASK_AGAIN);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (server.value.state !== "locked") look();
});

export async function tokenCount(body) {
  return (await (await post("tokenize", body)).json()).count;
}
