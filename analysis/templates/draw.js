"use strict";
// Draws each figure into its place once that place has a width: a figure inside a closed <details> waits until it opens.
(() => {
  const config = JSON.parse(document.getElementById("plot-config").textContent);
  const draw = (place) => {
    if (place.dataset.drawn || !place.clientWidth) return;
    place.dataset.drawn = "yes";
    const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    place.style.height = `${figure.layout.height}px`;
    Plotly.newPlot(place, figure.data, figure.layout, config);
  };
  const drawAll = (root) => root.querySelectorAll(".plot").forEach(draw);
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", () => drawAll(fold)));
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    drawAll(document);
  });
  drawAll(document);
})();
