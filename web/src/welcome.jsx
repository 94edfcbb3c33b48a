// What a visitor sees before the first question: what this is, what it gains here, and samples to begin with.
import {useEffect} from "preact/hooks";
import {signal} from "@preact/signals";
import {documentOf, sampleText, watchedDocuments, watchedText} from "./documents.js";
import {server, tokenCount} from "./server.js";
import {attach, setDraft} from "./conversations.js";
import {draft, error, openId} from "./state.js";
import {TierName} from "./tiers.jsx";
import {formatCount} from "./words.js";

const LENGTHS = [1000, 4000, 16000, 32000];  // of samples, in tokens
const PROBE = 8000;  // characters from which the length of a token is estimated
const ROOM = 1500;  // tokens of the context that a sample leaves free
const QUESTION = "Answer in one sentence: what was the name of the schooner that came into the harbour?";
const ABOUT = 'CUTTING FROM "THE DAILYGRAPH,"';  // the chapter in question begins with it

const STEPS = {
  draft: "A small model proposes the next tokens.",
  ngram: "The next tokens are copied from earlier in the conversation.",
  retrieval: "The model corrects the proposals, reading only the parts of the conversation that matter now.",
  full: "The model reads everything, once for several tokens, and accepts only the tokens of plain decoding.",
};

const watched = signal([]);
const isLoading = signal(false);

async function attachSample(length, chats) {
  if (isLoading.value) return;
  isLoading.value = true;
  const target = openId.value;
  try {
    const whole = await sampleText(), book = chats ? whole.slice(whole.indexOf(ABOUT)) : whole;
    const tokens = await tokenCount({prompt: book.slice(0, PROBE)});
    await attach(await documentOf("Dracula", book.slice(0, book.lastIndexOf(" ", length * PROBE / tokens))), target);
    if (chats && !draft.value.text) setDraft({text: QUESTION});
    document.getElementById("composer")?.focus();
  } catch (fault) { error.value = fault.message; }
  isLoading.value = false;
}

async function attachWatched({id, name}) {
  const target = openId.value;
  try { await attach(await documentOf(name, await watchedText(id)), target); } catch (fault) { error.value = fault.message; }
}

export function Welcome() {
  const {card, state} = server.value;
  useEffect(() => { if (state === "up") watchedDocuments().then(documents => { watched.value = documents; }).catch(() => {}); }, [state, card?.id]);
  const modes = card?.triforce.modes ?? [];
  const chats = card?.triforce.chats ?? true;
  const lengths = card ? LENGTHS.filter(length => length * 1.1 + ROOM < card.max_model_len) : [];
  return <section class="welcome">
    <h1>{chats ? "Ask about a long document" : "Continue a long document"}</h1>
    <p class="lead">Lossless speculative decoding: fast tiers draft the next tokens, the full model verifies each of them. Any answer can be checked against plain decoding with one click.</p>
    {card && <p id="pays">{card.triforce.pays}</p>}
    {lengths.length > 0 && <div class="chips" role="group" aria-label="Samples: the beginning of a chapter of Dracula">
      <span class="soft">Try a sample of <cite>Dracula</cite>, in tokens</span>
      {lengths.map(length => <button type="button" key={length} disabled={isLoading.value} onClick={() => attachSample(length, chats)}>{formatCount(length)}</button>)}
    </div>}
    {watched.value.length > 0 && <div class="chips" role="group" aria-label="Documents already read">
      <span class="soft">Already read</span>
      {watched.value.map(entry => <button type="button" key={entry.id} onClick={() => attachWatched(entry)}>{entry.name}</button>)}
    </div>}
    {!chats && <p class="soft">This model has no chat template, so it continues the text that it is given.</p>}
    <h2>How it works</h2>
    <ul class="how">
      {Object.entries(STEPS).filter(([tier]) => tier !== (modes.includes("draft") ? "ngram" : "draft")).map(([tier, step]) => <li key={tier}><TierName name={tier} /> {step}</li>)}
    </ul>
  </section>;
}
