// What the page shows: signals, and what follows from them.
import {computed, signal} from "@preact/signals";
import {branch, newId} from "./conversation.js";
import {server} from "./server.js";

export const blank = () => ({id: newId(), title: "", created: Date.now(), changed: Date.now(), choices: {}, system: "", tools: "", draft: {text: "", documents: []}});

export const list = signal([]);  // all conversations, the latest first
export const conversation = signal(blank());  // the open one
export const turns = signal(new Map());  // of the open conversation, by id
export const isOpening = signal(false);
export const readingDocument = signal("");  // which document is read now, in words, or an empty text
export const notice = signal(null);  // {text, undo}: what was done last, and how to take it back
export const error = signal("");  // what went wrong outside of an answer
export const openDialog = signal("");  // "settings", "runs" or an empty text
export const paintCost = {milliseconds: 0};  // of the latest rendering of an answer

export const openId = computed(() => conversation.value.id);
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

// Tokens of the documents of the shown branch and of the draft.
export const attachedTokens = computed(() => {
  const asked = shown.value.filter(({role}) => role === "user").flatMap(({documents}) => documents);
  return documentTokens([...asked, ...draft.value.documents]);
});

// Whether the documents alone leave no room for an answer. The rest of a conversation is the server's to judge.
export const isTooLong = computed(() => context.value > 0 && attachedTokens.value >= context.value);

// Answers that this tab receives, by the id of their turn.
export const growingHere = new Map();

// Show a turn, if it is one of the open conversation.
export function put(turn) {
  if (turn.conversation === openId.value) turns.value = new Map(turns.value).set(turn.id, turn);
}
