// How the site's search ranks pages. Sphinx gives a page with a word in any heading the same score as one that is about the word; here each
// word of the question counts where it stands: in the title, among the page's search words (KEYWORDS in conf.py), in a heading, in the text.
const PLACES = {"recipes/": 2, "for/": 1, "formats/": 0, "reference/": 0, "why/": -1, "extending/": -2};
const WORDS = {title: 10, keyword: 10, heading: 4, text: 1};
let keywords = null;

function stems(text) {
  const stemmer = new Stemmer();
  return text.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word && !stopwords.has(word)).map((word) => stemmer.stemWord(word));
}

function has(table, stem, file) {
  return Object.hasOwn(table, stem) && [table[stem]].flat().includes(file);
}

var Scorer = {
  score: ([name, , anchor]) => {
    const index = Search._index, file = index.docnames.indexOf(name);
    keywords ??= Object.entries(index.indexentries).flatMap(([entry, pages]) => pages.map(([page]) => [page, stems(entry)]));
    const own = new Set(keywords.filter(([page]) => page === file).flatMap(([, words]) => words)), title = stems(index.titles[file]);
    const asked = stems(new URLSearchParams(window.location.search).get("q") ?? "");
    const place = PLACES[Object.keys(PLACES).find((folder) => name.startsWith(folder))] ?? -1;
    const points = asked.map((stem) =>
      Math.max(
        title.includes(stem) ? WORDS.title + 4 / title.length : 0,
        own.has(stem) ? WORDS.keyword : 0,
        has(index.titleterms, stem, file) ? WORDS.heading : 0,
        has(index.terms, stem, file) ? WORDS.text : 0,
      ) );
    return points.reduce((sum, point) => sum + point, 0) / Math.max(asked.length, 1) + place - (anchor.startsWith("#index-") ? 20 : anchor ? 0.5 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
