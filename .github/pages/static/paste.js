// A box at the top of troubleshooting.md: it shows the rows of the tables that share most words and
// numbers with a pasted message. A code, such as in "exitcode: -9" or "errno: 97", is one word, which
// weighs more than the words around it.
const CODE = /\b(exit ?code|exit|errno|signal)[\s:=]*\(?(-?\d+)/g;
const wordsOf = (text) => {
  const plain = text.toLowerCase().replace(CODE, (all, name, number) => `code${number}`);
  return new Set(plain.match(/code-?\d+|\d+|[a-z_]{3,}/g));
};

// Return [score, number of the row], the best first. A row is a list of texts that its messages have.
function matches(typed, rows) {
  const rare = new Map(), sets = rows.map((texts) => texts.map(wordsOf)), wanted = wordsOf(typed);
  for (const row of sets)
    for (const word of new Set(row.flatMap((set) => [...set])))
      rare.set(word, (rare.get(word) ?? 0) + 1);
  const weight = (word) =>
    Math.log(2 * rows.length / (rare.get(word) ?? 1)) * (word.startsWith("code") ? 4 : 1);
  const sum = (words) => [...words].reduce((all, word) => all + weight(word), 0);
  const score = (words) => {
    const both = new Set([...words].filter((word) => wanted.has(word)));
    const share = Math.max(sum(both) / sum(words), sum(both) / sum(wanted));
    return both.size && share >= 0.5 ? sum(both) * share : 0;
  };
  const scores = sets.map((row, number) => [Math.max(...row.map(score)), number]);
  const best = Math.max(...scores.map(([each]) => each));
  return scores.filter(([each]) => each > best / 2).sort((a, b) => b[0] - a[0]).slice(0, 3);
}

globalThis.document?.addEventListener("DOMContentLoaded", () => {
  const title = document.querySelector("#troubleshooting h1");
  if (!title) return;
  const lines = [...document.querySelectorAll("#troubleshooting tbody tr")];
  const rows = lines.map(({ cells: [first] }) =>
    [first, ...first.querySelectorAll("code")].map((each) => each.textContent));
  const box = Object.assign(document.createElement("textarea"), { rows: 3 });
  box.placeholder = box.ariaLabel = "Paste your message, or type what you see";
  const found = document.createElement("table");
  title.after(box, found);
  box.oninput = () => found.replaceChildren(
    ...matches(box.value, rows).map(([, number]) => lines[number].cloneNode(true)));
});
