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
    // The page of watch.py tells how high it is.
    addEventListener("message", (event) => {
      const frame = recording.querySelector("iframe");
      if (event.source === frame?.contentWindow) frame.height = event.data.height;
    });
    recording.querySelector("a").onclick = (event) => {
      event.preventDefault();
      show();
    };
  }
  // In print, everything is shown.
  addEventListener("beforeprint", () =>
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
});
// Search shows the lessons first: those whose name or row in playground/README.md has what one
// types, and then the others, in order, because the first lesson that has a word explains it.
var Scorer = {
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => {
    const number = Object.keys(IDEAS).indexOf(page);
    if (number < 0) return score;
    const typed = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    const named = IDEAS[page].includes(typed.replace(/[-_]/g, " "));
    return (named ? 1000 : 500) - number;
  },
};
