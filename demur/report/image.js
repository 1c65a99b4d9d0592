"use strict";
// One image: its pixels, its class probabilities, and why it was accepted or rejected.
const OneImage = (() => {
  const { OFF, by, el } = Dom, { CON, state, array, correct, recordOf, column, scoreOf } = Data, { fixed } = Stats;

  // Select the image nearest to a click; returns whether there is one.
  function pick(panel, event) {
    const bounds = panel.scatter.getBoundingClientRect(), { view, box } = panel;
    const px = event.clientX - bounds.left, py = event.clientY - bounds.top;
    let best = -1, least = 20 * 20;
    for (let i = 0; i < view.x.length; i++) {
      const far = (box.x(view.x[i]) - px) ** 2 + (box.y(view.y[i]) - py) ** 2;
      if (far < least) [best, least] = [i, far];
    }
    if (best >= 0) [state.run, state.image] = [panel.index, best];
    return best >= 0;
  }

  // Number of images of a record that the page has pictures of.
  function pictures(run, record) {
    if (!run.clean_images) return 0;
    return Math.min(record.n, run.clean_images.count, record.clean ? Infinity : record.attacked?.count || 0);
  }

  function isIn(group, run, record, i) {
    if (group === "all") return true;
    const [t1, t2] = state.t[state.run];
    const accepted = column(run, record, CON)[i] >= t1 && column(run, record, scoreOf(run, record))[i] >= t2;
    return group === `${accepted ? "accepted" : "rejected"}-${correct(record)[i] ? "correct" : "wrong"}`;
  }

  // Select the next or previous image of a group; returns whether there is one.
  function step(direction) {
    const run = state.runs[state.run], record = run && recordOf(run);
    if (!record) return false;
    const group = by("group").value, stored = (by("stored").checked && pictures(run, record)) || record.n;
    let i = state.image < 0 && direction < 0 ? stored : state.image;
    for (let tried = 0; tried < stored; tried++) {
      i = (i + direction + stored) % stored;
      if (isIn(group, run, record, i)) { state.image = i; return true; }
    }
    by("image-words").textContent = "There is no such image among these.";
    return false;
  }

  function readable(value, t) {
    for (let digits = 3; digits < 9; digits++) {
      if (fixed(value, digits) !== fixed(t, digits)) return [fixed(value, digits), fixed(t, digits)];
    }
    return [fixed(value, 3), fixed(t, 3)];
  }

  function condition(name, value, t) {
    if (t === OFF) return `${name} ${Number.isFinite(value) ? fixed(value, 3) : "below its gate"}, any is accepted`;
    if (!Number.isFinite(value) || !Number.isFinite(t)) return `${name} ${value} ${value >= t ? "≥" : "<"} ${t}`;
    const [left, right] = readable(value, t);
    return `${name} ${left} ${value >= t ? "≥" : "<"} ${right}`;
  }

  function showImage() {
    const run = state.runs[state.run], record = run && recordOf(run);
    const there = record && state.image >= 0 && state.image < record.n;
    by("image-body").hidden = !there;
    if (!there) return;
    const i = state.image, [t1, t2] = state.t[state.run], name = scoreOf(run, record);
    const con = column(run, record, CON)[i], other = column(run, record, name)[i];
    const accepted = con >= t1 && other >= t2, right = correct(record)[i];
    const predicted = array(record, "predicted", "<u2");
    by("image-words").textContent = `Image ${array(record, "index", "<i4")[i]}${state.runs.length > 1 ? ` of ${run.name}` : ""}, ${record.attack}: true class ${run.classes[array(record, "y", "<u2")[i]]}, ` +
      `${predicted ? `predicted ${run.classes[predicted[i]]}` : right ? "predicted correctly" : "predicted wrongly"}.`;
    by("image-why").textContent = `${accepted ? "Accepted" : "Rejected"}, ${right ? "correct" : "wrong"}: ${condition("confidence", con, t1)}; ${condition(name, other, t2)}.`;
    showPixels(run, record, i);
    showProbabilities(run, record, i);
  }

  function showPixels(run, record, i) {
    const clean = run.clean_images, attacked = record.attacked;
    const there = i < pictures(run, record);
    by("pixels").hidden = !there;
    by("no-pixels").textContent = there ? "" : record.no_images ? `No picture: ${record.no_images}.` : `No picture: this page holds those of the first ${pictures(run, record)} images.`;
    if (!there) return;
    const size = clean.shape.reduce((a, b) => a * b), before = array(clean, "pixels", "u1").subarray(i * size, (i + 1) * size);
    const after = record.clean ? before : array(attacked, "pixels", "u1").subarray(i * size, (i + 1) * size);
    let largest = 0;
    for (let p = 0; p < size; p++) largest = Math.max(largest, Math.abs(after[p] - before[p]));
    const factor = largest ? Math.max(1, Math.floor(127 / largest)) : 1;
    const change = Uint8Array.from(before, (value, p) => 128 + factor * (after[p] - value));
    [["before", before], ["after", after], ["change", change]].forEach(([id, bytes]) => Charts.image(by(id), bytes, clean.shape));
    by("change-words").textContent = largest ? `difference × ${factor}` : "no difference";
  }

  function probabilities(record, i) {
    const logits = array(record, "logits", "<f4");
    if (!logits) return null;
    const classes = logits.length / record.n, row = Array.from(logits.subarray(i * classes, (i + 1) * classes));
    const top = Math.max(...row), mass = row.map((z) => Math.exp((z - top) / (state.tau ?? 1))), sum = mass.reduce((a, b) => a + b);
    return mass.map((m) => m / sum);
  }

  function showProbabilities(run, record, i) {
    const shown = probabilities(record, i), base = record.clean ? null : run.records.find((r) => r.clean && r.n > i);
    const before = base ? probabilities(base, i) : null, y = array(record, "y", "<u2")[i];
    by("probabilities").hidden = !shown;
    by("no-probabilities").textContent = shown ? "" : `No class probabilities: ${record.no_logits}.`;
    if (!shown) return;
    const bar = (p) => el("td", {}, el("span", { class: "bar-cell", style: `--p:${fixed(100 * p, 1)}%` }, `${fixed(100 * p, 1)}%`));
    by("probabilities").replaceChildren(
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "class"), el("th", { scope: "col" }, record.clean ? "without attack" : "attacked"), ...(before ? [el("th", { scope: "col" }, "without attack")] : []))),
      el("tbody", {}, ...shown.map((p, c) => [p, c]).sort((a, b) => b[0] - a[0]).slice(0, 10).map(([p, c]) =>
        el("tr", {}, el("th", { scope: "row" }, `${run.classes[c]}${c === y ? " (true)" : ""}`), bar(p), ...(before ? [bar(before[c])] : [])))));
  }

  return { pick, step, show: showImage };
})();
