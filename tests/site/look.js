// What is wrong with the page as it is shown: wider than it may be, or hard to read. Text has at least
// the contrast of WCAG 2.2, level AA, with what is behind it, and no text of a drawing lies on another.
() => {
  const article = document.querySelector("article");
  const hidden = { visibilityProperty: true, opacityProperty: true };
  const all = (selector) =>
    [...article.querySelectorAll(selector)].filter((e) => e.checkVisibility(hidden));
  const said = (e) => `<${e.tagName.toLowerCase()}> ${e.textContent.trim().replace(/\s+/g, " ").slice(0, 60)}`;
  const tooWide = (e) => e.scrollWidth > e.clientWidth + 1;

  const rgba = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return colour.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const luminance = (colour) => colour.slice(0, 3).map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * x, 0);
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };

  const grounds = new Map();
  function groundOf(element) { // the colour behind the text of an element of HTML
    if (!element) return [255, 255, 255];
    if (!grounds.has(element)) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      grounds.set(element, colour[3] === 1 ? colour : over(colour, groundOf(element.parentElement)));
    }
    return grounds.get(element);
  }

  function fillOf(shape) { // of a shape, that of a pattern's ground
    const style = getComputedStyle(shape);
    const pattern = style.fill.match(/url\("?#([^")]+)/);
    const ground = pattern && document.getElementById(pattern[1])?.querySelector("rect");
    const fill = pattern ? (ground ? getComputedStyle(ground).fill : "none") : style.fill;
    if (fill === "none") return null;
    const [r, g, b, a] = rgba(fill);
    return [r, g, b, a * style.fillOpacity * style.opacity];
  }

  // What lies behind a text of a drawing: a halo of its own, or else the shapes drawn before it.
  function groundIn(text, shapes, page) {
    const style = getComputedStyle(text);
    if (style.paintOrder.startsWith("stroke") && style.stroke !== "none") return rgba(style.stroke);
    const box = text.getBoundingClientRect();
    const at = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
    let ground = page;
    for (const [shape, outer] of shapes) {
      if (outer.left > at.x || outer.right < at.x || outer.top > at.y || outer.bottom < at.y) continue;
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
      if (!shape.isPointInFill(at.matrixTransform(shape.getScreenCTM().inverse()))) continue;
      const fill = fillOf(shape);
      if (fill) ground = over(fill, ground);
    }
    return ground;
  }

  function faint(element, colour, ground) {
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const found = contrast(over(colour, ground), ground);
    return found < (large ? 3 : 4.5) ? [`${said(element)}: ${found.toFixed(2)}`] : [];
  }

  const texts = all("*").filter((e) => !e.closest("svg, mjx-container, .headerlink, button, iframe") &&
    [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const contrasts = texts.flatMap((e) => faint(e, rgba(getComputedStyle(e).color), groundOf(e)));
  for (const svg of all("svg").filter((e) => !e.parentElement.closest("svg, mjx-container"))) {
    const page = groundOf(svg.parentElement);
    const shapes = [...svg.querySelectorAll("rect, path, circle, polygon")]
      .filter((e) => !e.closest("defs, clipPath, pattern"))
      .map((e) => [e, e.getBoundingClientRect()]);
    for (const text of svg.querySelectorAll("text")) {
      if (!text.textContent.trim() || !text.checkVisibility(hidden)) continue;
      const style = getComputedStyle(text), [r, g, b, a] = rgba(style.fill);
      const colour = [r, g, b, a * style.fillOpacity * style.opacity];
      contrasts.push(...faint(text, colour, groundIn(text, shapes, page)));
    }
  }

  // Texts of a drawing that cover one another by more than the room that a line has around its letters.
  function crossing(svg) {
    const boxes = [...svg.querySelectorAll("text")]
      .filter((e) => e.textContent.trim() && e.checkVisibility(hidden))
      .map((e) => [e, e.getBoundingClientRect()]);
    const frame = svg.getBoundingClientRect();
    const beyond = (a) => Math.max(frame.left - a.left, a.right - frame.right, frame.top - a.top,
      a.bottom - frame.bottom) > Math.max(2, 0.3 * Math.min(a.width, a.height));
    const cut = boxes.filter(([, a]) => beyond(a)).map(([e]) => `${said(e)} is cut`);
    return cut.concat(boxes.flatMap(([one, a], i) => boxes.slice(i + 1).flatMap(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const line = Math.min(a.width, a.height, b.width, b.height);
      return Math.min(across, down) > Math.max(2, 0.3 * line) ? [`${said(one)} on ${said(other)}`] : [];
    })));
  }

  // Formulas in lines of their own that are hard to read, or that are cut.
  const squeezed = (box) => {
    const svg = box.querySelector("svg.formula");
    const whole = parseFloat(svg.style.width) * parseFloat(getComputedStyle(svg).fontSize);
    const cut = tooWide(box) && getComputedStyle(box).overflowX !== "auto";
    return cut || svg.getBoundingClientRect().width < 0.84 * whole;
  };
  const shaded = (e) => getComputedStyle(e).backgroundAttachment.includes("local");

  // In cards a cell without a value says no name.
  const nameless = (e) => e.textContent.trim() || e.querySelector("svg, img") ||
    getComputedStyle(e, "::before").content === "none";

  const within = (e) => (e === article ? [] : [e, ...within(e.parentElement)]);
  return {
    page: document.documentElement.scrollWidth > innerWidth ? [document.documentElement.scrollWidth] : [],
    tables: all("table").filter((e) => within(e.parentElement).some(tooWide)).map(said),
    exhibits: all("table.exhibit, table.cards")
      .filter((e) => within(e.parentElement).some(tooWide)).map(said),
    code: all("pre").filter(tooWide).map(said),
    contrasts,
    broken: all("table:not(.cards) td:first-child code .pre").filter((e) => e.getClientRects().length > 1).map(said),
    formulas: all("div.math").filter(squeezed).map((e) => said(e)),
    unshaded: all("div.highlight pre, div.math").filter((e) => tooWide(e) && !shaded(e)).map(said),
    cards: all("table.cards td").filter((e) => !nameless(e)).map(said),
    texts: all("svg").filter((e) => !e.parentElement.closest("svg, mjx-container")).flatMap(crossing),
  };
}
