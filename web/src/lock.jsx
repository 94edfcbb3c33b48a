// The form for the server's key.
import {useSignal} from "@preact/signals";
import {server, setKey} from "./server.js";

export function Lock() {
  const fault = useSignal("");
  const unlock = event => {
    event.preventDefault();
    fault.value = setKey(event.target.elements.key.value.trim());
  };
  return <form class="card" onSubmit={unlock} autocomplete="off" aria-label="Key">
    <label for="key">Key of this server</label>
    <div class="line">
      <input id="key" name="key" type="password" autocomplete="off" spellcheck={false} aria-describedby="key-note key-fault" />
      <button type="submit" class="main">Unlock</button>
    </div>
    <p id="key-fault" class="fault" role="alert">{fault.value || server.value.message}</p>
    <p id="key-note" class="soft">The key stays in this tab until the tab is closed.</p>
  </form>;
}
