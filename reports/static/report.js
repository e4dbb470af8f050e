// Filters, copy buttons and links into folded cases. Without it everything is simply shown.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const chips = all("button[data-filter]"), find = document.querySelector(".find");
  const items = all("[data-states]"), groups = all("[data-group]");
  let state = "";

  function apply() {
    const words = (find ? find.value : "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const item of items) {
      const text = item.dataset.text.toLowerCase();
      item.hidden = !((!state || item.dataset.states.split(" ").includes(state)) && words.every((w) => text.includes(w)));
    }
    for (const group of groups) group.hidden = all("[data-states]", group).every((i) => i.hidden);
    for (const cell of all(".cell")) cell.classList.toggle("hit", cell.classList.contains("s-" + state));
    for (const table of all(".matrix")) table.classList.toggle("filtered", state !== "");
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.filter === state));
  }

  for (const chip of chips) {
    chip.disabled = false;
    chip.addEventListener("click", () => { state = chip.dataset.filter === state ? "" : chip.dataset.filter; apply(); });
  }
  if (find) { find.hidden = false; find.addEventListener("input", apply); }

  for (const head of all("h5[data-copy]")) {
    const button = document.createElement("button");
    button.className = "copy"; button.type = "button"; button.textContent = "copy";
    button.addEventListener("click", () => {
      const range = document.createRange(), selection = getSelection();
      range.selectNodeContents(head.nextElementSibling);
      selection.removeAllRanges(); selection.addRange(range);
      button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
    });
    head.append(button);
  }

  function unfold() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", unfold);
  unfold();
  if (chips.length) apply();
})();
