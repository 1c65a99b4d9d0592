"use strict";
// Follows a run folder: asks the server for changes, and shows them in the same view.
const Live = (() => {
  const SECONDS = 2;
  let version = null;

  async function poll() {
    const line = document.getElementById("live");
    try {
      const now = await (await fetch("state", { cache: "no-store" })).json();
      line.textContent = now.text;
      if (version !== null && now.version !== version) await refresh();
      version = now.version;
    } catch {
      line.textContent = "The server has stopped; start demur report --live again to follow the run.";
    }
    setTimeout(poll, 1000 * SECONDS);
  }

  // Replace what the page says outside the explorer, and give the explorer the new data.
  async function refresh() {
    const text = await (await fetch("./", { cache: "no-store" })).text();
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
      if (fresh) part.replaceWith(document.importNode(fresh, true));
    }
    Explorer.show(JSON.parse(page.getElementById("data").textContent));
  }

  return { poll };
})();
