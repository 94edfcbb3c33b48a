// Documents of a question or of the draft: name, size, a look at the text, and removal.
import {useSignal} from "@preact/signals";
import {Dialog} from "./dialog.jsx";
import {read} from "./store.js";
import {counted, formatCount} from "./words.js";

const MOST_SKIPPED = 20;  // names of skipped files that are shown
const MOST_SHOWN = 200_000;  // characters of a document that are shown

export function DocumentChips({documents, onRemove}) {
  const opened = useSignal(null);
  if (!documents.length) return null;
  const show = async id => { opened.value = await read("documents", id) ?? {name: "This document", text: "", note: "It is no longer in this browser's storage."}; };
  return <>
    <ul class="chips documents" aria-label="Documents">
      {documents.map(({id, name, tokens, note}) => <li key={id}>
        <button type="button" onClick={() => show(id)}>{name} <span class="soft">{[note, counted(tokens, "token")].filter(Boolean).join(", ")}</span></button>
        {onRemove && <button type="button" class="quiet" aria-label={`Remove ${name}`} onClick={() => onRemove(id)}>×</button>}
      </li>)}
    </ul>
    {opened.value && <Dialog title={opened.value.name} onClose={() => { opened.value = null; }}>
      {opened.value.note && <p class="soft">{opened.value.note}{opened.value.skipped?.length > 0 && `, as they are not text: ${opened.value.skipped.slice(0, MOST_SKIPPED).join(", ")}${opened.value.skipped.length > MOST_SKIPPED ? " and more" : ""}`}</p>}
      {opened.value.text.length > MOST_SHOWN && <p class="soft">The first {formatCount(MOST_SHOWN)} of {formatCount(opened.value.text.length)} characters</p>}
      <pre class="plain" tabindex="0">{opened.value.text.slice(0, MOST_SHOWN)}</pre>
    </Dialog>}
  </>;
}
