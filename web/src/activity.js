// What runs: one answer or one check at a time, its progress, and how it is stopped.
import {computed, signal} from "@preact/signals";
import {openId} from "./state.js";

const RECENT = 5000;  // milliseconds of progress from which the time left is estimated

export const activity = signal(null);  // what runs: {kind, conversation, turn, step, done, total, left, marks, abort}
export const isBusy = computed(() => activity.value !== null);
export const activeAnswer = computed(() => (activity.value?.kind === "answer" ? activity.value.turn : null));
export const activeCheck = computed(() => (activity.value?.kind === "check" ? activity.value.turn : null));
export const answeringConversation = computed(() => activity.value?.conversation ?? null);

// Do one thing at a time: what runs can be stopped, and nothing else begins until it has ended.
export async function exclusively(work) {
  if (activity.value) return;
  const idle = {kind: "", turn: null, step: "", done: 0, total: 0, left: null, marks: []};
  activity.value = {...idle, conversation: openId.value, abort: new AbortController()};
  try {
    await work();
  } finally {
    activity.value = null;
  }
}

export const stop = () => activity.value?.abort.abort();

// Stop what runs, and wait until it has been saved.
export function ended() {
  stop();
  return new Promise(resolve => {
    const dispose = isBusy.subscribe(busy => {
      if (busy) return;
      resolve();
      queueMicrotask(() => dispose());
    });
  });
}

// Tell what runs now, and return the signal that stops it.
export function begin(kind, turn, step) {
  activity.value = {...activity.value, kind, turn: turn.id, step, done: 0, total: 0, left: null, marks: []};
  return activity.value.abort.signal;
}

// Show progress, and the time left at the pace of the last few seconds. total: 0 where the end is not known.
export function progress(step, done, total) {
  const running = activity.value, now = performance.now();
  const marks = [...(running.step === step ? running.marks : []).filter(mark => now - mark.now < RECENT), {now, done}];
  const pace = (done - marks[0].done) / (now - marks[0].now);
  activity.value = {...running, step, done, total, marks, left: pace > 0 && total ? (total - done) / pace / 1000 : null};
}
