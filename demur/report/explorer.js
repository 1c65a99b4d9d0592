"use strict";
// The explorer: one state, kept in the address, and everything on the page computed from it.
const Explorer = (() => {
  const { OFF, by, count, el, percent, share, signed, threshold } = Dom, { fixed } = Stats;
  const { CON, RCON, state, remember, correct, recordOf, tauOf, column, scoreOf, keyOf, ranking } = Data;
  const { places, placeOf, atPlace, theory } = Data;
  let runs = [], panels = [], hashTimer = 0, announceTimer = 0, announced = "";

  // ---------------------------------------------------------------- thresholds

  // Images that TPR-95 thresholds are chosen on: clean cal images, or else the clean ones shown here.
  const reference = (run) => run.cal || run.records.find((record) => record.clean) || recordOf(run);
  const referenceWords = () =>
    runs.every((run) => run.cal) ? "clean held-out images" : "the clean test images, since none were held out";

  // Set thresholds of each run by a function of (run, record) that returns a pair, or null for none.
  function setEach(choose) {
    runs.forEach((run, i) => {
      const record = recordOf(run), pair = record && choose(run, record);
      if (pair) state.t[i] = pair;
    });
    update();
  }

  const single = (name, t) => (name === CON ? [t, OFF] : [OFF, t]);

  function setTpr(name, paper) {
    setEach((run, record) => {
      const source = paper ? record : reference(run);
      const rank = ranking(run, source, name === CON ? CON : scoreOf(run, source));
      return single(name, paper ? Stats.paperThreshold(rank.levels) : Stats.thresholdAtTpr(rank.groups));
    });
  }

  function setErrors(name) {
    const most = Number(by("errors").value);
    if (!(most >= 0 && most <= 100)) return;
    setEach((run, record) => {
      const levels = ranking(run, record, name === CON ? CON : scoreOf(run, record)).levels;
      return single(name, Stats.thresholdAtErrors(levels, Math.floor((most * record.n) / 100 + 1e-9)));
    });
  }

  function setCoupled() {
    choose("score", RCON);
    setEach((run, record) => {
      const found = theory(run, record);
      return found && found.xi < 1 ? [1 / (2 - found.xi), 0.5] : null;
    });
  }

  function setCertificate(i, { rejector, thresholds }) {
    const [first, second] = thresholds.map((t) => (t === null ? OFF : t));
    if (thresholds.length > 1) choose("score", RCON);
    else if (rejector !== CON) choose("score", rejector);
    state.t[i] = thresholds.length > 1 ? [first, second] : single(rejector, first);
    update();
  }

  // Choose an attack or a score; a threshold of another score means nothing for the new one.
  function choose(key, value) {
    if (key === "score" && value !== state.score) state.t = state.t.map(([first]) => [first, OFF]);
    state[key] = value;
  }

  // ---------------------------------------------------------------- controls

  function controls() {
    const attacks = [...new Set(runs.flatMap((run) => run.records.map((record) => record.attack)))];
    const scores = [...new Set(runs.flatMap((run) => Object.keys(run.scores)))].filter((name) => name !== CON);
    by("attack").replaceChildren(...attacks.map((name) => el("option", { value: name }, name)));
    by("score").replaceChildren(...scores.map((name) => el("option", { value: name }, name)));
    if (!attacks.includes(state.attack)) {
      const first = runs[0].records.find((record) => !record.clean) || runs[0].records[0];
      state.attack = first ? first.attack : attacks[0];
    }
    if (!scores.includes(state.score)) state.score = scores.includes(RCON) ? RCON : scores[0];
  }

  function button(text, title, press, disabled = false) {
    return el("button", { type: "button", title, disabled, onclick: press }, text);
  }

  // Made again only where they differ, so that the pressed one keeps the focus.
  function buttons() {
    const theorem = runs.some((run) => recordOf(run) && theory(run, recordOf(run))?.xi < 1);
    const key = `${state.score}|${theorem}|${runs.map((run) => run.certificates.length)}`;
    if (by("buttons").dataset.key === key) return;
    by("buttons").dataset.key = key;
    const rows = [CON, state.score].map((name) =>
      el("div", { class: "preset", role: "group", "aria-label": `thresholds of ${name}` },
        el("strong", {}, name),
        button("TPR-95", `accepts 95% of the correct predictions on ${referenceWords()}`, () => setTpr(name, false)),
        button("TPR-95, paper", "chosen with the labels of the images shown, as published tables do", () => setTpr(name, true)),
        button("limit errors", "the lowest threshold that keeps accepted errors under the limit", () => setErrors(name))));
    const both = el("div", { class: "preset", role: "group", "aria-label": "other rules" },
      el("strong", {}, "rules"),
      button("paper's coupled rule", "con ≥ 1/(2 - xi) and R-Con ≥ 1/2, at the median xi of these images (Theorem 1)", setCoupled, !theorem),
      ...runs.flatMap((run, i) => run.certificates.map((made) =>
        button(`certified ${made.label}${runs.length > 1 ? ` (${run.name})` : ""}`, made.sentence, () => setCertificate(i, made)))),
      button("accept all", "no threshold", () => setEach(() => [OFF, OFF])));
    const certified = runs.some((run) => run.certificates.length);
    const focused = by("buttons").contains(document.activeElement) ? document.activeElement.title : null;
    by("buttons").replaceChildren(...rows, both);
    if (focused) [...by("buttons").querySelectorAll("button")].find((one) => one.title === focused)?.focus();
    by("tpr-note").textContent = `TPR-95 is chosen on ${referenceWords()}; “paper” on the images shown, with their labels.`;
    by("certificate-note").textContent = certified ? "" : "No certificate is stored; demur calibrate RUN --risk 0.05 makes one where cal images were held out.";
  }

  function showControls() {
    by("attack").value = state.attack;
    by("score").value = state.score;
    const possible = runs.some((run) => recordOf(run)?.logits);
    const some = runs.map(recordOf).find(Boolean);
    by("tau").disabled = by("tau-reset").disabled = !possible;
    by("tau").value = Math.log2(possible && state.tau !== null ? state.tau : 1);
    const text = possible && state.tau !== null ? String(state.tau) : "as scored";
    by("tau-value").textContent = text;
    by("tau").setAttribute("aria-valuetext", text);
    by("tau-note").textContent = possible || !some ? "" : `Not available: ${some.no_logits}.`;
  }

  // ---------------------------------------------------------------- panels

  function slider(panel, which) {
    const id = `t${which}-${panel.index}`;
    const range = el("input", { type: "range", id, min: 0, max: 1, step: 0.001 });
    const exact = el("input", { type: "number", step: "any", class: "exact" });
    const label = el("label", { for: id });
    const set = (t) => { state.t[panel.index][which] = t; update(); };
    range.addEventListener("input", () => {
      const run = runs[panel.index], record = recordOf(run);
      set(atPlace(run, record, which ? scoreOf(run, record) : CON, Number(range.value)));
    });
    exact.addEventListener("change", () => set(exact.value === "" ? OFF : Number(exact.value)));
    return { range, exact, label, box: el("div", { class: "slider" }, label, range, exact) };
  }

  function makePanel(run, index) {
    const panel = { index, layer: {}, figures: {} };
    const canvas = (label) => el("canvas", { role: "img", "aria-label": label });
    panel.scatter = canvas("scatter");
    panel.risk = canvas("risk against coverage");
    panel.roc = canvas("ROC");
    panel.sliders = [slider(panel, 0), slider(panel, 1)];
    panel.rule = el("p", { class: "rule" });
    panel.theory = el("p", { class: "note theory" });
    panel.gap = el("p", { class: "gap" });
    panel.counts = el("tbody");
    panel.measures = el("dl", { class: "measures" });
    panel.attacks = el("tbody");
    panel.content = el("div", { class: "panel-body" },
      panel.rule,
      el("div", { class: "plots" },
        el("div", { class: "plot wide" }, el("div", {}, panel.scatter), ...panel.sliders.map((s) => s.box), panel.theory),
        el("div", { class: "plot" },
          table(["", "correct", "wrong", "all"], panel.counts, "Images by decision and correctness", "counts"),
          panel.measures, panel.gap),
        el("div", { class: "plot" }, el("h4", {}, "Risk against coverage"), el("div", {}, panel.risk)),
        el("div", { class: "plot" }, el("h4", {}, "ROC"), el("div", {}, panel.roc))),
      el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "the same thresholds under every attack" },
        table(["attack", "n", "accepted and wrong", "correct among accepted", "coverage", "correct accepted (TPR)"], panel.attacks, "The same thresholds under every attack", "every")));
    panel.missing = el("p", { class: "note", hidden: true });
    const heading = runs.length > 1 ? [el("h3", {}, run.name)] : [];
    panel.root = el("div", { class: "panel" }, ...heading, panel.missing, panel.content);
    panel.scatter.addEventListener("click", (event) => { if (OneImage.pick(panel, event)) update(); });
    return panel;
  }

  function table(names, body, caption, kind) {
    return el("table", { class: kind },
      el("caption", {}, el("span", {}, caption)),
      el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)))), body);
  }

  function drawPanel(panel) {
    const run = runs[panel.index], record = recordOf(run);
    const name = record && scoreOf(run, record), instead = record && name !== state.score;
    panel.content.hidden = !record;
    panel.missing.hidden = Boolean(record && !instead);
    panel.missing.textContent = instead ? `${state.score} is not scored here; confidence takes its place.`
      : run.records.length ? `There is no record of ${state.attack} in this run.` : "There is no record yet.";
    if (!record) return "";
    const [t1, t2] = state.t[panel.index];
    const found = Stats.counts(column(run, record, CON), t1, column(run, record, name), t2, correct(record));
    drawScatter(panel, run, record, name);
    drawCurves(panel, run, record, name, found);
    showSliders(panel, run, record, name);
    showCounts(panel, found);
    showRanking(panel, run, record, name);
    showAttacks(panel, run, name);
    return showRule(panel, run, name, found);
  }

  function drawScatter(panel, run, record, name) {
    const [t1, t2] = state.t[panel.index], unit = run.scores[name].unit;
    const found = name === RCON ? theory(run, record) : null;
    const region = found && found.xi < 1 ? { con: 1 / (2 - found.xi), text: `dotted: Theorem 1 at xi = ${fixed(found.xi, 2)}` } : null;
    panel.view = {
      x: places(run, record, CON), y: places(run, record, name), correct: correct(record),
      key: `${record.attack}|${keyOf(record, name)}|${record.n}`,
      at: [placeOf(run, record, CON, t1), placeOf(run, record, name, t2)],
      xLabel: "confidence (con)", yLabel: unit ? name : `${name}: share of images with a lower score`,
      bounded: run.scores[name].kind === "rcon", region,
      selected: state.run === panel.index ? state.image : -1,
    };
    panel.box = Charts.scatter(panel.scatter, panel.layer, panel.view);
    panel.theory.textContent = found ? theoryWords(found, record) : "";
  }

  function theoryWords(found, record) {
    const own = `At its own xi, Theorem 1 covers ${count(found.inside)} of ${count(record.n)} images (${percent(found.inside, record.n)}%).`;
    const region = found.xi < 1
      ? `The median xi is ${fixed(found.xi, 3)}: right of con = ${fixed(1 / (2 - found.xi), 3)} the theorem separates at R-Con = 1/2 every image whose xi is no larger.`
      : `The median xi is ${fixed(found.xi, 3)}; from 1 on the theorem says nothing.`;
    return `${region} ${own}`;
  }

  function curvesOf(run, record, name) {
    return remember(record, `curve ${keyOf(record, name)}`, () => {
      const { nRight, nWrong } = ranking(run, record, name).levels, last = nRight.length - 1;
      const accepted = nRight.map((right, k) => right + nWrong[k]);
      return {
        coverage: accepted.map((k) => k / record.n), risk: accepted.map((k, i) => nWrong[i] / k),
        fpr: [0, ...nWrong.map((k) => k / Math.max(1, nWrong[last]))], tpr: [0, ...nRight.map((k) => k / Math.max(1, nRight[last]))],
      };
    });
  }

  function drawCurves(panel, run, record, name, found) {
    const names = name === CON ? [CON] : [CON, name], all = names.map((one) => curvesOf(run, record, one));
    const accepted = found.acceptedRight + found.acceptedWrong, wrong = found.n - found.right;
    const risk = accepted ? found.acceptedWrong / accepted : 0;
    let most = Math.max(0.01, wrong / found.n, risk);
    for (const { coverage, risk: risks } of all) coverage.forEach((c, i) => { if (c >= 0.1) most = Math.max(most, risks[i]); });
    Charts.curves(panel.risk, {
      curves: all.map(({ coverage, risk: y }, i) => ({ name: names[i], x: coverage, y, dashed: i === 0 && names.length > 1 })),
      point: accepted ? [accepted / found.n, risk] : null, xLabel: "coverage: share accepted (%)",
      yLabel: "wrong among accepted (%)", yMax: Math.min(1, 1.05 * most),
    });
    const roc = [wrong ? found.acceptedWrong / wrong : 0, found.right ? found.acceptedRight / found.right : 1];
    Charts.curves(panel.roc, {
      curves: all.map(({ fpr, tpr }, i) => ({ name: names[i], x: fpr, y: tpr, dashed: i === 0 && names.length > 1 })),
      point: roc, xLabel: "wrong that are accepted (%)", yLabel: "correct that are accepted (%)", yMax: 1, diagonal: true,
    });
    const where = `${accepted ? `the operating point is at coverage ${percent(accepted, found.n)}% and risk ${percent(found.acceptedWrong, accepted)}%` : "nothing is accepted"}`;
    panel.risk.setAttribute("aria-label", `Risk against coverage of ${names.join(" and ")}; ${where}`);
    panel.roc.setAttribute("aria-label", `ROC of ${names.join(" and ")}; ${percent(found.acceptedWrong, wrong)}% of the wrong and ${percent(found.acceptedRight, found.right)}% of the correct predictions are accepted`);
    panel.scatter.setAttribute("aria-label", `Confidence against ${name} of ${count(found.n)} images, ${count(found.right)} correct and ${count(wrong)} wrong; choose images below to read one`);
  }

  function showSliders(panel, run, record, second) {
    [CON, second].forEach((name, which) => {
      const t = state.t[panel.index][which], { range, exact, label } = panel.sliders[which];
      const text = threshold(t, run.scores[name].unit);
      label.textContent = `${which ? name : "Confidence"} threshold`;
      range.value = placeOf(run, record, name, t);
      range.setAttribute("aria-valuetext", t === OFF ? "any score is accepted" : text);
      exact.setAttribute("aria-label", `${which ? name : "Confidence"} threshold as a number; empty accepts any score`);
      if (document.activeElement !== exact) exact.value = Number.isFinite(t) ? String(Number(text) || t) : "";
      exact.placeholder = text;
    });
  }

  function showCounts(panel, { n, right, acceptedRight, acceptedWrong }) {
    const wrong = n - right, accepted = acceptedRight + acceptedWrong;
    const rows = [["accepted", acceptedRight, acceptedWrong], ["rejected", right - acceptedRight, wrong - acceptedWrong], ["all", right, wrong]];
    panel.counts.replaceChildren(...rows.map(([decision, a, b]) =>
      el("tr", { "data-row": decision }, el("th", { scope: "row" }, decision), ...[a, b, a + b].map((k) => el("td", {}, count(k))))));
    const measures = [
      ["accepted-wrong", "Accepted and wrong, of all", share(acceptedWrong, n)],
      ["accuracy", "Correct among accepted", accepted ? share(acceptedRight, accepted) : "none accepted"],
      ["coverage", "Coverage", share(accepted, n)],
      ["tpr", "Correct that are accepted (TPR)", share(acceptedRight, right)],
    ];
    panel.measures.replaceChildren(...measures.map(([key, title, text]) =>
      el("div", {}, el("dt", {}, title), el("dd", { "data-figure": key }, text))));
  }

  function showRanking(panel, run, record, name) {
    const con = ranking(run, record, CON), other = ranking(run, record, name);
    panel.gap.textContent = "Percent and AUROC with 95% intervals.";
    const three = (x) => fixed(x, 3), auroc = ({ auroc: area, interval: [lo, hi] }) => `${three(area)} [${three(lo)}, ${three(hi)}]`;
    const [gap, lo, hi] = remember(record, `gap ${keyOf(record, name)}`, () => Stats.difference(other, con));
    const by3 = `by ${fixed(Math.abs(gap), 3)}`;
    const verdict = lo > 0 ? `${name} ranks better than confidence here, ${by3}` : hi < 0 ? `${name} ranks worse than confidence here, ${by3}` : `no difference beyond chance between ${name} and confidence here`;
    const line = (key, title, text) => el("div", {}, el("dt", {}, title), el("dd", { "data-figure": key }, text));
    panel.measures.append(line("auroc-con", "AUROC of Con", auroc(con)));
    if (name === CON) return;
    panel.measures.append(line("auroc", `AUROC of ${name}`, auroc(other)),
      line("auroc-gap", `${name} minus Con`, `${signed(gap, 3)} [${signed(lo, 3)}, ${signed(hi, 3)}]`));
    panel.gap.textContent = `AUROC: ${verdict}. Percent and AUROC with 95% intervals.`;
  }

  function showAttacks(panel, run, name) {
    const [t1, t2] = state.t[panel.index];
    panel.attacks.replaceChildren(...run.records.map((record) => {
      const second = column(run, record, name), usable = second && (state.tau === null || record.logits !== null || !recordOf(run).logits);
      const head = el("th", { scope: "row" }, record.attack);
      const shown = record.attack === state.attack ? "shown" : "";
      if (!usable) return el("tr", { class: shown }, head, el("td", {}, count(record.n)), el("td", { colspan: 4 }, second ? record.no_logits : `without ${name}`));
      const { n, right, acceptedRight: good, acceptedWrong: bad } = Stats.counts(column(run, record, CON), t1, second, t2, correct(record));
      const cells = [share(bad, n), good + bad ? share(good, good + bad) : "none accepted", share(good + bad, n), share(good, right)];
      return el("tr", { class: shown, "data-attack": record.attack }, head, el("td", {}, count(n)), ...cells.map((text) => el("td", {}, text)));
    }), ...run.worst.map((worst) => worstRow(worst, name, t1, t2)));
  }

  // Accepted errors of a worst-score attack, which knows the highest score of one rejector alone.
  function worstRow(worst, name, t1, t2) {
    const own = worst.rejector === CON, [t, other] = own ? [t1, t2] : [t2, t1];
    const reason = state.tau !== null ? "attacked at the temperature of the score" : other !== OFF || !(own || worst.rejector === name)
      ? `shown where ${worst.rejector} alone has a threshold` : "";
    const bad = Data.array(worst, "worst", "<f4").reduce((sum, score) => sum + (score >= t && score > OFF ? 1 : 0), 0);
    const cells = reason ? [el("td", { colspan: 4 }, reason)] : [el("td", {}, share(bad, worst.n)), el("td", { colspan: 3 }, `highest score of a wrong prediction, ${worst.rejector}`)];
    return el("tr", { "data-worst": worst.rejector }, el("th", { scope: "row" }, worst.attack), el("td", {}, count(worst.n)), ...cells);
  }

  function showRule(panel, run, name, { n, acceptedRight, acceptedWrong }) {
    const [t1, t2] = state.t[panel.index], conditions = [];
    if (t1 !== OFF) conditions.push(`confidence ≥ ${threshold(t1, true)}`);
    if (t2 !== OFF) conditions.push(`${name} ≥ ${threshold(t2, run.scores[name].unit)}`);
    const rule = conditions.length ? `Accepted where ${conditions.join(" and ")}` : "Every image is accepted";
    const accepted = acceptedRight + acceptedWrong;
    const text = `${state.attack}: ${rule}: ${count(accepted)} of ${count(n)} images, of which ${count(acceptedWrong)} are wrong.`;
    panel.rule.textContent = text;
    return runs.length > 1 ? `${run.name}, ${text}` : text;
  }

  // ---------------------------------------------------------------- address, drawing, start

  const word = (t) => (t === OFF ? "" : t === Infinity ? "inf" : String(t));
  const number = (text) => (text === "" ? OFF : text === "inf" ? Infinity : Number(text));

  function hash() {
    const parts = new URLSearchParams({ attack: state.attack, score: state.score, t: state.t.map((pair) => pair.map(word).join(",")).join(";") });
    if (state.tau !== null) parts.set("tau", state.tau);
    if (state.image >= 0) parts.set("image", runs.length > 1 ? `${state.run}:${state.image}` : state.image);
    return `#${parts}`;
  }

  function readHash() {
    const parts = new URLSearchParams(location.hash.slice(1));
    if (!parts.has("attack")) return;
    state.attack = parts.get("attack");
    state.score = parts.get("score") || state.score;
    const tau = Number(parts.get("tau"));
    state.tau = tau > 0 && Number.isFinite(tau) ? tau : null;
    const pairs = (parts.get("t") || "").split(";").map((pair) => pair.split(",").map(number));
    state.t = runs.map((_, i) => [0, 1].map((k) => { const t = pairs[i]?.[k]; return t === undefined || Number.isNaN(t) ? OFF : t; }));
    const image = (parts.get("image") || "").split(":").map(Number);
    if (parts.has("image") && image.every(Number.isInteger)) [state.run, state.image] = image.length > 1 ? image : [0, image[0]];
    if (!runs[state.run]) state.run = 0;
  }

  function update() {
    const begin = performance.now();
    showControls();
    buttons();
    const sentences = panels.map(drawPanel).filter(Boolean);
    OneImage.show();
    document.documentElement.dataset.stepMs = (performance.now() - begin).toFixed(1);
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => history.replaceState(null, "", hash()), 120);
    announce(sentences.join(" "));
  }

  function announce(text) {
    clearTimeout(announceTimer);
    announceTimer = setTimeout(() => { if (text !== announced) by("announce").textContent = announced = text; }, 500);
  }

  function listen() {
    by("attack").addEventListener("change", (event) => { choose("attack", event.target.value); update(); });
    by("score").addEventListener("change", (event) => { choose("score", event.target.value); update(); });
    by("tau").addEventListener("input", (event) => { state.tau = Number((2 ** Number(event.target.value)).toFixed(3)); update(); });
    by("tau-reset").addEventListener("click", () => { state.tau = null; update(); });
    by("next").addEventListener("click", () => { if (OneImage.step(1)) update(); });
    by("previous").addEventListener("click", () => { if (OneImage.step(-1)) update(); });
    by("controls").addEventListener("submit", (event) => event.preventDefault());
    addEventListener("hashchange", () => { if (location.hash !== hash()) { readHash(); controls(); update(); } });
    addEventListener("resize", () => requestAnimationFrame(update));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", update);
    addEventListener("beforeprint", update);
    addEventListener("afterprint", update);
  }

  // Show other data in the same view, as when a record appears.
  function show(data) {
    runs = state.runs = data.runs;
    state.t = runs.map((_, i) => state.t[i] || [OFF, OFF]);
    const explorable = runs.some((run) => run.records.length);
    by("explorer").hidden = !explorable;
    drawTraining();
    if (!explorable) return;
    readHash();
    controls();
    panels = runs.map(makePanel);
    by("panels").className = `panels runs-${runs.length}`;
    by("panels").replaceChildren(...panels.map((panel) => panel.root));
    if (!location.hash && state.t.every(([a, b]) => a === OFF && b === OFF)) setTpr(state.score, !runs.every((run) => run.cal));
    else update();
  }

  function drawTraining() {
    const shown = runs.filter((run) => run.training.length);
    by("training").hidden = !shown.length;
    by("curves").replaceChildren(...shown.map((run) => {
      const last = run.training[run.training.length - 1];
      const words = `${run.name}: epoch ${last.epoch} of ${run.epochs}, loss ${fixed(last.loss, 3)}`;
      const canvas = el("canvas", { role: "img", "aria-label": words });
      const validated = run.training.some((line) => line.val_clean != null);
      const key = `${validated ? "Blue: validation accuracy; orange: under attack; dashed" : "Dashed"}: loss, as a share of its maximum.`;
      const figure = el("figure", {}, el("figcaption", {}, words), el("div", {}, canvas), el("p", { class: "note" }, key));
      requestAnimationFrame(() => Charts.training(canvas, run.training, run.epochs));
      return figure;
    }));
  }

  function start(data) {
    listen();
    show(data);
  }

  return { start, show, state };
})();
