"use strict";
// The current step, its progress, and the time left at the pace of the last few seconds.
const RECENT = 5000;  // milliseconds

function formatDuration(seconds) {
  if (seconds < 1) return "less than a second";
  return seconds < 90 ? `about ${Math.round(seconds)} s` : `about ${Math.round(seconds / 60)} min`;
}

class Progress {
  begin(step) {
    if (step === $("status").textContent) return;
    $("status").textContent = step; $("left").textContent = "";
    $("bar").removeAttribute("value");
    this.marks = [];
  }
  at(done, total) {
    const now = performance.now();
    this.marks = [...this.marks.filter(mark => now - mark.now < RECENT), {now, done}];
    const [first] = this.marks, pace = (done - first.done) / (now - first.now);
    const left = pace > 0 ? `, ${formatDuration((total - done) / pace / 1000)} left` : "";
    $("bar").value = done / total;
    $("left").textContent = `${formatCount(done)} of ${formatCount(total)} tokens${left}`;
  }
}
