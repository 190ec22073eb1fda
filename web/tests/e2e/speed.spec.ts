import { writeFileSync } from "node:fs";
import { expect, test } from "@playwright/test";
import { pageOf, runOf, textTrace, worldOf } from "../fixtures";

test("500 groups of 8 x 256 tokens x 128 steps: painted in 2 s, a step within a frame", async ({ page }) => {
  test.setTimeout(60_000);
  const path = test.info().outputPath("page.html");
  const some = Array.from({ length: 10 }, (_, i) => textTrace(i, i));
  const traces = Array.from({ length: 500 }, (_, i) => ({ ...some[i % 10]!, id: `t${i}-0`, step: i }));
  writeFileSync(path, pageOf(worldOf([runOf("long", traces), traces])));
  await page.goto(`file://${path}`, { waitUntil: "commit" });
  await expect(page.locator(".samples li").first()).toBeVisible();
  const painted = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]!.startTime);
  await page.locator(".samples a").first().click();
  await expect(page.locator(".sheet .t")).toHaveCount(256);
  expect(await page.locator(".mini .t").count()).toBe(8 * 256);
  /** Median milliseconds from the slider's event to the layout that follows it, moving by so many steps at a time. */
  const moving = (by: number) => page.evaluate(async (by) => {
    const slider = document.querySelector<HTMLInputElement>("input[type=range]")!;
    const took: number[] = [];
    for (let move = 0; move < 41; move++) {
      const begun = performance.now();
      slider.value = String((move * by) % 129);
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      await Promise.resolve();
      document.body.getBoundingClientRect();
      took.push(performance.now() - begun);
      await new Promise((next) => requestAnimationFrame(next));
    }
    return took.sort((a, b) => a - b)[20]!;
  }, by);
  const [step, jump] = [await moving(1), await moving(37)];
  console.log(`first paint ${Math.round(painted)} ms, a step ${step.toFixed(1)} ms, a jump by 37 steps ${jump.toFixed(1)} ms`);
  expect(painted).toBeLessThan(2000);
  expect(step).toBeLessThan(16);
});
