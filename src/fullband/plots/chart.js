for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), cursor = svg.querySelector(".cursor"), tip = svg.parentNode.querySelector(".tip");
  const nearest = (xs, x) => xs.reduce((best, value, i) => Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best, 0);
  const on = chart.x.log ? Math.log : x => x, off = chart.x.log ? Math.exp : x => x, low = on(chart.x.low), high = on(chart.x.high);
  const scaled = x => (on(x) - low) / (high - low), unscaled = share => off(low + share * (high - low));
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const share = ((event.clientX - box.left) / scale - chart.left) / chart.width;
    if (share < -0.03 || share > 1.03) return hide();
    const grid = chart.grid, asked = unscaled(share), x = grid[nearest(grid, asked)];
    const at = chart.left + scaled(x) * chart.width;
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
    tip.replaceChildren();
    const add = (left, right, bold) => {
      const row = document.createElement("div"), name = document.createElement(bold ? "b" : "span"), value = document.createElement("span");
      name.textContent = left; value.textContent = right; row.append(name, value); tip.append(row);
    };
    add(chart.x.prefix + x.toFixed(chart.x.digits) + chart.x.unit, "", true);
    for (const line of chart.lines) {
      const i = nearest(line.x, x);
      if (Math.abs(scaled(line.x[i]) - scaled(x)) < 1 / 40) add(line.label, chart.y.log ? line.y[i].toPrecision(2) : line.y[i].toFixed(chart.y.digits));
    }
    tip.hidden = false;
    const left = at * scale + 14, room = box.width - tip.offsetWidth;
    tip.style.left = (left > room ? Math.max(0, at * scale - tip.offsetWidth - 14) : left) + "px";
  });
  svg.addEventListener("pointerleave", hide);
}
