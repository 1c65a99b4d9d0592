"use strict";
// Counts, intervals and curves; the same formulas and rounding as demur/metrics.
const Stats = (() => {
  const Z = 1.9599639845400536; // normal quantile of 0.975
  const SMALL_GROUP = 300;

  // Scores of correct and of wrong predictions, each ascending.
  function groups(score, correct) {
    let right = 0;
    for (let i = 0; i < correct.length; i++) right += correct[i];
    const made = { right: new Float64Array(right), wrong: new Float64Array(correct.length - right) };
    for (let i = 0, r = 0, w = 0; i < correct.length; i++) {
      if (correct[i]) made.right[r++] = score[i];
      else made.wrong[w++] = score[i];
    }
    made.right.sort();
    made.wrong.sort();
    return made;
  }

  // Distinct scores in descending order, with the correct and wrong counts at or above each.
  function levels({ right, wrong }) {
    const threshold = [], nRight = [], nWrong = [];
    let i = right.length - 1, j = wrong.length - 1;
    while (i >= 0 || j >= 0) {
      const t = Math.max(i >= 0 ? right[i] : -Infinity, j >= 0 ? wrong[j] : -Infinity);
      while (i >= 0 && right[i] >= t) i--;
      while (j >= 0 && wrong[j] >= t) j--;
      threshold.push(t);
      nRight.push(right.length - 1 - i);
      nWrong.push(wrong.length - 1 - j);
    }
    return { threshold, nRight, nWrong };
  }

  function auroc({ nRight, nWrong }) {
    const last = nRight.length - 1, pairs = nRight[last] * nWrong[last];
    if (pairs === 0) return 0.5;
    let halves = 0;
    for (let k = 0; k <= last; k++) {
      const right = nRight[k] - (k ? nRight[k - 1] : 0), wrong = nWrong[k] - (k ? nWrong[k - 1] : 0);
      halves += right * (2 * (nWrong[last] - nWrong[k]) + wrong);
    }
    return halves / (2 * pairs);
  }

  function wilson(k, n) {
    if (n === 0) return [0, 1];
    const centre = (k + (Z * Z) / 2) / (n + Z * Z);
    const half = (Z / (n + Z * Z)) * Math.sqrt((k * (n - k)) / n + (Z * Z) / 4);
    return [k > 0 ? centre - half : 0, k < n ? centre + half : 1];
  }

  // Largest threshold that at least 95% of the correct predictions reach.
  function thresholdAtTpr({ right }) {
    return right.length ? right[right.length - Math.ceil((19 * right.length) / 20)] : Infinity;
  }

  // Threshold t whose rule score >= t accepts what the paper's TPR-95 rule, score > level, accepts.
  function paperThreshold({ threshold, nRight, nWrong }) {
    const last = nRight.length - 1, total = nRight[last];
    if (total === 0) return Infinity;
    let best = -1, least = 0.95;
    for (let k = 0; k <= last; k++) {
      const corner = k === 0 || k === last ||
        nRight[k + 1] - 2 * nRight[k] + nRight[k - 1] !== 0 ||
        nWrong[k + 1] - 2 * nWrong[k] + nWrong[k - 1] !== 0;
      const distance = Math.abs(nRight[k] / total - 0.95);
      if (corner && distance < least) [best, least] = [k, distance];
    }
    return best <= 0 ? Infinity : threshold[best - 1];
  }

  // Smallest threshold with at most this many accepted errors; more errors need a lower one.
  function thresholdAtErrors({ threshold, nWrong }, most) {
    let k = nWrong.length - 1;
    while (k >= 0 && nWrong[k] > most) k--;
    return k < 0 ? Infinity : k === nWrong.length - 1 ? -Infinity : threshold[k];
  }

  function lowerBound(sorted, value, orEqual) {
    let lo = 0, hi = sorted.length;
    while (lo < hi) {
      const mid = (lo + hi) >> 1;
      if (sorted[mid] < value || (orEqual && sorted[mid] === value)) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  }

  // DeLong's placements of each image, in image order: correct ones, then wrong ones.
  function placements(score, correct, { right, wrong }) {
    const made = [new Float64Array(right.length), new Float64Array(wrong.length)];
    for (let i = 0, r = 0, w = 0; i < correct.length; i++) {
      const others = correct[i] ? wrong : right;
      const below = lowerBound(others, score[i], false);
      const upTo = others[below] === score[i] ? lowerBound(others, score[i], true) : below;
      const share = (below + upTo) / (2 * others.length);
      if (correct[i]) made[0][r++] = share;
      else made[1][w++] = 1 - share;
    }
    return made;
  }

  function mean(xs) {
    let sum = 0;
    for (let i = 0; i < xs.length; i++) sum += xs[i];
    return sum / xs.length;
  }

  function covariance(xs, ys) {
    const mx = mean(xs), my = mean(ys);
    let sum = 0;
    for (let i = 0; i < xs.length; i++) sum += (xs[i] - mx) * (ys[i] - my);
    return sum / (xs.length - 1);
  }

  const variance = ([a, b]) => covariance(a, a) / a.length + covariance(b, b) / b.length;

  function delong(area, spread2) {
    const spread = Math.sqrt(spread2) / (area * (1 - area)), odds = Math.log(area / (1 - area));
    return [-1, 1].map((sign) => 1 / (1 + Math.exp(-odds - sign * Z * spread)));
  }

  function newcombe(area, nRight, nWrong) {
    const half = (nRight + nWrong) / 2 - 1;
    const excess = (t) => {
      const near = (1 - t) / (2 - t) + t / (1 + t);
      const spread = Math.sqrt((t * (1 - t) * (1 + half * near)) / (nRight * nWrong));
      return Math.abs(area - t) - Z * spread;
    };
    return [0, 1].map((end) => {
      if (excess(end) <= 0) return end;
      let outer = end, inner = area;
      for (let k = 0; k < 60; k++) {
        const middle = (outer + inner) / 2;
        if (excess(middle) > 0) outer = middle;
        else inner = middle;
      }
      return outer;
    });
  }

  // AUROC of a score with its interval, and what a comparison with another score needs.
  function ranking(score, correct) {
    const parts = groups(score, correct), steps = levels(parts), area = auroc(steps);
    const nRight = parts.right.length, nWrong = parts.wrong.length, least = Math.min(nRight, nWrong);
    const made = { groups: parts, levels: steps, auroc: area, interval: [0, 1], placements: null };
    if (least === 0) return made;
    if (least >= 2) made.placements = placements(score, correct, parts);
    const perfect = area === 0 || area === 1;
    if (least === 1 || perfect) return { ...made, interval: newcombe(area, nRight, nWrong) };
    const one = delong(area, variance(made.placements));
    if (least >= SMALL_GROUP) return { ...made, interval: one };
    const other = newcombe(area, nRight, nWrong);
    return { ...made, interval: [Math.min(one[0], other[0]), Math.max(one[1], other[1])] };
  }

  // AUROC(a) - AUROC(b) on the same images: value, low, high.
  function difference(a, b) {
    const gap = a.auroc - b.auroc;
    if (!a.placements || !b.placements) return [gap, -1, 1];
    const same = a.placements.every((xs, k) => xs.every((x, i) => x === b.placements[k][i]));
    if (same) return [0, 0, 0];
    const spread = Math.sqrt(variance(a.placements) * variance(b.placements));
    const shared = a.placements.reduce((sum, xs, k) => sum + covariance(xs, b.placements[k]) / xs.length, 0);
    const correlation = spread > 0 ? Math.max(-1, Math.min(1, shared / spread)) : 0;
    const reach = (one, other) => {
      const below = one.auroc - one.interval[0], above = other.interval[1] - other.auroc;
      return Math.sqrt(Math.max(0, below ** 2 + above ** 2 - 2 * correlation * below * above));
    };
    return [gap, Math.max(-1, gap - reach(a, b)), Math.min(1, gap + reach(b, a))];
  }

  // Counts of accepting where both scores reach their thresholds.
  function counts(first, t1, second, t2, correct) {
    let acceptedRight = 0, acceptedWrong = 0, right = 0;
    for (let i = 0; i < correct.length; i++) {
      right += correct[i];
      if (first[i] >= t1 && second[i] >= t2) {
        if (correct[i]) acceptedRight++;
        else acceptedWrong++;
      }
    }
    return { n: correct.length, right, acceptedRight, acceptedWrong };
  }

  // con at a temperature, or T-Con with the labels instead of the predictions; from logits.
  function probabilityAt(tau, label, { n, classes, logits, predicted }) {
    const made = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      const row = i * classes, top = logits[row + predicted[i]];
      let sum = 0;
      for (let c = 0; c < classes; c++) sum += Math.exp((logits[row + c] - top) / tau);
      made[i] = Math.exp((logits[row + label[i]] - top) / tau) / sum;
    }
    return made;
  }

  // R-Con = con * A from the logit of A; -Infinity where con is below the gate.
  function rectified(con, a, gate) {
    return con.map((p, i) => (p < gate ? -Infinity : p / (1 + Math.exp(-a[i]))));
  }

  // Smallest xi of Definition 1 for each image, from con, R-Con = con * A and T-Con = con * A*.
  function xi(con, rcon, tcon) {
    const made = new Float64Array(con.length);
    for (let i = 0; i < con.length; i++) {
      const a = rcon[i] / con[i], star = tcon[i] / con[i];
      const high = Math.max(a, star), ratio = high > 0 ? Math.min(a, star) / high : 1;
      made[i] = Math.min(2 * (1 - ratio), 2 * Math.abs(a - star));
    }
    return made;
  }

  function median(values) {
    const sorted = Float64Array.from(values).sort(), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // Decimal text as Python formats it: an exact tie goes to the even digit.
  function fixed(x, digits) {
    const text = x.toFixed(digits), exact = Math.abs(x).toFixed(Math.min(100, digits + 60));
    const rest = exact.slice(exact.indexOf(".") + 1 + digits);
    if (!/^50*$/.test(rest) || Number(text[text.length - 1]) % 2 === 0) return text;
    const down = Math.abs(x) - 0.5 / 10 ** digits;
    return (x < 0 ? "-" : "") + Math.max(0, down).toFixed(digits);
  }

  return {
    groups, levels, auroc, wilson, thresholdAtTpr, paperThreshold, thresholdAtErrors, lowerBound,
    ranking, difference, counts, probabilityAt, rectified, xi, median, fixed,
  };
})();
