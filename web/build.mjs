// Bundles the page into the package: one HTML file with its script and style inlined, the renderer, and the reader of PDFs.
// The same sources and package-lock.json give the same bytes on every machine.
import {createHash} from "node:crypto";
import {readFileSync, readdirSync, writeFileSync, mkdirSync} from "node:fs";
import {join} from "node:path";
import {fileURLToPath} from "node:url";
import {build} from "esbuild";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const OUT = process.argv[2] ?? join(HERE, "../src/triforce/server/web");
const TARGETS = ["chrome117", "firefox119", "safari17.4"];

async function bundle(entry) {
  const {outputFiles, metafile} = await build({
    absWorkingDir: HERE, entryPoints: [entry], bundle: true, minify: true, format: "iife", target: TARGETS, write: false, metafile: true,
    charset: "ascii", legalComments: "none", jsx: "automatic", jsxImportSource: "preact", loader: {".css": "css"}, logLevel: "error",
  });
  const packages = new Set(Object.keys(metafile.inputs).map(file => /^node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(file)?.[1]).filter(Boolean));
  return {text: outputFiles[0].text, packages};
}

// Return the licences of the bundled packages, each behind its name and version.
function licences(packages) {
  return [...packages].sort().map(name => {
    const folder = join(HERE, "node_modules", name), {version, license} = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const texts = readdirSync(folder).filter(file => /^(licen[sc]e|notice)/i.test(file)).sort().map(file => readFileSync(join(folder, file), "utf8").trim());
    if (!texts.length) throw new Error(`${name} has no text of its licence`);
    return `${name} ${version}, ${license}\n\n${texts.join("\n\n")}\n`;
  }).join("\n" + "-".repeat(80) + "\n\n");
}

// Return a digest of the sources, by which a test without node sees that the bundle belongs to them.
function sourceDigest() {
  const hash = createHash("sha256");
  for (const file of ["build.mjs", "package-lock.json", ...readdirSync(join(HERE, "src")).sort().map(name => `src/${name}`)]) {
    hash.update(file + "\0").update(readFileSync(join(HERE, file))).update("\0");
  }
  return hash.digest("hex");
}

const [page, style, renderer, pdf] = await Promise.all(["src/main.jsx", "src/page.css", "src/renderer.js", "src/pdf.js"].map(bundle));
const closed = text => text.replaceAll("</script", "<\\/script").trim();
const html = readFileSync(join(HERE, "src/page.html"), "utf8")
  .replace("/* style */", () => style.text.trim())
  .replace("/* script */", () => closed(page.text))
  .replace("<!-- digest -->", () => `<!-- sources ${sourceDigest()} -->`);
mkdirSync(OUT, {recursive: true});
writeFileSync(join(OUT, "page.html"), html);
writeFileSync(join(OUT, "renderer.js"), closed(renderer.text) + "\n");
writeFileSync(join(OUT, "pdf.js"), pdf.text);
writeFileSync(join(OUT, "licences.txt"), licences(new Set([...page.packages, ...renderer.packages, ...pdf.packages])));
