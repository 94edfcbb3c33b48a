// The composer: documents, the question, and why it cannot be sent.
import {useEffect, useRef} from "preact/hooks";
import {signal, useSignal} from "@preact/signals";
import {DocumentChips} from "./document_chips.jsx";
import {documentOf, groupsOf, groupsOfFiles, isLongPaste, readGroup} from "./documents.js";
import {server} from "./server.js";
import {chosenWords} from "./settings.js";
import {isBusy, stop} from "./activity.js";
import {draftHindrance, send} from "./answers.js";
import {attach, detach, setDraft} from "./conversations.js";
import {context, draft, error, expectedTokens, isOpening, isTooLong, mayBeTooLong, openId, readingDocument} from "./state.js";
import {counted, formatCount} from "./words.js";

const IME_KEY = 229;  // code of a key that an input method takes, in browsers that do not say isComposing
const faults = signal([]);  // documents that could not be read

async function attachGroups(groups) {
  faults.value = [];
  if (!context.value) {
    faults.value = ["Documents can be attached once the server answers."];
    return;
  }
  const target = openId.value;
  for (const group of groups) {
    try {
      readingDocument.value = `Reading ${group.name}`;
      await attach(await readGroup(group, context.value, words => { readingDocument.value = words; }), target);
    } catch (fault) { faults.value = [...faults.value, fault.message]; }
  }
  readingDocument.value = "";
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

export function Composer({notice}) {
  const area = useRef(null), files = useRef(null), folder = useRef(null), isOver = useSignal(false);
  useDrops(isOver);
  useEffect(() => { if (matchMedia("(pointer: fine)").matches) area.current.focus({preventScroll: true}); }, []);
  const submit = event => {
    event.preventDefault();
    error.value = "";
    send();
  };
  const onKey = event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === IME_KEY || matchMedia("(pointer: coarse)").matches) return;
    submit(event);
  };
  const onPaste = async event => {
    const pasted = event.clipboardData.getData("text/plain");
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attachGroups(groupsOfFiles(event.clipboardData.files));
    } else if (isLongPaste(pasted)) {
      event.preventDefault();
      const target = openId.value;
      try { await attach(await documentOf("Pasted text", pasted), target); } catch (fault) { faults.value = [fault.message]; }
    }
  };
  const choose = event => {
    attachGroups(groupsOfFiles([...event.target.files]));
    event.target.value = "";
  };
  const chats = server.value.card?.triforce.chats ?? true, isRunning = isBusy.value;
  return <form class={isOver.value ? "composer over" : "composer"} onSubmit={submit} autocomplete="off" aria-label={chats ? "Ask" : "Continue"}>
    {notice}
    <DocumentChips documents={draft.value.documents} onRemove={detach} />
    <div class="ask">
      <textarea id="composer" ref={area} rows="2" aria-describedby="room" aria-label={chats ? "Question" : "Text"} placeholder={chats ? "Ask a question; drop or paste a document" : "Write a text to continue; drop or paste a document"}
        value={draft.value.text} readOnly={isOpening.value} onInput={event => setDraft({text: event.target.value})} onKeyDown={onKey} onPaste={onPaste} />
      {isRunning ? <button type="button" class="main" onClick={stop}>Stop</button>
        : <button type="submit" class="main" disabled={Boolean(draftHindrance.value) || (!draft.value.text.trim() && !draft.value.documents.length)}>{chats ? "Ask" : "Continue"}</button>}
    </div>
    <div class="line tight">
      <span class="line tight">
        <button type="button" aria-label="Attach files" onClick={() => files.current.click()}>+ Files</button>
        <button type="button" aria-label="Attach a folder" onClick={() => folder.current.click()}>+ Folder</button>
      </span>
      <input ref={files} id="files" type="file" multiple hidden aria-label="Files" onChange={choose} />
      <input ref={folder} id="folder" type="file" webkitdirectory hidden aria-label="A folder" onChange={choose} />
      <Room />
    </div>
    <p class="soft" role="status">{readingDocument.value}</p>
    <div role="alert">{faults.value.map(fault => <p key={fault} class="fault">{fault}</p>)}</div>
  </form>;
}

// How much of the context is used, and what that means for the speed.
function Room() {
  const {card} = server.value, total = expectedTokens.value;
  if (draftHindrance.value) return <p id="room" class={isTooLong.value ? "fault" : "soft"} role="status">{draftHindrance.value}</p>;
  if (!card || !total) return <p id="room" class="soft" />;
  if (mayBeTooLong.value) {
    return <p id="room" class="fault" role="status">This may be too long: about {counted(total, "token")}, and the model's context holds {formatCount(context.value)} with the answer.</p>;
  }
  const {pays_from: from} = card.triforce;
  const gain = from === null ? "Speculation gains no speed here." : total < from ? `Too short to gain speed: that begins at ${formatCount(from)}.` : "Long enough to gain speed.";
  const chosen = chosenWords();
  return <p id="room" class="soft">{`${formatCount(total)} of ${counted(context.value, "token")}. ${gain}`}{chosen && ` Settings: ${chosen}.`}</p>;
}
