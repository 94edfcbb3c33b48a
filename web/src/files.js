// Files that leave the page and come back: exported conversations and tables of runs; and the clipboard.
import {newId} from "./conversation.js";
import {restore} from "./conversations.js";
import {list} from "./state.js";
import {read, readPart} from "./store.js";

const FORMAT = "triforce-conversation", VERSION = 1;

export function download(name, data) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], {type: "application/json"}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const fileName = title => (title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation") + ".json";

export async function exportConversation(id) {
  const conversation = await read("conversations", id);
  const details = (await readPart("details", id)).map(detail => ({...detail, pieces: detail.pieces.map(piece => ({...piece, ids: Array.from(piece.ids)}))}));
  download(fileName(conversation.title), {format: FORMAT, version: VERSION, conversation, turns: await readPart("turns", id), details, documents: await readPart("documents", id)});
}

class ImportError extends Error {}

const need = (holds, what) => { if (!holds) throw new ImportError(`The file is no exported conversation: ${what}.`); };
const requiredText = (value, what) => { need(typeof value === "string", `${what} is no text`); return value; };
const nonNegative = value => (Number.isFinite(value) && value >= 0 ? value : 0);
const requiredList = (value, what) => { need(Array.isArray(value), `${what} is no list`); return value; };
const objectOf = value => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

// Import a conversation under new ids. Only known fields of the expected types are taken. Raises ImportError.
export async function importConversation(file) {
  let given;
  try { given = JSON.parse(await file.text()); } catch { throw new ImportError(`${file.name} is no exported conversation, as it is no JSON.`); }
  need(given?.format === FORMAT, `its format is not ${FORMAT}`);
  need(given.version === VERSION, `its version is not ${VERSION}`);
  const ids = new Map(), renamed = id => (id === null ? null : ids.get(id) ?? ids.set(id, newId()).get(id));
  const id = renamed(requiredText(given.conversation?.id, "its id"));
  const documents = requiredList(given.documents, "documents").map(document => ({
    id: renamed(requiredText(document?.id, "a document's id")), conversation: id, name: requiredText(document.name, "a document's name"), text: requiredText(document.text, "a document's text"),
    note: typeof document.note === "string" ? document.note : "", skipped: [], tokens: nonNegative(document.tokens),
  }));
  const head = ({text: dropped, conversation: owner, skipped, ...rest}) => rest;
  const known = new Map(documents.map(document => [document.id, head(document)]));
  const attached = value => requiredList(value, "a turn's documents").map(document => known.get(renamed(document?.id))).filter(Boolean);
  const turns = requiredList(given.turns, "turns").map(turn => {
    const base = {id: renamed(requiredText(turn?.id, "a turn's id")), conversation: id, parent: renamed(turn.parent === null ? null : requiredText(turn.parent, "a turn's parent")), role: turn.role, created: nonNegative(turn.created)};
    if (turn.role === "user") return {...base, text: requiredText(turn.text, "a question"), documents: attached(turn.documents)};
    if (turn.role === "tool") return {...base, results: requiredList(turn.results, "results").map(result => ({id: requiredText(result?.id, "a result's id"), name: requiredText(result.name, "a result's name"), text: requiredText(result.text, "a result's text")}))};
    need(turn.role === "assistant", "a turn has no known role");
    need(turn.pieces?.length > 0, "an answer has no piece");
    return {...base, pieces: requiredList(turn.pieces, "an answer's pieces").map(importedPiece)};
  });
  const names = new Set(turns.map(turn => turn.id)), seen = new Set();
  need(names.size === turns.length, "two turns have one id");
  for (const turn of turns) {
    need(turn.parent === null || names.has(turn.parent), "a turn's parent is missing");
    for (let at = turn, steps = 0; at && !seen.has(at.id); at = turns.find(({id: other}) => other === at.parent)) need(++steps <= turns.length, "turns follow each other in a circle");
    seen.add(turn.id);
  }
  const details = requiredList(given.details, "details").filter(detail => ids.has(detail?.id)).map(detail => ({
    id: renamed(detail.id), conversation: id,
    pieces: requiredList(detail.pieces, "details' pieces").map(piece => ({
      ids: Uint32Array.from(requiredList(piece?.ids, "token ids"), nonNegative),
      runs: requiredList(piece.runs, "tiers").filter(run => Array.isArray(run) && typeof run[0] === "string").map(([tier, characters]) => [tier, nonNegative(characters)]),
      lines: requiredList(piece.lines, "reads").filter(line => Array.isArray(line) && line.length).map(line => line.map(nonNegative)),
    })),
  }));
  const choices = Object.fromEntries(Object.entries(objectOf(given.conversation.choices)).filter(([, child]) => ids.has(child)).map(([parent, child]) => [parent === "root" ? parent : renamed(parent), renamed(child)]));
  const draft = objectOf(given.conversation.draft);
  const conversation = {
    id, title: importedTitle(requiredText(given.conversation.title, "its title").slice(0, 200)), created: nonNegative(given.conversation.created), changed: Date.now(), choices,
    system: requiredText(given.conversation.system, "its system prompt"), tools: requiredText(given.conversation.tools, "its functions"),
    draft: {text: typeof draft.text === "string" ? draft.text : "", documents: Array.isArray(draft.documents) ? attached(draft.documents) : []},
  };
  await restore(conversation, {turns, details, documents});
  return id;
}

const importedTitle = title => (list.value.some(record => record.title === title) ? `${title} (imported)` : title);

const STATES = ["finished", "limit", "stopped", "interrupted", "failed"];

function importedFigures(given) {
  if (!given || typeof given !== "object") return null;
  const numbers = ["tokens", "seconds", "promptTokens", "cachedTokens", "repeated", "firstToken"];
  return {
    ...Object.fromEntries(numbers.map(name => [name, nonNegative(given[name])])), promptDigest: String(given.promptDigest ?? ""),
    tiers: (Array.isArray(given.tiers) ? given.tiers : []).map(tier => ({name: String(tier?.name ?? ""), proposed: nonNegative(tier?.proposed), accepted: nonNegative(tier?.accepted), passes: nonNegative(tier?.passes)})),
    inText: Object.fromEntries(Object.entries(objectOf(given.inText)).map(([tier, tokens]) => [tier, nonNegative(tokens)])),
  };
}

// Return the known fields of a request that have a valid type.
function importedFields(given) {
  const numbers = ["temperature", "top_p", "min_p", "top_k", "repetition_penalty"].filter(name => Number.isFinite(given[name]));
  const stop = Array.isArray(given.stop) ? given.stop.filter(word => typeof word === "string") : [];
  return {...Object.fromEntries(numbers.map(name => [name, given[name]])), max_tokens: Math.max(1, Math.round(nonNegative(given.max_tokens))), ...(stop.length ? {stop} : {})};
}

// A verdict is not imported: it is a fact only where it was found.
function importedPiece(piece) {
  const frozen = objectOf(piece?.frozen), figures = importedFigures(piece?.figures);
  const known = STATES.includes(piece?.state) && (figures || piece.state !== "limit");
  return {
    isImported: true, state: known ? piece.state : "interrupted", text: requiredText(piece?.text, "an answer's text"), thoughts: requiredText(piece.thoughts, "thoughts"),
    calls: requiredList(piece.calls, "calls").map(call => ({id: requiredText(call?.id, "a call's id"), name: requiredText(call.name, "a call's name"), arguments: requiredText(call.arguments, "a call's arguments")})),
    error: typeof piece.error === "string" ? piece.error : "", figures, fingerprint: String(piece.fingerprint ?? ""), model: String(piece.model ?? ""), proof: null,
    frozen: {
      fields: importedFields(objectOf(frozen.fields)), seed: /^\d{1,19}$/.test(frozen.seed) ? String(BigInt(frozen.seed)) : "0", mode: String(frozen.mode ?? ""), thinking: String(frozen.thinking ?? ""),
      chats: frozen.chats !== false, system: String(frozen.system ?? ""), tools: Array.isArray(frozen.tools) ? frozen.tools : [],
    },
  };
}

// Copy text. Pages without TLS have no clipboard of their own, so a selection is copied there.
export async function copy(words) {
  if (navigator.clipboard) return navigator.clipboard.writeText(words);
  const area = Object.assign(document.createElement("textarea"), {value: words});
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!done) throw new Error("The browser does not let this page copy.");
}
