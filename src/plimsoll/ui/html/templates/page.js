"use strict";
(() => {
  const charts = [...document.querySelectorAll("script[data-chart]")].map((data) => {
    const place = document.getElementById(data.dataset.chart);
    const { data: traces, layout } = JSON.parse(data.textContent);
    const settings = { responsive: true, displayModeBar: false };
    Plotly.newPlot(place, traces, layout, settings).then(() => { place.dataset.drawn = "true"; });
    return place;
  });

  // On paper: everything open, and the charts as wide as a page.
  const PAGE_PIXELS = 680;
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = true; });
    charts.forEach((chart) => Plotly.relayout(chart, { width: PAGE_PIXELS }));
  });
  addEventListener("afterprint", () => {
    folded.forEach((details) => { details.open = false; });
    charts.forEach((chart) => Plotly.relayout(chart, { width: null, autosize: true }));
  });
})();
