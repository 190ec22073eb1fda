import { defineConfig } from "@playwright/test";

export default defineConfig({
  testDir: "tests/e2e",
  workers: 1,
  reporter: "line",
  timeout: 20_000,
  retries: 1, // on a busy machine; the report names a test that needed it
  use: {
    viewport: { width: 1200, height: 800 },
    // a browser of the system: none is downloaded
    launchOptions: { executablePath: process.env["CHROMIUM"] ?? "/usr/bin/chromium", args: ["--no-sandbox"] },
  },
});
