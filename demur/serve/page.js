"use strict";
// The page to try the service: images are sent, answers are shown.

const $ = (id) => document.getElementById(id);
const show = (value) => (value === null ? "none" : Number(value).toPrecision(4));
let state = { rule: [], attack: false, token: false };
let current = null; // the chosen file
const answers = []; // of all images: { file, url, row, label }

function say(text) {
  $("status").textContent = text;
}

async function send(path, file) {
  const headers = { "Content-Type": file.type || "application/octet-stream" };
  if (state.token) headers.Authorization = `Bearer ${$("token").value}`;
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, body: file });
  } catch {
    throw new Error("The service cannot be reached.");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail);
  return body;
}

function fillScores(row) {
  const body = $("scores").tBodies[0];
  body.replaceChildren();
  const cells = state.rule.map((part) => [part.score, row.scores[part.score], part.threshold]);
  for (const [name, value, threshold] of [["confidence", row.confidence, null], ...cells]) {
    const line = body.insertRow();
    for (const text of [name, show(value), threshold === null ? "" : show(threshold)]) {
      line.insertCell().textContent = text;
    }
  }
}

function fillClasses(row) {
  // an object orders names that are numbers by number
  const sorted = Object.entries(row.probabilities).sort((a, b) => b[1] - a[1]);
  const items = sorted.map(([name, p]) => {
    const item = document.createElement("li");
    const label = document.createElement("span");
    const meter = document.createElement("meter");
    const share = document.createElement("span");
    label.textContent = label.title = name;
    meter.value = p;
    meter.setAttribute("aria-label", `probability of ${name}`);
    share.textContent = `${(100 * p).toFixed(1)}%`;
    item.append(label, meter, share);
    return item;
  });
  $("classes").replaceChildren(...items);
}

function showRow(row, url) {
  $("preview").src = url;
  $("verdict").textContent = `${row.class}: ${row.accepted ? "accepted" : "rejected"}`;
  $("verdict").className = row.accepted ? "accepted" : "rejected";
  $("reason").textContent = row.reason;
  fillScores(row);
  fillClasses(row);
  $("result").hidden = false;
  $("attack").hidden = !state.attack;
  $("verdict").focus();
}

async function classify(files) {
  $("result").hidden = $("attacked").hidden = true;
  let last = "";
  for (const [number, file] of files.entries()) {
    say(files.length > 1 ? `Classifying ${number + 1} of ${files.length} ...` : "Classifying ...");
    current = file;
    const answer = { file, url: URL.createObjectURL(file) };
    try {
      answer.row = (await send("predict", file)).predictions[0];
      showRow(answer.row, answer.url);
    } catch (error) {
      last = files.length > 1 ? `${file.name}: ${error.message}` : error.message;
    }
    if (answer.row) answers.push(answer);
  }
  say(last);
  if (answers.length > 1) fillList();
}

function picture(answer) {
  const image = document.createElement("img");
  image.src = answer.url;
  image.alt = answer.file.name;
  return image;
}

function fillList() {
  const items = answers.map((answer) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const text = document.createElement("span");
    text.textContent = `${answer.row.class}: ${answer.row.accepted ? "accepted" : "rejected"}`;
    button.type = "button";
    button.className = answer.row.accepted ? "accepted" : "rejected";
    button.title = answer.file.name;
    button.append(picture(answer), text);
    button.addEventListener("click", () => {
      current = answer.file;
      $("attacked").hidden = true;
      showRow(answer.row, answer.url);
    });
    item.append(button);
    return item;
  });
  $("all").replaceChildren(...items);
  const rejected = answers.filter((answer) => !answer.row.accepted);
  $("counts").textContent = `${answers.length} images, ${rejected.length} rejected`;
  $("rejected").replaceChildren(...rejected.map(labelled));
  $("look").hidden = rejected.length === 0;
  $("list").hidden = false;
}

function labelled(answer, number) {
  const item = document.createElement("li");
  const label = document.createElement("label");
  const input = document.createElement("input");
  const names = document.createElement("datalist");
  names.id = `names-${number}`;
  names.append(...Object.keys(answer.row.probabilities).map((name) => new Option(name)));
  input.setAttribute("list", names.id);
  input.value = answer.label || "";
  input.addEventListener("input", () => { answer.label = input.value; });
  label.append(picture(answer), `${answer.file.name}: class `, input);
  item.append(label, names);
  return item;
}

function csvCell(text) {
  // a cell that starts like a formula would be run by a spreadsheet
  const safe = /^[=+@\t\r-]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}

function download() {
  const rows = answers.filter((answer) => !answer.row.accepted)
    .map((answer) => [answer.file.name, answer.label || "", answer.row.class, answer.row.reason]);
  const lines = [["file", "label", "predicted", "reason"], ...rows].map((row) => row.map(csvCell));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  link.download = "rejected.csv";
  link.click();
}

async function attack() {
  $("attack").disabled = true;
  say("Attacking ...");
  try {
    const report = await send("attack", current);
    const { before, after, images } = report;
    const fooled = after.class !== before.class;
    const outcome = !fooled
      ? "The prediction did not change."
      : after.accepted
        ? "The prediction changed, and the wrong one was accepted."
        : "The prediction changed, and the guard rejected it.";
    $("attack-text").textContent = `${report.attack}. ${outcome}`;
    for (const [name, row] of [["before", before], ["after", after]]) {
      $(`image-${name}`).src = images[name];
      $(`caption-${name}`).textContent = `${name}: ${row.class}, ${row.reason}`;
    }
    $("image-difference").src = images.difference;
    $("caption-difference").textContent = `difference, times ${report.gain.toFixed(1)}`;
    $("attacked").hidden = false;
    $("attack-title").focus();
    say("");
  } catch (error) {
    say(error.message);
  } finally {
    $("attack").disabled = false;
  }
}

function take(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (files.length) classify(images.length ? images : [files[0]]);
}

async function start() {
  const health = await (await fetch("health")).json();
  state = health;
  $("token-form").hidden = !health.token;
  const parts = health.rule.map((part) =>
    part.threshold === null ? `any ${part.score}` : `${part.score} ≥ ${show(part.threshold)}`);
  $("rule").textContent = `${health.classes} classes; accepts where ${parts.join(" and ")}.`;
  $("summary").textContent = health.summary;
  const [, height, width] = health.shape;
  $("inputs").textContent = health.resize
    ? `Images are resized to ${width} × ${height} pixels.`
    : `Images must have ${width} × ${height} pixels.`;
  $("health").textContent = health.status === "drift"
    ? "Alarm: the scores have drifted away from the calibration images." : "";
}

for (const name of ["file", "camera"]) {
  $(name).addEventListener("change", (event) => take(event.target.files));
}
$("download").addEventListener("click", download);
$("attack").addEventListener("click", attack);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (current) classify([current]);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
  });
}
document.addEventListener("drop", (event) => take(event.dataTransfer.files));
start().catch(() => say("The service cannot be reached."));
