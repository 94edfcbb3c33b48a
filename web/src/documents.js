// Documents: what a file is, its text, and why it cannot be read.
import {addressOf, ask, tokenCount} from "./server.js";
import {counted, formatBytes, formatCount} from "./words.js";
import {joined, newId} from "./conversation.js";

const MOST_CHARACTERS_PER_TOKEN = 32;  // a text with more characters per token of the context is refused before it is read
const MAX_PDF_BYTES = 100e6, MAX_FILES = 2000, PASTED_CHARACTERS = 4000;
const SKIPPED_FOLDERS = new Set(["node_modules", "__pycache__"]);
const PDF = "%PDF-", HEAD_BYTES = 4096;
const KINDS = [  // of files that are no text, by their first bytes
  ["\x89PNG", "a PNG picture"], ["\xff\xd8\xff", "a JPEG picture"], ["GIF8", "a GIF picture"], ["PK\x03\x04", "a ZIP archive or an Office file"],
  ["\x1f\x8b", "a gzip archive"], ["\x7fELF", "a program"], ["MZ", "a program"], ["GGUF", "a model"], ["\xd0\xcf\x11\xe0", "an old Office file"],
  ["RIFF", "sound, video or a picture"], ["ID3", "sound"], ["SQLite", "a database"], ["7z\xbc\xaf", "a 7z archive"], ["BZh", "a bzip2 archive"],
];

class DocumentError extends Error {}

// Return text of bytes in UTF-8 or UTF-16, or else in Windows-1252, which contains the letters of Latin-1. Raises DocumentError.
function decode(bytes, name) {
  const head = String.fromCharCode(...bytes.subarray(0, 8)), kind = KINDS.find(([magic]) => head.startsWith(magic));
  if (head.startsWith("\xff\xfe")) return new TextDecoder("utf-16le").decode(bytes);
  if (head.startsWith("\xfe\xff")) return new TextDecoder("utf-16be").decode(bytes);
  let text = null;
  try { text = new TextDecoder("utf-8", {fatal: true}).decode(bytes); } catch { /* in another encoding, or no text */ }
  if (bytes.includes(0) || (text === null && kind)) {
    throw new DocumentError(`${name} is ${kind ? kind[1] : "no text"}: the model reads text and the text of PDF files.`);
  }
  return text ?? new TextDecoder("windows-1252").decode(bytes);
}

// Read one file. onProgress: pages read of a PDF, and all of them. Raises DocumentError.
async function readFile(file, name, context, onProgress) {
  const head = await file.slice(0, PDF.length).text().catch(() => { throw new DocumentError(`${name} cannot be read, perhaps as it is a folder or was moved.`); });
  if (head === PDF) {
    if (file.size > MAX_PDF_BYTES) throw new DocumentError(`${name} has ${formatBytes(file.size)}; a PDF of at most ${formatBytes(MAX_PDF_BYTES)} is read.`);
    return readPdf(new Uint8Array(await file.arrayBuffer()), name, onProgress);
  }
  const most = context * MOST_CHARACTERS_PER_TOKEN;
  if (file.size > most) {
    decode(new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer()), name);  // its kind says more than its size
    throw new DocumentError(`${name} has ${formatBytes(file.size)}. The model's context of ${formatCount(context)} tokens holds about ${formatBytes(context * 4)} of text.`);
  }
  return decode(new Uint8Array(await file.arrayBuffer()), name);
}

// The reader of PDFs is large: it is loaded when the first one comes, and runs beside the page.
function readPdf(bytes, name, onProgress) {
  return new Promise((resolve, reject) => {
    const worker = new Worker(addressOf("page/pdf.js"));
    const {port1: answers, port2: port} = new MessageChannel();
    const end = act => { worker.terminate(); answers.close(); act(); };
    worker.onerror = () => end(() => reject(new DocumentError(`${name}: the reader of PDF files did not start.`)));
    answers.onmessage = ({data}) => {
      if (data.pages) onProgress(data.page, data.pages);
      else if (data.fault) end(() => reject(new DocumentError(`${name} ${data.fault}`)));
      else end(() => resolve(data.text));
    };
    worker.postMessage({bytes, port}, [bytes.buffer, port]);
  });
}

async function* walk(entry, path) {
  if (entry.isFile) {
    yield {file: await new Promise((resolve, reject) => entry.file(resolve, reject)), path};
  } else if (!SKIPPED_FOLDERS.has(entry.name)) {
    const reader = entry.createReader();
    for (let part = [null]; part.length;) {
      part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      for (const child of part) if (!child.name.startsWith(".")) yield* walk(child, `${path}/${child.name}`);
    }
  }
}

// Return what was dropped, chosen or pasted, as groups: single files, and folders with their files.
// It is to be called during the event, as a drop's list is empty afterwards.
export function groupsOf(transfer) {
  const entries = [...transfer.items ?? []].filter(item => item.kind === "file").map(item => item.webkitGetAsEntry?.() ?? item.getAsFile());
  return entries.filter(Boolean).map(entry => ({
    name: entry.name, isFolder: Boolean(entry.isDirectory),
    async *files() { if (entry instanceof File) yield {file: entry, path: entry.name}; else yield* walk(entry, entry.name); },
  }));
}

export function groupsOfFiles(files) {
  const folders = new Map(), groups = [];
  for (const file of files) {
    const path = file.webkitRelativePath, folder = path.split("/")[0];
    if (!path) groups.push({name: file.name, isFolder: false, async *files() { yield {file, path: file.name}; }});
    else if (!path.split("/").some(part => part.startsWith(".") || SKIPPED_FOLDERS.has(part))) folders.set(folder, [...folders.get(folder) ?? [], {file, path}]);
  }
  return [...groups, ...Array.from(folders, ([name, listed]) => ({name, isFolder: true, async *files() { yield* listed; }}))];
}

// Read a group as one document. onProgress receives a sentence. Raises DocumentError.
export async function readGroup({name, isFolder, files}, context, onProgress) {
  const texts = [], skipped = [];
  let characters = 0;
  for await (const {file, path} of files()) {
    if (texts.length + skipped.length >= MAX_FILES) throw new DocumentError(`${name} has more than ${formatCount(MAX_FILES)} files. Attach a part of it.`);
    onProgress(`Reading ${path}`);
    try {
      const text = await readFile(file, path, context, (page, pages) => onProgress(`Reading ${path}: page ${page} of ${pages}`));
      texts.push({name: path, text});
      characters += text.length;
    } catch (error) {
      if (!(error instanceof DocumentError) || !isFolder) throw error;
      skipped.push(path);
    }
    if (characters > context * MOST_CHARACTERS_PER_TOKEN) throw new DocumentError(`${name} has more than ${formatCount(characters)} characters. The model's context of ${formatCount(context)} tokens holds about ${formatBytes(context * 4)} of text.`);
  }
  if (!texts.some(({text}) => text.trim())) throw new DocumentError(isFolder ? `${name} has no file with text.` : `${name} is empty.`);
  texts.sort((a, b) => (a.name < b.name ? -1 : 1));
  if (!isFolder) return documentOf(name, texts[0].text);
  const note = counted(texts.length, "file") + (skipped.length ? `, ${formatCount(skipped.length)} skipped` : "");
  return documentOf(name, joined(texts), {note, skipped});
}

// Return a document with its number of tokens.
export async function documentOf(name, text, {note = "", skipped = []} = {}) {
  return {id: newId(), name, text, note, skipped, tokens: await tokenCount({prompt: text, add_special_tokens: false})};
}

export const isLongPaste = text => text.length > PASTED_CHARACTERS;

export const sampleText = async () => (await ask("sample.txt")).text();
export const watchedDocuments = async () => (await (await ask("documents")).json()).documents;
export const watchedText = async id => (await ask("documents/" + encodeURIComponent(id))).text();
