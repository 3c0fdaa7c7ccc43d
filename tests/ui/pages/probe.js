// Runs in the tested page after its own script: looks at it as a reader would, and writes down what it saw.
(() => {
  const seen = { errors: [] };
  addEventListener("error", (event) => seen.errors.push(event.message));
  const charts = [...document.querySelectorAll(".chart")];

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
  const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 4 || b.bottom <= a.top + 4;

  seen.isDark = luminance(ground) < 0.2;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.lowestTextContrast = Math.min(...[...document.querySelectorAll("h1, h2, p, td, th, dt, dd, small, summary, a")]
    .map((node) => contrast(getComputedStyle(node).color, ground)));
  seen.charts = Object.fromEntries(charts.map((chart) => {
    const all = [...chart.querySelectorAll("svg")];
    const pictures = all.filter((picture) => box(picture).width);
    const picture = pictures[0] ?? all[0];
    const frame = box(picture);
    const words = [...picture.querySelectorAll("text:not(.letter)")];
    const upright = words.filter((node) => !node.hasAttribute("transform"));
    return [chart.id, {
      pictures: pictures.length,
      isFolded: chart.closest("details:not([open])") !== null,
      shapes: picture.querySelectorAll("path").length,
      cells: picture.querySelectorAll("rect").length,
      width: frame.width,
      words: words.map((node) => node.textContent),
      lowestContrast: Math.min(...words.map((node) => contrast(getComputedStyle(node).fill, ground))),
      smallestWords: Math.min(...words.map((node) => parseFloat(getComputedStyle(node).fontSize) * picture.getScreenCTM().a)),
      cutWords: words.filter((node) => {
        const place = box(node);
        return place.left < frame.left - 3 || place.right > frame.right + 3
          || place.top < frame.top - 3 || place.bottom > frame.bottom + 3;
      }).map((node) => node.textContent),
      overprinted: upright.flatMap((one, index) => upright.slice(index + 1)
        .filter((other) => !apart(box(one), box(other))).map((other) => `${one.textContent} | ${other.textContent}`)),
    }];
  }));
  // Every line of text that can be seen, where its letters are: no two of them may share a place.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const lines = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, style, title, datalist, .chart") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroll = parent.closest("caption") ? null : parent.closest(".scroll");  // cells can be scrolled to; a caption stays
    for (const place of range.getClientRects()) {
      const isOut = scroll && (place.right > box(scroll).right + 1 || place.left < box(scroll).left - 1);
      if (place.width > 1 && !isOut) lines.push({ node, place, text: node.textContent.trim().slice(0, 40) });
    }
  }
  const frames = charts.filter((chart) => chart.checkVisibility()).map((chart) => ({ node: chart, place: box(chart), text: chart.id }));
  seen.lines = lines.length;
  seen.overlaps = [...lines, ...frames].flatMap((one, index, all) => all.slice(index + 1)
    .filter((other) => one.node !== other.node && !apart(one.place, other.place)).map((other) => `${one.text} | ${other.text}`));
  seen.beyond = lines.filter(({ node, place }) => place.right > document.documentElement.clientWidth + 1 || place.left < -1)
    .map(({ text }) => text);
  seen.hints = [...document.querySelectorAll("#map-0 title")].map((node) => node.textContent).join(" ");

  const input = document.querySelector(".pull input");
  const pull = (value) => {
    input.value = value;
    input.dispatchEvent(new Event("input"));
    const points = [...document.querySelectorAll("#frontier-0 svg.wide .budget-point")];
    return { words: document.querySelector(".pull output").textContent, value: input.getAttribute("aria-valuetext"),
      chosen: points.findIndex((point) => point.classList.contains("chosen")) };
  };
  seen.isPulled = Boolean(input) && input.checkVisibility();
  if (seen.isPulled) seen.pulled = [pull(input.min), pull(input.max)];

  const result = document.createElement("script");
  result.type = "application/json";
  result.id = "seen";
  result.textContent = JSON.stringify(seen).replaceAll("<", "\\u003c");
  document.body.append(result);
})();
