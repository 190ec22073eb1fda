import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

const ROOT = import.meta.dirname;

/** A hash of the sources. tests/test_web.py computes it too and fails if the page is older than its sources. */
function sourcesHash(): string {
  const inSrc = readdirSync(join(ROOT, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name).slice(ROOT.length + 1));
  const hash = createHash("sha256");
  for (const name of [...inSrc, "index.html", "package.json", "tsconfig.json", "vite.config.ts"].sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(ROOT, name))).update("\0");
  }
  return hash.digest("hex");
}

const allowed = (text: string) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

/** Put script and style into the page, and allow only these two, by their hashes. */
function onePage(): Plugin {
  return {
    name: "one-page",
    enforce: "post",
    generateBundle(_options, bundle) {
      let script = "";
      let style = "";
      for (const [name, file] of Object.entries(bundle)) {
        if (file.type === "chunk") script += file.code;
        else if (name.endsWith(".css")) style += String(file.source);
        else continue;
        delete bundle[name];
      }
      script = script.trim().replaceAll("</script", "<\\/script");
      style = style.trim();
      const page = bundle["index.html"];
      if (page?.type !== "asset") throw new Error("vite made no index.html");
      const policy = [
        "default-src 'none'",
        `script-src ${allowed(script)}`,
        `style-src ${allowed(style)}`,
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
      ].join("; ");
      const head =
        `<meta http-equiv="Content-Security-Policy" content="${policy}">\n` +
        `<meta name="unmask-sources" content="${sourcesHash()}">\n<style>${style}</style>\n`;
      // A classic script before the traces: the page is painted before they are parsed.
      page.source = String(page.source)
        .replace(/\s*<script type="module".*?<\/script>/s, "")
        .replace(/\s*<link rel="stylesheet".*?>/s, "")
        .replace("<!--policy-->", () => head.trim())
        .replace("<!--script-->", () => `<script>${script}</script>`);
      page.fileName = "page.html";
    },
  };
}

export default defineConfig({
  root: ROOT,
  plugins: [onePage()],
  build: {
    outDir: "../unmask/view",
    emptyOutDir: false,
    cssCodeSplit: false,
    modulePreload: false,
    target: "es2022",
    rolldownOptions: { output: { format: "iife" } },
  },
});
