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

// The tabs of a page are its sections. CSS shows the one in the address, and this marks its link.
function markTab() {
  const target = document.getElementById(location.hash.slice(1));
  const shown = target?.closest(".tabbed > section") ?? document.querySelector(".tabbed > section");
  for (const link of document.querySelectorAll('.tabs a[href^="#"]')) {
    link.ariaCurrent = link.hash === `#${shown?.id}` ? "true" : null;
  }
}
addEventListener("hashchange", markTab);
markTab();

// A box that ticks all others of its form.
document.addEventListener("change", (event) => {
  const name = event.target.dataset.ticks;
  if (name) {
    for (const box of event.target.form.querySelectorAll(`input[name="${name}"]`)) {
      box.checked = event.target.checked;
    }
  }
});

// Shows the time and the length under the pointer in a chart, also after the chart was refreshed.
let pointed = null;

function read(plot, x) {
  const points = JSON.parse(plot.dataset.points);
  const box = plot.getBoundingClientRect();
  const share = Math.min(Math.max((x - box.left) / box.width, 0), 1);
  const seconds = share * Number(plot.dataset.seconds);
  const point = points.findLast(([since]) => since <= seconds);
  if (point === undefined) {
    return;
  }
  const cursor = plot.querySelector(".cursor");
  cursor.setAttribute("x1", `${share * 100}%`);
  cursor.setAttribute("x2", `${share * 100}%`);
  const at = new Date((Number(plot.dataset.began) + seconds) * 1000);
  const time = new Intl.DateTimeFormat("en-GB", {
    dateStyle: "medium",
    timeStyle: "medium",
    timeZone: document.documentElement.dataset.timeZone,
  }).format(at);
  const rates = JSON.parse(plot.dataset.rates).findLast(([since]) => since <= seconds);
  plot.parentElement.querySelector(".reading").textContent =
    `${time}: ${point[1].toLocaleString("en")} ${point[1] === 1 ? "message" : "messages"}` +
    (rates ? `; published ${rates[1]}/s, acknowledged ${rates[2]}/s, redelivered ${rates[3]}/s` : "");
}

document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest("[data-chart]");
  if (plot !== null) {
    pointed = event.clientX;
    read(plot, pointed);
  }
});

// A list that gets new entries at its top, and keeps so many.
document.addEventListener("htmx:after:swap", () => {
  for (const list of document.querySelectorAll("[data-keeps]")) {
    while (list.children.length > Number(list.dataset.keeps)) {
      list.lastElementChild.remove();
    }
  }
});

document.addEventListener("htmx:after:swap", () => {
  const plot = document.querySelector("[data-chart]");
  if (plot !== null && pointed !== null) {
    read(plot, pointed);
  }
});

// The time zone of the browser, for pages before the first sign-in and for new accounts.
document.cookie =
  `timezone=${encodeURIComponent(Intl.DateTimeFormat().resolvedOptions().timeZone)}; path=/; max-age=31536000; samesite=lax`;
