"use strict";
// The document: a sample, a file or the visitor's own text, and its number of tokens.
const LENGTHS = [1000, 4000, 16000, 32000], DEFAULT_LENGTH = 16000;  // of samples, in tokens
const PROBE = 8000;  // characters from which the length of a token is estimated
let context = 0, counting = null;

const countTokens = async text => (await (await post("/tokenize", {prompt: text})).json()).count;

async function offerSamples() {
  const whole = await (await ask("/sample.txt")).text();
  const book = $("asking").hidden ? whole : whole.slice(whole.indexOf($("question").dataset.about));
  const characters = PROBE / await countTokens(book.slice(0, PROBE));
  const fitting = LENGTHS.filter(length => length * 1.1 + $("tokens").valueAsNumber < context);
  const fill = length => { setDocument(book.slice(0, book.lastIndexOf(" ", length * characters)), length); };
  $("lengths").replaceChildren(...fitting.map(length => chip(formatCount(length), length, () => fill(length))));
  $("samples").hidden = !fitting.length;
  if (fitting.length && !$("document").value) fill(fitting.findLast(length => length <= DEFAULT_LENGTH));
  else press(null);
}

// Documents that `triforce watch` has prefilled: a question about one of them starts at once.
async function offerWatched() {
  const {documents} = await (await ask("/documents")).json();
  const open = async id => setDocument(await (await ask("/documents/" + id)).text());
  $("read").replaceChildren(...documents.map(({id, name}) => chip(name, "", () => open(id).catch(fail))));
  $("watched").hidden = !documents.length;
}

function chip(textContent, value, act) {
  const button = Object.assign(document.createElement("button"), {type: "button", textContent, value});
  button.addEventListener("click", act);
  return button;
}

function press(length) {
  for (const button of $("lengths").children) button.setAttribute("aria-pressed", String(Number(button.value) === length));
}

function setDocument(text, length = null) {
  $("document").value = text;
  measure(length);
}

// Count the tokens when the visitor pauses.
function measure(length = null) {
  clearTimeout(counting);
  press(length);
  const text = $("document").value;
  $("ending").textContent = text && "\u2026" + text.slice(text.lastIndexOf(" ", text.length - 60) + 1).trim();
  $("size").textContent = text ? formatCount(text.length) + " characters" : "";
  if (text && context) counting = setTimeout(() => showTokenCount(text), 400);
}

async function showTokenCount(text) {
  let message;
  try {
    const tokens = await countTokens(text), hint = tokens < breakEven.tokens ? ": a short text, which gains little" : "";
    message = `${formatCount(tokens)} tokens${hint}. The context holds ${formatCount(context)}.`;
  } catch (error) { message = error.message; }
  if (text === $("document").value) $("size").textContent = message;
}

async function readFile(file) { if (file) setDocument(await file.text()); }

$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", event => readFile(event.target.files[0]));
$("document").addEventListener("input", () => measure());
$("document").addEventListener("dragover", event => { event.preventDefault(); event.target.classList.add("over"); });
$("document").addEventListener("dragleave", event => event.target.classList.remove("over"));
$("document").addEventListener("drop", event => {
  event.target.classList.remove("over");
  if (event.dataTransfer.files.length) { event.preventDefault(); readFile(event.dataTransfer.files[0]); }
});
