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
  // A picture fills the window after a click.
  for (const image of document.querySelectorAll("article img"))
    image.onclick = () => image.classList.toggle("large");
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
// Search shows first the pages whose row of IDEAS has the beginnings of all words that one types:
// pages about symptoms, lessons, and others. Then come the other lessons in order, because the first
// one that has a word explains it.
var Scorer = {
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => {
    const number = Object.keys(IDEAS).indexOf(page);
    if (number < 0) return score;
    const typed = new URLSearchParams(location.search).get("q").toLowerCase();
    const words = typed.split(/[^a-z0-9.]+/).map((word) => ` ${word.replace(/s$/, "")}`);
    if (words.every((word) => IDEAS[page].includes(word))) return 1000 - number;
    return /^run|\/pages\//.test(page) ? score : 500 - number;
  },
};
