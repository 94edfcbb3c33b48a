// Renders answers: Markdown with tables, code and mathematics, as safe HTML. It is loaded when the first answer comes.
import {Marked} from "marked";
import DOMPurify from "dompurify";
import temml from "temml";
import hljs from "highlight.js/lib/common";

const escaped = text => text.replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);
const LINK = /^(https?:|mailto:)/i;
const DEEP = /^[ \t>*+-]{200}/m;  // a line that begins inside very many lists and quotes

// The page's policy allows no style of single elements, and a browser reports one even where it is cut off later.
function withoutStyle(node) {
  if (node.style) node.style = {};
  if (node.attributes) delete node.attributes.style;
  for (const child of node.children ?? []) withoutStyle(child);
  return node;
}

function mathematics(source, isDisplay) {
  try {
    const tree = temml.__renderToMathMLTree(source, {displayMode: isDisplay, throwOnError: true, trust: false, strict: false, maxExpand: 200});
    return withoutStyle(tree).toMarkup();
  } catch {
    return `<code>${escaped(source)}</code>`;
  }
}

// Formulas of at most 2,000 characters stand between dollars or in \( \) and \[ \]. A single dollar followed by a space or a digit behind the end is money.
const FORMULAS = [
  {name: "displayFormula", level: "block", start: /\$\$|\\\[/, rule: /^(?:\$\$([^$]{1,2000}?)\$\$|\\\[([\s\S]{1,2000}?)\\\])(?:[ \t]*(?:\n|$))/, isDisplay: true},
  {name: "inlineFormula", level: "inline", start: /\$|\\\(|\\\[/, rule: /^(?:\$\$([^$]{1,2000}?)\$\$|\\\(([\s\S]{1,2000}?)\\\)|\\\[([\s\S]{1,2000}?)\\\]|\$(?!\s)((?:\\[^\n]|[^$\\\n]){1,2000}?)(?<!\s)\$(?!\d))/, isDisplay: false},
];

const extensions = FORMULAS.map(({name, level, start, rule, isDisplay}) => ({
  name, level,
  start: source => source.match(start)?.index,
  tokenizer(source) {
    const match = rule.exec(source), text = match?.slice(1).find(Boolean).trim();
    if (text) return {type: name, raw: match[0], text};
  },
  renderer: ({text, raw}) => mathematics(text, isDisplay || /^(\$\$|\\\[)/.test(raw)),
}));

// HTML in an answer is shown as text. Pictures become links, so nothing is loaded.
const renderer = {
  html: ({text}) => escaped(text),
  link({href, tokens}) {
    const inner = this.parser.parseInline(tokens);
    return LINK.test(href) ? `<a href="${escaped(href)}">${inner}</a>` : inner;
  },
  image({href, text}) {
    const words = escaped(text || "picture");
    return LINK.test(href) ? `<a href="${escaped(href)}">${words}</a>` : words;
  },
  code({text, lang}) { return `<pre><code>${highlighted(text, lang)}</code></pre>`; },
  checkbox: ({checked}) => (checked ? "☑ " : "☐ "),
};

const markdown = new Marked({gfm: true, extensions, renderer});
const language = lang => (lang ?? "").trim().split(/\s/)[0].toLowerCase();
const MOST_CODE = 50_000;  // characters of code whose syntax is coloured

function highlighted(text, lang) {
  const name = language(lang);
  return name && hljs.getLanguage(name) && text.length < MOST_CODE ? hljs.highlight(text, {language: name, ignoreIllegals: true}).value : escaped(text);
}

const SAFE = {
  USE_PROFILES: {html: true, mathMl: true},
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "option", "img", "video", "audio", "source", "picture", "track", "area", "map", "dialog", "template", "noscript"],
  FORBID_ATTR: ["style", "id", "name", "background", "srcset", "src", "poster", "action", "ping", "tabindex", "popover", "slot", "is", "download"],
  ALLOWED_URI_REGEXP: LINK, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
};

DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (!node.hasAttribute?.("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const safe = html => DOMPurify.sanitize(html, SAFE);

function blockOf(token, links) {
  if (token.type === "code") return {raw: token.raw, code: token.text, language: language(token.lang), html: safe(highlighted(token.text, token.lang))};
  return {raw: token.raw, html: safe(markdown.parser(Object.assign([token], {links})))};
}

const plainBlocks = text => [{raw: text, html: `<p class="plain">${escaped(text)}</p>`}];

// Return the blocks of a Markdown text: code with its language and text, anything else as safe HTML.
// known: blocks that were rendered before, by their source. A text that nests too deeply is shown as it is written.
function blocks(text, known = new Map()) {
  if (DEEP.test(text)) return plainBlocks(text);
  try {
    const tokens = markdown.lexer(text), {links} = tokens, hasLinks = Object.keys(links).length > 0;  // a link may change any block
    return tokens.filter(({type}) => type !== "space" && type !== "def").map(token => (!hasLinks && known.get(token.raw)) || blockOf(token, links));
  } catch {
    return plainBlocks(text);
  }
}

globalThis.triforceRenderer = {blocks};
