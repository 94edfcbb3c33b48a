// The proof of an answer: the same request by plain decoding, compared by token ids; and the table of all runs.
import {requestOf, stream} from "./run.js";
import {server} from "./server.js";
import {begin, exclusively, progress} from "./activity.js";
import {lineBefore, lineTo, setProof} from "./answers.js";
import {shown} from "./state.js";
import {read} from "./store.js";
import {counted, formatCount, formatRate, formatShare} from "./words.js";

const MIN_SPEEDUP = 1.1;  // speedup over plain decoding below which a reason is given
const MIN_TOKENS = 16;  // tokens below which no speed is shown
const MIN_DRAFTED_SHARE = .1;  // share of proposed tokens below which an answer counts as decoded plainly
const LOOP_SHARE = .1;  // share of repeated 8-grams from which on a text counts as a loop
const CHANGED = "The model or the server changed since this answer was made, so it cannot be checked.";

export const rateOf = figures => (figures?.seconds ? figures.tokens / figures.seconds : 0);
const draftedShare = ({inText, tokens}) => (tokens ? 1 - (inText.full ?? 0) / tokens : 0);

// Return why a piece cannot be checked now, or an empty text.
export function uncheckable(piece) {
  const {card} = server.value;
  if (!piece.figures?.tokens) return "There is no text to check.";
  if (!card) return "The server does not answer.";
  if (piece.model !== card.id || piece.fingerprint !== card.triforce.system_fingerprint) return CHANGED;
  if (card.triforce.coupling !== "seeded" && piece.frozen.fields.temperature !== 0) {
    return `This server's coupling is ${card.triforce.coupling}: it preserves the distribution of texts, not the text of a seed.`;
  }
  return piece.frozen.mode === "ar" ? "This answer is plain decoding itself." : "";
}

// Return the most seconds that plain decoding takes for a piece: as measured, or as a verification costs at least a plain step.
export function price({figures, proof}) {
  if (proof?.figures) return proof.figures.seconds;
  const full = figures.tiers.at(-1);
  return full?.passes ? figures.seconds * figures.tokens / full.passes : figures.seconds;
}

// Check the pieces of an answer one after another, each behind the tokens that it had then.
export const check = turn => exclusively(async () => {
  const line = lineTo(turn.parent);
  for (let index = 0; index < turn.pieces.length; index++) {
    const piece = turn.pieces[index];
    if (!piece.figures?.tokens) continue;
    const reason = uncheckable(piece);
    if (reason) await setProof(turn, index, {state: "unchecked", reason});
    else if (!await checkPiece(turn, index, lineBefore(turn, index, line))) return;
  }
});

// Return whether the check came to an end.
async function checkPiece(turn, index, line) {
  const piece = turn.pieces[index], {figures, frozen} = piece;
  const outer = begin("check", turn, "Plain decoding"), inner = new AbortController(), signal = AbortSignal.any([outer, inner.signal]);
  try {
    const kept = (await read("details", turn.id))?.pieces[index];
    if (kept?.ids.length !== figures.tokens) return unchecked(turn, index, "The tokens of this answer were not kept, so it cannot be checked.");
    const whole = piece.state === "finished", limit = whole ? frozen.fields.max_tokens : kept.ids.length;
    const request = await requestOf(line, frozen, {mode: "ar", max_tokens: limit});
    let plain = null;
    for await (plain of stream(request, signal, ({processed, total}) => progress("Plain decoding: reading the conversation", processed, total))) {
      if (plain.fingerprint !== piece.fingerprint || plain.model !== piece.model) return unchecked(turn, index, CHANGED);
      if (plain.promptDigest && plain.promptDigest !== figures.promptDigest) {
        return unchecked(turn, index, "The server now reads this conversation as other tokens, so the answer cannot be checked.");
      }
      progress("Plain decoding", plain.tokens, kept.ids.length);
    }
    await setProof(turn, index, plain?.finish ? verdict(piece, kept.ids, plain) : {state: "unchecked", reason: "The check came to no end."});
    return true;
  } catch (fault) {
    if (fault.name !== "AbortError") await setProof(turn, index, {state: "unchecked", reason: `The check came to no end: ${fault.message}`});
    return false;
  } finally {
    inner.abort();
  }
}

async function unchecked(turn, index, reason) {
  await setProof(turn, index, {state: "unchecked", reason});
  return true;
}

// Compare token ids. The text must be that of the tokens, too: an answer of a file could have any.
function verdict(piece, ids, plain) {
  const {figures} = plain, length = piece.state === "finished" ? Math.max(ids.length, plain.ids.length) : ids.length;
  let same = 0;
  while (same < length && ids[same] === plain.ids[same]) same++;
  if (same < length) return {state: "differs", figures, at: same, text: plain.text};
  const isWhole = piece.state === "finished" || piece.state === "limit";  // else letters of the last tokens may be missing
  const agrees = (shownText, text) => (isWhole ? shownText === text : text.startsWith(shownText));
  const isText = agrees(piece.text, plain.text) && agrees(piece.thoughts, plain.thoughts) && callWords(piece.calls) === callWords(plain.calls);
  return isText ? {state: "identical", figures} : {state: "unchecked", reason: "The text that is shown is not the text of its tokens."};
}

const callWords = calls => JSON.stringify(calls.map(({name, arguments: given}) => [name, given]));

// Return the sentences of a proof: headline, facts, and why it was not faster.
export function sentences(piece) {
  const {proof, figures} = piece;
  if (proof.state === "unchecked") return {headline: "Not checked", facts: proof.reason, why: ""};
  const speed = comparisonOf(piece);
  if (proof.state === "differs") {
    const why = "The same text is promised where the kernels round a pass over several tokens like a pass over one token. Please report this.";
    return {headline: `Differs from plain decoding at token ${formatCount(proof.at + 1)}`, facts: factsOf(piece, speed), why};
  }
  const addition = speed.loops ? ", but it repeats itself" : speed.isFaster ? `, ${formatRate(speed.times)} times as fast` : "";
  const why = speed.loops ? warning(speed.repeated) : speed.isMeasured && !speed.isFaster ? reason(figures, piece.frozen, speed.isPlain) : "";
  return {headline: `Identical to plain decoding${addition}`, facts: `Speculation changed no token. ${factsOf(piece, speed)}`, why};
}

function comparisonOf({figures, proof, isImported}) {
  const isShort = Math.min(figures.tokens, proof.figures.tokens) < MIN_TOKENS, isMeasured = !isShort && !isImported;
  const times = rateOf(figures) / rateOf(proof.figures), isPlain = draftedShare(figures) < MIN_DRAFTED_SHARE;
  const repeated = Math.max(figures.repeated, proof.figures.repeated);
  return {isShort, isMeasured, times, isPlain, repeated, loops: !isShort && repeated >= LOOP_SHARE, isFaster: isMeasured && !isPlain && times >= MIN_SPEEDUP};
}

function factsOf({figures, proof, isImported}, {isShort}) {
  if (isShort) return "These are too few tokens to measure a speed.";
  if (isImported) return "The speed of an imported answer is not known here.";
  const speed = run => `${run.seconds.toFixed(1)} s, ${formatRate(rateOf(run))} per second`;
  return `${counted(figures.tokens, "token")} after a conversation of ${formatCount(figures.promptTokens)}: ${speed(figures)}; plain decoding: ${speed(proof.figures)}.`;
}

const warning = share => `The text repeats itself (${formatShare(share)} of its runs of eight tokens), so the ratio of these speeds says little: a loop is easy to draft.`;

function reason(figures, frozen, isPlain) {
  const {pays, pays_from: from} = server.value.card?.triforce ?? {};
  const chance = isPlain ? " This text was decoded plainly, and the difference in speed is chance." : "";
  if (from === null || from === undefined) return `Why not faster? ${pays ?? ""}${chance}`;
  if (figures.promptTokens < from) {
    return `Why not faster: a conversation of ${formatCount(figures.promptTokens)} tokens is short, so plain decoding reads little per token. ` +
      `Here speculation pays from ${formatCount(from)} tokens on.${chance}`;
  }
  if (isPlain) return `Why not faster: mode ${frozen.mode} found that speculation does not pay for this text.${chance}`;
  return `Why not faster: ${formatShare(draftedShare(figures))} of the tokens were proposed correctly, but the proposals took as much time as they saved.`;
}

// Return the shares of proposals that the verification kept, over all tiers but the last.
export function acceptance(figures) {
  const proposers = figures.tiers.slice(0, -1), proposed = proposers.reduce((sum, tier) => sum + tier.proposed, 0);
  return proposed ? proposers.reduce((sum, tier) => sum + tier.accepted, 0) / proposed : null;
}

// ---- the table of runs

function runsOf(turnsShown) {
  const rows = [];
  turnsShown.filter(turn => turn.role === "assistant").forEach((turn, place) => turn.pieces.forEach((piece, part) => {
    if (!piece.figures?.tokens) return;
    const answer = turn.pieces.length > 1 ? `${place + 1}.${part + 1}` : `${place + 1}`;
    rows.push(row(answer, piece.frozen.mode, piece.model, piece.figures, piece.proof?.state ?? ""));
    if (piece.proof?.figures) rows.push(row(answer, "ar", piece.model, piece.proof.figures, "check"));
  }));
  return rows;
}

const row = (answer, mode, model, figures, verdict) => ({
  answer, mode, model, verdict, context: figures.promptTokens, cached: figures.cachedTokens, tokens: figures.tokens,
  firstToken: round(figures.firstToken), seconds: round(figures.seconds), rate: round(rateOf(figures)), acceptance: figures.tiers.length > 1 ? round(acceptance(figures)) : null,
});
const round = number => (number === null ? null : Math.round(number * 1000) / 1000);

export const currentRuns = () => runsOf(shown.value);

const FIELDS = {answer: "string", mode: "string", model: "string", verdict: "string", context: "number", cached: "number", tokens: "number", firstToken: "number", seconds: "number", rate: "number", acceptance: "number"};
const LINK = "#runs=";

// Return a link that shows a table of runs. It holds figures and names, and no text.
export function linkOf(rows) {
  const bytes = new TextEncoder().encode(JSON.stringify(rows));
  const code = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return location.href.split("#")[0] + LINK + code;
}

// Return the runs of a link, or null where the address has none. Values of other types are left out.
export function runsOfLink(hash) {
  if (!hash.startsWith(LINK)) return null;
  try {
    const bytes = Uint8Array.from(atob(hash.slice(LINK.length).replaceAll("-", "+").replaceAll("_", "/")), letter => letter.charCodeAt(0));
    return JSON.parse(new TextDecoder().decode(bytes)).slice(0, 1000).map(given =>
      Object.fromEntries(Object.entries(FIELDS).map(([name, type]) => [name, typeof given[name] === type ? (type === "string" ? given[name].slice(0, 100) : given[name]) : type === "string" ? "" : null])));
  } catch { return []; }
}
