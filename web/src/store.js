// Conversations in the browser's own storage (IndexedDB). Records that it does not take, or that the visitor does not
// want to be kept, are in memory; every read sees both, and a record in memory is the newer one.
// Tables: conversations; their turns; details of a turn's pieces, which only its panel reads; documents with their text.
import {openDB} from "idb";
import {signal} from "@preact/signals";
import {visitorStorage} from "./browser_storage.js";

const NAME = "triforce", VERSION = 1, SWITCH = "triforce.keep";
const PARTS = ["turns", "details", "documents"];  // each of their records names its conversation
const TABLES = ["conversations", ...PARTS];
const FULL = "The browser's storage is full: what is new lasts until the page is closed. Delete or export conversations.";
const REFUSED = "This browser keeps nothing for this page: conversations last until the page is closed.";

export const keeps = signal(visitorStorage.get(SWITCH) !== "off");
export const storageFault = signal("");  // why the browser keeps nothing that is new, or an empty text

const memory = Object.fromEntries(TABLES.map(table => [table, new Map()]));
let opened = null;

// Return the database, or null where the browser refuses it.
function database() {
  const upgrade = created => {
    created.createObjectStore("conversations", {keyPath: "id"});
    for (const table of PARTS) created.createObjectStore(table, {keyPath: "id"}).createIndex("conversation", "conversation");
  };
  opened ??= (async () => openDB(NAME, VERSION, {upgrade}))().catch(() => {
    storageFault.value = REFUSED;
    return null;
  });
  return opened;
}

export async function read(table, id) {
  return memory[table].get(id) ?? (await database())?.get(table, id);
}

async function overlaid(table, kept, isWanted) {
  const records = new Map((kept ?? []).map(record => [record.id, record]));
  for (const record of memory[table].values()) if (isWanted(record)) records.set(record.id, record);
  return [...records.values()];
}

export async function readConversations() {
  return overlaid("conversations", await (await database())?.getAll("conversations"), () => true);
}

export async function readPart(table, conversation) {
  const kept = await (await database())?.getAllFromIndex(table, "conversation", conversation);
  return overlaid(table, kept, record => record.conversation === conversation);
}

// Change a record in one transaction, so that changes of two tabs to one record are both kept.
// change: from the record, or undefined where there is none, to the new record; undefined for no change.
export async function update(table, id, change) {
  const held = memory[table].get(id);
  if (held || !keeps.value) {
    const changed = change(held ?? await (await database())?.get(table, id));
    if (changed) memory[table].set(id, changed);
    if (!keeps.value || !changed) return;
  }
  const base = await database();
  let changed;
  try {
    if (!base) throw new DOMException(REFUSED, "NotFoundError");
    const transaction = base.transaction(table, "readwrite");
    changed = memory[table].get(id) ?? change(await transaction.store.get(id));
    if (changed) transaction.store.put(changed).catch(() => {});  // the transaction fails with it
    await transaction.done;
    memory[table].delete(id);
  } catch (error) {
    if (base) storageFault.value = FULL;
    changed ??= change(await base?.get(table, id));
    if (changed) memory[table].set(id, changed);
  }
}

export const write = (table, record) => update(table, record.id, () => record);

// Keep new records from now on, with those in memory, or keep none.
export async function setKeeping(on) {
  visitorStorage.set(SWITCH, on ? "on" : "off");
  keeps.value = on;
  if (!on) return;
  for (const table of TABLES) for (const record of [...memory[table].values()]) await write(table, record);
}

async function remove(table, id) {
  memory[table].delete(id);
  await (await database())?.delete(table, id);
}

export async function removeConversation(id) {
  for (const table of PARTS) for (const record of await readPart(table, id)) await remove(table, record.id);
  await remove("conversations", id);
}

export async function removeAll() {
  for (const table of TABLES) {
    memory[table].clear();
    await (await database())?.clear(table);
  }
}
