// One request for text: its body, frozen at the click, and the piece that its stream becomes.
import {frames, post} from "./server.js";
import {messages, plainText} from "./conversation.js";

const MAP_LINES = 48;  // latest verifications whose reads are kept

// Return a short digest of token ids (64 bits of cyrb53's kind of mixing). Pages without TLS have no crypto.subtle.
function digest(ids) {
  let a = 0xdeadbeef, b = 0x41c6ce57;
  for (const id of ids) {
    a = Math.imul(a ^ id, 2654435761);
    b = Math.imul(b ^ (id + a), 1597334677);
  }
  return `${(a >>> 0).toString(16).padStart(8, "0")}${(b >>> 0).toString(16).padStart(8, "0")}-${ids.length}`;
}

// Return the address and the JSON of a request. frozen: the settings as they were at the click.
export async function requestOf(line, frozen, changes = {}) {
  const fields = {
    ...frozen.fields, mode: frozen.mode, stream: true, stream_options: {include_usage: true},
    tier_stats: true, trace: true, return_progress: true, return_token_ids: true,
    ...(frozen.thinking ? {chat_template_kwargs: {enable_thinking: frozen.thinking === "on"}} : {}),
    ...(frozen.tools.length ? {tools: frozen.tools} : {}),
    ...changes,
  };
  const body = frozen.chats
    ? {...fields, messages: await messages(line, frozen.system)}
    : {...fields, prompt: await plainText(line), parse_special: false};
  // The seed is put in as text: it may have more digits than a number holds.
  return [frozen.chats ? "v1/chat/completions" : "v1/completions", JSON.stringify(body).replace("{", `{"seed":${frozen.seed},`)];
}

// Text that a stream has brought so far.
class Growth {
  constructor() {
    Object.assign(this, {text: "", thoughts: "", calls: [], ids: [], runs: [], lines: [], tiers: [], inText: {}, finish: ""});
    Object.assign(this, {tokens: 0, seconds: 0, promptTokens: 0, cachedTokens: 0, promptDigest: "", repeated: 0, firstToken: 0, fingerprint: "", model: ""});
    this.started = performance.now();
  }

  addPrompt(ids) {
    this.promptTokens = ids.length;
    this.promptDigest = digest(ids);
  }

  add(choice) {
    const {delta = {}} = choice;
    this.text += choice.text ?? delta.content ?? "";
    this.thoughts += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.calls.push({id: call.id, name: call.function.name, arguments: call.function.arguments});
    if (choice.prompt_token_ids) this.addPrompt(choice.prompt_token_ids);
    for (const id of choice.token_ids ?? []) this.ids.push(id);
    const tiers = choice.token_tiers ?? [], characters = choice.token_characters ?? [];
    if (tiers.length && !this.firstToken) this.firstToken = (performance.now() - this.started) / 1000;
    tiers.forEach((tier, i) => this.paint(tier, characters[i] ?? 0));
    this.tokens += tiers.length;
    if (choice.trace) this.trace(choice.trace);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // Tokens of one tier in a row are one run: a tier, and its number of characters.
  paint(tier, characters) {
    this.inText[tier] = (this.inText[tier] ?? 0) + 1;
    const last = this.runs.at(-1);
    if (last?.[0] === tier) last[1] += characters;
    else this.runs.push([tier, characters]);
  }

  // An empty `seen` means that the retrieval tier was not used: it adds no line.
  trace({seconds, tiers, seen}) {
    this.seconds = seconds;  // measured by the server: the browser may lag
    this.tiers = tiers;
    if (seen.length) this.lines = [...this.lines, seen].slice(-MAP_LINES);
  }

  get figures() {
    const {tokens, seconds, promptTokens, cachedTokens, promptDigest, repeated, firstToken, tiers, inText} = this;
    return {tokens, seconds, promptTokens, cachedTokens, promptDigest, repeated, firstToken, tiers, inText};
  }
}

// Send a request, and yield its growth after each event. onProgress receives the prompt's reading.
export async function* stream([path, body], abort, onProgress) {
  const growth = new Growth();
  for await (const event of frames(await post(path, body, abort))) {
    growth.fingerprint = event.system_fingerprint ?? growth.fingerprint;
    growth.model = event.model ?? growth.model;
    if (event.prompt_token_ids) growth.addPrompt(event.prompt_token_ids);
    if (event.prompt_progress) {
      growth.cachedTokens = event.prompt_progress.cache;
      onProgress(event.prompt_progress);
      continue;
    }
    if (event.usage) {
      growth.promptTokens = event.usage.prompt_tokens;
      growth.cachedTokens = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
      growth.tiers = event.usage.tiers ?? growth.tiers;
      [growth.repeated = 0] = event.usage.repeated_8_grams ?? [];
    }
    for (const choice of event.choices) growth.add(choice);
    yield growth;
  }
}
