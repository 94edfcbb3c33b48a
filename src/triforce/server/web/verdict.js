"use strict";
// The verdict of a comparison, in words.
const FASTER = 1.1;  // times plain decoding: below it the page gives the reason
const FEW = 16;  // tokens: fewer do not measure a speed
const SELDOM = .1;  // share of proposed tokens: below it both are plain decoding, and differences are chance
const LOOP = .1;  // share of a text's 8-grams that occurred in it before: from it on the text is a loop
let gains = {from: null, said: ""};  // from: context in tokens from which speculation pays, or null; said: the server's sentence

const guessed = ({inText, tokens}) => 1 - (inText.full ?? 0) / tokens;

function headline(times, same, seldom, loops) {
  if (loops) return same ? "The same text, but it repeats itself" : "The texts differ, and one repeats itself";
  const fast = seldom ? "As fast as plain decoding" : `${paced(times)} times as fast`;
  return `${fast}, ${same ? "the same text" : "but the texts differ"}`;
}

function warning(share) {
  return `The text repeats itself (${Math.round(100 * share)} % of its 8-grams), so the ratio of these speeds says ` +
    "little: a loop is easy to draft. Ask something else, or try another seed.";
}

function reason(times, tiered, seldom) {
  if (times >= FASTER && !seldom) return "";
  if (tiered.tiers.length < 2) return "Why not faster: both are plain decoding. Choose another mode under Advanced.";
  const chance = seldom ? " This text was decoded plainly, and the difference in speed is chance." : "";
  if (gains.from === null) return `Why not faster? ${gains.said}${chance}`;
  if (tiered.read < gains.from) {
    return `Why not faster: the KV cache of ${told(tiered.read)} tokens is small, so plain decoding reads little ` +
      `per token, and speculation can save nothing. Try a document of more than ${told(gains.from)} tokens.${chance}`;
  }
  if (seldom) {
    return "Why not faster: speculation was found not to pay here. Both are plain decoding, " +
      "and the difference in speed is chance.";
  }
  return `Why not faster: ${Math.round(100 * guessed(tiered))} % of the tokens were proposed correctly, but the proposals took as much ` +
    "time as they saved. The larger a model, the longer a document must be before its KV cache dominates the time.";
}

function judge(tiered, plain) {
  const same = tiered.text === plain.text, times = tiered.rate / plain.rate;
  const seldom = guessed(tiered) < SELDOM;
  const few = Math.min(tiered.tokens, plain.tokens) < FEW, repeated = Math.max(tiered.repeated, plain.repeated);
  const loops = repeated >= LOOP;
  $("headline").className = !same ? "other" : times >= FASTER && !seldom && !loops ? "same" : "";
  $("headline").textContent = !few ? headline(times, same, seldom, loops) : same ? "The same text" : "The texts differ";
  $("facts").textContent = few ? "These are too few tokens to measure a speed." :
    `${told(tiered.tokens)} tokens after a document of ${told(tiered.read)}: ${paced(tiered.rate)} per second with ` +
    `TriForce, ${paced(plain.rate)} by plain decoding.`;
  $("why").textContent = !same
    ? "Only the coupling seeded promises the same text, and only if the kernels round a pass over several tokens " +
      "like a pass over one token. Otherwise only the distribution of texts is preserved."
    : few ? "" : loops ? warning(repeated) : reason(times, tiered, seldom);
}
