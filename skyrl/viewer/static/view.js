"use strict";
// Keys, and what the run has written meanwhile. Every page works without this file.

const line = document.getElementById("status");
let version = "", first = null;

// Asks each second what is new, and nothing while nobody looks. A page that has regions marked `data-live` gets them again.
async function look() {
  if (document.hidden) {
    document.addEventListener("visibilitychange", look, { once: true });
    return;
  }
  try {
    const answer = await fetch("/status", { headers: version ? { "If-None-Match": version } : {} });
    if (answer.status === 200) {
      const { samples, complete, state } = await answer.json();
      const shown = version === "" || (await refreshed());
      if (shown) version = answer.headers.get("ETag");
      first ??= samples;
      const fresh = samples > first && !document.querySelector("[data-live]") ? `, ${samples - first} new: reload to see them` : "";
      line.textContent = `${samples.toLocaleString("en")} samples${complete ? "" : ", indexing"}${fresh} · ${state}`;
    }
    setTimeout(look, 1000);
  } catch {
    line.textContent = "The command has ended.";
  }
}

// Fetches this page anew and replaces its live regions; false while text in them is selected, so that it can be copied.
async function refreshed() {
  const regions = [...document.querySelectorAll("[data-live]")];
  if (!regions.length) return true;
  if (!getSelection().isCollapsed) return false;
  const answer = await fetch(location.href);
  if (!answer.ok) return false;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focused = document.activeElement.closest("[data-live]") && document.activeElement.getAttribute("href");
  for (const region of regions) {
    const fresh = page.getElementById(region.id);
    if (fresh) region.replaceWith(fresh);
  }
  if (focused) document.querySelector(`[data-live] a[href="${CSS.escape(focused)}"]`)?.focus();
  return true;
}

function move(by) {
  const links = [...document.querySelectorAll("a.open")];
  const here = links.indexOf(document.activeElement);
  links[Math.min(Math.max(here + by, 0), links.length - 1)]?.focus();
}

const follow = (id) => document.getElementById(id)?.click();
const KEYS = {
  "/": () => document.getElementById("search")?.focus(),
  "?": () => (document.getElementById("keys").open = !document.getElementById("keys").open),
  j: () => move(1), k: () => move(-1),
  n: () => follow("next"), p: () => follow("previous"),
  g: () => follow("group"), t: () => follow("prompt"), u: () => follow("up"), r: () => follow("run"), m: () => follow("markup"),
  1: () => follow("mode1"), 2: () => follow("mode2"), 3: () => follow("mode3"), 4: () => follow("mode4"), 5: () => follow("mode5"),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  if (KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});
look();
