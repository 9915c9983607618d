// Drives a headless browser: `node browser.mjs PACKAGES STEPS`, where STEPS are JSON, and prints JSON.
//
// Each step is [name, ...values]; "read" and "style" add to what is printed. Whatever the page logs as
// an error, every address that it loads, and all that it asks the model, is printed too.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , packages, steps] = process.argv;
const require = createRequire(`${packages}/`);
const load = async (name) => (await import(pathToFileURL(require.resolve(name)))).default;
const [chromium, puppeteer] = [await load("@sparticuz/chromium"), await load("puppeteer-core")];
const browser = await puppeteer.launch({
  args: chromium.args,
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
const page = await browser.newPage();
const got = { read: [], errors: [], loaded: [], sent: [] };
page.on("pageerror", (error) => got.errors.push(error.message));
page.on("request", (request) => {
  got.loaded.push(request.url());
  if (request.url().endsWith("/completions")) got.sent.push(JSON.parse(request.postData()));
});
page.on("console", (message) => {
  if (message.type() === "error" || /Security Policy/.test(message.text())) got.errors.push(message.text());
});

let held = null; // requests that wait for "release"
const does = {
  hold: async (path) => {
    held = [];
    await page.setRequestInterception(true);
    page.on("request", (request) =>
      held && request.url().endsWith(path) ? held.push(request) : request.continue(),
    );
  },
  release: async () => {
    const waiting = held;
    held = null;
    for (const request of waiting) await request.continue();
  },
  size: (width, height) => page.setViewport({ width, height, isMobile: width < 600, hasTouch: width < 600 }),
  scheme: (value) => page.emulateMediaFeatures([{ name: "prefers-color-scheme", value }]),
  open: (url) => page.goto(url),
  wait: (selector) => page.waitForSelector(selector, { visible: true, timeout: 60000 }),
  gone: (selector) => page.waitForFunction((s) => !document.querySelector(s), {}, selector),
  type: (selector, text) => page.type(selector, text),
  click: (selector) => page.click(selector),
  read: async (selector) => got.read.push(await page.$$eval(selector, (all) => all.map((e) => e.innerText))),
  style: async (selector, name) =>
    got.read.push(await page.$eval(selector, (e, name) => getComputedStyle(e)[name], name)),
  wide: async () => got.read.push(await page.evaluate(() => document.documentElement.scrollWidth)),
  address: () => got.read.push(page.url()),
};
try {
  for (const [name, ...values] of JSON.parse(steps)) await does[name](...values);
} finally {
  await browser.close();
}
console.log(JSON.stringify(got));
