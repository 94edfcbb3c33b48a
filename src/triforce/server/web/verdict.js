"use strict";
// What came of a comparison, in words.
const FASTER = 1.1;  // times plain decoding: below it, it is said why
const FEW = 16;  // tokens that say nothing of the speed
const SELDOM = .1;  // share of tokens that were guessed: below it both are plain decoding, and what differs is chance
const LOOP = .1;  // share of a text's 8-grams that stood in it before: from it on it repeats itself
let gains = {from: null, said: ""};  // tokens read where they begin, null: nowhere; and what the server says of it

const guessed = ({inText, tokens}) => 1 - (inText.full ?? 0) / tokens;

function headline(times, same, seldom, loops) {
  if (loops) return same ? "The same text, but it repeats itself" : "The texts differ, and one repeats itself";
  const fast = seldom ? "As fast as plain decoding" : `${paced(times)} times as fast`;
  return `${fast}, ${same ? "the same text" : "but the texts differ"}`;
}

function warning(share) {
  return `The text repeats itself (${Math.round(100 * share)} % of its 8-grams), so the ratio of these speeds says ` +
    "little: a loop is easy to guess. Ask something else, or try another seed.";
}

function reason(times, tiered, seldom) {
  if (times >= FASTER && !seldom) return "";
  if (tiered.tiers.length < 2) return "Why not faster: both are plain decoding. Choose another mode under Advanced.";
  const chance = seldom ? " This one was decoded plainly, and what differs in speed is chance." : "";
  if (gains.from === null) return `Why not faster? ${gains.said}${chance}`;
  if (tiered.read < gains.from) {
    return `Why not faster: the KV cache of ${told(tiered.read)} tokens is small, so plain decoding has little to read ` +
      `for each new one, and there is nothing to save. Try a document of more than ${told(gains.from)} tokens.${chance}`;
  }
  if (seldom) return "Why not faster: guessing was found not to pay here. Both are plain decoding, and what differs in speed is chance.";
  return `Why not faster: ${Math.round(100 * guessed(tiered))} % of the tokens had been guessed right, but guessing took as much ` +
    "time as it saved. The larger a model, the longer a document must be for its KV cache to be what takes time.";
}

function judge(tiered, plain) {
  const same = tiered.text === plain.text, times = tiered.rate / plain.rate;
  const seldom = guessed(tiered) < SELDOM;
  const few = Math.min(tiered.tokens, plain.tokens) < FEW, repeated = Math.max(tiered.repeated, plain.repeated);
  const loops = repeated >= LOOP;
  $("headline").className = !same ? "other" : times >= FASTER && !seldom && !loops ? "same" : "";
  $("headline").textContent = !few ? headline(times, same, seldom, loops) : same ? "The same text" : "The texts differ";
  $("facts").textContent = few ? "These are too few tokens to tell the speed of." :
    `${told(tiered.tokens)} tokens after a document of ${told(tiered.read)}: ${paced(tiered.rate)} per second with ` +
    `TriForce, ${paced(plain.rate)} by plain decoding.`;
  $("why").textContent = !same
    ? "Only the coupling seeded promises the same text, and only where the kernels round a pass over several tokens " +
      "like one over a single token. Elsewhere the distribution of texts is the same."
    : few ? "" : loops ? warning(repeated) : reason(times, tiered, seldom);
}
