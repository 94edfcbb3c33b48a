// The table of runs: of the shown conversation, or of a link.
import {Dialog} from "./dialog.jsx";
import {CopyButton} from "./copy_button.jsx";
import {download} from "./files.js";
import {currentRuns, linkOf, runsOfLink} from "./proof.js";
import {formatCount, formatRate, formatSeconds, formatShare} from "./words.js";

const WORDS = {identical: "identical to plain decoding", differs: "differs from plain decoding", unchecked: "not checked"};
const of = (value, format) => (value === null ? "" : format(value));

export function Runs({onClose}) {
  const linked = runsOfLink(location.hash), rows = linked ?? currentRuns();
  const close = () => {
    if (linked) history.replaceState(null, "", location.pathname + location.search);
    onClose();
  };
  return <Dialog title={linked ? "Runs of a link" : "Runs of this conversation"} onClose={close}>
    {linked && <p class="soft">These figures come from the link; this page has not verified them.</p>}
    {rows.length === 0 ? <p>There are no runs yet: ask something first.</p> : <>
      <div class="scroll" tabindex="0" role="group" aria-label="Runs"><table>
        <thead><tr>{["Answer", "Mode", "Context", "Read before", "Tokens", "First token", "Tokens per second", "Accepted", "Verdict", "Model"].map(name => <th key={name} scope="col">{name}</th>)}</tr></thead>
        <tbody>{rows.map((run, i) => <tr key={i}>
          <th scope="row">{run.answer}</th><td>{run.verdict === "check" ? `${run.mode} (check)` : run.mode}</td><td>{of(run.context, formatCount)}</td><td>{of(run.cached, formatCount)}</td><td>{of(run.tokens, formatCount)}</td>
          <td>{of(run.firstToken, formatSeconds)}</td><td>{of(run.rate, formatRate)}</td><td>{of(run.acceptance, formatShare)}</td><td>{Object.hasOwn(WORDS, run.verdict) ? WORDS[run.verdict] : ""}</td><td>{run.model}</td>
        </tr>)}</tbody>
      </table></div>
      {!linked && <div class="line tight">
        <button type="button" onClick={() => download("runs.json", rows)}>Export as JSON</button>
        <span><CopyButton text={() => linkOf(rows)} label="Copy a link" /> <span class="soft">The link holds figures and names, and no text.</span></span>
      </div>}
    </>}
  </Dialog>;
}
