// Lab notes come after everything else that the search finds.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("notes/") ? score / 1000 : score),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
