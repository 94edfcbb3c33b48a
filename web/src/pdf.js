// A worker that reads the text of a PDF file. It has a policy of its own, which lets it connect to nothing.
import * as pdfjsWorker from "pdfjs-dist/legacy/build/pdf.worker.min.mjs";
import {getDocument} from "pdfjs-dist/legacy/build/pdf.min.mjs";

globalThis.pdfjsWorker = pdfjsWorker;  // so pdf.js starts no worker of its own

// Return the text of a page: pieces of a line follow each other, and a gap between baselines is a new line.
async function pageText(page) {
  const {items} = await page.getTextContent();
  return items.map(({str, hasEOL}) => str + (hasEOL ? "\n" : "")).join("");
}

async function read(data, port) {
  const loading = getDocument({data, isEvalSupported: false, useWorkerFetch: false, useWasm: false, disableFontFace: true, verbosity: 0});
  const pdf = await loading.promise;
  const texts = [];
  for (let page = 1; page <= pdf.numPages; page++) {
    port.postMessage({page, pages: pdf.numPages});
    texts.push(await pageText(await pdf.getPage(page)));
  }
  const text = texts.join("\n\n");
  return text.trim() ? {text} : {fault: "has no text that can be read: its pages may be pictures."};
}

const FAULTS = {PasswordException: "is encrypted: save it without a password.", InvalidPDFException: "is no valid PDF file."};

// Answers go through a port of the page's own, as pdf.js itself sends messages to the starter of the worker.
onmessage = async ({data: {bytes, port}}) => {
  if (!port) return;
  try {
    port.postMessage(await read(bytes, port));
  } catch (error) {
    port.postMessage({fault: FAULTS[error.name] ?? "cannot be read as a PDF file."});
  }
};
