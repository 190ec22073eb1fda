import { expect, test } from "@playwright/test";
import { pageOf, runOf, sudokuTraces, worldOf } from "../fixtures";

const HERE = "http://localhost:8123";

test("a run that is being written is followed, and the reader keeps the place", async ({ page }) => {
  const traces = sudokuTraces(3, 0.99);
  const world = worldOf([runOf("first", traces.slice(0, 6), { finished: null, done: 20, clock: { x: [10, 20], y: [12, 24] } }), []]);
  world.index.live = true;
  const asked: (string | undefined)[] = [];
  let now = { tag: '"1"', index: world.index };
  await page.route(`${HERE}/**`, (route) => {
    const url = new URL(route.request().url());
    if (url.pathname === "/") return route.fulfill({ contentType: "text/html", body: pageOf(world) });
    if (url.pathname === "/api/trace") return route.fulfill({ json: traces.find(({ id }) => id === url.searchParams.get("id")) });
    const known = route.request().headers()["if-none-match"];
    asked.push(known);
    if (known === now.tag) return route.fulfill({ status: 304 });
    return route.fulfill({ json: now.index, headers: { ETag: now.tag } });
  });
  await page.clock.install();
  await page.goto(HERE);
  await expect(page.getByText("20 of 80 updates, not finished: 24 s of training so far, about 72 s left")).toBeVisible();
  await page.getByLabel("Prompt contains").fill("1..");
  await expect(page.locator(".samples li")).toHaveCount(6);
  await page.clock.runFor(3100);
  await expect.poll(() => asked).toEqual([undefined, '"1"']); // nothing new: 304
  now = { tag: '"2"', index: { ...world.index, live: false, runs: [runOf("first", traces, { done: 80 })] } };
  await page.clock.runFor(3100);
  await expect(page.getByText("80 of 80 updates, finished")).toBeVisible();
  await expect(page.getByLabel("Prompt contains")).toHaveValue("1..");
  await expect(page.locator(".samples li")).toHaveCount(18);
  await page.clock.runFor(10_000);
  expect(asked).toHaveLength(3); // a finished run is not asked about again
  await page.locator(".samples a").last().click();
  await expect(page.locator(".sheet .t")).toHaveCount(16);
});
