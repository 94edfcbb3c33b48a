// The frame of the page: conversations at the side, the shown one in the middle, the composer below.
import {useSignal} from "@preact/signals";
import {useEffect, useLayoutEffect, useRef} from "preact/hooks";
import {Composer} from "./composer.jsx";
import {Lock} from "./lock.jsx";
import {Runs} from "./runs.jsx";
import {Settings} from "./settings_view.jsx";
import {Sidebar} from "./sidebar.jsx";
import {Welcome} from "./welcome.jsx";
import {Turn} from "./turn.jsx";
import {siblingsOf} from "./conversation.js";
import {server} from "./server.js";
import {conversation, error, notice, openDialog, openId, shown, turns as allTurns} from "./state.js";
import {storageFault} from "./store.js";
import {formatCount} from "./words.js";

const NEAR = 100;  // pixels from the end at which a visitor still follows the text
const RECENT_TURNS = 20;  // turns that are shown at first
const NOTICE_TIME = 5_000, UNDO_TIME = 20_000;  // milliseconds

export function App() {
  const hasList = useSignal(false);
  const close = () => { openDialog.value = ""; };
  return <>
    <a class="skip" href="#composer" onClick={event => { event.preventDefault(); document.getElementById("composer").focus(); }}>To the question</a>
    <div class={hasList.value ? "frame listed" : "frame"}>
      <Sidebar isOpen={hasList} />
      <div class="middle">
        <Header hasList={hasList} />
        <main>
          {server.value.state === "locked" && <Lock />}
          {shown.value.length ? <Thread key={openId.value} /> : <Welcome />}
          <p class="fault" role="alert">{error.value}</p>
        </main>
        <Composer notice={<Notice />} />
      </div>
    </div>
    {openDialog.value === "settings" && <Settings onClose={close} />}
    {openDialog.value === "runs" && <Runs onClose={close} />}
  </>;
}

function Header({hasList}) {
  const {state, card, message} = server.value;
  return <header class="top">
    <button type="button" class="only-narrow" aria-expanded={hasList.value} aria-controls="conversations" onClick={() => { hasList.value = !hasList.value; }}>Conversations</button>
    <p class="brand"><b>triforce</b>{" "}
      <span id="about" class="soft" role="status">
        {state === "down" ? message : card ? `serves ${card.id}, ${formatCount(card.max_model_len)} tokens of context` : state === "locked" ? "is locked" : "asks the server"}
      </span>
    </p>
    <div class="line tight">
      <button type="button" onClick={() => { openDialog.value = "runs"; }}>Runs</button>
      <button type="button" onClick={() => { openDialog.value = "settings"; }}>Settings</button>
    </div>
    {storageFault.value && <p class="soft wide" role="status">{storageFault.value}</p>}
  </header>;
}

// The turns of the shown branch. The page follows a growing answer unless the visitor has scrolled up.
function Thread() {
  const follows = useRef(true), thread = useRef(null), all = useSignal(false);
  const turns = shown.value, hidden = all.value ? 0 : Math.max(0, turns.length - RECENT_TURNS);
  useEffect(() => {
    const watch = () => { follows.current = innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR; };
    addEventListener("scroll", watch, {passive: true});
    return () => removeEventListener("scroll", watch);
  }, []);
  useEffect(() => { follows.current = true; }, [turns.length]);
  useLayoutEffect(() => {
    const follow = () => { if (follows.current) scrollTo({top: document.documentElement.scrollHeight, behavior: "instant"}); };
    const observer = new ResizeObserver(follow);
    observer.observe(thread.current);
    return () => observer.disconnect();
  }, []);
  const siblings = siblingsOf(allTurns.value);
  const items = turns.slice(hidden).map((turn, i, {length}) => {
    const line = siblings.get(turn.parent);
    return <Turn key={turn.id} turn={turn} isLast={i === length - 1} place={line.indexOf(turn)} count={line.length} />;
  });
  return <>
    <h1 class="unseen">{conversation.value.title}</h1>
    {conversation.value.system && <details class="system"><summary>System prompt</summary><p class="plain">{conversation.value.system}</p></details>}
    {hidden > 0 && <p><button type="button" onClick={() => { follows.current = false; all.value = true; }}>Show {formatCount(hidden)} earlier turns</button></p>}
    <ol class="thread" ref={thread} aria-label="Conversation">
      {items}
    </ol>
  </>;
}

function Notice() {
  const told = notice.value;
  useEffect(() => {
    if (!told) return;
    const timer = setTimeout(() => { if (notice.value === told) notice.value = null; }, told.undo ? UNDO_TIME : NOTICE_TIME);
    return () => clearTimeout(timer);
  }, [told]);
  return <div class="notice" role="status" hidden={!told}>
    {told && <>
      <span>{told.text}</span>
      {told.undo && <button type="button" onClick={() => { notice.value = null; told.undo(); }}>Undo</button>}
    </>}
  </div>;
}
