// Search of a page that is opened from disk: browsers start no Worker for file:// addresses.
// This class has the part of Worker's interface that the theme's search uses, and runs the
// script in a hidden frame instead. Elsewhere the browser's own Worker stays.
(() => {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const page = inside.document;
      page.open(); // a written page has the origin of this one, so both reach each other
      page.write(`<!doctype html><body><script src="${url}"></` + "script>");
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      page.close();
    }

    postMessage(data) {
      const message = new MessageEvent("message", { data });
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(message));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = window.Worker = IFrameWorker; // the search asks for the first name
})();
