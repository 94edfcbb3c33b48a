// Small values in the browser's own storage. A browser may refuse it: then they last as long as the page.
class SmallStorage {
  constructor(open) {
    this.values = new Map();
    try { this.storage = open(); } catch { this.storage = null; }
  }
  get(name) {
    try { return this.storage?.getItem(name) ?? this.values.get(name) ?? null; } catch { return this.values.get(name) ?? null; }
  }
  set(name, text) {
    this.values.set(name, text);
    try { this.storage?.setItem(name, text); } catch { /* full, or refused */ }
  }
  remove(name) {
    this.values.delete(name);
    try { this.storage?.removeItem(name); } catch { /* refused */ }
  }
}

export const tabStorage = new SmallStorage(() => sessionStorage);
export const visitorStorage = new SmallStorage(() => localStorage);
