// What operators' pages do beyond HTML. All of them work without it.

// A button that was pressed says so, and can't be pressed again.
document.addEventListener("submit", (event) => {
  if (event.target.matches("form[data-once]")) {
    for (const button of [...event.target.elements].filter((element) => element.type === "submit")) {
      button.dataset.words = button.textContent;
      button.textContent = "Working …";
      button.disabled = true;
    }
  }
});

// Somebody who goes back finds it as it was.
addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("button[data-words]")) {
    button.textContent = button.dataset.words;
    button.disabled = false;
  }
});

// The search field of select2 has no label: it gets that of its select, after Django has created it.
addEventListener("load", () =>
  globalThis.django?.jQuery(() => {
    for (const field of document.querySelectorAll(".select2-search__field")) {
      const [label] = field.closest(".related-widget-wrapper").querySelector("select").labels;
      field.setAttribute("aria-label", label.textContent);
    }
  }),
);
