"use strict";
// A page of a sample: curves, AUROC and TPR-95 thresholds are those of all images of a record.
const Sample = (() => {
  const { state, ranking, tauOf, array, remember } = Data, { thresholdAtTpr, paperThreshold, difference } = Stats;

  // Counts of all images, as shares of the sample's.
  function exact(record, known) {
    const counts = (key) => Array.from(array(known, key, "<i4"), (k) => (k * record.n) / record.of);
    const [tpr, paper] = array(known, "at", "<f4"), threshold = Array.from(array(known, "threshold", "<f4"));
    return { ...known, levels: { threshold, nRight: counts("right"), nWrong: counts("wrong"), paper }, groups: { tpr } };
  }

  Data.ranking = (run, record, name) => {
    const known = record.exact?.[name];
    return known && tauOf(record) === null ? remember(record, `exact ${name}`, () => exact(record, known)) : ranking(run, record, name);
  };
  Stats.thresholdAtTpr = (groups) => groups.tpr ?? thresholdAtTpr(groups);
  Stats.paperThreshold = (levels) => levels.paper ?? paperThreshold(levels);
  Stats.difference = (a, b) => a.gap ?? difference(a, b);

  // All logits of a record of which the page holds the largest; the others share the rest evenly.
  function spread({ n, classes, top, logits, rest }) {
    const packed = { top, logits, rest }, at = array(packed, "top", "<u2");
    const values = array(packed, "logits", "<f4"), others = array(packed, "rest", "<f4");
    const made = new Float32Array(n * classes), width = at.length / n;
    for (let i = 0; i < n; i++) {
      made.fill(others[i], i * classes, (i + 1) * classes);
      for (let k = i * width; k < (i + 1) * width; k++) made[i * classes + at[k]] = values[k];
    }
    return made;
  }

  // Samples of two records differ, so an image may have no probabilities without attack.
  function showImage(show) {
    show();
    const run = state.runs[state.run], record = run && Data.recordOf(run), i = state.image;
    const clean = record && run.records.find((one) => one.clean && one.n > i);
    if (!clean || array(clean, "index", "<i4")[i] === array(record, "index", "<i4")[i]) return;
    for (const row of Dom.by("probabilities").rows) if (row.cells.length > 2) row.deleteCell(2);
  }

  function prepare(data) {
    const { show } = OneImage;
    OneImage.show = () => showImage(show);
    for (const record of data.runs.flatMap((run) => [...run.records, ...(run.cal ? [run.cal] : [])])) {
      if (!record.top) continue;
      let made = null;
      Object.defineProperty(record, "_logits", { get: () => (made ??= spread(record)) });
    }
    return data;
  }

  return { prepare };
})();
