// The start of the page.
import {render} from "preact";
import {App} from "./app.jsx";
import {look} from "./server.js";
import {activity, stop} from "./activity.js";
import {send} from "./answers.js";
import {flush, open, refreshList, startNew} from "./conversations.js";
import {conversation, openDialog, openId} from "./state.js";
import {keeps, storageFault} from "./store.js";

const followAddress = () => {
  const id = /^#\/(\w+)$/.exec(location.hash)?.[1];
  if (location.hash.startsWith("#runs=")) openDialog.value = "runs";
  else if (id && id !== openId.value) open(id);
  else if (!id) startNew();
};

// Escape stops, and Ctrl+Enter sends the draft, unless a dialog, another form or an input method takes the key.
document.addEventListener("keydown", event => {
  if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") stop();
  const form = event.target.closest?.("form");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && (!form || form.classList.contains("composer"))) {
    event.preventDefault();
    send();
  }
});
addEventListener("popstate", followAddress);
addEventListener("pagehide", flush);
addEventListener("beforeunload", event => { if (activity.value || ((!keeps.value || storageFault.value) && conversation.value.title)) event.preventDefault(); });

render(<App />, document.getElementById("page"));
followAddress();
refreshList();
look();
