"use strict";
// Draws the figures of the page with Plotly for a light or a dark page, smooths them, and sets the steps that all of them show.

const { figures, templates } = JSON.parse(document.getElementById("figures").textContent);
const places = [...document.querySelectorAll(".chart")];
const raw = figures.map(({ data }) => data.map((trace) => Array.from(trace.y)));
const dark = matchMedia("(prefers-color-scheme: dark)");

// Exponential moving average from the first value, with its start corrected (Kingma and Ba 2015, section 3).
function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

function smooth() {
  const weight = Number(document.getElementById("smoothing").value);
  document.getElementById("weight").textContent = weight.toFixed(2);
  places.forEach((place, number) => {
    if (!figures[number].data[0].stackgroup) Plotly.restyle(place, { y: raw[number].map((values) => smoothed(values, weight)) });
  });
}

function zoom() {
  const [from, to] = ["from", "to"].map((id) => document.getElementById(id).value);
  const range = from !== "" && to !== "" ? { "xaxis.range": [Number(from), Number(to)] } : { "xaxis.autorange": true };
  places.forEach((place) => Plotly.relayout(place, range));
}

const template = () => templates[dark.matches ? "dark" : "light"];
Plotly.setPlotConfig({ displayModeBar: false, responsive: true });
places.forEach((place, number) => Plotly.newPlot(place, figures[number].data, { ...figures[number].layout, template: template() }));
dark.addEventListener("change", () => places.forEach((place) => Plotly.relayout(place, { template: template() })));
document.getElementById("smoothing").addEventListener("input", smooth);
for (const id of ["from", "to"]) document.getElementById(id).addEventListener("input", zoom);
document.documentElement.dataset.drawn = String(places.length);
