"use strict";
// The parts of the text that the retrieval tier read: one line per verification, in the colour of the canvas.
const LINES = 48, PARTS = 256;

class ReadMap {
  constructor() { this.clear(); }
  clear() { this.lines = []; this.draw(); this.say(""); $("map").setAttribute("aria-label", "Nothing yet"); }
  // An empty `seen` means that the tier was not used: it adds no line.
  add({seen, tokens}) {
    if (!seen.length) return;
    this.lines = [...this.lines, seen].slice(-LINES);
    this.tokens = tokens;
  }
  show() {
    if (!this.lines.length) return;
    this.draw();
    const seen = this.lines.at(-1), mean = Math.round(seen.reduce((a, b) => a + b) / seen.length);
    $("map").setAttribute("aria-label", `Heads of the retrieval tier see ${mean} % of ${formatCount(this.tokens)} tokens on average`);
    const all = this.lines.every(line => line.every(percent => percent === 100));
    this.say(all ? "The retrieval tier read the whole text, as the text is within its budget." : "");
  }
  end() { if (!this.lines.length) this.say("The retrieval tier was not used for this text."); }
  say(text) {
    $("map-none").textContent = text;
    $("map-shown").hidden = Boolean(text) || !this.lines.length;
  }
  draw() {
    const pen = $("map").getContext("2d"), top = LINES - this.lines.length;
    pen.clearRect(0, 0, PARTS, LINES);
    pen.fillStyle = getComputedStyle($("map")).color;
    this.lines.forEach((seen, y) => seen.forEach((percent, i) => {
      pen.globalAlpha = Math.sqrt(percent / 100);
      const left = Math.floor(i * PARTS / seen.length);
      pen.fillRect(left, top + y, Math.ceil((i + 1) * PARTS / seen.length) - left, 1);
    }));
  }
}
