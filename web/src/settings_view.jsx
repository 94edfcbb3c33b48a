// The dialog of settings, each with one line of explanation.
import {Dialog} from "./dialog.jsx";
import {forgetKey, key, server} from "./server.js";
import {fault, MODE_NAMES, MODES, NUMBERS, resetSettings, settings, setSetting} from "./settings.js";
import {toolFault} from "./answers.js";
import {removeAll, setSystem, setTools} from "./conversations.js";
import {conversation} from "./state.js";
import {keeps, setKeeping} from "./store.js";

function Field({name, label, note, children, wrong = fault(name, settings.value[name] ?? "")}) {
  return <p class="field">
    <label for={name}>{label}</label>
    {children({id: name, "aria-describedby": `${name}-note`, "aria-invalid": Boolean(wrong)})}
    <span id={`${name}-note`} class={wrong ? "fault" : "soft"}>{wrong || note}</span>
  </p>;
}

const onInput = name => event => setSetting(name, event.target.value);


export function Settings({onClose}) {
  const {card} = server.value, chosen = settings.value, defaults = card?.triforce.defaults ?? {};
  const mode = card?.triforce.modes.includes(chosen.mode) ? chosen.mode : "";
  return <Dialog title="Settings" onClose={onClose}>
    <h3>All conversations</h3>
    <div class="grid">
      {NUMBERS.map(({name, label, note}) => <Field key={name} name={name} label={label} note={note}>{attributes =>
        <input {...attributes} inputmode="decimal" value={chosen[name]} placeholder={name in defaults ? `the model's ${defaults[name]}` : name === "max_tokens" ? "" : "off"} onInput={onInput(name)} />}</Field>)}
      <Field name="seed" label="Seed" note="The same seed, settings and conversation give the same answer. Empty: a new one each time.">{attributes =>
        <input {...attributes} inputmode="numeric" value={chosen.seed} placeholder="a new one each time" onInput={onInput("seed")} />}</Field>
      <Field name="mode" label="Mode" note={MODES[mode || card?.triforce.mode] ?? "The tiers that are used."}>{attributes =>
        <select {...attributes} value={mode} onChange={onInput("mode")}>
          <option value="">{card ? `the server's: ${card.triforce.mode}` : "the server's"}</option>
          {(card?.triforce.modes ?? []).map(mode => <option key={mode} value={mode}>{MODE_NAMES[mode] ? `${MODE_NAMES[mode]} (${mode})` : mode}</option>)}
        </select>}</Field>
      {card?.triforce.thinks && <Field name="thinking" label="Thinking" note="Whether the model thinks before it answers.">{attributes =>
        <select {...attributes} value={chosen.thinking} onChange={onInput("thinking")}>
          <option value="">as the model does</option><option value="on">on</option><option value="off">off</option>
        </select>}</Field>}
      <Field name="stop" label="Stop words" note="One a line; an answer ends before the first of them.">{attributes =>
        <textarea {...attributes} rows="2" value={chosen.stop} onInput={onInput("stop")} />}</Field>
    </div>
    <button type="button" onClick={resetSettings}>Reset</button>
    <h3>This conversation</h3>
    <Field name="system" label="System prompt" note="Instructions in front of the conversation. A change makes the server read the conversation again." wrong="">{attributes =>
      <textarea {...attributes} rows="3" value={conversation.value.system} onInput={event => setSystem(event.target.value)} />}</Field>
    <Field name="tools" label="Functions" note="A JSON list of functions that the model may call. The page calls nothing: you write their results." wrong={toolFault.value}>{attributes =>
      <textarea {...attributes} rows="3" spellcheck={false} value={conversation.value.tools} onInput={event => setTools(event.target.value)} />}</Field>
    <h3>Privacy</h3>
    <label class="check"><input type="checkbox" checked={keeps.value} onChange={event => setKeeping(event.target.checked)} /> Keep conversations in this browser</label>
    <div class="line tight">
      <button type="button" onClick={() => { if (confirm("Delete all kept conversations? This cannot be undone.")) removeAll(); }}>Delete all conversations</button>
      {key.value && <button type="button" onClick={forgetKey}>Forget the key</button>}
    </div>
    <p class="soft">The page sends requests to its own server only. <a href="page/licences.txt">Licences of its parts</a></p>
  </Dialog>;
}
