"use strict";
// What came of a comparison, in words.
const FEW = 10;  // tokens that say nothing of the speed
const SHORT = 4000;  // tokens read: where gains begin, as the retrieval tier reads some 2,000 (docs/benchmarks.md)

function headline(times, same) {
  const fast = `${paced(times)} times as fast`;
  return `${fast}, ${same ? "the same text" : "but the texts differ"}`;
}

function reason(times, tiered) {
  if (times >= 1.1) return "";
  if (tiered.tiers.length < 2) return "Why not faster: both are plain decoding. Choose another mode under Advanced.";
  if (tiered.read < SHORT) {
    return `Why not faster: the KV cache of ${told(tiered.read)} tokens is small, so plain decoding has little to read ` +
      `for each new one, and there is nothing to save. Try a document of more than ${told(SHORT)} tokens.`;
  }
  const guessed = 1 - (tiered.inText.full ?? 0) / tiered.tokens;
  if (guessed < .2) return "Why not faster: guessing was found not to pay here, so most tokens were decoded plainly.";
  return `Why not faster: ${Math.round(100 * guessed)} % of the tokens had been guessed right, but guessing took as much ` +
    "time as it saved. The larger a model, the longer a document must be for its KV cache to be what takes time.";
}

function judge(tiered, plain) {
  const same = tiered.text === plain.text, times = tiered.rate / plain.rate;
  const few = Math.min(tiered.tokens, plain.tokens) < FEW;
  $("headline").className = same ? "same" : "other";
  $("headline").textContent = !few ? headline(times, same) : same ? "The same text" : "The texts differ";
  $("facts").textContent = few ? "These are too few tokens to tell the speed of." :
    `${told(tiered.tokens)} tokens after a document of ${told(tiered.read)}: ${paced(tiered.rate)} per second with ` +
    `TriForce, ${paced(plain.rate)} by plain decoding.`;
  $("why").textContent = !same
    ? "Only the coupling seeded promises the same text, and only where the kernels round a pass over several tokens " +
      "like one over a single token. Elsewhere the distribution of texts is the same."
    : few ? "" : reason(times, tiered);
}
