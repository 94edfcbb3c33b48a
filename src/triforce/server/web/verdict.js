"use strict";
// The verdict of a comparison, in words.
const MIN_SPEEDUP = 1.1;  // speedup over plain decoding below which the page gives a reason
const MIN_TOKENS = 16;  // tokens below which the page shows no speed
const MIN_DRAFTED_SHARE = .1;  // share of proposed tokens below which a text counts as decoded plainly
const LOOP_SHARE = .1;  // share of repeated 8-grams from which on a text counts as a loop
// tokens: context from which on speculation pays, or null; sentence: the same in words, from the server
let breakEven = {tokens: null, sentence: ""};

const draftedShare = ({inText, tokens}) => 1 - (inText.full ?? 0) / tokens;

function headline(times, same, isPlain, loops) {
  if (loops) return same ? "The same text, but it repeats itself" : "The texts differ, and one repeats itself";
  const fast = isPlain ? "As fast as plain decoding" : `${formatRate(times)} times as fast`;
  return `${fast}, ${same ? "the same text" : "but the texts differ"}`;
}

function warning(share) {
  return `The text repeats itself (${Math.round(100 * share)} % of its 8-grams), so the ratio of these speeds says ` +
    "little: a loop is easy to draft. Ask something else, or try another seed.";
}

function reason(times, tiered, isPlain) {
  if (times >= MIN_SPEEDUP && !isPlain) return "";
  if (tiered.tiers.length < 2) return "Why not faster: both are plain decoding. Choose another mode under Advanced.";
  const chance = isPlain ? " This text was decoded plainly, and the difference in speed is chance." : "";
  if (breakEven.tokens === null) return `Why not faster? ${breakEven.sentence}${chance}`;
  if (tiered.read < breakEven.tokens) {
    return `Why not faster: the KV cache of ${formatCount(tiered.read)} tokens is small, so plain decoding reads little ` +
      `per token, and speculation can save nothing. Try a document of more than ${formatCount(breakEven.tokens)} tokens.${chance}`;
  }
  if (isPlain) {
    return "Why not faster: speculation was found not to pay for this text. Both texts were decoded plainly, " +
      "and the difference in speed is chance.";
  }
  return `Why not faster: ${Math.round(100 * draftedShare(tiered))} % of the tokens were proposed correctly, but the proposals took as much ` +
    "time as they saved. The larger a model, the longer a document must be before its KV cache dominates the time.";
}

function judge(tiered, plain) {
  const same = tiered.text === plain.text, times = tiered.rate / plain.rate;
  const isPlain = draftedShare(tiered) < MIN_DRAFTED_SHARE;
  const isShort = Math.min(tiered.tokens, plain.tokens) < MIN_TOKENS, repeated = Math.max(tiered.repeated, plain.repeated);
  const loops = repeated >= LOOP_SHARE;
  $("headline").className = !same ? "other" : times >= MIN_SPEEDUP && !isPlain && !loops ? "same" : "";
  $("headline").textContent = !isShort ? headline(times, same, isPlain, loops) : same ? "The same text" : "The texts differ";
  $("facts").textContent = isShort ? "These are too few tokens to measure a speed." :
    `${formatCount(tiered.tokens)} tokens after a document of ${formatCount(tiered.read)}: ${formatRate(tiered.rate)} per second with ` +
    `TriForce, ${formatRate(plain.rate)} by plain decoding.`;
  $("why").textContent = !same
    ? "Only the coupling seeded promises the same text, and only if the kernels round a pass over several tokens " +
      "like a pass over one token. Otherwise only the distribution of texts is preserved."
    : isShort ? "" : loops ? warning(repeated) : reason(times, tiered, isPlain);
}
