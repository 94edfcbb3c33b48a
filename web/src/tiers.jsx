// The tiers of decoding: their names, their colours, and what they did for an answer.
import {useEffect, useRef} from "preact/hooks";
import {formatCount, formatShare} from "./words.js";

export const TIERS = {
  draft: "a small draft model proposed the token",
  ngram: "the token was copied from earlier in the text",
  retrieval: "the model proposed the token while it read the parts of the text that matter",
  streaming: "the model proposed the token while it read both ends of the text",
  full: "the full model, which verifies all tokens, made the token itself",
};

// Names of tiers come from the server or from an imported file: only known ones have a style.
export const TierName = ({name}) => <span class={`tier ${Object.hasOwn(TIERS, name) ? name : ""}`}>{name}</span>;

export function TierTable({figures}) {
  const tiers = figures.tiers.filter((tier, i) => tier.proposed || i === figures.tiers.length - 1), last = tiers.length - 1;
  return <div class="scroll" tabindex="0" role="group" aria-label="Tokens by tier"><table>
    <caption>Tokens by tier. A tier also passes on what the tier below proposed, so it may propose more tokens than are named after it.</caption>
    <thead><tr><th scope="col">Tier</th><th scope="col">In the text</th><th scope="col">Proposed</th><th scope="col">Accepted</th></tr></thead>
    <tbody>{tiers.map((tier, i) => <tr key={tier.name}>
      <th scope="row"><TierName name={tier.name} /></th>
      <td>{formatCount(figures.inText[tier.name] ?? 0)}</td>
      <td>{i < last ? formatCount(tier.proposed) : ""}</td>
      <td>{i < last && tier.proposed ? formatShare(tier.accepted / tier.proposed) : ""}</td>
    </tr>)}</tbody>
  </table></div>;
}

// The answer's text, each run of tokens in the colour and with the underline of the tier that proposed it.
export function TierText({text, runs}) {
  const letters = Array.from(text);
  let at = 0;
  const spans = runs.map(([tier, characters], i) => {
    const part = letters.slice(at, at += characters).join("");
    return part && <span key={i} class={Object.hasOwn(TIERS, tier) ? tier : ""} title={TIERS[tier]}>{part}</span>;
  });
  return <p class="plain tiered" tabindex="0" role="group" aria-label="Text by tier">{spans}{letters.slice(at).join("")}</p>;
}

const PARTS = 256;

// One line per verification, the latest at the bottom; a stronger colour means that more attention heads read a part.
export function ReadMap({lines, tokens}) {
  const canvas = useRef(null);
  const draw = () => {
    const pen = canvas.current?.getContext("2d");
    if (!pen) return;
    pen.clearRect(0, 0, PARTS, lines.length);
    pen.fillStyle = getComputedStyle(canvas.current).color;
    lines.forEach((seen, y) => seen.forEach((percent, i) => {
      pen.globalAlpha = Math.sqrt(percent / 100);
      const left = Math.floor(i * PARTS / seen.length);
      pen.fillRect(left, y, Math.ceil((i + 1) * PARTS / seen.length) - left, 1);
    }));
  };
  useEffect(() => {
    draw();
    const schemes = ["(prefers-color-scheme: dark)", "(forced-colors: active)"].map(query => matchMedia(query));
    for (const scheme of schemes) scheme.addEventListener("change", draw);
    return () => { for (const scheme of schemes) scheme.removeEventListener("change", draw); };
  });
  if (!lines.length) return <p class="soft">The retrieval tier was not used for this text.</p>;
  if (lines.every(line => line.every(percent => percent === 100))) return <p class="soft">The retrieval tier read the whole text, as the text is within its budget.</p>;
  const latest = lines.at(-1), mean = Math.round(latest.reduce((a, b) => a + b) / latest.length);
  return <figure>
    <figcaption class="soft">Parts that the retrieval tier read, a row for each verification, the latest at the bottom: {mean} % of {formatCount(tokens)} tokens for an average attention head</figcaption>
    <canvas ref={canvas} class="map" width={PARTS} height={lines.length} role="img" aria-label={`Heads of the retrieval tier see ${mean} % of ${formatCount(tokens)} tokens on average`} />
    <p class="ends soft"><span>start of the text</span><span>latest token</span></p>
    <p class="key soft"><span>no head</span><span class="ramp" /><span>all heads</span></p>
  </figure>;
}
