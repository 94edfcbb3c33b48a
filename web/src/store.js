// Conversations in the browser's own storage (IndexedDB), or in memory where the visitor or the browser wants no storage.
// Records: a conversation; its turns; details of a turn's pieces, which only its panel reads; documents with their text.
import {openDB} from "idb";
import {signal} from "@preact/signals";
import {visitorStorage} from "./browser_storage.js";

const NAME = "triforce", VERSION = 1, SWITCH = "triforce.keep";
const PARTS = ["turns", "details", "documents"];  // each of their records names its conversation

class MemoryTables {
  constructor() { this.tables = Object.fromEntries(["conversations", ...PARTS].map(name => [name, new Map()])); }
  async get(table, id) { return this.tables[table].get(id); }
  async all(table) { return [...this.tables[table].values()]; }
  async of(table, conversation) { return (await this.all(table)).filter(record => record.conversation === conversation); }
  async put(table, record) { this.tables[table].set(record.id, record); }
  async remove(table, id) { this.tables[table].delete(id); }
  async clear() { for (const table of Object.values(this.tables)) table.clear(); }
}

class BrowserTables {
  static async open() {
    const upgrade = database => {
      database.createObjectStore("conversations", {keyPath: "id"});
      for (const name of PARTS) database.createObjectStore(name, {keyPath: "id"}).createIndex("conversation", "conversation");
    };
    const tables = new BrowserTables();
    tables.database = await openDB(NAME, VERSION, {upgrade, blocking: () => tables.database.close()});
    return tables;
  }
  get(table, id) { return this.database.get(table, id); }
  all(table) { return this.database.getAll(table); }
  of(table, conversation) { return this.database.getAllFromIndex(table, "conversation", conversation); }
  put(table, record) { return this.database.put(table, record); }
  remove(table, id) { return this.database.delete(table, id); }
  async clear() { for (const table of ["conversations", ...PARTS]) await this.database.clear(table); }
}

export const keeps = signal(visitorStorage.get(SWITCH) !== "off");
export const storageFault = signal("");  // why this browser keeps nothing, or an empty text

const memory = new MemoryTables();
let opened = null;

async function tables() {
  if (!keeps.value) return memory;
  opened ??= BrowserTables.open().catch(() => {
    storageFault.value = "This browser keeps nothing for this page: conversations last until the page is closed.";
    return memory;
  });
  return opened;
}

export function setKeeping(on) {
  visitorStorage.set(SWITCH, on ? "on" : "off");
  keeps.value = on;
}

async function put(table, record) {
  const kept = await tables();
  try {
    await kept.put(table, record);
  } catch (error) {
    storageFault.value = error.name === "QuotaExceededError"
      ? "The browser's storage is full: what is new lasts until the page is closed. Delete or export conversations."
      : "The browser did not store this conversation: what is new lasts until the page is closed.";
    await memory.put(table, record);
  }
}

const get = async (table, id) => await (await tables()).get(table, id) ?? memory.get(table, id);

export const saveConversation = record => put("conversations", record);
export const saveTurn = record => put("turns", record);
export const saveDetails = record => put("details", record);
export const saveDocument = record => put("documents", record);
export const readDetails = id => get("details", id);
export const readDocument = id => get("documents", id);
export const readConversation = id => get("conversations", id);
export const readConversations = async () => (await tables()).all("conversations");
export const readPart = async (table, conversation) => (await tables()).of(table, conversation);

export async function removeConversation(id) {
  const kept = await tables();
  for (const name of PARTS) for (const record of await kept.of(name, id)) await kept.remove(name, record.id);
  await kept.remove("conversations", id);
}

export const removeAll = async () => (await tables()).clear();
