// /api/docs/: send a call with the reader's session or token, and show the answer. No address and no storage gets the token.

for (const form of document.querySelectorAll("form[data-method]")) {
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}
document.getElementById("try")?.removeAttribute("hidden");

addEventListener("hashchange", open);
open();

function open() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.matches("details")) {
    target.open = true;
    target.scrollIntoView();
  }
}

async function send(form) {
  const button = form.querySelector("button");
  const shown = form.querySelector("[role=status]");
  button.disabled = true;
  shown.hidden = false;
  shown.textContent = "Waiting for the answer…";
  try {
    const answer = await fetch(addressOf(form), requestOf(form));
    shown.textContent = await inWords(answer);
  } catch (error) {
    shown.textContent = `No answer: ${error.message}`;
  } finally {
    button.disabled = false;
  }
}

function addressOf(form) {
  let path = form.dataset.path;
  const query = new URLSearchParams();
  for (const input of form.querySelectorAll("input[data-in]")) {
    if (input.dataset.in === "path") {
      path = path.replace(`{${input.name}}`, encodeURIComponent(input.value));
    } else if (input.value !== "") {
      query.set(input.name, input.value);
    }
  }
  return query.size === 0 ? path : `${path}?${query}`;
}

function requestOf(form) {
  const token = document.getElementById("token").value.trim();
  const body = form.querySelector("textarea")?.value.trim();
  const headers = { Accept: "application/json, */*" };
  if (token !== "") {
    headers.Authorization = `Token ${token}`;
  } else {
    headers["X-CSRFToken"] = document.querySelector("#try [name=csrfmiddlewaretoken]").value;
  }
  if (body) {
    headers["Content-Type"] = "application/json";
  }
  return {
    method: form.dataset.method,
    headers,
    body: body || undefined,
    credentials: token === "" ? "same-origin" : "omit",
    cache: "no-store",
    redirect: "error",
  };
}

const HEADERS = ["X-Result-Count", "Link", "Location", "Retry-After"];
const MAX_CHARACTERS = 100_000;

async function inWords(answer) {
  const lines = [`${answer.status} ${answer.statusText}`];
  for (const name of HEADERS) {
    if (answer.headers.has(name)) {
      lines.push(`${name}: ${answer.headers.get(name)}`);
    }
  }
  let text = await answer.text();
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Not JSON, as in a download: shown as it is.
  }
  return [...lines, "", text.slice(0, MAX_CHARACTERS)].join("\n");
}
