// What the page shows, and all that a visitor can do with it.
import {computed, signal} from "@preact/signals";
import {ancestry, answerText, branch, callsOf, children, isOpen, newId, titleOf} from "./conversation.js";
import {requestOf, stream} from "./run.js";
import {look, server} from "./server.js";
import {faults, frozenSettings, settings} from "./settings.js";
import * as store from "./store.js";

const SAVE_PAUSE = 500;  // milliseconds between two savings of an answer that grows
const PAINT_PAUSE = 100;  // milliseconds between two repaints, as a repaint takes CPU time that the server may need
const RECENT = 5000;  // milliseconds of progress from which the time left is estimated
const ANSWER_WAIT = 300;  // milliseconds in which another tab says that an answer is its own
const TAB = newId();

const blank = () => ({id: newId(), title: "", created: Date.now(), changed: Date.now(), choices: {}, system: "", tools: "", draft: {text: "", documents: []}});

export const list = signal([]);  // kept conversations, the latest first
export const conversation = signal(blank());
export const turns = signal(new Map());
export const activity = signal(null);  // the request that runs: {kind, turn, piece, step, done, total, left, abort}
export const notice = signal(null);  // {text, undo}: what was done last, and how to take it back
export const error = signal("");  // what went wrong outside of an answer
export const isBusy = computed(() => activity.value !== null);
export const activeAnswer = computed(() => (activity.value?.kind === "answer" ? activity.value.turn : null));
export const activeCheck = computed(() => (activity.value?.kind === "check" ? activity.value.turn : null));
export const shown = computed(() => branch(turns.value, conversation.value.choices));
export const draft = computed(() => conversation.value.draft);

// Tokens of the shown branch with the draft: as the server counted them, and by an estimate behind that.
export const expectedTokens = computed(() => {
  const size = (text, documents) => Math.ceil(text.length / 4) + documents.reduce((sum, {tokens}) => sum + tokens, 0);
  let total = size(conversation.value.system, []);
  for (const turn of shown.value) {
    const piece = turn.role === "assistant" ? turn.pieces.findLast(({figures}) => figures?.promptTokens) : null;
    if (piece) total = piece.figures.promptTokens + piece.figures.tokens;
    else if (turn.role === "user") total += size(turn.text, turn.documents);
  }
  return total + size(draft.value.text, draft.value.documents);
});

export const context = computed(() => server.value.card?.max_model_len ?? 0);
export const isTooLong = computed(() => context.value > 0 && expectedTokens.value >= context.value);

// ---- what other tabs do

const channel = new BroadcastChannel("triforce");
const answersHere = new Set();  // ids of turns whose answer this tab receives

channel.onmessage = async ({data}) => {
  if (data.asks && answersHere.has(data.asks)) channel.postMessage({owns: data.asks});
  if (!data.changed) return;
  await refreshList();
  if (data.changed === conversation.value.id && !activity.value) await open(data.changed);
};

function isOwnedElsewhere(turn) {
  return new Promise(resolve => {
    const replies = new BroadcastChannel("triforce");
    const end = owned => { replies.close(); resolve(owned); };
    replies.onmessage = ({data}) => { if (data.owns === turn) end(true); };
    replies.postMessage({asks: turn});
    setTimeout(end, ANSWER_WAIT, false);
  });
}

const tellTabs = () => channel.postMessage({changed: conversation.value.id});

// ---- conversations

export async function refreshList() {
  const kept = await store.readConversations();
  list.value = kept.sort((a, b) => b.changed - a.changed);
}

let saving = null;

function change(changes, isQuick = false) {
  conversation.value = {...conversation.value, ...changes, changed: Date.now()};
  clearTimeout(saving);
  if (isQuick) saving = setTimeout(saveConversation, SAVE_PAUSE);
  else return saveConversation();
}

async function saveConversation() {
  clearTimeout(saving);
  saving = null;
  const record = conversation.value;
  await store.saveConversation(record);
  if (location.hash !== "#/" + record.id) history.pushState(null, "", "#/" + record.id);
  list.value = [record, ...list.value.filter(({id}) => id !== record.id)].sort((a, b) => b.changed - a.changed);
  tellTabs();
}

export const flush = () => { if (saving) saveConversation(); };

function put(turn) {
  turns.value = new Map(turns.value).set(turn.id, turn);
}

export async function startNew() {
  flush();
  stop();
  conversation.value = blank();
  turns.value = new Map();
  error.value = "";
  if (location.hash.startsWith("#/")) history.pushState(null, "", location.pathname + location.search);
}

export async function open(id) {
  flush();
  if (id !== conversation.value.id) stop();
  const kept = await store.readConversation(id);
  if (!kept) {
    error.value = "This conversation is not in this browser's storage.";
    return startNew();
  }
  const loaded = await store.readPart("turns", id);
  conversation.value = kept;
  turns.value = new Map(loaded.map(turn => [turn.id, turn]));
  error.value = "";
  if (location.hash !== "#/" + id) history.pushState(null, "", "#/" + id);
  for (const turn of loaded) if (turn.role === "assistant" && turn.pieces.some(isOpen)) markInterrupted(turn);
}

// An answer that no tab receives any more was cut when its tab was closed or reloaded.
async function markInterrupted(turn) {
  if (answersHere.has(turn.id) || await isOwnedElsewhere(turn.id)) return;
  const pieces = turn.pieces.map(piece => (isOpen(piece) ? {...piece, state: "interrupted"} : piece));
  if (turns.value.get(turn.id) === turn) put({...turn, pieces});
  await store.saveTurn({...turn, pieces});
}

export const rename = (id, title) => edit(id, {title, isNamed: true});

async function edit(id, changes) {
  if (id === conversation.value.id) return change(changes);
  const record = {...await store.readConversation(id), ...changes};
  await store.saveConversation(record);
  await refreshList();
}

export async function remove(id) {
  flush();
  const record = await store.readConversation(id);
  const parts = {turns: await store.readPart("turns", id), details: await store.readPart("details", id), documents: await store.readPart("documents", id)};
  if (id === conversation.value.id) await startNew();
  await store.removeConversation(id);
  await refreshList();
  notice.value = {text: `“${record.title || "New conversation"}” is deleted.`, undo: async () => { await restore(record, parts); await open(id); }};
}

export async function restore(record, {turns: restored, details, documents}) {
  for (const document of documents) await store.saveDocument(document);
  for (const turn of restored) await store.saveTurn(turn);
  for (const detail of details) await store.saveDetails(detail);
  await store.saveConversation(record);
  await refreshList();
}

export const removeAll = async () => {
  await startNew();
  await store.removeAll();
  await refreshList();
};

// ---- the draft

export const setDraft = changes => change({draft: {...draft.value, ...changes}}, true);
export const setSystem = system => change({system}, true);
export const setTools = tools => change({tools}, true);

export async function attach(document) {
  await store.saveDocument({...document, conversation: conversation.value.id});
  const {text, ...head} = document;
  await change({draft: {...draft.value, documents: [...draft.value.documents, head]}});
}

export function detach(id) {
  const before = draft.value.documents, removed = before.find(document => document.id === id), target = conversation.value.id;
  setDraft({documents: before.filter(document => document.id !== id)});
  notice.value = {
    text: `${removed.name} is removed.`,
    undo: () => { if (conversation.value.id === target) setDraft({documents: [...draft.value.documents, removed]}); },
  };
}

// ---- answers

// Return the functions that the answer may call. Raises Error for text that is no list of them.
export function toolsOf(text) {
  if (!text.trim()) return [];
  let listed;
  try { listed = JSON.parse(text); } catch (fault) { throw new Error(`The functions are no JSON: ${fault.message}.`); }
  if (!Array.isArray(listed)) throw new Error("The functions are no JSON list.");
  return listed.map(tool => (tool?.type === "function" ? tool : {type: "function", function: tool}));
}

function freeze() {
  const {card} = server.value;
  return {...frozenSettings(card), chats: card.triforce.chats, system: conversation.value.system, tools: toolsOf(conversation.value.tools)};
}

// Return why no answer can be asked for now, or an empty text.
export const hindrance = computed(() => {
  if (server.value.state === "locked") return "Unlock the server with its key first.";
  if (!server.value.card) return "The server has not answered yet.";
  if (isTooLong.value) return "too long";
  settings.value;
  const [fault] = faults();
  if (fault) return fault;
  try { toolsOf(conversation.value.tools); } catch (fault) { return fault.message; }
  return "";
});

// Do one thing at a time: what runs can be stopped, and nothing else begins until it has ended.
export async function exclusively(work) {
  if (activity.value) return;
  activity.value = {kind: "", turn: null, piece: 0, step: "", done: 0, total: 0, left: null, marks: [], abort: new AbortController()};
  try { await work(); } finally { activity.value = null; }
}

// Tell what runs now, and return the signal that stops it.
export function begin(kind, turn, index, step) {
  activity.value = {...activity.value, kind, turn: turn.id, piece: index, step, done: 0, total: 0, left: null, marks: []};
  return activity.value.abort.signal;
}

export const send = () => exclusively(async () => {
  if (hindrance.value) return;
  const {text, documents} = draft.value;
  if (!text.trim() && !documents.length) return;
  const parent = shown.value.at(-1)?.id ?? null, frozen = freeze();
  const turn = {id: newId(), conversation: conversation.value.id, parent, role: "user", created: Date.now(), text: text.trim(), documents};
  const title = conversation.value.title || titleOf(text || documents[0].name);
  await add(turn, {title, draft: {text: "", documents: []}});
  await answer(turn.id, frozen);
});

export const sendEdited = (edited, text) => exclusively(async () => {
  const frozen = freeze(), turn = {...edited, id: newId(), created: Date.now(), text: text.trim()};
  await add(turn);
  await answer(turn.id, frozen);
});

export const sendResults = (parent, results) => exclusively(async () => {
  const frozen = freeze(), turn = {id: newId(), conversation: conversation.value.id, parent, role: "tool", created: Date.now(), results};
  await add(turn);
  await answer(turn.id, frozen);
});

export const regenerate = turn => exclusively(() => answer(turn.parent, freeze()));

async function add(turn, changes = {}) {
  put(turn);
  await store.saveTurn(turn);
  const {[turn.parent ?? "root"]: earlier, ...choices} = conversation.value.choices;  // the latest branch is shown
  await change({...changes, choices});
}

// Show the branch that begins some steps from a turn.
export function choose(turn, step) {
  const siblings = children(turns.value, turn.parent), place = siblings.findIndex(({id}) => id === turn.id);
  return change({choices: {...conversation.value.choices, [turn.parent ?? "root"]: siblings[place + step].id}});
}

const newPiece = frozen => ({state: "running", text: "", thoughts: "", calls: [], frozen, error: "", figures: null, fingerprint: "", model: "", proof: null});

async function answer(parent, frozen) {
  const turn = {id: newId(), conversation: conversation.value.id, parent, role: "assistant", created: Date.now(), pieces: [newPiece(frozen)]};
  await add(turn);
  await receive(turn, 0);
}

// Continue an answer that ended at its limit or was cut. A piece without text is asked for again.
export const goOn = turn => exclusively(async () => {
  const kept = turn.pieces.filter(piece => piece.text || piece.thoughts);
  const longer = {...turn, pieces: [...kept, newPiece(freeze())]};
  put(longer);
  await receive(longer, kept.length);
});

// Return the turns behind which a piece stands: its turn's ancestors, and the pieces before it.
export function lineBefore(turn, index) {
  const line = turn.parent ? ancestry(turns.value, turn.parent) : [];
  return index ? [...line, {...turn, pieces: turn.pieces.slice(0, index)}] : line;
}

const withPiece = (turn, index, changes) => ({...turn, pieces: turn.pieces.map((piece, i) => (i === index ? {...piece, ...changes} : piece))});

// Show progress, and the time left at the pace of the last few seconds.
export function progress(step, done, total) {
  const running = activity.value;
  if (!running) return;
  const now = performance.now(), before = running.step === step ? running.marks : [];
  const marks = [...before.filter(mark => now - mark.now < RECENT), {now, done}];
  const pace = (done - marks[0].done) / (now - marks[0].now);
  activity.value = {...running, step, done, total, marks, left: pace > 0 ? (total - done) / pace / 1000 : null};
}

export const stop = () => activity.value?.abort.abort();

function details(turn, index, growth, before) {
  const pieces = [...before];
  pieces[index] = {ids: Uint32Array.from(growth.ids), runs: growth.runs, lines: growth.lines};
  return {id: turn.id, conversation: turn.conversation, pieces};
}

async function receive(turn, index) {
  const signal = begin("answer", turn, index, "Waiting for the server");
  const owner = conversation.value.id, {frozen} = turn.pieces[index];
  const before = (await store.readDetails(turn.id))?.pieces.slice(0, index) ?? [];
  let painted = -PAINT_PAUSE, timer = null, growth = null, latest = turn;
  const show = changes => {
    latest = withPiece(latest, index, changes);
    if (conversation.value.id === owner) put(latest);
  };
  const save = async () => {
    clearTimeout(timer);
    timer = null;
    if (growth && latest.pieces[index].state === "running") latest = withPiece(latest, index, shownPart(growth));
    await store.saveTurn(latest);
    if (growth) await store.saveDetails(details(latest, index, growth, before));
  };
  answersHere.add(turn.id);
  try {
    await save();
    const line = lineBefore(turn, index);
    const onProgress = ({processed, total, queue_place: place}) =>
      progress(place ? `Waiting behind ${place} other${place === 1 ? "" : "s"}` : "Reading the conversation", processed, total);
    for await (growth of stream(await requestOf(line, frozen), signal, onProgress)) {
      const now = performance.now();
      if (now - painted >= PAINT_PAUSE && growth.tokens) {
        painted = now;
        progress("Answering", growth.tokens, frozen.fields.max_tokens);
        show(shownPart(growth));
      }
      timer ??= setTimeout(save, SAVE_PAUSE);
    }
    show({...shownPart(growth), state: growth.finish === "length" ? "limit" : "finished"});
  } catch (fault) {
    const state = fault.name === "AbortError" ? "stopped" : growth?.tokens ? "interrupted" : "failed";
    show({...(growth ? shownPart(growth) : {}), state, error: state === "stopped" ? "" : fault.message});
  } finally {
    answersHere.delete(turn.id);
  }
  await save();
  if (latest.pieces[index].fingerprint && latest.pieces[index].fingerprint !== server.value.card?.triforce.system_fingerprint) look();
  tellTabs();
}

const shownPart = growth => ({
  text: growth.text, thoughts: growth.thoughts, calls: [...growth.calls], figures: growth.figures, fingerprint: growth.fingerprint, model: growth.model,
});

// Store the result of a check with its piece.
export async function setProof(turn, index, proof) {
  const changed = withPiece(turns.value.get(turn.id) ?? turn, index, {proof});
  if (turns.value.has(turn.id)) put(changed);
  await store.saveTurn(changed);
}

export const copyOf = turn => (turn.role === "user" ? turn.text : answerText(turn) || callsOf(turn).map(({name, arguments: given}) => `${name}(${given})`).join("\n"));
