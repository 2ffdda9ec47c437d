// What the theme leaves out: names that tell landmarks apart, and the keyboard in whatever can be scrolled.
function named() {
  const seen = {};
  for (const one of document.querySelectorAll("nav")) {
    const label = one.getAttribute("aria-label") || (one.className.includes("code") ? "Code" : "Pages");
    const key = label.replace(/ \(\d+\)$/, "").toLowerCase();
    seen[key] = (seen[key] || 0) + 1;
    if (seen[key] > 1 || !one.hasAttribute("aria-label"))
      one.setAttribute("aria-label", `${label.replace(/ \(\d+\)$/, "")} (${seen[key]})`);
  }
  for (const one of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .highlight-ipynb, .jp-OutputArea-output pre"))
    one.tabIndex = 0;
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
}
let waiting = 0;
new MutationObserver(() => { clearTimeout(waiting); waiting = setTimeout(named, 50); }).observe(document.body, {childList: true, subtree: true});
named();
