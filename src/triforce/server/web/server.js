"use strict";
// Requests to the server, as any client sends them, with the visitor's key.
const $ = id => document.getElementById(id);
const formatCount = number => number.toLocaleString("en");

async function ask(path, options = {}) {
  const key = $("key").value.trim();
  const headers = {"Content-Type": "application/json", ...(key ? {"Authorization": "Bearer " + key} : {})};
  let response;
  try { response = await fetch(path, {headers, ...options}); } catch (error) { throw readableError(error); }
  if (!response.ok) throw await refusal(response);
  return response;
}

const post = (path, body, signal) => ask(path, {method: "POST", body: JSON.stringify(body), signal});

function readableError(error) {
  return error.name === "AbortError" ? error : new Error("The server does not answer. Is it still running?");
}

async function refusal(response) {
  if (response.status === 401) { $("keyed").hidden = false; $("key").focus(); }
  const text = await response.text();
  let message = "the server answered " + response.status;
  try { message = JSON.parse(text).error.message; } catch { /* not this server's error format */ }
  return Object.assign(new Error(message), {status: response.status});
}

async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read().catch(error => { throw readableError(error); });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice(part.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
