// A conversation: a tree of turns, the branch that is shown, and its messages for the server.
// Turns: {id, conversation, parent, role, created, ...}. role "user": text and documents; "assistant": pieces;
// "tool": results of calls. A piece is what one request returned; several pieces continue each other.
import {read} from "./store.js";

export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), part => part.toString(36)).join("");

// Return the turns of each parent, the earliest first.
export function siblingsOf(turns) {
  const siblings = new Map();
  for (const turn of turns.values()) {
    if (!siblings.has(turn.parent)) siblings.set(turn.parent, []);
    siblings.get(turn.parent).push(turn);
  }
  for (const line of siblings.values()) line.sort((a, b) => a.created - b.created);
  return siblings;
}

// Return the turns of the shown branch, in order. choices: the chosen child of a parent; without one, the latest is shown.
export function branch(turns, choices) {
  const siblings = siblingsOf(turns), shown = [];
  for (let line = siblings.get(null); line; line = siblings.get(shown.at(-1).id)) {
    const chosen = choices[line[0].parent ?? "root"];
    shown.push(line.find(({id}) => id === chosen) ?? line.at(-1));
  }
  return shown;
}

// Return the turns from the first one to a turn.
export function ancestry(turns, id) {
  const line = [];
  for (let turn = turns.get(id); turn; turn = turns.get(turn.parent)) line.unshift(turn);
  return line;
}

export const answerText = turn => turn.pieces.map(piece => piece.text).join("");
export const thoughtsOf = turn => turn.pieces.map(piece => piece.thoughts).join("");
export const callsOf = turn => turn.pieces.flatMap(piece => piece.calls);
export const isRunning = piece => piece.state === "running";

// Return several texts as one, told apart as `triforce chat --file FOLDER` does it.
export const joined = files => files.map(({name, text}) => `--- ${name} ---\n${text}\n`).join("");

// Documents stand in front of the question.
function withDocuments(question, documents) {
  if (!documents.length) return question;
  const text = documents.length === 1 ? documents[0].text : joined(documents);
  return question ? `${text}\n\n${question}` : text;
}

async function content(turn) {
  const documents = [];
  for (const {id, name} of turn.documents) {
    const kept = await read("documents", id);
    if (!kept) throw new Error(`The document ${name} is no longer in this browser's storage. Attach it again in a new question.`);
    documents.push(kept);
  }
  return withDocuments(turn.text, documents);
}

// Return the messages of a line of turns. system: the system prompt, perhaps empty.
export async function messages(line, system) {
  const told = system ? [{role: "system", content: system}] : [];
  for (const turn of line) {
    if (turn.role === "user") {
      const text = await content(turn), last = told.at(-1);
      if (last?.role === "user") last.content += "\n\n" + text;  // the answer between them came to nothing
      else told.push({role: "user", content: text});
    } else if (turn.role === "tool") {
      for (const {id, text} of turn.results) told.push({role: "tool", tool_call_id: id, content: text});
    } else {
      const text = answerText(turn), thoughts = thoughtsOf(turn), calls = callsOf(turn);
      if (!text && !calls.length) continue;
      told.push({
        role: "assistant", content: text,
        ...(thoughts ? {reasoning_content: thoughts} : {}),
        ...(calls.length ? {tool_calls: calls.map(({id, name, arguments: given}) => ({id, type: "function", function: {name, arguments: given}}))} : {}),
      });
    }
  }
  return told;
}

// Return the text of a line of turns, for a model without a chat template.
export async function plainText(line) {
  const texts = [];
  for (const turn of line) texts.push(turn.role === "user" ? await content(turn) : turn.role === "assistant" ? answerText(turn) : "");
  return texts.join("");
}

export const titleOf = text => text.trim().split("\n")[0].slice(0, 80) || "New conversation";
