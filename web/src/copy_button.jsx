// A button that copies text, and says that it did.
import {useSignal} from "@preact/signals";
import {copy} from "./files.js";
import {notice} from "./state.js";

const SHOWN_TIME = 2000;  // milliseconds

// label: what the button says, for screen readers too; `short` is shown in its place where the label is plain beside it.
export function CopyButton({text, label, short = label}) {
  const isDone = useSignal(false);
  const act = async () => {
    try {
      await copy(text());
      isDone.value = true;
      setTimeout(() => { isDone.value = false; }, SHOWN_TIME);
    } catch (fault) { notice.value = {text: fault.message}; }
  };
  return <button type="button" class={short === label ? "" : "quiet"} aria-label={isDone.value ? "Copied" : label} onClick={act}>{isDone.value ? "Copied" : short}</button>;
}
