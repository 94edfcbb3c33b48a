// The composer: documents, the question, and why it cannot be sent.
import {useEffect, useRef} from "preact/hooks";
import {signal, useSignal} from "@preact/signals";
import {DocumentChips} from "./document_chips.jsx";
import {documentOf, groupsOf, groupsOfFiles, isLongPaste, readGroup} from "./documents.js";
import {server} from "./server.js";
import {attach, context, detach, draft, error, expectedTokens, hindrance, isBusy, isTooLong, send, setDraft} from "./state.js";
import {counted, formatCount} from "./words.js";

const reading = signal("");  // what is read now, or an empty text
const faults = signal([]);  // documents that could not be read

async function attachGroups(groups) {
  faults.value = [];
  if (!context.value) {
    faults.value = ["Documents can be attached once the server answers."];
    return;
  }
  for (const group of groups) {
    try {
      reading.value = `Reading ${group.name}`;
      await attach(await readGroup(group, context.value, words => { reading.value = words; }));
    } catch (fault) { faults.value = [...faults.value, fault.message]; }
  }
  reading.value = "";
}

// The whole page takes drops.
function useDrops(isOver) {
  useEffect(() => {
    const has = event => [...event.dataTransfer?.types ?? []].includes("Files");
    const over = event => { if (has(event)) { event.preventDefault(); isOver.value = true; } };
    const leave = event => { if (!event.relatedTarget) isOver.value = false; };
    const drop = event => {
      if (!has(event)) return;
      event.preventDefault();
      isOver.value = false;
      attachGroups(groupsOf(event.dataTransfer));
    };
    const listeners = {dragover: over, dragleave: leave, drop};
    for (const [name, listener] of Object.entries(listeners)) document.addEventListener(name, listener);
    return () => { for (const [name, listener] of Object.entries(listeners)) document.removeEventListener(name, listener); };
  }, []);
}

export function Composer() {
  const area = useRef(null), files = useRef(null), folder = useRef(null), isOver = useSignal(false);
  useDrops(isOver);
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) area.current.focus({preventScroll: true}); }, []);
  const submit = event => {
    event.preventDefault();
    error.value = "";
    send();
  };
  const onKey = event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
    submit(event);
  };
  const onPaste = async event => {
    const pasted = event.clipboardData.getData("text/plain");
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attachGroups(groupsOfFiles(event.clipboardData.files));
    } else if (isLongPaste(pasted)) {
      event.preventDefault();
      try { await attach(await documentOf("Pasted text", pasted)); } catch (fault) { faults.value = [fault.message]; }
    }
  };
  const choose = event => {
    attachGroups(groupsOfFiles([...event.target.files]));
    event.target.value = "";
  };
  const chats = server.value.card?.triforce.chats ?? true, isRunning = isBusy.value;
  return <form class={isOver.value ? "composer over" : "composer"} onSubmit={submit} autocomplete="off" aria-label={chats ? "Ask" : "Continue"}>
    <DocumentChips documents={draft.value.documents} onRemove={detach} />
    <div class="ask">
      <textarea id="composer" ref={area} rows="2" aria-describedby="room" aria-label={chats ? "Question" : "Text"} placeholder={chats ? "Ask a question; drop or paste a document" : "Write a text to continue; drop or paste a document"}
        value={draft.value.text} onInput={event => setDraft({text: event.target.value})} onKeyDown={onKey} onPaste={onPaste} />
      <button type="submit" class="main" disabled={isRunning || Boolean(hindrance.value) || (!draft.value.text.trim() && !draft.value.documents.length)}>{chats ? "Ask" : "Continue"}</button>
    </div>
    <div class="line tight">
      <span class="line tight">
        <button type="button" onClick={() => files.current.click()}>Attach files</button>
        <button type="button" onClick={() => folder.current.click()}>Attach a folder</button>
      </span>
      <input ref={files} id="files" type="file" multiple hidden aria-label="Files" onChange={choose} />
      <input ref={folder} id="folder" type="file" webkitdirectory hidden aria-label="A folder" onChange={choose} />
      <Room />
    </div>
    <p class="soft" role="status">{reading.value}</p>
    <div role="alert">{faults.value.map(fault => <p key={fault} class="fault">{fault}</p>)}</div>
  </form>;
}

// How much of the context is used, and what that means for the speed.
function Room() {
  const {card} = server.value, total = expectedTokens.value;
  if (!card || !total) return <p id="room" class="soft">{hindrance.value}</p>;
  if (isTooLong.value) {
    return <p id="room" class="fault" role="alert">This is too long: about {counted(total, "token")}, and the model's context holds {formatCount(context.value)} with the answer. Attach or ask less.</p>;
  }
  const {pays_from: from} = card.triforce;
  const gain = from === null ? card.triforce.pays : total < from ? `Short: speculation pays from ${formatCount(from)} tokens on here.` : "Long enough for speculation to pay here.";
  return <p id="room" class="soft">{hindrance.value || `About ${formatCount(total)} of ${counted(context.value, "token")}. ${gain}`}</p>;
}
