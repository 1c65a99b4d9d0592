"use strict";
// The state of the view, the data of the page, and the scores of its images at the temperature.
const Data = (() => {
  const CON = "Con", RCON = "R-Con", { OFF } = Dom;
  const WIDE = { "<f4": Float32Array, "<i4": Int32Array, "<u2": Uint16Array };
  const state = { attack: "", score: "", tau: null, t: [], run: 0, image: -1, runs: [] };

  function decode(text, type) {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return type === "u1" ? bytes : new WIDE[type](bytes.buffer);
  }

  // Arrays are decoded when they are first needed.
  function array(record, key, type) {
    const made = `_${key}`;
    if (!(made in record)) record[made] = record[key] === null ? null : decode(record[key], type);
    return record[made];
  }

  function remember(record, key, make) {
    const cache = (record._cache ??= new Map());
    if (!cache.has(key)) {
      if (cache.size > 120) cache.clear();
      cache.set(key, make());
    }
    return cache.get(key);
  }

  const correct = (record) => array(record, "correct", "u1");
  const recordOf = (run) => run.records.find((record) => record.attack === state.attack);
  const tauOf = (record) => (record.logits === null ? null : state.tau);

  // Values of a score for every image, at the temperature; null if the record lacks it.
  function column(run, record, name) {
    const spec = run.scores[name], tau = tauOf(record);
    if (!spec || record.scores[name] === undefined) return null;
    if (tau === null || spec.kind === "fixed") {
      return remember(record, name, () => decode(record.scores[name], "<f4"));
    }
    return remember(record, `${name}|${tau}`, () => {
      if (spec.kind === "rcon") return Stats.rectified(column(run, record, CON), array(record, "a", "<f4"), OFF);
      if (spec.kind === "coupled") return Stats.rectified(column(run, record, CON), array(record, "a", "<f4"), spec.gate);
      const logits = array(record, "logits", "<f4"), predicted = array(record, "predicted", "<u2");
      const label = spec.kind === "tcon" ? array(record, "y", "<u2") : predicted;
      return Stats.probabilityAt(tau, label, { n: record.n, classes: logits.length / record.n, logits, predicted });
    });
  }

  // The chosen score, or confidence in a run or record without it.
  const scoreOf = (run, record) => (column(run, record, state.score) ? state.score : CON);

  const keyOf = (record, name) => `${name}|${tauOf(record)}`;
  const ranking = (run, record, name) =>
    remember(record, `rank ${keyOf(record, name)}`, () => Stats.ranking(column(run, record, name), correct(record)));
  const sorted = (run, record, name) =>
    remember(record, `sorted ${keyOf(record, name)}`, () => Float64Array.from(column(run, record, name)).sort());

  // Place of each image on an axis from 0 to 1: the score itself, or the share of lower scores.
  function places(run, record, name) {
    const values = column(run, record, name);
    if (run.scores[name].unit) return values;
    return remember(record, `place ${keyOf(record, name)}`, () => {
      const ranks = sorted(run, record, name);
      return Float64Array.from(values, (v) => Stats.lowerBound(ranks, v, false) / record.n);
    });
  }

  function placeOf(run, record, name, t) {
    if (t === OFF) return 0;
    return run.scores[name].unit ? t : Stats.lowerBound(sorted(run, record, name), t, false) / record.n;
  }

  function atPlace(run, record, name, place) {
    if (place <= 0) return OFF;
    if (run.scores[name].unit) return place;
    return sorted(run, record, name)[Math.min(record.n - 1, Math.round(place * record.n))];
  }

  // Median xi and the images inside Theorem 1 at their own xi; null without R-Con = con * A.
  function theory(run, record) {
    const spec = run.scores[RCON], tau = tauOf(record);
    if (!spec || spec.kind !== "rcon" || (tau === null && spec.tau !== run.scores[CON].tau)) return null;
    const names = [CON, RCON, "T-Con (oracle)"], columns = names.map((name) => column(run, record, name));
    if (columns.some((values) => values === null)) return null;
    return remember(record, `theory ${tau}`, () => {
      const xi = Stats.xi(...columns);
      let inside = 0;
      for (let i = 0; i < xi.length; i++) inside += columns[0][i] * (2 - xi[i]) > 1 + 1e-12 ? 1 : 0;
      return { xi: Stats.median(xi), inside };
    });
  }

  return {
    CON, RCON, state, array, remember, correct, recordOf, tauOf, column, scoreOf, keyOf, ranking,
    places, placeOf, atPlace, theory,
  };
})();
