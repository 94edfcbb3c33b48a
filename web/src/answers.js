// Answers: what can be asked for, the request that the draft becomes, and the piece that grows with its stream.
import {computed} from "@preact/signals";
import {begin, exclusively, isBusy, progress} from "./activity.js";
import {ancestry, answerText, callsOf, isRunning, newId, titleOf} from "./conversation.js";
import {changeConversation, changePieces, dropPending, SAVE_PAUSE, tellTabs} from "./conversations.js";
import {requestOf, stream} from "./run.js";
import {look, server} from "./server.js";
import {faults, frozenSettings} from "./settings.js";
import {attachedTokens, context, conversation, draft, growingHere, isOpening, isTooLong, openId, paintCost, put, readingDocument, shown, turns} from "./state.js";
import * as store from "./store.js";
import {formatCount} from "./words.js";

const PAINT_PAUSE = 100;  // milliseconds between two repaints, as a repaint takes CPU time that the server may need
const PAINT_SHARE = 5;  // a repaint takes at most this part of the time between two

// Return the functions that the answer may call. Raises Error for text that is no list of them.
function toolsOf(text) {
  if (!text.trim()) return [];
  let listed;
  try { listed = JSON.parse(text); } catch (fault) { throw new Error(`The functions are no JSON: ${fault.message}.`); }
  if (!Array.isArray(listed)) throw new Error("The functions are no JSON list.");
  return listed.map(tool => (tool?.type === "function" ? tool : {type: "function", function: tool}));
}

// Why the functions of the conversation cannot be sent, or an empty text.
export const toolFault = computed(() => {
  try { toolsOf(conversation.value.tools); } catch (fault) { return fault.message; }
  return "";
});

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
  return toolFault.value;
});

// Return why the draft cannot be sent now, or an empty text.
export const draftHindrance = computed(() => {
  if (hindrance.value) return hindrance.value;
  if (readingDocument.value) return "A document is being read.";
  if (isTooLong.value) return `This is too long: the documents have ${formatCount(attachedTokens.value)} tokens here, and the model's context holds ${formatCount(context.value)} with the answer. Attach less.`;
  return isOpening.value ? "The conversation is being opened." : "";
});

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
  if (isBusy.value || hindrance.value) return false;
  const turn = newTurn(parent, role, fields), answer = newTurn(turn.id, "assistant", {created: turn.created + 1, pieces: [newPiece(freeze())]});
  const line = [...lineTo(parent), turn];
  exclusively(async () => {
    await add(turn, changes);
    await add(answer);
    await receive(answer, 0, line);
  });
  return true;
}

// Ask a question about documents. A model without a chat template continues the text where it ends.
function question(parent, text, documents, changes) {
  if (hindrance.value || (!text.trim() && !documents.length)) return false;
  return request(parent, "user", {text: server.value.card.triforce.chats ? text.trim() : text, documents}, changes);
}

export function send() {
  const {text, documents} = draft.value;
  if (draftHindrance.value || isBusy.value || (!text.trim() && !documents.length)) return false;
  dropPending();
  const title = conversation.value.title || titleOf(text || documents[0].name);
  return question(shown.value.at(-1)?.id ?? null, text, documents, {title, draft: {text: "", documents: []}});
}

export const sendEdited = (edited, text) => question(edited.parent, text, edited.documents);
export const sendResults = (answer, results) => request(answer.id, "tool", {results});

export const regenerate = turn => exclusively(async () => {
  if (hindrance.value) return;
  const answer = newTurn(turn.parent, "assistant", {pieces: [newPiece(freeze())]}), line = lineTo(turn.parent);
  await add(answer);
  await receive(answer, 0, line);
});

// Continue an answer that ended at its limit or was cut. A piece without text is asked for again.
export const goOn = turn => exclusively(async () => {
  if (hindrance.value) return;
  const pieces = [...turn.pieces.filter(piece => piece.text), newPiece(freeze())];
  const longer = {...turn, pieces};
  put(longer);
  await receive(longer, pieces.length - 1, lineBefore(longer, pieces.length - 1, lineTo(turn.parent)));
});

const newPiece = frozen => ({state: "running", text: "", thoughts: "", calls: [], frozen, error: "", figures: null, fingerprint: "", model: "", proof: null});

// Return the turns of the open conversation from the first one to the turn of an id, or none for null.
export const lineTo = id => (id === null ? [] : ancestry(turns.value, id));

// Return the turns behind which a piece stands: those before its turn, and the pieces before it.
export const lineBefore = (turn, index, line) => (index ? [...line, {...turn, pieces: turn.pieces.slice(0, index)}] : line);

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

async function receive(turn, index, line) {
  const signal = begin("answer", turn, "Waiting for the server"), growing = new GrowingPiece(turn, index);
  const {frozen} = turn.pieces[index];
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
  tellTabs(turn.conversation);
}

// Store the result of a check with its piece. A check that came to no verdict leaves an earlier one.
export const setProof = (turn, index, proof) => changePieces(turn.id, (piece, i) =>
  (i === index && (proof.figures || !piece.proof?.figures) ? {...piece, proof} : piece));

export const copyOf = turn => (turn.role === "user" ? turn.text : answerText(turn) || callsOf(turn).map(({name, arguments: given}) => `${name}(${given})`).join("\n"));
