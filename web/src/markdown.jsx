// An answer's Markdown. Until the renderer is loaded, and where it cannot be, the text is shown as it is written.
import {Component} from "preact";
import {signal} from "@preact/signals";
import {copy} from "./files.js";
import {notice} from "./state.js";

const ready = signal(false);
let loading = null;

// The page's policy allows the renderer by its hash, which holds for inline scripts: so its text becomes one.
export function loadRenderer() {
  loading ??= fetch(new URL("page/renderer.js", new URL(".", location.href))).then(async response => {
    if (!response.ok) throw new Error("no renderer");
    const script = document.createElement("script");
    script.textContent = (await response.text()).trimEnd();
    document.head.append(script);
    if (!globalThis.triforceRenderer) throw new Error("another renderer than this page's");
    ready.value = true;
  }).catch(() => { loading = null; });
}

// A block is rendered again only if its text has changed.
class Block extends Component {
  shouldComponentUpdate({block}) { return block.raw !== this.props.block.raw; }
  render({block}) {
    if (block.code === undefined) return <div class="block" dangerouslySetInnerHTML={{__html: block.html}} />;
    return <figure class="code">
      <figcaption><span>{block.language}</span><CopyButton text={() => block.code} label="Copy the code" /></figcaption>
      <pre tabindex="0"><code dangerouslySetInnerHTML={{__html: block.html}} /></pre>
    </figure>;
  }
}

export function Markdown({text}) {
  if (!ready.value) {
    loadRenderer();
    return <p class="plain">{text}</p>;
  }
  return <div class="markdown">{globalThis.triforceRenderer.blocks(text).map((block, i) => <Block key={i} block={block} />)}</div>;
}

export function CopyButton({text, label}) {
  const act = async () => {
    try {
      await copy(text());
      notice.value = {text: "Copied."};
    } catch (fault) { notice.value = {text: fault.message}; }
  };
  return <button type="button" class="quiet" aria-label={label} onClick={act}>Copy</button>;
}
