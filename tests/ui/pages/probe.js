// Runs in the tested page after its own script: waits for the charts, looks at them as a reader would, writes down what it saw.
(async () => {
  const seen = { errors: [] };
  addEventListener("error", (event) => seen.errors.push(event.message));
  const charts = [...document.querySelectorAll(".chart")];
  while (charts.some((chart) => !chart.dataset.drawn)) await new Promise((done) => setTimeout(done, 20));

  const channel = (value) => { const c = value / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = getComputedStyle(document.documentElement).backgroundColor;
  const box = (node) => node.getBoundingClientRect();
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;

  seen.isDark = luminance(ground) < 0.2;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.lowestTextContrast = Math.min(...[...document.querySelectorAll("h1, h2, p, td, th, dt, dd, small, summary")]
    .map((node) => contrast(getComputedStyle(node).color, ground)));
  seen.charts = Object.fromEntries(charts.map((chart) => {
    const words = [...chart.querySelectorAll(
      ".xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .annotation-text, .textpoint text")]
      .filter((node) => node.textContent);
    const frame = box(chart);
    const legend = chart.querySelector(".legend");
    const title = chart.querySelector(".xtitle");
    return [chart.id, {
      lines: chart.querySelectorAll(".scatterlayer .trace").length,
      areas: [...chart.querySelectorAll(".scatterlayer .js-fill")].filter((n) => n.getAttribute("d")).length,
      boxes: chart.querySelectorAll(".boxlayer .trace path.box").length,
      bars: chart.querySelectorAll(".barlayer .point path").length,
      grids: chart.querySelectorAll(".heatmaplayer image").length,
      width: frame.width,
      words: words.map((node) => node.textContent),
      lowestContrast: Math.min(...words.map((node) => contrast(getComputedStyle(node).fill, ground))),
      smallestWords: Math.min(...words.map((node) => parseFloat(getComputedStyle(node).fontSize))),
      cutWords: words.filter((node) => {
        const place = box(node);
        return place.left < frame.left - 1 || place.right > frame.right + 1
          || place.top < frame.top - 1 || place.bottom > frame.bottom + 1;
      }).map((node) => node.textContent),
      isLegendOnTitle: Boolean(legend && title && !apart(box(legend), box(title))),
    }];
  }));

  const settled = () => new Promise((done) => setTimeout(done, 300));
  Plotly.Fx.hover("map-0", { xval: 1, yval: 0 });
  await settled();
  seen.hover = [...document.querySelectorAll("#map-0 .hovertext text")].map((node) => node.textContent).join(" ");
  Plotly.Fx.unhover("map-0");

  const paper = () => ({
    closed: document.querySelectorAll("details:not([open])").length,
    widest: Math.max(...charts.map((chart) => chart.querySelector(".main-svg").getBoundingClientRect().width)),
  });
  dispatchEvent(new Event("beforeprint"));
  await settled();
  seen.printed = paper();
  dispatchEvent(new Event("afterprint"));
  await settled();
  seen.restored = paper();

  const result = document.createElement("script");
  result.type = "application/json";
  result.id = "seen";
  result.textContent = JSON.stringify(seen).replaceAll("<", "\\u003c");
  document.body.append(result);
})();
