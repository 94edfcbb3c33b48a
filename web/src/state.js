// What the page shows, and all that a visitor can do with it.
import {computed, signal} from "@preact/signals";
import {ancestry, answerText, branch, callsOf, isRunning, newId, siblingsOf, titleOf} from "./conversation.js";
import {requestOf, stream} from "./run.js";
import {look, server} from "./server.js";
import {faults, frozenSettings} from "./settings.js";
import * as store from "./store.js";

const SAVE_PAUSE = 500;  // milliseconds between two savings of an answer that grows
const PAINT_PAUSE = 100;  // milliseconds between two repaints, as a repaint takes CPU time that the server may need
const PAINT_SHARE = 5;  // a repaint takes at most this part of the time between two
const RECENT = 5000;  // milliseconds of progress from which the time left is estimated
const REPLY_WAIT = 300;  // milliseconds in which another tab says that an answer is its own

const blank = () => ({id: newId(), title: "", created: Date.now(), changed: Date.now(), choices: {}, system: "", tools: "", draft: {text: "", documents: []}});

export const list = signal([]);  // all conversations, the latest first
export const conversation = signal(blank());  // the open one
export const turns = signal(new Map());  // of the open conversation, by id
export const isOpening = signal(false);
export const activity = signal(null);  // what runs: {kind, conversation, turn, step, done, total, left, marks, abort}
export const readingDocument = signal("");  // which document is read now, in words, or an empty text
export const notice = signal(null);  // {text, undo}: what was done last, and how to take it back
export const error = signal("");  // what went wrong outside of an answer
export const openDialog = signal("");  // "settings", "runs" or an empty text
export const paintCost = {milliseconds: 0};  // of the latest rendering of an answer

export const openId = computed(() => conversation.value.id);
export const isBusy = computed(() => activity.value !== null);
export const activeAnswer = computed(() => (activity.value?.kind === "answer" ? activity.value.turn : null));
export const activeCheck = computed(() => (activity.value?.kind === "check" ? activity.value.turn : null));
export const answeringConversation = computed(() => activity.value?.conversation ?? null);
export const shown = computed(() => branch(turns.value, conversation.value.choices));
export const draft = computed(() => conversation.value.draft);
export const context = computed(() => server.value.card?.max_model_len ?? 0);

const documentTokens = documents => documents.reduce((sum, {tokens}) => sum + tokens, 0);

// Tokens of the shown branch with the draft: as the server counted them, and by an estimate behind that.
export const expectedTokens = computed(() => {
  const size = (text, documents) => Math.ceil(text.length / 4) + documentTokens(documents);
  let total = size(conversation.value.system, []);
  for (const turn of shown.value) {
    const piece = turn.role === "assistant" ? turn.pieces.findLast(({figures}) => figures?.promptTokens) : null;
    if (piece) total = piece.figures.promptTokens + piece.figures.tokens;
    else if (turn.role === "user") total += size(turn.text, turn.documents);
  }
  return total + size(draft.value.text, draft.value.documents);
});

export const mayBeTooLong = computed(() => context.value > 0 && expectedTokens.value >= context.value);

// Whether the documents alone leave no room for an answer. The rest of a conversation is the server's to judge.
const isTooLong = computed(() => {
  const asked = shown.value.filter(({role}) => role === "user").flatMap(({documents}) => documents);
  return context.value > 0 && documentTokens([...asked, ...draft.value.documents]) >= context.value;
});

// ---- what other tabs do

const channel = new BroadcastChannel("triforce");
const growingHere = new Map();  // answers that this tab receives, by the id of their turn
let isOutdated = false;  // another tab changed the open conversation while an answer came

channel.onmessage = async ({data}) => {
  if (data.asks && growingHere.has(data.asks)) channel.postMessage({owns: data.asks});
  if (data.removed !== undefined) {
    if (data.removed === null || answeringConversation.value === data.removed) await ended();
    if (data.removed === null || data.removed === openId.value) startNew();
    await refreshList();
  }
  if (data.changed) {
    await refreshList();
    if (data.changed === openId.value) await reopen();
  }
};

async function reopen() {
  isOutdated = isBusy.value;
  if (isOutdated) return;
  const id = openId.value, loaded = await loadTurns(id), kept = await store.read("conversations", id);
  if (!kept || id !== openId.value || isBusy.value) return;
  conversation.value = {...kept, draft: conversation.value.draft};
  turns.value = loaded;
}

function isOwnedElsewhere(turn) {
  return new Promise(resolve => {
    const replies = new BroadcastChannel("triforce");
    const end = owned => {
      replies.close();
      resolve(owned);
    };
    replies.onmessage = ({data}) => { if (data.owns === turn) end(true); };
    replies.postMessage({asks: turn});
    setTimeout(end, REPLY_WAIT, false);
  });
}

// ---- conversations

export async function refreshList() {
  list.value = (await store.readConversations()).sort((a, b) => b.changed - a.changed);
}

let pending = null;  // changes of the open conversation that are not stored yet: {id, changes, timer}

// Change fields of a conversation, on the page if it is the open one, and in the storage.
async function changeConversation(id, changes) {
  const stamped = {...changes, changed: Date.now()}, current = conversation.value;
  if (id === current.id) conversation.value = {...current, ...stamped};
  await store.update("conversations", id, kept => ({...(kept ?? current), ...stamped, id}));
  await announce(id);
}

// Tell the address, the list and other tabs that a conversation has changed.
async function announce(id) {
  if (id === openId.value && location.hash !== "#/" + id) history.pushState(null, "", "#/" + id);
  await refreshList();
  channel.postMessage({changed: id});
}

// Change fields that grow by letters: they are stored when the visitor pauses.
function changeSoon(changes) {
  conversation.value = {...conversation.value, ...changes};
  clearTimeout(pending?.timer);
  pending = {id: openId.value, changes: {...pending?.changes, ...changes}, timer: setTimeout(flush, SAVE_PAUSE)};
}

export function flush() {
  if (!pending) return;
  const {id, changes, timer} = pending;
  clearTimeout(timer);
  pending = null;
  return changeConversation(id, changes);
}

function put(turn) {
  if (turn.conversation === openId.value) turns.value = new Map(turns.value).set(turn.id, turn);
}

export function startNew() {
  flush();
  conversation.value = blank();
  turns.value = new Map();
  error.value = "";
  if (location.hash.startsWith("#/")) history.pushState(null, "", location.pathname + location.search);
}

async function loadTurns(id) {
  const kept = await store.readPart("turns", id);
  return new Map(kept.map(turn => [turn.id, growingHere.get(turn.id)?.grown() ?? turn]));
}

export async function open(id) {
  isOpening.value = true;
  try {
    await flush();
    const [kept, loaded] = await Promise.all([store.read("conversations", id), loadTurns(id)]);
    if (!kept) {
      history.replaceState(null, "", location.pathname + location.search);
      startNew();
      error.value = "This conversation is not in this browser's storage.";
      return;
    }
    await flush();
    conversation.value = kept;
    turns.value = loaded;
    error.value = "";
    if (location.hash !== "#/" + id) history.pushState(null, "", "#/" + id);
    for (const turn of loaded.values()) if (turn.role === "assistant" && turn.pieces.some(isRunning)) markInterrupted(turn.id);
  } finally {
    isOpening.value = false;
  }
}

// An answer that no tab receives any more was cut when its tab was closed or loaded again.
async function markInterrupted(id) {
  if (growingHere.has(id) || await isOwnedElsewhere(id)) return;
  await changePieces(id, piece => (isRunning(piece) ? {...piece, state: "interrupted"} : piece));
}

// Change the pieces of a stored turn, and show the turn.
async function changePieces(id, change) {
  let changed;
  await store.update("turns", id, kept => (changed = kept && {...kept, pieces: kept.pieces.map(change)}));
  if (changed) put(changed);
}

export const rename = (id, title) => changeConversation(id, {title});

export async function remove(id) {
  await flush();
  if (answeringConversation.value === id) await ended();
  const record = await store.read("conversations", id);
  const [loaded, details, documents] = await Promise.all(["turns", "details", "documents"].map(table => store.readPart(table, id)));
  if (id === openId.value) startNew();
  await store.removeConversation(id);
  await refreshList();
  channel.postMessage({removed: id});
  const undo = async () => {
    await restore(record, {turns: loaded, details, documents});
    await open(id);
  };
  notice.value = {text: `“${record.title || "New conversation"}” is deleted.`, undo};
}

export async function restore(record, parts) {
  for (const [table, records] of Object.entries(parts)) for (const part of records) await store.write(table, part);
  await store.write("conversations", record);
  await refreshList();
}

export async function removeAll() {
  await ended();
  startNew();
  await store.removeAll();
  await refreshList();
  channel.postMessage({removed: null});
}

// ---- the draft

export const setDraft = changes => changeSoon({draft: {...draft.value, ...changes}});
export const setSystem = system => changeSoon({system});
export const setTools = tools => changeSoon({tools});

// Attach a document to the draft of the conversation in which its reading began.
export async function attach(document, id) {
  await store.write("documents", {...document, conversation: id});
  const {text, skipped, ...head} = document;
  await flush();
  const attached = record => ({...record, draft: {...record.draft, documents: [...record.draft.documents, head]}});
  const unstored = id === openId.value ? conversation.value : {...blank(), id};
  await store.update("conversations", id, kept => attached(kept ?? unstored));
  readingDocument.value = "";
  if (id === openId.value) conversation.value = attached(conversation.value);
  await announce(id);
}

export function detach(id) {
  const removed = draft.value.documents.find(document => document.id === id), target = openId.value;
  setDraft({documents: draft.value.documents.filter(document => document.id !== id)});
  const undo = () => { if (openId.value === target) setDraft({documents: [...draft.value.documents, removed]}); };
  notice.value = {text: `${removed.name} is removed.`, undo};
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
  const {card} = server.value, {system, tools} = conversation.value;
  return {...frozenSettings(card), chats: card.triforce.chats, system, tools: toolsOf(tools)};
}

// Return why nothing can be asked for now, or an empty text.
export const hindrance = computed(() => {
  if (server.value.state === "locked") return "Unlock the server with its key first.";
  if (!server.value.card) return "The server has not answered yet.";
  const [fault] = faults.value;
  if (fault) return fault;
  try { toolsOf(conversation.value.tools); } catch (fault) { return fault.message; }
  return "";
});

// Return why the draft cannot be sent now, or an empty text.
export const draftHindrance = computed(() => {
  if (hindrance.value) return hindrance.value;
  if (readingDocument.value) return "A document is being read.";
  if (isTooLong.value) return `This is too long: the documents have ${documentTokens(draft.value.documents).toLocaleString("en")} tokens here, and the model's context holds ${context.value.toLocaleString("en")} with the answer. Attach less.`;
  return isOpening.value ? "The conversation is being opened." : "";
});

// Do one thing at a time: what runs can be stopped, and nothing else begins until it has ended.
export async function exclusively(work) {
  if (activity.value) return;
  const idle = {kind: "", turn: null, step: "", done: 0, total: 0, left: null, marks: []};
  activity.value = {...idle, conversation: openId.value, abort: new AbortController()};
  try {
    await work();
  } finally {
    activity.value = null;
    if (isOutdated) await reopen();
  }
}

export const stop = () => activity.value?.abort.abort();

// Stop what runs, and wait until it has been saved.
function ended() {
  stop();
  return new Promise(resolve => {
    const dispose = isBusy.subscribe(busy => {
      if (busy) return;
      resolve();
      queueMicrotask(() => dispose());
    });
  });
}

// Tell what runs now, and return the signal that stops it.
export function begin(kind, turn, step) {
  activity.value = {...activity.value, kind, turn: turn.id, step, done: 0, total: 0, left: null, marks: []};
  return activity.value.abort.signal;
}

// Show progress, and the time left at the pace of the last few seconds. total: 0 where the end is not known.
export function progress(step, done, total) {
  const running = activity.value, now = performance.now();
  const marks = [...(running.step === step ? running.marks : []).filter(mark => now - mark.now < RECENT), {now, done}];
  const pace = (done - marks[0].done) / (now - marks[0].now);
  activity.value = {...running, step, done, total, marks, left: pace > 0 && total ? (total - done) / pace / 1000 : null};
}

// A turn comes later than all turns before it, also where the clock was set back.
function newTurn(parent, role, fields) {
  const latest = Math.max(0, ...Array.from(turns.value.values(), ({created}) => created));
  return {id: newId(), conversation: openId.value, parent, role, created: Math.max(Date.now(), latest + 1), ...fields};
}

// Add a turn, and show the branch that ends in it. changes: of its conversation.
async function add(turn, changes = {}) {
  put(turn);
  await store.write("turns", turn);
  const {[turn.parent ?? "root"]: earlier, ...choices} = conversation.value.choices;  // the latest branch is shown
  await changeConversation(turn.conversation, {...changes, ...(turn.conversation === openId.value ? {choices} : {})});
}

// Ask: add a turn of the visitor and the answer to it. Return whether this has begun.
function request(parent, role, fields, changes) {
  if (activity.value || hindrance.value) return false;
  const frozen = freeze(), turn = newTurn(parent, role, fields), answer = newTurn(turn.id, "assistant", {created: turn.created + 1, pieces: [newPiece(frozen)]});
  exclusively(async () => {
    await add(turn, changes);
    await add(answer);
    await receive(answer, 0);
  });
  return true;
}

export function send() {
  const {text, documents} = draft.value;
  if (draftHindrance.value || (!text.trim() && !documents.length)) return false;
  clearTimeout(pending?.timer);
  pending = null;
  const question = server.value.card.triforce.chats ? text.trim() : text;  // a text is continued where it ends
  const title = conversation.value.title || titleOf(text || documents[0].name);
  return request(shown.value.at(-1)?.id ?? null, "user", {text: question, documents}, {title, draft: {text: "", documents: []}});
}

export const sendEdited = (edited, text) => request(edited.parent, "user", {text: text.trim(), documents: edited.documents});
export const sendResults = (answer, results) => request(answer.id, "tool", {results});

export const regenerate = turn => exclusively(async () => {
  if (hindrance.value) return;
  const answer = newTurn(turn.parent, "assistant", {pieces: [newPiece(freeze())]});
  await add(answer);
  await receive(answer, 0);
});

// Continue an answer that ended at its limit or was cut. A piece without text is asked for again.
export const goOn = turn => exclusively(async () => {
  if (hindrance.value) return;
  const pieces = [...turn.pieces.filter(piece => piece.text), newPiece(freeze())];
  const longer = {...turn, pieces};
  put(longer);
  await receive(longer, pieces.length - 1);
});

// Show the branch that begins some steps from a turn.
export function choose(turn, step) {
  const siblings = siblingsOf(turns.value).get(turn.parent), place = siblings.findIndex(({id}) => id === turn.id);
  return changeConversation(turn.conversation, {choices: {...conversation.value.choices, [turn.parent ?? "root"]: siblings[place + step].id}});
}

const newPiece = frozen => ({state: "running", text: "", thoughts: "", calls: [], frozen, error: "", figures: null, fingerprint: "", model: "", proof: null});

// Return the turns behind which a piece stands: its turn's ancestors, and the pieces before it.
export function lineBefore(turn, index) {
  const line = turn.parent ? ancestry(turns.value, turn.parent) : [];
  return index ? [...line, {...turn, pieces: turn.pieces.slice(0, index)}] : line;
}

const withPiece = (turn, index, changes) => ({...turn, pieces: turn.pieces.map((piece, i) => (i === index ? {...piece, ...changes} : piece))});

// A piece that grows: it is shown at most every PAINT_PAUSE and stored at most every SAVE_PAUSE.
class GrowingPiece {
  constructor(turn, index) {
    Object.assign(this, {turn, index, growth: null, timer: null, paintTime: -PAINT_PAUSE});
  }

  change(changes) {
    this.turn = withPiece(this.turn, this.index, {...(this.growth ? grownFields(this.growth) : {}), ...changes});
    put(this.turn);
  }

  // Return the turn with all text that has come.
  grown() {
    const isRunningPiece = this.growth && isRunning(this.turn.pieces[this.index]);
    return isRunningPiece ? withPiece(this.turn, this.index, grownFields(this.growth)) : this.turn;
  }

  grow(growth) {
    this.growth = growth;
    this.timer ??= setTimeout(() => this.save(), SAVE_PAUSE);
    const now = performance.now();
    if (!growth.tokens || now - this.paintTime < Math.max(PAINT_PAUSE, PAINT_SHARE * paintCost.milliseconds)) return;
    this.paintTime = now;
    progress("Answering", growth.tokens, 0);  // where an answer ends is not known before
    this.change({});
  }

  // The details go first: a turn in the storage never has more text than its tokens.
  async save() {
    clearTimeout(this.timer);
    this.timer = null;
    const {growth, index} = this;
    if (growth) {
      const part = {ids: Uint32Array.from(growth.ids), runs: growth.runs, lines: growth.lines};
      this.turn = this.grown();
      const saved = this.turn;
      await store.update("details", saved.id, kept => {
        const pieces = Array.from({length: index}, (_, i) => kept?.pieces[i] ?? NO_DETAILS);
        return {id: saved.id, conversation: saved.conversation, pieces: [...pieces, part]};
      });
    }
    await store.write("turns", this.turn);
  }
}

const NO_DETAILS = {ids: new Uint32Array(), runs: [], lines: []};

const grownFields = growth => ({
  text: growth.text, thoughts: growth.thoughts, calls: [...growth.calls], figures: growth.figures, fingerprint: growth.fingerprint, model: growth.model,
});

async function receive(turn, index) {
  const signal = begin("answer", turn, "Waiting for the server"), growing = new GrowingPiece(turn, index);
  const line = lineBefore(turn, index), {frozen} = turn.pieces[index];
  const onProgress = ({processed, total, queue_place: place}) =>
    progress(place ? `Waiting behind ${place} other${place === 1 ? "" : "s"}` : "Reading the conversation", processed, total);
  growingHere.set(turn.id, growing);
  try {
    await growing.save();
    for await (const growth of stream(await requestOf(line, frozen), signal, onProgress)) growing.grow(growth);
    growing.change({state: growing.growth.finish === "length" ? "limit" : "finished"});
  } catch (fault) {
    const state = fault.name === "AbortError" ? "stopped" : growing.growth?.tokens ? "interrupted" : "failed";
    growing.change({state, error: state === "stopped" ? "" : fault.message});
  }
  await growing.save();
  growingHere.delete(turn.id);
  const {fingerprint} = growing.turn.pieces[index];
  if (fingerprint && fingerprint !== server.value.card?.triforce.system_fingerprint) look();
  channel.postMessage({changed: turn.conversation});
}

// Store the result of a check with its piece. A check that came to no verdict leaves an earlier one.
export const setProof = (turn, index, proof) => changePieces(turn.id, (piece, i) =>
  (i === index && (proof.figures || !piece.proof?.figures) ? {...piece, proof} : piece));

export const copyOf = turn => (turn.role === "user" ? turn.text : answerText(turn) || callsOf(turn).map(({name, arguments: given}) => `${name}(${given})`).join("\n"));
