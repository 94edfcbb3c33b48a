// Conversations and their drafts: open, change, delete and restore them, and follow what other tabs do with them.
import {answeringConversation, ended, isBusy} from "./activity.js";
import {isRunning, siblingsOf} from "./conversation.js";
import {blank, conversation, draft, error, growingHere, isOpening, list, notice, openId, put, readingDocument, turns} from "./state.js";
import * as store from "./store.js";

export const SAVE_PAUSE = 500;  // milliseconds between two savings of a text that grows
const REPLY_WAIT = 300;  // milliseconds in which another tab says that an answer is its own

const channel = new BroadcastChannel("triforce");
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

isBusy.subscribe(busy => { if (!busy && isOutdated) reopen(); });

async function reopen() {
  isOutdated = isBusy.value;
  if (isOutdated) return;
  const id = openId.value, loaded = await loadTurns(id), kept = await store.read("conversations", id);
  if (!kept || id !== openId.value || isBusy.value) return;
  conversation.value = {...kept, draft: conversation.value.draft};
  turns.value = loaded;
}

export const tellTabs = id => channel.postMessage({changed: id});

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

export async function refreshList() {
  list.value = (await store.readConversations()).sort((a, b) => b.changed - a.changed);
}

let pending = null;  // changes of the open conversation that are not stored yet: {id, changes, timer}

// Change fields of a conversation, on the page if it is the open one, and in the storage.
export async function changeConversation(id, changes) {
  const stamped = {...changes, changed: Date.now()}, current = conversation.value;
  if (id === current.id) conversation.value = {...current, ...stamped};
  await store.update("conversations", id, kept => ({...(kept ?? current), ...stamped, id}));
  await announce(id);
}

// Tell the address, the list and other tabs that a conversation has changed.
async function announce(id) {
  if (id === openId.value && location.hash !== "#/" + id) history.pushState(null, "", "#/" + id);
  await refreshList();
  tellTabs(id);
}

// Change fields that grow by letters: they are stored when the visitor pauses.
function changeSoon(changes) {
  conversation.value = {...conversation.value, ...changes};
  clearTimeout(pending?.timer);
  pending = {id: openId.value, changes: {...pending?.changes, ...changes}, timer: setTimeout(flush, SAVE_PAUSE)};
}

// Forget changes that are not stored yet, as what follows replaces them.
export function dropPending() {
  clearTimeout(pending?.timer);
  pending = null;
}

export function flush() {
  if (!pending) return;
  const {id, changes} = pending;
  dropPending();
  return changeConversation(id, changes);
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
export async function changePieces(id, change) {
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

// Show the branch that begins some steps from a turn.
export function choose(turn, step) {
  const siblings = siblingsOf(turns.value).get(turn.parent), place = siblings.findIndex(({id}) => id === turn.id);
  return changeConversation(turn.conversation, {choices: {...conversation.value.choices, [turn.parent ?? "root"]: siblings[place + step].id}});
}

// Parts of the draft grow by letters.
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
