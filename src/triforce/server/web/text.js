"use strict";
// A text as it is written: each token in the colour of the tier that proposed it, and how fast they come.

const TIERS = {
  draft: "guessed by the small draft model",
  ngram: "copied from earlier in the text",
  retrieval: "guessed by the model, reading parts of the document",
  streaming: "guessed by the model, reading the document's ends",
  full: "written by the full model itself",
};

// A token's characters may come later than the token, where a character is cut in two: so they wait in line.
class Painter {
  constructor(into) { this.into = into; this.waiting = []; this.text = this.fresh = ""; this.last = null; into.replaceChildren(); }
  add(text, tiers, characters) {
    tiers.forEach((tier, i) => this.waiting.push([tier, characters[i] ?? 0]));
    this.text += text; this.fresh += text;
  }
  show() {
    const low = this.into.scrollHeight - this.into.scrollTop - this.into.clientHeight < 40;
    let letters = Array.from(this.fresh);
    while (letters.length) {
      while (this.waiting.length && !this.waiting[0][1]) this.waiting.shift();
      const head = this.waiting[0] ?? ["full", letters.length];
      const now = letters.slice(0, head[1]);
      letters = letters.slice(now.length);
      head[1] -= now.length;
      this.paint(head[0], now.join(""));
    }
    this.fresh = "";
    if (low) this.into.scrollTop = this.into.scrollHeight;
  }
  paint(tier, text) {
    if (this.last?.className === tier) { this.last.textContent += text; return; }
    this.last = document.createElement("span");
    this.last.className = tier;
    this.last.textContent = text;
    this.last.title = TIERS[tier] ?? tier;
    this.into.append(this.last);
  }
}

class Writing {
  constructor(id) {
    this.id = id; this.painter = new Painter($(id));
    this.tokens = this.seconds = this.read = this.repeated = 0; this.inText = {}; this.tiers = [];
    $(id + "-speed").textContent = ""; $(id + "-bar").style.width = "0";
  }
  get text() { return this.painter.text; }
  get rate() { return this.seconds ? this.tokens / this.seconds : 0; }
  add(choice) {
    const tiers = choice.token_tiers ?? [];
    this.tokens += tiers.length;
    tiers.forEach(tier => this.inText[tier] = (this.inText[tier] ?? 0) + 1);
    this.painter.add(choice.text ?? choice.delta.content ?? "", tiers, choice.token_characters ?? []);
    if (!choice.trace) return;
    this.seconds = choice.trace.seconds;  // the server's: the browser may be late
    this.tiers = choice.trace.tiers;
  }
  show() {
    this.painter.show();
    $(this.id + "-speed").textContent = `${told(this.tokens)} tokens, ${paced(this.rate)} per second`;
  }
}

const paced = rate => rate.toFixed(rate < 9.95 ? 1 : 0);

// The longer bar is the faster text.
function raceBars(...writings) {
  const best = Math.max(...writings.map(each => each.rate)) || 1;
  for (const each of writings) $(each.id + "-bar").style.width = `${100 * each.rate / best}%`;
}

function named(tier) {
  return Object.assign(document.createElement("span"), {className: tier, textContent: tier});
}

// Those that guessed, and the full one.
const asked = tiers => tiers.filter((tier, i) => tier.proposed || i === tiers.length - 1);

function explain(tiers) {
  $("legend").replaceChildren(...asked(tiers).map(({name}) => {
    const item = document.createElement("li");
    item.append(named(name), " " + (TIERS[name] ?? ""));
    return item;
  }));
}

function tabulate({tiers, inText}) {
  $("tiers").replaceChildren(...asked(tiers).map((tier, i, {length}) => {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row"; head.append(named(tier.name));
    const share = tier.proposed ? Math.round(100 * tier.accepted / tier.proposed) + " %" : "";
    const cells = [told(inText[tier.name] ?? 0), ...(i < length - 1 ? [told(tier.proposed), share] : ["", ""])];
    row.append(head, ...cells.map(text => Object.assign(document.createElement("td"), {textContent: text})));
    return row;
  }));
}
