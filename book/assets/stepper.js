// Pages that step through a launch, each in a frame that is loaded when its button is pressed. It gets
// the theme of this page, and as much height as it says it needs. It never shrinks while one steps, or
// this page would jump.
"use strict";
(() => {
  const frames = [...document.querySelectorAll("details.stepper iframe")];
  const tell = (frame) =>
    frame.contentWindow.postMessage({ theme: document.documentElement.dataset.theme }, "*");
  const load = (frame) => {
    if (frame.closest("details").open && !frame.src) frame.src = frame.dataset.src;
  };
  for (const frame of frames) {
    frame.closest("details").addEventListener("toggle", () => load(frame));
    load(frame);
  }

  addEventListener("message", ({ data, source }) => {
    const frame = frames.find((one) => one.contentWindow === source);
    if (!frame || !data.stepper) return;
    const before = Number(frame.dataset.width) === frame.clientWidth ? frame.clientHeight : 0;
    frame.dataset.width = frame.clientWidth;
    frame.style.height = `${Math.max(before, data.stepper)}px`;
    tell(frame);
  });
  new MutationObserver(() => frames.forEach(tell)).observe(document.documentElement, {
    attributeFilter: ["data-theme"],
  });
})();
