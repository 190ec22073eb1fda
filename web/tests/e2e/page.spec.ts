import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { expect, type Page, test } from "@playwright/test";
import { HOSTILE, hostileTrace, pageOf, runOf, sudokuTraces, textTrace, type World, worldOf } from "../fixtures";

const [first, second] = [sudokuTraces(3, 0.99), sudokuTraces(11, 0.9)];
const ONE = worldOf([runOf("first", first), first]);
const TWO = worldOf([runOf("first", first), first], [runOf("second", second, { method: "agrpo" }, 0.3), second]);

let problems: string[];
test.beforeEach(({ page }) => {
  problems = [];
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("request", (request) => !request.url().startsWith("file:") && !request.url().startsWith("data:") && problems.push(request.url()));
});
test.afterEach(() => expect(problems, "errors, or requests to somewhere").toEqual([]));

async function open(page: Page, world: World, hash = ""): Promise<void> {
  const path = test.info().outputPath("page.html");
  writeFileSync(path, pageOf(world));
  await page.goto(`file://${path}${hash}`);
}

/** The large canvas as it is painted, "_" where it is masked. */
async function canvas(page: Page): Promise<string> {
  return page.locator(".sheet .t").evaluateAll((cells) =>
    cells.map((cell) => (getComputedStyle(cell).color === "rgba(0, 0, 0, 0)" ? "_" : cell.textContent)).join(""),
  );
}

function stateOf(id: string, rollout: number, done: number): string {
  const { tokens, filled } = first.find((trace) => trace.id === id)!.rollouts[rollout]!;
  return tokens.map((token, i) => (filled[i]! < done ? token : "_")).join("");
}

test("from the run to a trace and back, where the reader was", async ({ page }) => {
  await open(page, ONE);
  await expect(page.getByRole("heading", { name: "first" })).toBeVisible();
  await expect(page.getByRole("img", { name: /^Solved over updates: held out, sampled from 0\.15 to/ })).toBeVisible();
  await page.getByRole("combobox", { name: "From" }).selectOption("eval");
  await expect(page.locator(".samples li")).toHaveCount(9);
  const link = page.locator(".samples a").last();
  await link.scrollIntoViewIfNeeded();
  const top = await page.evaluate(() => scrollY);
  await link.click();
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("Held-out problem, update 80");
  await page.goBack();
  await expect(page.locator(".samples li")).toHaveCount(9);
  await expect.poll(() => page.evaluate(() => scrollY)).toBe(top);
});

test("every state is the one the trace says, by slider, keys and play", { tag: "@core" }, async ({ page }) => {
  await page.emulateMedia({ reducedMotion: "reduce" });
  await open(page, ONE, "#/trace/0/t40-0");
  await page.getByRole("button", { name: "Rollout 2", exact: true }).click();
  const slider = page.getByRole("slider", { name: "Steps done" });
  for (const done of [8, 0, 5, 2, 7]) {
    await slider.fill(String(done));
    await expect.poll(() => canvas(page)).toBe(stateOf("t40-0", 1, done));
  }
  await page.locator("body").press("Home");
  await page.locator("body").press("ArrowRight");
  await expect.poll(() => canvas(page)).toBe(stateOf("t40-0", 1, 1));
  await page.keyboard.press("End");
  await expect.poll(() => canvas(page)).toBe(stateOf("t40-0", 1, 8));
  await page.keyboard.press("]");
  await expect.poll(() => canvas(page)).toBe(stateOf("t40-0", 2, 8));
  await page.locator("h1").click();
  await page.keyboard.press(" ");
  await expect(page.getByRole("button", { name: "Pause" })).toBeVisible();
  await expect(page.locator(".player .at b")).toHaveText("2");
  await page.keyboard.press(" ");
  await expect(page.getByRole("status").filter({ hasText: "tokens" })).toHaveText(/^Step [2-4] of 8\. \d+ of 16 tokens written\. New: /);
});

test("colouring: by button and key, with a legend, and the token line says the numbers", async ({ page }) => {
  await open(page, ONE, "#/trace/0/t40-0");
  const token = page.locator(".sheet .t").first();
  const colour = () => token.evaluate((cell) => getComputedStyle(cell).backgroundColor);
  await expect(page.locator(".ends")).toHaveText("step 1step 8");
  const seen = new Set([await colour()]);
  for (const [key, legend] of [["p", "00.51"], ["3", /^0\.\d+11\.\d+$/], ["a", /^−0\.\d+0\+0\.\d+$/]] as const) {
    await page.locator("body").press(key);
    await expect(page.locator(".ends")).toHaveText(legend);
    await expect.poll(async () => seen.has(await colour())).toBe(false);
    seen.add(await colour());
  }
  await page.locator(".sheet").focus();
  await page.keyboard.press("ArrowRight");
  const rollout = first.find(({ id }) => id === "t40-0")!.rollouts[0]!;
  const line = page.locator(".token-line");
  await expect(line).toContainText(`position 2written at step ${rollout.filled[1]! + 1} of 8probability ${rollout.p[1]}credit ${rollout.weight![1]}counted`);
  await expect(page.locator(".player .at b")).toHaveText("8"); // the arrows went to the tokens
});

test("branches, probes and the board", { tag: "@core" }, async ({ page }) => {
  await open(page, ONE, "#/trace/0/t40-0");
  await page.getByRole("button", { name: "Rollout 2", exact: true }).click();
  const rollout = first.find(({ id }) => id === "t40-0")!.rollouts[1]!;
  const branch = rollout.branches![1]!;
  await page.getByRole("button", { name: /^B after step 4 reward 1/ }).click();
  await expect(page.locator(".sheet .updated")).toHaveCount(Object.keys(branch.filled).length);
  await expect(page.locator(".sheet .updated").first()).toHaveText(Object.values(branch.filled)[0]!);
  await expect(page.locator(".player .at b")).toHaveText("4");
  await page.locator("body").press("ArrowRight"); // leaving the step leaves the branch
  await expect(page.locator(".sheet .updated")).toHaveCount(0);
  await page.getByRole("combobox", { name: "State" }).selectOption("1");
  await expect(page.locator(".sheet .asked")).toHaveCount(4);
  const colours = page.getByRole("group", { name: "Colour tokens by" });
  await expect(colours.locator('[aria-pressed="true"]')).toHaveText("Probability"); // the colour that is used
  await expect(colours.getByRole("button", { name: "Step" })).toBeDisabled();
  await page.locator(".sheet .asked").first().click();
  await expect(page.locator(".token-line")).toContainText(`log-probability ${String(rollout.probes![1]!.logp[0]).replace("-", "−")}`);
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: /^First violation at step/ }).click();
  const [at, broken] = [Number(await page.locator(".player .at b").textContent()), page.locator(".board .wrong")];
  await expect.poll(() => broken.count()).toBeGreaterThan(0);
  await page.locator("body").press("ArrowLeft");
  await expect(page.locator(".player .at b")).toHaveText(String(at - 1));
  await expect(broken).toHaveCount(0);
});

test("a completion can be read as text", async ({ page }) => {
  const [trace] = [textTrace(4, 20)];
  await open(page, worldOf([runOf("first", [trace]), [trace]]), "#/trace/0/t20-0");
  await page.getByRole("button", { name: "Text" }).click();
  const [tokens, ends] = [trace.rollouts[0]!.tokens, new Set(trace.rollouts[0]!.special)];
  const shown = trace.rollouts.findIndex((rollout) => rollout.solved);
  const text = trace.rollouts[Math.max(0, shown)]!;
  await expect.poll(() => page.locator(".reading").textContent()).toBe(text.tokens.filter((_, i) => !text.special!.includes(i)).join("").trim());
  expect(tokens.length - ends.size).toBeGreaterThan(100);
  await page.locator("h1").click();
  await page.keyboard.press("t");
  await expect(page.locator(".sheet .t")).toHaveCount(256);
});

test("an evaluation has one value and no updates", async ({ page }) => {
  const whole = first[0]!;
  const trace = { ...whole, steps: 0, rollouts: whole.rollouts.map((rollout) => ({ ...rollout, tokens: [rollout.tokens.join("")], solved: true })) };
  const metrics = { "eval/solved_greedy": { x: [0], y: [0.75] } };
  await open(page, worldOf([runOf("results", [trace], { updates: null, finished: { ended: "evaluation" }, metrics }), [trace]]));
  await expect(page.locator(".headline dd")).toHaveText("75 %");
  await page.locator(".samples a").click();
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("Held-out problem, evaluation");
  await expect(page.locator(".reading")).toHaveText(trace.rollouts[0]!.tokens[0]!);
});

test("many runs are a table: sorted, chosen, any two side by side", { tag: "@core" }, async ({ page }) => {
  const runs = Array.from({ length: 12 }, (_, i) => {
    const traces = i % 2 ? second : first;
    return [runOf(`run ${i}`, traces, { method: i % 2 ? "agrpo" : "wd1" }, 0.1 + 0.05 * i), traces] as [Parameters<typeof worldOf>[0][0], typeof first];
  });
  await open(page, worldOf(...runs));
  const rows = page.locator(".all-runs tbody tr");
  await expect(rows).toHaveCount(12);
  await page.getByRole("button", { name: "solved, sampled" }).click();
  await expect(rows.first().locator("th")).toHaveText("run 11"); // the best first
  await expect(page.getByRole("columnheader", { name: "solved, sampled" })).toHaveAttribute("aria-sort", "descending");
  await expect(rows.first()).toContainText("15 % → 76.8 %");
  await expect(page.getByRole("checkbox", { checked: true })).toHaveCount(10);
  await expect(page.locator(".chart").first().locator(".keys li")).toHaveCount(30); // ten runs, three lines each
  await rows.getByRole("button", { name: "run 3", exact: true }).click();
  await page.getByRole("checkbox", { name: "Show run 8" }).check();
  await expect(page.getByRole("checkbox", { checked: true })).toHaveCount(2);
  await page.getByRole("link", { name: "The two chosen runs side by side" }).click();
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("run 3 and run 8");
  await page.getByLabel("Left").selectOption("run 11");
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("run 11 and run 8");
  await expect(page.locator(".sheet")).toHaveCount(2);
});

test("groups are found by run, reward and completion", async ({ page }) => {
  await open(page, TWO);
  const rows = page.locator(".samples li");
  await expect(rows).toHaveCount(36);
  await page.getByRole("combobox", { name: "Run" }).selectOption("second");
  await expect(rows).toHaveCount(18);
  await page.getByLabel("Best reward to").fill("0.99");
  const unsolved = second.filter(({ rollouts }) => rollouts.every(({ reward }) => reward! < 1)).length;
  await expect(rows).toHaveCount(unsolved);
  await page.getByLabel("Best reward to").fill("");
  const text = second[4]!.rollouts[1]!.tokens.join("");
  await page.getByLabel("Completion contains").fill(text);
  await expect(rows).toHaveCount(second.filter(({ rollouts }) => rollouts.some(({ tokens }) => tokens.join("").includes(text))).length);
});

test("two runs on the same prompt step together", { tag: "@core" }, async ({ page }) => {
  await open(page, TWO, "#/compare");
  await expect(page.getByRole("heading", { level: 1 })).toHaveText("first and second");
  await page.getByLabel("Time, second").selectOption("e40-0");
  await page.getByRole("slider").fill("3");
  const sheets = await page.locator(".sheet").evaluateAll((all) => all.map((sheet) => sheet.querySelectorAll(".t.on").length));
  expect(sheets).toEqual([6, 6]); // two tokens a step
  await page.goBack();
  await expect(page.getByLabel("Time, second")).toHaveValue("e80-0");
});

test("what a model wrote is text, whatever it wrote", { tag: "@core" }, async ({ page }) => {
  const trace = hostileTrace();
  await open(page, worldOf([runOf(HOSTILE[1]!, [trace]), [trace]]), "#/trace/0/t1-9");
  await expect(page.locator(".sheet .t")).toHaveText(HOSTILE);
  await page.getByRole("button", { name: /^A after step 2/ }).click();
  await page.getByRole("link", { name: "unmask" }).click();
  await expect(page.getByRole("heading", { name: HOSTILE[1]! })).toBeVisible();
  expect(await page.evaluate(() => "hurt" in window)).toBe(false);
  expect(await page.locator("main img, main script, main a[href^=javascript]").count()).toBe(0);
});

test("the page's own policy stops a script that gets in", async ({ page }) => {
  await open(page, ONE);
  const hurt = await page.evaluate(async () => {
    const script = document.createElement("script");
    script.textContent = "window.hurt = 1";
    document.body.append(script);
    return "hurt" in window;
  });
  expect(hurt).toBe(false);
  expect(problems.splice(0).join()).toContain("Content Security Policy");
});

test("a phone's width needs no sideways scrolling, in any place", async ({ page }) => {
  await page.setViewportSize({ width: 360, height: 700 });
  const traces = [textTrace(4, 20), hostileTrace(), ...first];
  const name = "a-run-with-a-name-that-is-long-enough-to-matter";
  await open(page, worldOf(...["", "-2", "-3"].map((end): [ReturnType<typeof runOf>, typeof traces] => [runOf(name + end, traces), traces])));
  for (const hash of ["#/", "#/trace/0/t20-0", "#/trace/0/t1-9", "#/trace/0/t40-0", "#/compare"]) {
    await page.evaluate((to) => (location.hash = to), hash);
    await expect(page.getByRole("heading", { level: 1 })).toBeAttached();
    await expect.poll(() => page.evaluate(() => document.documentElement.scrollWidth), hash).toBe(360);
  }
});

test("no accessibility fault that axe can find, in both themes", async ({ page }) => {
  const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf-8");
  await page.emulateMedia({ reducedMotion: "reduce" });
  const third: [(typeof TWO.index.runs)[0], typeof first] = [runOf("third", first, { finished: null }), first];
  await open(page, worldOf([TWO.index.runs[0]!, first], [TWO.index.runs[1]!, second], third)); // three: a table
  await page.evaluate(axe);
  for (const [hash, theme] of [["#/", "light"], ["#/trace/0/t40-0", "dark"], ["#/trace/0/t40-0", "light"], ["#/compare", "dark"]] as const) {
    await page.emulateMedia({ colorScheme: theme });
    await page.evaluate((to) => (location.hash = to), hash);
    await expect(page.getByRole("heading", { level: 1 })).toBeAttached();
    const violated = await page.evaluate(async () => {
      const { violations } = await (window as unknown as { axe: typeof import("axe-core") }).axe.run();
      return violations.map(({ id, nodes }) => `${id}: ${nodes[0]!.html}`);
    });
    expect(violated, `${hash} ${theme}`).toEqual([]);
  }
});
