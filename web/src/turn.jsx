// A turn of the conversation: a question with its documents, an answer with its proof, or results of calls.
import {Component} from "preact";
import {useSignal} from "@preact/signals";
import {useEffect, useRef} from "preact/hooks";
import {answerText, callsOf, thoughtsOf} from "./conversation.js";
import {DocumentChips} from "./document_chips.jsx";
import {CopyButton} from "./copy_button.jsx";
import {Markdown} from "./markdown.jsx";
import {check, price, rateOf, sentences, uncheckable} from "./proof.js";
import {server} from "./server.js";
import {activeAnswer, activeCheck, activity, isBusy} from "./activity.js";
import {copyOf, goOn, hindrance, regenerate, sendEdited, sendResults} from "./answers.js";
import {choose} from "./conversations.js";
import {read} from "./store.js";
import {ReadMap, TierTable, TierText} from "./tiers.jsx";
import {counted, formatCount, formatRate, formatSeconds} from "./words.js";

// A turn is rendered again only if its record or its place has changed.
export class Turn extends Component {
  shouldComponentUpdate(next) { return ["turn", "isLast", "place", "count"].some(name => next[name] !== this.props[name]); }
  componentDidCatch() { this.setState({isBroken: true}); }
  render({turn, isLast, place, count}, {isBroken}) {
    if (isBroken) return <li class="turn fault">This turn cannot be shown.</li>;
    const branches = count > 1 && <Branches turn={turn} place={place} count={count} />;
    if (turn.role === "user") return <Question turn={turn} branches={branches} />;
    if (turn.role === "tool") return <Results turn={turn} />;
    return <Answer turn={turn} isLast={isLast} branches={branches} />;
  }
}

const Branches = ({turn, place, count}) => <span class="branches">
  <button type="button" class="quiet" aria-label="Earlier branch" disabled={!place || isBusy.value} onClick={() => choose(turn, -1)}>‹</button>
  {place + 1} of {count}
  <button type="button" class="quiet" aria-label="Later branch" disabled={place === count - 1 || isBusy.value} onClick={() => choose(turn, 1)}>›</button>
</span>;

function Question({turn, branches}) {
  const isEdited = useSignal(false);
  return <li class="turn question" aria-label="Question">
    <DocumentChips documents={turn.documents} />
    {isEdited.value ? <Editor turn={turn} onEnd={() => { isEdited.value = false; }} /> : <p class="plain">{turn.text}</p>}
    <div class="acts">
      {branches}
      <CopyButton text={() => copyOf(turn)} label="Copy the question" short="Copy" />
      {!isEdited.value && <button type="button" class="quiet" disabled={isBusy.value} onClick={() => { isEdited.value = true; }}>Edit</button>}
    </div>
  </li>;
}

function Editor({turn, onEnd}) {
  const area = useRef(null);
  useEffect(() => area.current.focus(), []);
  const submit = event => {
    event.preventDefault();
    if (sendEdited(turn, area.current.value)) onEnd();
  };
  const onKey = event => {
    if (event.isComposing) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    if (event.key === "Escape") {
      event.preventDefault();
      onEnd();
    }
  };
  return <form onSubmit={submit}>
    <textarea ref={area} aria-label="Question, edited" rows="4" defaultValue={turn.text} onKeyDown={onKey} />
    <div class="line end">
      <button type="button" onClick={onEnd}>Cancel</button>
      <button type="submit" class="main" disabled={isBusy.value || Boolean(hindrance.value)}>Ask as a new branch</button>
    </div>
  </form>;
}

const Results = ({turn}) => <li class="turn results" aria-label="Results of calls">
  {turn.results.map(({id, name, text}) => <details key={id}><summary>Result of {name}</summary><p class="plain">{text}</p></details>)}
</li>;

const ENDS = {
  finished: () => "The model ended its answer.", stopped: () => "You stopped this answer.",
  limit: ({frozen, figures}) => (figures.tokens < frozen.fields.max_tokens ? "The answer reached the end of the context." : `The answer reached its limit of ${counted(frozen.fields.max_tokens, "token")}.`),
  interrupted: ({error}) => `The answer was interrupted${error ? `: ${error}` : ": the page was closed or loaded again."}`,
  failed: ({error}) => error,
};

function Answer({turn, isLast, branches}) {
  const last = turn.pieces.at(-1), text = answerText(turn), thoughts = thoughtsOf(turn), calls = callsOf(turn);
  const isRunning = last.state === "running", isHere = isRunning && activeAnswer.value === turn.id;
  const checked = isRunning ? [] : turn.pieces.map((piece, index) => ({piece, index})).filter(({piece}) => piece.figures?.tokens);
  const isCut = ["limit", "stopped", "interrupted", "failed"].includes(last.state);
  const isFull = last.figures && server.value.card && last.figures.promptTokens + last.figures.tokens >= server.value.card.max_model_len;
  return <li class="turn answer" aria-label="Answer" aria-busy={isRunning}>
    {thoughts && <details class="thoughts"><summary>{isRunning && !text ? "Thinking" : "Thoughts"}</summary><p class="plain">{thoughts}</p></details>}
    {text && <Markdown text={text} />}
    {calls.map(call => <Call key={call.id} call={call} />)}
    {isHere && <Progress />}
    {isRunning && !isHere && <p class="soft">Another tab receives this answer.</p>}
    {(!isRunning || last.figures?.tokens > 0) && <p class="soft">
      {!isRunning && <span class={last.state === "failed" ? "fault" : "ending"}>{ENDS[last.state](last)}</span>}
      {last.figures?.tokens > 0 && <Figures pieces={turn.pieces} />}
    </p>}
    {!isRunning && <div class="acts">
      {branches}
      {text && <CopyButton text={() => copyOf(turn)} label="Copy the answer" short="Copy" />}
      {isCut && isLast && !isFull && <button type="button" disabled={isBusy.value || Boolean(hindrance.value)} onClick={() => goOn(turn)}>{text ? "Go on" : "Try again"}</button>}
      <button type="button" class="quiet" disabled={isBusy.value || Boolean(hindrance.value)} onClick={() => regenerate(turn)}>Regenerate</button>
      {checked.length > 0 && <CheckButton turn={turn} pieces={checked} />}
    </div>}
    {calls.length > 0 && isLast && !isRunning && <CallForm turn={turn} calls={calls} />}
    {checked.length > 0 && <Proof turn={turn} pieces={checked} />}
  </li>;
}

const Call = ({call}) => <details class="call">
  <summary>The model calls <code>{call.name}</code></summary>
  <pre tabindex="0"><code>{prettyJson(call.arguments)}</code></pre>
</details>;

function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// The page calls nothing: the visitor writes what a function returned.
function CallForm({turn, calls}) {
  const submit = event => {
    event.preventDefault();
    sendResults(turn, calls.map(({id, name}, i) => ({id, name, text: event.target.elements[`result-${i}`].value})));
  };
  return <form class="card" onSubmit={submit} aria-label="Results of calls">
    {calls.map(({id, name}, i) => <p key={id}><label for={`result-${id}`}>Result of {name}</label><textarea id={`result-${id}`} name={`result-${i}`} rows="2" /></p>)}
    <div class="line end"><button type="submit" class="main" disabled={isBusy.value || Boolean(hindrance.value)}>Send the results</button></div>
  </form>;
}

function Progress() {
  const {step, done, total, left} = activity.value;
  return <div class="going">
    <p role="status">{step}</p>
    <progress max="1" value={total ? done / total : undefined} aria-label={step} />
    <p class="soft">{total > 0 ? `${formatCount(done)} of ${counted(total, "token")}` : done > 0 && counted(done, "token")}{left !== null && `, about ${formatSeconds(left)} left`}</p>
  </div>;
}

function Figures({pieces}) {
  const {figures} = pieces.at(-1), {tokens, cachedTokens, promptTokens, firstToken} = figures;
  const total = pieces.reduce((sum, piece) => sum + (piece.figures?.tokens ?? 0), 0);
  return <span class="figures">
    {" "}{counted(tokens, "token")}{total > tokens && ` in this part, ${formatCount(total)} in all`}{rateOf(figures) > 0 && `, ${formatRate(rateOf(figures))} per second`}.
    {" "}First token after {formatSeconds(firstToken)}: {cachedTokens ? `${formatCount(cachedTokens)} of ${counted(promptTokens, "token")} of the conversation were read before` : `${counted(promptTokens, "token")} read`}.
  </span>;
}

// pieces: pieces with tokens, each with its place in the turn.
function CheckButton({turn, pieces}) {
  const reasons = pieces.map(({piece}) => uncheckable(piece)), canCheck = reasons.some(reason => !reason);
  const seconds = formatSeconds(pieces.reduce((sum, {piece}) => sum + price(piece), 0)), isChecked = pieces.some(({piece}) => piece.proof);
  return <>
    <button type="button" disabled={isBusy.value || !canCheck} onClick={() => check(turn)}>{isChecked ? "Check again" : "Check against plain decoding"}</button>
    <span class="soft price">{!canCheck ? reasons[0] : isChecked ? `takes ${seconds}` : `generates it again plainly, in at most about ${seconds}`}</span>
  </>;
}

function Proof({turn, pieces}) {
  const proven = pieces.filter(({piece}) => piece.proof), lastProven = proven.at(-1);
  return <div class="proof">
    {proven.map(({piece, index}) => <Verdict key={index} piece={piece} part={pieces.length > 1 ? index + 1 : 0} hasReason={index === lastProven.index} />)}
    {activeCheck.value === turn.id && <Progress />}
    <Details turn={turn} />
  </div>;
}

const STYLES = {identical: "same", differs: "other", unchecked: ""};

function Verdict({piece, part, hasReason}) {
  const {headline, facts, why} = sentences(piece);
  return <div class="verdict" role="status">
    <p class={`headline ${STYLES[piece.proof.state]}`}>{part ? `Part ${part}: ` : ""}{headline}</p>
    <p>{facts}</p>
    {why && (hasReason || piece.proof.state === "differs") && <p class="soft">{why}</p>}
    {piece.proof.state === "differs" && <details><summary>Text of plain decoding</summary><p class="plain">{piece.proof.text}</p></details>}
  </div>;
}

// What the tiers did. The details are read from the storage when the visitor opens them.
function Details({turn}) {
  const kept = useSignal(null);
  const onToggle = async event => { kept.value = event.currentTarget.open ? (await read("details", turn.id))?.pieces ?? [] : null; };
  return <details class="details" onToggle={onToggle}>
    <summary>How it was made</summary>
    {kept.value && turn.pieces.map((piece, i) => piece.figures?.tokens > 0 && <div key={i}>
      {turn.pieces.length > 1 && <h3>Part {i + 1}</h3>}
      <p class="soft">Mode {piece.frozen.mode}, seed {piece.frozen.seed}, temperature {piece.frozen.fields.temperature ?? "of the model"}.</p>
      <TierTable figures={piece.figures} />
      {!piece.thoughts && !piece.calls.length && kept.value[i] ? <TierText text={piece.text} runs={kept.value[i].runs} /> : <p class="soft">Single tokens of thoughts and calls are not shown by tier.</p>}
      <ReadMap lines={kept.value[i]?.lines ?? []} tokens={piece.figures.promptTokens + piece.figures.tokens} />
    </div>)}
  </details>;
}
