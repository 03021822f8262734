"use strict";
/* Keeps a page fresh and asks before something is done. Without it the pages work as plain HTML.

   The server says by server-sent events *that* something has changed; the parts that show it are
   fetched again and merged into the page, so that focus, open details and scroll stay. */

(function () {
  // ---- theme, shared with JupyterHub's own pages; before anything is painted
  const THEME = "jupyterhub-bs-theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function stored() {
    try { return localStorage.getItem(THEME); } catch (_error) { return null; }
  }
  function theme(name) {
    document.documentElement.setAttribute("data-bs-theme", name);
  }
  function preferred() {
    const chosen = stored();
    return chosen === "light" || chosen === "dark" ? chosen : dark.matches ? "dark" : "light";
  }
  theme(preferred());
  dark.addEventListener("change", () => theme(preferred()));

  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("gs-theme").addEventListener("click", () => {
      const next = preferred() === "dark" ? "light" : "dark";
      try { localStorage.setItem(THEME, next); } catch (_error) { /* private window */ }
      theme(next);
    });
    times(document);
    setInterval(() => times(document), 20000);
    questions();
    filter();
    live();
    const flash = document.getElementById("gs-flash");
    if (flash) flash.focus({ preventScroll: true });
  });

  // ---- times: how long ago, and the exact moment on hover
  const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
  function ago(seconds) {
    for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
      if (Math.abs(seconds) >= size) return relative.format(-Math.round(seconds / size), unit);
    }
    return seconds >= 0 ? "just now" : "in a moment";
  }
  function times(root) {
    for (const node of root.querySelectorAll("time[datetime]:not([data-exact])")) {
      const at = new Date(node.dateTime);
      if (isNaN(at)) continue;
      const text = ago((Date.now() - at) / 1000);
      if (node.textContent !== text) node.textContent = text;
      node.title = at.toLocaleString();
    }
  }

  // ---- merging a fresh part into the page
  function key(node) {
    return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
  }
  function alike(one, other) {
    return one.nodeType === other.nodeType && one.nodeName === other.nodeName && key(one) === key(other);
  }
  function merge(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    // What the visitor has opened or pressed stays as it is.
    const hers = old.nodeName === "DETAILS" ? ["open"] : old.nodeName === "BUTTON" ? ["aria-pressed"] : [];
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !hers.includes(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (!hers.includes(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    children(old, fresh);
  }
  function children(old, fresh) {
    const keyed = new Map();
    const staying = new Set([...fresh.childNodes].map(key));
    for (const node of [...old.childNodes]) {
      if (key(node) && !staying.has(key(node))) node.remove();
      else if (key(node)) keyed.set(key(node), node);
    }
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let found = key(wanted) ? keyed.get(key(wanted)) : at;
      if (found && !alike(found, wanted)) found = null;
      if (!found) {
        old.insertBefore(wanted, at);
        continue;
      }
      if (found === at) at = at.nextSibling;
      else old.insertBefore(found, at);
      merge(found, wanted);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  // ---- live
  const POLL_MS = 10000;
  const SILENT_MS = 40000;
  const body = () => document.body;
  let refilter = () => {};

  function live() {
    const sign = document.getElementById("gs-live");
    const parts = [...document.querySelectorAll("[data-part]")];
    if (!sign || !parts.length) return;
    const text = document.getElementById("gs-live-text");
    const due = new Set();
    let source = null, heard = 0, busy = false, seen = new Date(), over = false;

    function say(state, words) {
      if (sign.dataset.state === state && text.textContent === words) return;
      sign.dataset.state = state;
      text.textContent = words;
    }
    function want(topics) {
      for (const part of parts) {
        if (!topics || part.dataset.topics.split(" ").some((topic) => topics.includes(topic))) due.add(part);
      }
      pull();
    }
    async function pull() {
      if (busy || over) return;
      busy = true;
      try {
        while (due.size && !over) {
          const [part] = due;
          due.delete(part);
          await fetchPart(part);
        }
        seen = new Date();
        if (!over && source && source.readyState === EventSource.OPEN) say("live", "Live");
        else if (!over) say("slow", "Not live: looked at every " + POLL_MS / 1000 + " s");
      } catch (error) {
        due.clear();
        if (!over) say("out", "Not live: " + (error.told || "the allocator does not answer") + ". As of " + seen.toLocaleTimeString());
      } finally {
        busy = false;
      }
    }
    async function fetchPart(part) {
      const url = new URL(location.pathname + location.search, location.href);
      url.searchParams.set("fragment", part.dataset.part);
      const answer = await fetch(url, {
        headers: { "X-XSRFToken": body().dataset.xsrf }, credentials: "same-origin", redirect: "error",
        signal: AbortSignal.timeout(20000),
      });
      if (!answer.ok) {
        if ([401, 403, 404].includes(answer.status)) stop(answer.status);
        const error = new Error(String(answer.status));
        error.told = answer.status >= 500 ? "the allocator or JupyterHub has a problem" : undefined;
        throw error;
      }
      const fresh = new DOMParser().parseFromString("<main>" + (await answer.text()) + "</main>", "text/html");
      const inside = part.contains(document.activeElement);
      children(part, fresh.querySelector("main"));
      times(part);
      refilter();
      // What had the focus is gone: stay in the same place instead of at the top of the page.
      if (inside && !part.contains(document.activeElement)) {
        const title = part.querySelector("h2[tabindex]") || document.getElementById("main");
        title.focus({ preventScroll: true });
      }
    }
    function stop(status) {
      over = true;
      if (source) source.close();
      const words = status === 404 ? "this is gone; " : status === 403 ? "you may not see this any more; " : "you are logged out; ";
      say("out", "Not live: " + words);
      const again = document.createElement("a");
      again.href = location.href.split("#")[0];
      again.textContent = "load the page again";
      text.append(again);
    }
    function listen() {
      if (over || document.hidden) return;
      if (source) source.close();
      heard = Date.now();
      source = new EventSource(body().dataset.live + "?_xsrf=" + encodeURIComponent(body().dataset.xsrf));
      source.addEventListener("hello", () => { heard = Date.now(); want(null); });
      source.addEventListener("beat", () => { heard = Date.now(); });
      source.addEventListener("changed", (event) => { heard = Date.now(); want(JSON.parse(event.data)); });
      source.addEventListener("error", () => { if (!over) say("slow", "Not live: connecting again"); });
    }
    // One connection fewer while nobody looks: browsers have only six for each address.
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) listen();
      else if (source) { source.close(); source = null; }
    });
    window.addEventListener("pagehide", () => { if (source) source.close(); });
    window.addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
    setInterval(() => {
      if (over || document.hidden) return;
      const open = source && source.readyState === EventSource.OPEN;
      if (open && Date.now() - heard < SILENT_MS) return;
      if (!source || source.readyState === EventSource.CLOSED || Date.now() - heard > SILENT_MS) listen();
      want(null);
    }, POLL_MS);
    listen();
  }

  // ---- questions open in a dialog
  function questions() {
    const dialog = document.getElementById("gs-dialog");
    document.addEventListener("click", async (event) => {
      const close = event.target.closest("[data-close]");
      if (close && dialog.contains(close)) {
        event.preventDefault();
        dialog.close();
        return;
      }
      const link = event.target.closest("a[data-ask]");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      const url = new URL(link.href);
      url.searchParams.set("fragment", "question");
      try {
        const answer = await fetch(url, {
          headers: { "X-XSRFToken": body().dataset.xsrf }, credentials: "same-origin", redirect: "error",
        });
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        dialog.replaceChildren(...fresh.body.childNodes);
        dialog.returnFocus = link.href;
        dialog.showModal();
        const first = dialog.querySelector("input:not([type=hidden]), select, [data-close]");
        if (first) first.focus();
      } catch (_error) {
        location.href = link.href;
      }
    });
    dialog.addEventListener("close", () => {
      // The link may have been replaced meanwhile; its address says which one it was.
      const link = [...document.querySelectorAll("a[data-ask]")].find((one) => one.href === dialog.returnFocus);
      if (link) link.focus();
    });
    document.addEventListener("submit", (event) => {
      const button = event.target.querySelector("[type=submit]");
      // Twice is once; and it comes back if the visitor comes back.
      setTimeout(() => { button.disabled = true; });
      window.addEventListener("pageshow", () => { button.disabled = false; }, { once: true });
    });
  }

  // ---- filter
  function filter() {
    const field = document.getElementById("gs-find");
    if (!field) return;
    const states = new Set();
    const found = document.getElementById("gs-found");
    field.value = new URLSearchParams(location.search).get("q") || "";

    refilter = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = (text) => words.every((word) => text.includes(word));
      for (const chip of document.querySelectorAll(".gs-chip")) {
        chip.setAttribute("aria-pressed", String(states.has(chip.dataset.state)));
      }
      let shown = 0, all = 0;
      for (const host of document.querySelectorAll(".gs-host")) {
        const tiles = [...host.querySelectorAll("[data-tile]")];
        let left = 0;
        for (const tile of tiles) {
          const ok = fits(tile.dataset.find + " " + host.dataset.find) && (!states.size || states.has(tile.dataset.state));
          tile.hidden = !ok;
          left += ok;
        }
        all += tiles.length;
        shown += left;
        host.hidden = (words.length > 0 || states.size > 0) && !left && (states.size > 0 || !fits(host.dataset.find));
      }
      for (const row of document.querySelectorAll("tr[data-find]")) row.hidden = !fits(row.dataset.find);
      const words_or_states = words.length || states.size;
      found.textContent = words_or_states ? shown + " of " + all + " GPUs" : "";
    };
    let waiting = 0;
    field.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        const url = new URL(location.href);
        if (field.value) url.searchParams.set("q", field.value); else url.searchParams.delete("q");
        history.replaceState(null, "", url);
        refilter();
      }, 120);
    });
    document.addEventListener("click", (event) => {
      const chip = event.target.closest(".gs-chip");
      if (!chip) return;
      if (!states.delete(chip.dataset.state)) states.add(chip.dataset.state);
      refilter();
    });
    refilter();
  }
})();
