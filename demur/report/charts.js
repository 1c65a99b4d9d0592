"use strict";
// Drawings on canvas: scatter with the threshold, curves, images and the training curve.
const Charts = (() => {
  const MARGIN = { left: 46, right: 12, top: 12, bottom: 40 };
  const NAMES = ["ink", "soft", "line", "card", "wash", "accent", "right", "wrong"];

  function theme() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  // Size a canvas to its box in device pixels; the context draws in CSS pixels.
  function prepare(canvas, aspect) {
    const width = Math.max(220, Math.round(canvas.parentElement.clientWidth)), height = Math.round(width * aspect);
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    return { context, width, height, scale };
  }

  // Maps data in a box to pixels.
  function frame({ width, height }, [x0, x1], [y0, y1]) {
    const { left, right, top, bottom } = MARGIN, w = width - left - right, h = height - top - bottom;
    return {
      left, top, w, h,
      x: (v) => left + ((v - x0) / (x1 - x0)) * w,
      y: (v) => top + h - ((v - y0) / (y1 - y0)) * h,
    };
  }

  function axes(context, box, colours, { xTicks, yTicks, xLabel, yLabel }) {
    context.strokeStyle = colours.line;
    context.fillStyle = colours.soft;
    context.lineWidth = 1;
    context.strokeRect(box.left + 0.5, box.top + 0.5, box.w, box.h);
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const [value, text] of xTicks) context.fillText(text, box.x(value), box.top + box.h + 5);
    context.fillStyle = colours.ink;
    context.fillText(xLabel, box.left + box.w / 2, box.top + box.h + 22);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = colours.soft;
    for (const [value, text] of yTicks) context.fillText(text, box.left - 5, box.y(value));
    context.save();
    context.translate(11, box.top + box.h / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillStyle = colours.ink;
    context.fillText(yLabel, 0, 0);
    context.restore();
  }

  const shares = [0, 0.2, 0.4, 0.6, 0.8, 1].map((v) => [v, v === 0 || v === 1 ? String(v) : v.toFixed(1)]);
  const percents = [0, 0.2, 0.4, 0.6, 0.8, 1].map((v) => [v, String(Math.round(100 * v))]);

  // Offsets and opacities of the pixels of a mark: a dot or a cross.
  function marker(cross, scale) {
    const size = Math.ceil(8 * scale), sprite = document.createElement("canvas");
    sprite.width = sprite.height = size;
    const context = sprite.getContext("2d");
    context.scale(scale, scale);
    context.lineWidth = 1.1;
    context.beginPath();
    if (cross) {
      context.moveTo(1.8, 1.8); context.lineTo(6.2, 6.2);
      context.moveTo(6.2, 1.8); context.lineTo(1.8, 6.2);
      context.stroke();
    } else {
      context.arc(4, 4, 2, 0, 7);
      context.fill();
    }
    const { data } = context.getImageData(0, 0, size, size), dx = [], dy = [], strength = [];
    for (let p = 0; p < size * size; p++) {
      if (!data[4 * p + 3]) continue;
      dx.push((p % size) - (size >> 1));
      dy.push(Math.floor(p / size) - (size >> 1));
      strength.push(data[4 * p + 3] / 255);
    }
    return { dx: Int32Array.from(dx), dy: Int32Array.from(dy), strength: Float64Array.from(strength) };
  }

  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

  // Points alone; redrawn only where data, size or colours changed. Pixels are blended here, since
  // ten thousand drawImage calls take a tenth of a second without a GPU.
  function pointLayer(layer, view, box, size, colours) {
    const key = [view.key, size.width, size.scale, colours.right, colours.card].join("|");
    if (layer.key === key) return layer.canvas;
    const width = Math.round(size.width * size.scale), height = Math.round(size.height * size.scale), n = view.correct.length;
    const marks = [marker(true, size.scale), marker(false, size.scale)], inks = [rgb(colours.wrong), rgb(colours.right)];
    const sums = new Float32Array(4 * width * height), opacity = n > 3000 ? 0.35 : 0.75;
    for (let i = 0; i < n; i++) {
      const x = Math.round(box.x(view.x[i]) * size.scale), y = Math.round(box.y(view.y[i]) * size.scale);
      const { dx, dy, strength } = marks[view.correct[i]], [red, green, blue] = inks[view.correct[i]];
      for (let k = 0; k < dx.length; k++) {
        const px = x + dx[k], py = y + dy[k];
        if (px < 0 || px >= width || py < 0 || py >= height) continue;
        const p = 4 * (py * width + px), a = strength[k] * opacity, rest = 1 - a;
        sums[p] = sums[p] * rest + red * a;
        sums[p + 1] = sums[p + 1] * rest + green * a;
        sums[p + 2] = sums[p + 2] * rest + blue * a;
        sums[p + 3] = sums[p + 3] * rest + a;
      }
    }
    const canvas = layer.canvas || document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    for (let p = 0; p < sums.length; p += 4) {
      const a = sums[p + 3];
      if (a === 0) continue;
      for (let c = 0; c < 3; c++) image.data[p + c] = sums[p + c] / a;
      image.data[p + 3] = 255 * a;
    }
    context.putImageData(image, 0, 0);
    layer.key = key;
    layer.canvas = canvas;
    return canvas;
  }

  // view: x, y, correct, key, xLabel, yLabel, at (thresholds on both axes), region, selected.
  function scatter(canvas, layer, view) {
    const size = prepare(canvas, 0.86), { context } = size, colours = theme();
    const box = frame(size, [0, 1.02], [0, 1.02]);
    if (view.bounded) shadeImpossible(context, box, colours);
    const [tx, ty] = view.at.map((t) => Math.min(1.02, Math.max(0, t)));
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.13;
    context.fillRect(box.x(tx), box.top, box.left + box.w - box.x(tx), box.y(ty) - box.top);
    context.globalAlpha = 1;
    const points = pointLayer(layer, view, box, size, colours);
    context.drawImage(points, 0, 0, size.width, size.height);
    axes(context, box, colours, { xTicks: shares, yTicks: shares, xLabel: view.xLabel, yLabel: view.yLabel });
    rule(context, [[box.x(tx), box.top], [box.x(tx), box.y(ty)], [box.left + box.w, box.y(ty)]], colours.accent, []);
    if (view.region) drawRegion(context, box, colours, view.region);
    if (view.selected >= 0) ring(context, box.x(view.x[view.selected]), box.y(view.y[view.selected]), colours.ink);
    return box;
  }

  function shadeImpossible(context, box, colours) {
    context.fillStyle = colours.wash;
    context.beginPath();
    context.moveTo(box.x(0), box.y(0));
    context.lineTo(box.x(0), box.top);
    context.lineTo(box.x(1.02), box.top);
    context.lineTo(box.x(1.02), box.y(1.02));
    context.fill();
    context.fillStyle = colours.soft;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText("R-Con is never above con", box.x(0.02), box.top + 6);
  }

  function drawRegion(context, box, colours, { con, text }) {
    const corner = [[box.x(con), box.top], [box.x(con), box.y(0)]];
    rule(context, corner, colours.ink, [2, 3]);
    rule(context, [[box.x(con), box.y(0.5)], [box.left + box.w, box.y(0.5)]], colours.ink, [2, 3]);
    const wide = context.measureText(text).width;
    context.fillStyle = colours.card;
    context.fillRect(box.left + box.w - wide - 8, box.y(0) - 20, wide + 7, 18);
    context.fillStyle = colours.ink;
    context.textAlign = "right";
    context.textBaseline = "bottom";
    context.fillText(text, box.left + box.w - 4, box.y(0) - 4);
  }

  function rule(context, points, colour, dash, width = 1.6) {
    context.beginPath();
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.setLineDash(dash);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
    context.setLineDash([]);
  }

  function ring(context, x, y, colour) {
    context.beginPath();
    context.arc(x, y, 7, 0, 7);
    context.strokeStyle = colour;
    context.lineWidth = 2.2;
    context.stroke();
  }

  // curves: [{name, x, y, dashed}], each ascending in x; point: [x, y] or null.
  function curves(canvas, { curves: lines, point, xLabel, yLabel, yMax, diagonal }) {
    const size = prepare(canvas, 0.78), { context } = size, colours = theme();
    const box = frame(size, [0, 1], [0, yMax]);
    const yTicks = yMax === 1 ? percents : niceTicks(yMax);
    axes(context, box, colours, { xTicks: percents, yTicks, xLabel, yLabel });
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.w, box.h);
    context.clip();
    if (diagonal) rule(context, [[box.x(0), box.y(0)], [box.x(1), box.y(1)]], colours.line, []);
    for (const { x, y, dashed } of lines) {
      const points = thinned(x, y, box);
      rule(context, points, dashed ? colours.soft : colours.accent, dashed ? [5, 3] : [], 2);
    }
    context.restore();
    legend(context, box, colours, lines, diagonal);
    if (point) {
      context.beginPath();
      context.arc(box.x(point[0]), box.y(Math.min(point[1], yMax)), 6, 0, 7);
      context.fillStyle = colours.wrong;
      context.strokeStyle = colours.card;
      context.lineWidth = 2;
      context.fill();
      context.stroke();
    }
  }

  // Points at least half a pixel apart.
  function thinned(x, y, box) {
    const points = [];
    let lastX = -9, lastY = -9;
    for (let i = 0; i < x.length; i++) {
      const px = box.x(x[i]), py = box.y(y[i]);
      if (i === x.length - 1 || Math.abs(px - lastX) + Math.abs(py - lastY) > 0.5) points.push([px, py]), ([lastX, lastY] = [px, py]);
    }
    return points;
  }

  function legend(context, box, colours, lines, low) {
    context.textAlign = "left";
    context.textBaseline = "middle";
    lines.forEach(({ name, dashed }, i) => {
      const y = low ? box.top + box.h - 14 - 17 * (lines.length - 1 - i) : box.top + 14 + 17 * i;
      const x = low ? box.left + box.w - 12 - Math.max(...lines.map((l) => context.measureText(l.name).width)) - 32 : box.left + 10;
      rule(context, [[x, y], [x + 26, y]], dashed ? colours.soft : colours.accent, dashed ? [5, 3] : [], 2);
      context.fillStyle = colours.ink;
      context.fillText(name, x + 32, y);
    });
  }

  function niceTicks(most) {
    const step = most > 0.5 ? 0.2 : most > 0.2 ? 0.1 : most > 0.08 ? 0.02 : 0.01, ticks = [];
    for (let v = 0; v <= most + 1e-9; v += step) ticks.push([v, String(Math.round(100 * v))]);
    return ticks;
  }

  // One image of C, H, W bytes, enlarged without smoothing by CSS.
  function image(canvas, bytes, [channels, height, width]) {
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d"), data = context.createImageData(width, height);
    for (let p = 0; p < width * height; p++) {
      for (let c = 0; c < 3; c++) data.data[4 * p + c] = bytes[(channels === 1 ? 0 : c) * width * height + p];
      data.data[4 * p + 3] = 255;
    }
    context.putImageData(data, 0, 0);
  }

  // Loss and accuracies by epoch, each in its own scale.
  function training(canvas, lines, epochs) {
    const size = prepare(canvas, 0.34), { context } = size, colours = theme();
    const losses = lines.map((line) => line.loss), most = Math.max(...losses, 1e-9);
    const box = frame(size, [0, epochs], [0, 1.05]);
    const step = Math.max(1, Math.ceil(epochs / 8)), xTicks = [];
    for (let e = 0; e <= epochs; e += step) xTicks.push([e, String(e)]);
    axes(context, box, colours, { xTicks, yTicks: shares, xLabel: "epoch", yLabel: "share" });
    const series = [
      ["val_clean", colours.right, []],
      ["val_robust", colours.wrong, []],
    ].filter(([key]) => lines.some((line) => line[key] != null));
    [[null, colours.soft, [5, 3]], ...series].forEach(([key, colour, dash]) => {
      const points = lines.map((line) => [box.x(line.epoch), box.y(key ? line[key] : line.loss / most)]);
      rule(context, points, colour, dash, 2);
      if (points.length === 1) ring(context, ...points[0], colour);
    });
  }

  return { scatter, curves, image, training };
})();
