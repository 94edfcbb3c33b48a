// The kept conversations: open, rename, export, import, delete.
import {useSignal} from "@preact/signals";
import {exportConversation, importConversation} from "./files.js";
import {answeringConversation} from "./activity.js";
import {open, remove, rename, startNew} from "./conversations.js";
import {list, notice, openId} from "./state.js";
import {keeps} from "./store.js";

const shownTitle = record => record.title || (record.draft.text.trim() ? `Draft: ${record.draft.text.trim().slice(0, 40)}` : "Draft");

export function Sidebar({isOpen}) {
  const fault = useSignal("");
  const close = () => {
    isOpen.value = false;
    fault.value = "";
  };
  const load = async event => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      await open(await importConversation(file));
      close();
      notice.value = {text: "The conversation is imported, without verdicts of earlier checks."};
    } catch (wrong) { fault.value = wrong.message; }
  };
  return <nav id="conversations" class="side" aria-label="Conversations">
    <div class="line tight">
      <button type="button" class="main" onClick={() => { startNew(); close(); document.getElementById("composer").focus(); }}>New conversation</button>
      <label class="button">Import<input id="import" type="file" accept="application/json,.json" onChange={load} /></label>
    </div>
    <button type="button" class="only-narrow" onClick={close}>Close</button>
    <p class="fault" role="alert">{fault.value}</p>
    <ul>{list.value.map(record => <Entry key={record.id} record={record} onOpen={close} />)}</ul>
    <p class="soft">{keeps.value ? "Conversations are kept in this browser only." : "Conversations are not kept: they last until the page is closed."}</p>
  </nav>;
}

function Entry({record, onOpen}) {
  const isRenamed = useSignal(false), isCurrent = record.id === openId.value;
  const submit = event => {
    event.preventDefault();
    const title = event.target.elements.title.value.trim();
    isRenamed.value = false;
    if (title) rename(record.id, title.slice(0, 200));
  };
  if (isRenamed.value) {
    return <li><form onSubmit={submit}>
      <input name="title" aria-label="New name" defaultValue={record.title} ref={input => input?.focus()} onKeyDown={event => { if (event.key === "Escape") {
        event.preventDefault();
        isRenamed.value = false;
      } }} />
      <button type="submit">Rename</button>{" "}
      <button type="button" class="quiet" onClick={() => { isRenamed.value = false; }}>Cancel</button>
    </form></li>;
  }
  return <li class={isCurrent ? "current" : ""}>
    <button type="button" class="title" aria-current={isCurrent ? "page" : undefined} onClick={() => { if (!isCurrent) open(record.id); onOpen(); }}><span>{shownTitle(record)}</span>{answeringConversation.value === record.id && <em class="soft"> is answering</em>}</button>
    {isCurrent && <div class="acts">
      <button type="button" class="quiet" onClick={() => { isRenamed.value = true; }}>Rename</button>
      <button type="button" class="quiet" onClick={() => exportConversation(record.id)}>Export</button>
      <button type="button" class="quiet" onClick={() => remove(record.id)}>Delete</button>
    </div>}
  </li>;
}
