"use strict";
// Searches without a worker and without a request, both of which browsers refuse to a page that is opened from disk.
// The index is a script (ci/docs/site.py), loaded with the first word that is searched for.
const MOST = 20, SHOWN = 200;
let searched = null;

function load(name) {
  return new Promise((loaded, failed) => {
    const script = document.createElement("script");
    script.src = `${base_url}/search/${name}`;
    script.onload = loaded;
    script.onerror = failed;
    document.head.append(script);
  });
}

async function built() {
  await Promise.all([load("lunr.js"), load("search_index.js")]);
  const { config, docs } = searchIndex;
  lunr.tokenizer.separator = new RegExp(config.separator);
  const index = lunr(function () {
    this.field("title", { boost: 5 });
    this.field("text");
    this.ref("location");
    for (const doc of docs) this.add(doc);
  });
  return { index, docs: new Map(docs.map((doc) => [doc.location, doc])) };
}

// The words as they are typed, and every word that begins like one of them.
function places(index, words) {
  return index.query((query) => {
    query.term(words, { boost: 10 });
    query.term(words, { usePipeline: false, wildcard: lunr.Query.wildcard.TRAILING });
  });
}

function entry({ location, title, text }) {
  const article = document.createElement("article"), head = document.createElement("h3");
  const link = document.createElement("a"), start = document.createElement("p");
  link.href = `${base_url}/${location}`;
  link.textContent = title;
  start.textContent = text.slice(0, SHOWN);
  head.append(link);
  article.append(head, start);
  return article;
}

async function search(box, found) {
  searched ??= built();
  const { index, docs } = await searched, words = lunr.tokenizer(box.value).filter((word) => word.toString());
  const hits = words.length ? places(index, words).slice(0, MOST).map((hit) => entry(docs.get(hit.ref))) : [];
  found.replaceChildren(...(hits.length || !words.length ? hits : [found.dataset.noResultsText]));
}

// The theme puts the box for words below its scripts.
document.addEventListener("DOMContentLoaded", () => {
  const [box, found] = ["query", "results"].map((name) => document.getElementById(`mkdocs-search-${name}`));
  box.addEventListener("input", () => search(box, found));
  box.form.addEventListener("submit", (event) => event.preventDefault());
});
