// The store server's routes: reading and changing, with a token where one is wanted, and following what changes.

const BASE = new URL("v1/agl/", document.baseURI);
const TOKEN = "agl-token"; // where the tab keeps the token
const TOKEN_MARK = "#token="; // before a token in an address
const WAIT_SECONDS = 25;
const REST_MS = 800; // between two looks at a busy store
const LISTEN_MS = 250; // between two questions while others' changes come in a stream
const QUICK_MS = 1000; // the time in an answer that took longer may be that of the question
const RETRY_MS = [300, 600, 1200, 2500, 5000];

/** The server cannot be reached, or its store cannot be used. */
export class Gone extends Error {}
/** The server answered, and not with what was asked for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let clockSkew = 0; // how far the server's clock is ahead, in milliseconds

export function now() {
  return (Date.now() + clockSkew) / 1000;
}

/** The answer to GET, as JSON. Lists in the parameters are repeated; null and "" are left out. */
export async function get(path, parameters = {}, signal = undefined) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") url.searchParams.append(name, one);
    }
  }
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const response = await reached(url, token, { signal });
    const isKeptOut = response.status === 401 || (response.status === 403 && token !== null); // a token of too little
    if (!isKeptOut) return read(response);
    const { detail } = await response.json().catch(() => ({}));
    // Another request may have got a new token meanwhile.
    if (sessionStorage.getItem(TOKEN) === token) await askToken(token === null ? "" : detail);
  }
}

/** Change something; the answer as JSON. What the token does not permit is refused, and nobody is asked for another. */
export async function post(path, body) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return read(await reached(new URL(path, BASE), sessionStorage.getItem(TOKEN), options));
}

/** Whether the token may permit changes: a signed one names its scope, the master token and none are an operator's. */
export function mayChange() {
  const [format, payload = ""] = (sessionStorage.getItem(TOKEN) ?? "").split(".");
  if (format !== "agl1") return true;
  try {
    return JSON.parse(atob(payload.replaceAll("-", "+").replaceAll("_", "/"))).kind === "admin";
  } catch {
    return false;
  }
}

async function reached(url, token, { headers = {}, ...options }) {
  const withToken = token === null ? headers : { ...headers, Authorization: `Bearer ${token}` };
  const began = Date.now();
  try {
    const response = await fetch(url, { ...options, headers: withToken, cache: "no-store" });
    const skew = Date.parse(response.headers.get("date")) - Date.now();
    if (Date.now() - began < QUICK_MS) clockSkew = Math.abs(skew) > 2000 ? skew : 0;
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone(error.message);
  }
}

async function read(response) {
  if (response.status >= 502 && response.status <= 504) throw new Gone(`It answers ${response.status}.`);
  const body = await response.json().catch(() => {
    throw new Gone("Its answer was cut off.");
  });
  if (response.ok) return body;
  const { detail } = body;
  throw new Refused(response.status, typeof detail === "string" ? detail : JSON.stringify(detail));
}

// ------------------------------------------------------------------ the token

let asking = null; // while the reader is asked: a promise of his answer
let answered = () => {}; // keeps it

/** Take a token out of the address, `#token=…`: there it would be shown, and kept and sent with the address. */
export function takeToken() {
  if (!location.hash.startsWith(TOKEN_MARK)) return;
  const token = tokenIn(location.hash);
  history.replaceState(null, "", location.pathname + location.search);
  if (token !== null) useToken(token);
}

/** The token in a text, which is one or is an address that ends with one; null if it cannot be sent. */
function tokenIn(text) {
  const [plain, inAddress] = text.trim().split(TOKEN_MARK, 2);
  const token = inAddress === undefined ? plain : decoded(inAddress);
  return /^[!-~]+$/.test(token) ? token : null;
}

/** A part of an address as it was meant; what somebody has written by hand as it is. */
export function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Ask the reader for a token, once however many requests want it. */
function askToken(complaint) {
  asking ??= new Promise((resolve) => {
    answered = resolve;
    const form = document.getElementById("ask");
    const input = document.getElementById("token");
    document.getElementById("refused").textContent = complaint ?? "";
    form.hidden = false;
    input.value = "";
    input.focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      const token = tokenIn(input.value);
      if (token !== null) useToken(token);
    };
  });
  return asking;
}

/** Keep a token until the tab is closed, also when the page is loaded again, and go on with what waited for it. */
function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
  document.getElementById("token").value = "";
  document.getElementById("ask").hidden = true;
  asking = null;
  answered();
}

// ------------------------------------------------------------------ changes

/**
 * Refresh now and after every change, for ever: `refresh(signal, notices)` is called again with the notices that
 * `concern` the view, so that it reads only what they name; without them at first, when some were missed, and after
 * `mostSeconds` for what changes with time. While the server is gone `state` is told so, and the first thing it hears
 * when it is back is a refresh.
 */
export async function follow({ kinds, concerns = () => true, mostSeconds = Infinity, refresh, state, signal }) {
  let failures = 0;
  let changes = null; // since the last refresh; null if they are not known
  let cursor = null;
  let log = null; // which store the cursor is of: another one may be served at the same address
  while (!signal.aborted) {
    try {
      // Before looking, so that no change falls in between.
      if (cursor === null) ({ cursor, log } = await get("notices", {}, signal));
      const began = performance.now();
      await refresh(signal, changes);
      failures = 0;
      state("live");
      await pause(Math.max(REST_MS, 3 * (performance.now() - began)), signal);
      for (changes = []; changes !== null && !changes.length; ) {
        const left = Math.max(0, mostSeconds - (performance.now() - began) / 1000);
        const wait = Math.min(WAIT_SECONDS, left);
        const heard = await get("notices", { kinds, after: cursor, log, wait }, signal);
        const isLate = performance.now() - began >= 1000 * mostSeconds;
        const isLost = isLate || heard.notices.some((notice) => notice.kind === "gap");
        changes = isLost ? null : heard.notices.filter(concerns);
        ({ cursor, log } = heard);
        if (changes !== null && !changes.length) await pause(LISTEN_MS, signal);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Gone)) throw error;
      [changes, cursor] = [null, null];
      state("gone");
      await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    signal.addEventListener("abort", end);
  });
}

/** `work` on every item, a few at a time: a browser has six connections to a server, and one of them waits. */
export async function inParallel(items, work, most = 4) {
  const results = new Array(items.length);
  let next = 0;
  const worker = async () => {
    while (next < items.length) {
      const index = next++;
      results[index] = await work(items[index]);
    }
  };
  await Promise.all(Array.from({ length: Math.min(most, items.length) }, worker));
  return results;
}
