// What a page does when one clicks. Without JavaScript, all of it is there.
document.addEventListener("DOMContentLoaded", () => {
  // A recorded run is shown, in the page, after an answer to the question about it.
  for (const recording of document.querySelectorAll(".recording")) {
    const show = () => {
      recording.querySelector("p[hidden]")?.removeAttribute("hidden");
      if (recording.querySelector("iframe")) return;
      const link = recording.querySelector("a");
      const frame = document.createElement("iframe");
      frame.src = link.href;
      frame.title = "A recorded run";
      // The front page has no question. Its frame is low, and leaves the wheel to the page.
      if (!recording.querySelector("button")) frame.scrolling = "no";
      link.replaceWith(frame);
    };
    for (const button of recording.querySelectorAll("button"))
      button.onclick = () => {
        button.className = "right" in button.dataset ? "right" : "wrong";
        recording.querySelector("[data-right]").className = "right";
        show();
      };
    // The page of watch.py tells how high it is, and is as dark as this one.
    const darken = () => recording.querySelector("iframe")?.contentWindow.postMessage(
      getComputedStyle(document.body).colorScheme, "*");
    addEventListener("message", (event) => {
      const frame = recording.querySelector("iframe");
      if (event.source !== frame?.contentWindow) return;
      frame.height = event.data.height;
      darken();
    });
    new MutationObserver(darken).observe(document.body, { attributeFilter: ["data-theme"] });
    recording.querySelector("a").onclick = (event) => {
      event.preventDefault();
      show();
    };
    if (!recording.querySelector("button")) show();
  }
  // A picture is a link to itself: a phone enlarges it then, and a keyboard reaches it.
  for (const image of document.querySelectorAll("article img")) {
    const link = Object.assign(document.createElement("a"), { href: image.src });
    image.replaceWith(link);
    link.append(image);
  }
  // What a screen reader needs, and the theme lacks.
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
  for (const drawer of document.querySelectorAll("aside")) drawer.ariaLabel = drawer.className;
  // A line may break before a flag, but not after its dash.
  for (const block of document.querySelectorAll(".highlight-console pre"))
    block.innerHTML = block.innerHTML.replace(/(?<=[\s>])-[^\s<]+/g, "<span class=flag>$&</span>");
  // A phone shows the cells of a table with sentences below each other, with their heads.
  for (const table of document.querySelectorAll("article table")) {
    const heads = [...table.querySelectorAll("th")].map((head) => head.textContent);
    const cells = [...table.querySelectorAll("td:not(:first-child)")];
    if (cells.some((cell) => cell.textContent.length > 30)) table.classList.add("sentences");
    if (heads.length > 2)
      for (const cell of cells) cell.dataset.head = `${heads[cell.cellIndex]}: `;
  }
  // In print, everything is shown.
  addEventListener("beforeprint", () =>
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
});
// A search need not have the short words that one types, unless there are no others.
var splitQuery = (query) => {
  const words = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((word) => word);
  const longer = words.filter((word) => word.length > 2);
  return longer.length ? longer : words;
};
// Above what a search finds stand the rows of troubleshooting.md with a message that is in the typed
// text, or most of it, or that has all typed words.
document.addEventListener("DOMContentLoaded", () => {
  const results = document.querySelector("#search-results");
  if (!results) return;
  results.insertAdjacentHTML("beforebegin", "<h1>Search</h1>");
  const letters = (text) => new Set(text.toLowerCase().match(/[a-z_]{3,}/g));
  const typed = letters(new URLSearchParams(location.search).get("q") ?? "");
  const shared = (message) => {
    const words = letters(message), both = words.intersection(typed).size;
    const isName = !message.includes(" ");  // not of a flag or of code, if it is no error's
    if (isName && !(typed.size < 3 && /^\w{8,}/.test(message))) return 0;
    if (both === words.size) return 99 + both;
    return both > 1 && both === typed.size || both > 3 && 2 * both > words.size ? both : 0;
  };
  const rows = ERRORS.map(([messages, seen], number) =>
    [Math.max(0, ...messages.map(shared)), seen, number + 1]);
  const list = document.createElement("ul");
  list.className = "search errors";
  for (const [score, seen, number] of rows.sort((a, b) => b[0] - a[0]).slice(0, 3)) {
    if (!score) break;
    const link = document.createElement("a");
    link.href = `playground/pages/troubleshooting.html#row-${number}`;
    link.textContent = seen;
    list.appendChild(document.createElement("li")).append(link);
  }
  if (list.firstChild) results.before(list);
});
// Search shows first the pages whose row of IDEAS has the beginnings of all words that one types:
// pages about symptoms, lessons, and others. Then come the other lessons in order, because the first
// one that has a word explains it.
var Scorer = {
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => {
    const number = Object.keys(IDEAS).indexOf(page);
    if (number < 0) return score;
    const typed = new URLSearchParams(location.search).get("q").toLowerCase();
    const all = typed.split(/[^a-z0-9.]+/), longer = all.filter((word) => word.length > 2);
    const words = (longer.length ? longer : all).map((word) => ` ${word.replace(/s$/, "")}`);
    if (words.every((word) => IDEAS[page].includes(word))) return 1000 - number;
    return /^run|\/pages\//.test(page) ? score : 500 - number;
  },
};
