// The start of the page.
import {render} from "preact";
import {App} from "./app.jsx";
import {look} from "./server.js";
import {activity, conversation, flush, open, refreshList, send, startNew, stop} from "./state.js";
import {keeps} from "./store.js";

const followAddress = () => {
  const id = /^#\/(\w+)$/.exec(location.hash)?.[1];
  if (id && id !== conversation.value.id) open(id);
  else if (!id && !location.hash) startNew();
};

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing && !event.defaultPrevented && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    send();
  }
});
addEventListener("popstate", followAddress);
addEventListener("pagehide", flush);
addEventListener("beforeunload", event => { if (activity.value || (!keeps.value && conversation.value.title)) event.preventDefault(); });

render(<App />, document.getElementById("page"));
followAddress();
refreshList();
look();
