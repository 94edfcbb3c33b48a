// Documents of a question or of the draft: name, size, a look at the text, and removal.
import {useSignal} from "@preact/signals";
import {Dialog} from "./dialog.jsx";
import {readDocument} from "./store.js";
import {counted, formatCount} from "./words.js";

const MOST_SHOWN = 200_000;  // characters of a document that are shown

export function DocumentChips({documents, onRemove}) {
  const opened = useSignal(null);
  if (!documents.length) return null;
  const show = async id => { opened.value = await readDocument(id) ?? {name: "This document", text: "", note: "It is no longer in this browser's storage."}; };
  return <>
    <ul class="chips documents" aria-label="Documents">
      {documents.map(({id, name, tokens}) => <li key={id}>
        <button type="button" onClick={() => show(id)}>{name} <span class="soft">{counted(tokens, "token")}</span></button>
        {onRemove && <button type="button" class="quiet" aria-label={`Remove ${name}`} onClick={() => onRemove(id)}>×</button>}
      </li>)}
    </ul>
    {opened.value && <Dialog title={opened.value.name} onClose={() => { opened.value = null; }}>
      {opened.value.note && <p class="soft">{opened.value.note}</p>}
      {opened.value.text.length > MOST_SHOWN && <p class="soft">The first {formatCount(MOST_SHOWN)} of {formatCount(opened.value.text.length)} characters</p>}
      <pre class="plain" tabindex="0">{opened.value.text.slice(0, MOST_SHOWN)}</pre>
    </Dialog>}
  </>;
}
