// What the pages do beyond HTML. All of them work without it.

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (button === null) {
    return;
  }
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    // Not over plain HTTP, or not allowed: the text is selected instead, to be copied by hand.
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: press Ctrl-C";
  }
});
