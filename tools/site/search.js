// Search in search-index.js: every word of the query must begin a word of a section; a hit in the title counts more.
"use strict";
(() => {
  const { sections, words } = window.COURSE_INDEX;
  const vocabulary = Object.keys(words).sort();
  const box = document.querySelector("#search input");
  const found = document.getElementById("found");

  const split = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];

  // the words that begin with `prefix` lie side by side in the sorted vocabulary
  function beginning(prefix) {
    let low = 0, high = vocabulary.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (vocabulary[middle] < prefix) low = middle + 1; else high = middle;
    }
    let end = low;
    while (end < vocabulary.length && vocabulary[end].startsWith(prefix)) end++;
    return vocabulary.slice(low, end);
  }

  function search(query) {
    const asked = split(query);
    if (!asked.length) return [];
    const scores = asked.map((prefix) => {
      const score = new Map();
      for (const word of beginning(prefix)) {
        const weight = word === prefix ? 2 : 1;
        for (const [section, count] of words[word]) {
          const inTitle = split(sections[section].title).includes(word) ? 20 : 0;
          score.set(section, (score.get(section) || 0) + weight * (Math.log1p(count) + inTitle));
        }
      }
      return score;
    });
    const everywhere = [...scores[0].keys()].filter((section) => scores.every((score) => score.has(section)));
    const total = (section) => scores.reduce((sum, score) => sum + score.get(section), 0);
    return everywhere.sort((a, b) => total(b) - total(a)).slice(0, 20).map((section) => sections[section]);
  }

  function snippet(text, asked) {
    const low = text.toLowerCase();
    const at = Math.max(0, Math.min(...asked.map((word) => low.indexOf(word)).filter((place) => place >= 0), text.length) - 40);
    return (at ? "…" : "") + text.slice(at, at + 140) + (at + 140 < text.length ? "…" : "");
  }

  function show() {
    const query = box.value.trim();
    const hits = search(query);
    found.hidden = !query;
    found.replaceChildren();
    const line = document.createElement("p");
    line.textContent = hits.length ? `${hits.length === 20 ? "The first 20" : hits.length} found` : "Nothing found";
    found.append(line);
    for (const hit of hits) {
      const link = document.createElement("a");
      link.href = hit.link;
      const title = document.createElement("b");
      title.textContent = hit.page === hit.title ? hit.title : `${hit.page} · ${hit.title}`;
      const text = document.createElement("span");
      text.textContent = snippet(hit.text, split(query));
      link.append(title, text);
      link.addEventListener("click", () => { found.hidden = true; });
      found.append(link);
    }
  }

  box.addEventListener("input", show);
  box.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const first = found.querySelector("a");
    if (first) first.click();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { found.hidden = true; box.blur(); }
    if (event.key === "/" && document.activeElement !== box) { event.preventDefault(); box.focus(); }
  });
  if (matchMedia("(max-width: 900px)").matches) document.querySelector("details.lessons").open = false;
})();
