"use strict";
// Keys, and the number of samples while a run continues. Every page works without this file.

const line = document.getElementById("status");
let first = null;

async function look() {
  try {
    const { samples, complete } = await (await fetch("/status")).json();
    first ??= samples;
    const fresh = samples > first ? `, ${samples - first} new: reload to see them` : "";
    line.textContent = `${samples.toLocaleString("en")} samples${complete ? "" : ", indexing"}${fresh}`;
    setTimeout(look, complete ? 5000 : 1000);
  } catch {
    line.textContent = "The command has ended.";
  }
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
  g: () => follow("group"), t: () => follow("prompt"), u: () => follow("up"),
  1: () => follow("mode1"), 2: () => follow("mode2"), 3: () => follow("mode3"), 4: () => follow("mode4"), 5: () => follow("mode5"),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});
look();
