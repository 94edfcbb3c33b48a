"use strict";
// The comparison: one text with TriForce, and the same seed by plain decoding.
const PAUSE = 100;  // milliseconds between two repaints, as a repaint takes CPU time that the server may need
const map = new ReadMap(), progress = new Progress();
let running = null;

async function loadModel() {
  $("error").textContent = "";
  let model;
  try { [model] = (await (await ask("/v1/models")).json()).data; } catch (error) {
    if (error.status === 401 && !$("key").value) return;  // the page now asks for the key
    throw error;
  }
  const {chats, modes, pays, pays_from} = model.triforce;
  breakEven = {tokens: pays_from, sentence: pays};
  $("pays").textContent = pays;
  context = model.max_model_len;
  $("about").textContent = `serves ${model.id}, ${formatCount(context)} tokens of context`;
  $("asking").hidden = !chats; $("continuing").hidden = chats;
  $("mode").replaceChildren($("mode").options[0], ...modes.map(mode => new Option(mode, mode)));
  await offerSamples();
  await offerWatched();
}

function request(mode) {
  const text = $("document").value, question = $("asking").hidden ? "" : $("question").value.trim();
  const common = {
    max_tokens: $("tokens").valueAsNumber, temperature: $("temperature").valueAsNumber, seed: $("seed").valueAsNumber,
    stream: true, stream_options: {include_usage: true}, tier_stats: true, trace: true, return_progress: true,
    ...(mode ? {mode} : {}),
  };
  if (!question) return ["/v1/completions", {...common, prompt: text}];
  return ["/v1/chat/completions", {...common, messages: [{role: "user", content: `${text}\n\n${question}`}]}];
}

// Generate one text: `onTrace` receives each trace, and `show` repaints at most once per PAUSE.
async function write(mode, writing, step, activity, show, onTrace = () => {}) {
  const [path, body] = request(mode);
  let paintTime = -PAUSE;
  const paint = () => { writing.show(); show(); };
  for await (const event of frames(await post(path, body, running.signal))) {
    if (event.prompt_progress) {
      progress.begin(step + ": reading the document");
      progress.at(event.prompt_progress.processed, event.prompt_progress.total);
      continue;
    }
    if (event.usage) writing.read = event.usage.prompt_tokens;
    if (event.usage?.tiers) writing.tiers = event.usage.tiers;
    if (event.usage?.repeated_8_grams) [writing.repeated] = event.usage.repeated_8_grams;
    const [choice] = event.choices;
    if (!choice) continue;
    writing.add(choice);
    if (!choice.trace) continue;
    onTrace(choice.trace);
    if (performance.now() - paintTime < PAUSE) continue;
    paintTime = performance.now();
    progress.begin(`${step}: ${activity}`);
    progress.at(writing.tokens, body.max_tokens);
    paint();
  }
  paint();
}

async function compare() {
  const mode = $("mode").value, comparing = $("compare").checked, steps = comparing ? 2 : 1;
  const tiered = new Writing("tiered"), plain = new Writing("plain");
  $("beside").hidden = !comparing;
  await write(mode, tiered, `1 of ${steps}`, "generating with TriForce", () => {
    unveil();
    explain(tiered.tiers); tabulate(tiered); map.show(); raceBars(tiered, plain);
  }, trace => map.add(trace));
  map.end();
  if (!comparing) return;
  progress.begin("2 of 2: plain decoding");
  await write("ar", plain, "2 of 2", "generating the same by plain decoding", () => raceBars(tiered, plain));
  judge(tiered, plain);
}

// Show the result once it has content: only then is the page long enough to scroll its top into view.
function unveil() {
  if (!$("made").hidden) return;
  $("made").hidden = false;
  $("result").scrollIntoView();
}

function reset() {
  for (const id of ["error", "headline", "facts", "why"]) $(id).textContent = "";
  for (const id of ["legend", "tiers"]) $(id).replaceChildren();
  map.clear();
  $("run").disabled = $("made").hidden = true; $("result").hidden = $("going").hidden = false;
  progress.begin("Waiting for the server");
  $("result").scrollIntoView();
}

async function run() {
  running = new AbortController();
  reset();
  try {
    await compare();
    $("going").hidden = true;
    $("headline").scrollIntoView({block: "nearest"});
  } catch (error) { giveUp(error); }
  running = null; $("run").disabled = false;
}

function giveUp(error) {
  $("going").hidden = true;
  if (error.name === "AbortError") { $("facts").textContent = "Stopped."; return; }
  $("result").hidden = $("made").hidden;
  fail(error);
  $("error").scrollIntoView({block: "center"});
}

function fail(error) { $("error").textContent = error.message; }

function describeRun() {
  const comparing = $("compare").checked, tokens = formatCount($("tokens").valueAsNumber || 0);
  $("run").textContent = comparing ? "Compare" : "Run";
  $("run-note").textContent = `Generates up to ${tokens} tokens with TriForce` + (comparing ? ", then the same by plain decoding." : ".");
}

$("form").addEventListener("submit", event => { event.preventDefault(); if (!running) run(); });
$("stop").addEventListener("click", () => running?.abort());
$("advanced").addEventListener("input", describeRun);
$("advanced").addEventListener("invalid", () => { $("advanced").open = true; }, true);  // else an invalid field stays hidden
$("key").addEventListener("change", () => loadModel().catch(fail));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.draw());
describeRun();
loadModel().catch(fail);
