// An answer's Markdown. Until the renderer is loaded, and where it cannot be, the text is shown as it is written.
import {Component} from "preact";
import {signal} from "@preact/signals";
import {useRef} from "preact/hooks";
import {CopyButton} from "./copy_button.jsx";
import {addressOf} from "./server.js";
import {paintCost} from "./state.js";

const ready = signal(false);
let loading = null;
const RETRY_TIME = 10_000;  // milliseconds until a renderer that could not be loaded is asked for again

// The page's policy allows the renderer by its hash, which holds for inline scripts: so its text becomes one.
function loadRenderer() {
  loading ??= fetch(addressOf("page/renderer.js")).then(async response => {
    if (!response.ok) throw new Error("no renderer");
    const script = document.createElement("script");
    script.textContent = (await response.text()).trimEnd();
    document.head.append(script);
    if (!globalThis.triforceRenderer) throw new Error("another renderer than this page's");
    ready.value = true;
  }).catch(() => { setTimeout(() => { loading = null; }, RETRY_TIME); });
}

// A block is rendered again only if its text has changed.
class Block extends Component {
  shouldComponentUpdate({block}) { return block.raw !== this.props.block.raw; }
  render({block}) {
    if (block.code === undefined) return <div class="block" dangerouslySetInnerHTML={{__html: block.html}} />;
    return <figure class="code">
      <figcaption><span>{block.language}</span><CopyButton text={() => block.code} label="Copy the code" short="Copy" /></figcaption>
      <pre tabindex="0"><code dangerouslySetInnerHTML={{__html: block.html}} /></pre>
    </figure>;
  }
}

export function Markdown({text}) {
  const earlier = useRef(new Map());  // blocks of the text before, by their source: a growing answer renders its last one
  if (!ready.value) {
    loadRenderer();
    return <p class="plain">{text}</p>;
  }
  const started = performance.now(), blocks = globalThis.triforceRenderer.blocks(text, earlier.current);
  earlier.current = new Map(blocks.map(block => [block.raw, block]));
  paintCost.milliseconds = performance.now() - started;
  return <div class="markdown">{blocks.map((block, i) => <Block key={i} block={block} />)}</div>;
}
