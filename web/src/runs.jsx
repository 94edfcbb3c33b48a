// The table of runs: of the shown conversation, or of a link.
import {Dialog} from "./dialog.jsx";
import {copy, download} from "./files.js";
import {currentRuns, linkOf, runsOfLink} from "./proof.js";
import {notice} from "./state.js";
import {formatCount, formatRate, formatSeconds, formatShare} from "./words.js";

const WORDS = {identical: "identical to plain decoding", differs: "differs from plain decoding", unchecked: "not checked", check: "the check"};
const of = (value, format) => (value === null ? "" : format(value));

export function Runs({onClose}) {
  const linked = runsOfLink(location.hash), rows = linked ?? currentRuns();
  const share = async () => {
    try {
      await copy(linkOf(rows));
      notice.value = {text: "The link is copied. It holds figures and names, and no text."};
    } catch (fault) { notice.value = {text: fault.message}; }
  };
  const close = () => {
    if (linked) history.replaceState(null, "", location.pathname + location.search);
    onClose();
  };
  return <Dialog title={linked ? "Runs of a link" : "Runs of this conversation"} onClose={close}>
    {linked && <p class="soft">Someone else measured these figures; this server did not.</p>}
    {rows.length === 0 ? <p>There are no runs yet: ask something first.</p> : <>
      <div class="scroll" tabindex="0" role="group" aria-label="Runs"><table>
        <thead><tr>{["Answer", "Mode", "Context", "Read before", "Tokens", "First token", "Tokens per second", "Accepted", "Verdict", "Model"].map(name => <th key={name} scope="col">{name}</th>)}</tr></thead>
        <tbody>{rows.map((run, i) => <tr key={i}>
          <th scope="row">{of(run.answer, formatCount)}</th><td>{run.mode}</td><td>{of(run.context, formatCount)}</td><td>{of(run.cached, formatCount)}</td><td>{of(run.tokens, formatCount)}</td>
          <td>{of(run.firstToken, formatSeconds)}</td><td>{of(run.rate, formatRate)}</td><td>{of(run.acceptance, formatShare)}</td><td>{Object.hasOwn(WORDS, run.verdict) ? WORDS[run.verdict] : ""}</td><td>{run.model}</td>
        </tr>)}</tbody>
      </table></div>
      {!linked && <div class="line tight">
        <button type="button" onClick={() => download("runs.json", rows)}>Export as JSON</button>
        <button type="button" onClick={share}>Copy a link</button>
      </div>}
    </>}
  </Dialog>;
}
