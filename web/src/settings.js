// Settings of a request: what each does, its valid values, and what the visitor chose.
import {computed, signal} from "@preact/signals";
import {visitorStorage} from "./browser_storage.js";

const NAME = "triforce.settings";
const MAX_SEED = 2n ** 63n - 1n;

// An empty field has the model's own default, except for `max_tokens` and `seed`.
export const NUMBERS = [
  {name: "temperature", label: "Temperature", min: 0, max: 5, note: "0 takes the most probable token each time; higher values vary more."},
  {name: "top_p", label: "Top-p", min: 0, max: 1, note: "Keeps the most probable tokens up to this mass; 1 keeps all."},
  {name: "min_p", label: "Min-p", min: 0, max: 1, note: "Drops tokens below this share of the most probable one; 0 drops none."},
  {name: "top_k", label: "Top-k", min: 0, max: 1e6, whole: true, note: "Keeps this many of the most probable tokens; 0 keeps all."},
  {name: "max_tokens", label: "Tokens at most", min: 1, max: 1e7, whole: true, note: "The length at which an answer ends; it can go on from there."},
];
export const MODES = {
  ar: "plain decoding: the model reads everything for each token",
  draft: "a small draft model proposes tokens, the full model verifies them",
  retrieval: "the model proposes tokens while it reads the parts of the text that matter now",
  streaming: "the model proposes tokens while it reads both ends of the text",
  triforce: "a draft model proposes, the retrieval tier corrects, the full model verifies",
  ngram: "tokens are copied from earlier in the text, the retrieval tier corrects them",
  "draft-ngram": "tokens are proposed by the draft model and copied from the text",
  auto: "chooses among all tiers while it generates, by measured times",
};
export const MODE_NAMES = {ar: "plain decoding", draft: "draft model", retrieval: "retrieval", streaming: "both ends", triforce: "draft and retrieval", ngram: "copies and retrieval", "draft-ngram": "draft and copies", auto: "automatic"};
const LABELS = {...Object.fromEntries(NUMBERS.map(({name, label}) => [name, label.toLowerCase()])), max_tokens: "at most", seed: "seed", thinking: "thinking"};
const DEFAULTS = {temperature: "", top_p: "", min_p: "", top_k: "", max_tokens: "1000", seed: "", mode: "", stop: "", thinking: ""};

function read() {
  try {
    const saved = JSON.parse(visitorStorage.get(NAME) ?? "{}");
    return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, typeof saved[name] === "string" ? saved[name] : value]));
  } catch { return DEFAULTS; }
}

export const settings = signal(read());

export function setSetting(name, text) {
  settings.value = {...settings.value, [name]: text};
  visitorStorage.set(NAME, JSON.stringify(settings.value));
}

export function resetSettings() {
  settings.value = DEFAULTS;
  visitorStorage.remove(NAME);
}

// Return why a text is no valid value of a setting, or an empty text.
export function fault(name, text) {
  if (name === "seed") return !text || (/^\d+$/.test(text) && BigInt(text) <= MAX_SEED) ? "" : `The seed is a whole number from 0 to ${MAX_SEED}.`;
  const field = NUMBERS.find(number => number.name === name);
  if (!field || (!text && name !== "max_tokens")) return "";
  const value = Number(text), {label, min, max, whole} = field;
  if (text.trim() && value >= min && value <= max && (!whole || Number.isInteger(value))) return "";
  return `${label}: give a ${whole ? "whole " : ""}number from ${min} to ${max.toLocaleString("en")}.`;
}

// Return what the visitor chose, in a few words.
export const chosenWords = () => Object.entries(settings.value).filter(([name, text]) => text !== DEFAULTS[name])
  .map(([name, text]) => (name === "mode" ? `mode ${text}` : name === "stop" ? "stop words" : `${LABELS[name]} ${text}`)).join(", ");

export const faults = computed(() => Object.entries(settings.value).map(([name, text]) => fault(name, text)).filter(Boolean));

const drawnSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

// Return the fields of a request as they are now. The seed stays a text, as it may have more digits than a number.
export function frozenSettings(card) {
  const chosen = settings.value, fields = {...card.triforce.defaults};
  for (const {name} of NUMBERS) if (chosen[name]) fields[name] = Number(chosen[name]);
  const stops = chosen.stop.split("\n").filter(Boolean);
  return {
    fields: {...fields, ...(stops.length ? {stop: stops} : {})},
    seed: chosen.seed ? String(BigInt(chosen.seed)) : drawnSeed(),
    mode: card.triforce.modes.includes(chosen.mode) ? chosen.mode : card.triforce.mode,
    thinking: card.triforce.thinks ? chosen.thinking : "",
  };
}
